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

HERE = Path(__file__).resolve().parent
GPUS, LINKS, INSTANCES, PROCESSES, FAILURES, EVENTS = 64, 18, 7, 32, 64, 1024
MAGIC = 0x4D475055

u32, i32, u64 = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64


def _chars(length: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * length


class Process(ctypes.Structure):
    _fields_ = (
        ("pid", u32),
        ("mps", u32),
        ("bytes", u64),
        ("sm_util", u32),
        ("memory_util", u32),
        ("instance", u32),
        ("unused", u32),
    )


class Link(ctypes.Structure):
    _fields_ = (("active", u32), ("remote", i32))


class Gpu(ctypes.Structure):
    _fields_ = (
        ("uuid", _chars(96)),
        ("name", _chars(96)),
        ("bus_id", _chars(32)),
        ("serial", _chars(32)),
        ("domain", u32),
        ("bus", u32),
        ("device", u32),
        ("capability", u32 * 2),
        ("memory_total", u64),
        ("memory_used", u64),
        ("memory_reserved", u64),
        ("utilization", u32),
        ("memory_utilization", u32),
        ("temperature", i32),
        ("memory_temperature", i32),
        ("power_mw", u32),
        ("power_limit_mw", u32),
        ("energy_mj", u64),
        ("energy_since_ns", u64),
        ("energy_period_ns", u64),
        ("energy_runs", u32),
        ("clocks_mhz", u32 * 4),
        ("clocks_max_mhz", u32 * 4),
        ("throttle_reasons", u64),
        ("ecc_enabled", u32),
        ("ecc", u64 * 2 * 2),
        ("remapped", u32 * 4),
        ("recovery_action", u32),
        ("compute_mode", u32),
        ("mig_mode", u32),
        ("mig_count", u32),
        ("mig_uuids", _chars(96) * INSTANCES),
        ("links", Link * LINKS),
        ("topology", u32 * GPUS),
        ("pcie_generation", u32),
        ("pcie_width", u32),
        ("pcie_kib", u32 * 2),
        ("event_types", u64),
        ("lost", u32),
        ("generation", u32),
        ("hangs", u32),
        ("delay_us", u32),
        ("processes", Process * PROCESSES),
    )


class Failure(ctypes.Structure):
    _fields_ = (("function", _chars(64)), ("gpu", i32), ("code", i32))


class Event(ctypes.Structure):
    _fields_ = (("number", u64), ("type", u64), ("data", u64), ("gpu", u32), ("part", u32))


class State(ctypes.Structure):
    _fields_ = (
        ("magic", u32),
        ("size", u32),
        ("count", u32),
        ("cuda_version", i32),
        ("driver_version", _chars(80)),
        ("nvml_version", _chars(80)),
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
    subprocess.run([compiler, *flags, name, "-o", str(new), str(HERE / "nvml.c")], check=True, timeout=120)
    new.rename(path)
    return path
