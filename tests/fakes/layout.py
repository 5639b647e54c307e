"""The file format of a simulated driver's state (the structures of tests/fakes/nvml.c), and how to build nvml.c.

Only the standard library, so that the simulated `nvidia-smi` runs anywhere.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GPUS, LINKS, INSTANCES, PROCESSES, FAILURES, EVENTS = 64, 18, 7, 32, 64, 1024
MAGIC = 0x4D475055

u32, i32, u64 = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64


def _chars(length: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * length


def _all(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Process(ctypes.Structure):
    _fields_ = (*_all(u32, "pid mps"), ("bytes", u64), *_all(u32, "sm_util memory_util instance unused"))


class Link(ctypes.Structure):
    _fields_ = (("active", u32), ("remote", i32))


class Gpu(ctypes.Structure):
    _fields_ = (
        *_all(_chars(96), "uuid name"),
        *_all(_chars(32), "bus_id serial"),
        *_all(u32, "domain bus device"),
        ("capability", u32 * 2),
        *_all(u64, "memory_total memory_used memory_reserved"),
        *_all(u32, "utilization memory_utilization"),
        *_all(i32, "temperature memory_temperature"),
        *_all(u32, "power_mw power_limit_mw"),
        *_all(u64, "energy_mj energy_since_ns energy_period_ns"),
        ("energy_runs", u32),
        *_all(u32 * 4, "clocks_mhz clocks_max_mhz"),
        ("throttle_reasons", u64),
        ("ecc_enabled", u32),
        ("ecc", u64 * 2 * 2),
        ("remapped", u32 * 4),
        *_all(u32, "recovery_action compute_mode mig_mode mig_count"),
        ("mig_uuids", _chars(96) * INSTANCES),
        ("links", Link * LINKS),
        ("topology", u32 * GPUS),
        *_all(u32, "pcie_generation pcie_width"),
        ("pcie_kib", u32 * 2),
        ("event_types", u64),
        *_all(u32, "lost generation hangs delay_us"),
        ("processes", Process * PROCESSES),
    )


class Failure(ctypes.Structure):
    _fields_ = (("function", _chars(64)), ("gpu", i32), ("code", i32))


class Event(ctypes.Structure):
    _fields_ = (*_all(u64, "number type data"), *_all(u32, "gpu part"))


class State(ctypes.Structure):
    _fields_ = (
        *_all(u32, "magic size count"),
        ("cuda_version", i32),
        *_all(_chars(80), "driver_version nvml_version"),
        ("failures", Failure * FAILURES),
        ("events_begun", u64),
        ("events", Event * EVENTS),
        ("gpus", Gpu * GPUS),
    )


def build_nvml() -> Path:
    """Builds the simulated libnvidia-ml.so.1 if needed; returns its path. unittest.SkipTest: there is no C compiler."""
    source = (HERE / "nvml.c").read_bytes()
    folder = Path(tempfile.gettempdir(), f"multigpu-fakes-{os.getuid()}", hashlib.sha256(source).hexdigest()[:16])
    path = folder / "libnvidia-ml.so.1"
    if path.exists():
        return path
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise unittest.SkipTest("the simulated NVML needs a C compiler: apt-get install gcc libc6-dev")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = folder / f"{os.getpid()}.so"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-shared", "-fPIC", "-pthread"]
    name = f"-Wl,-soname,{path.name}"
    subprocess.run([compiler, *flags, name, "-o", str(new), str(HERE / "nvml.c")], check=True, timeout=400)
    new.rename(path)
    return path
