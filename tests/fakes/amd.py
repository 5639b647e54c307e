"""A host with simulated AMD GPUs: what tests write here, the real package amdsmi reads at once.

    gpus = SimulatedAmdGpus(tmp_path / "gpus", n=2)
    worker = subprocess.Popen([...], env={**os.environ, **gpus.env()})
    gpus.gpu(1).temperature = 95

The library libamd_smi.so is simulated by amdsmi.c. HIP is not: a worker on such a GPU computes on the processor.
"""

import ctypes
import hashlib
import importlib.util
import mmap
import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
VARIABLE = "FAKE_AMDSMI_STATE"
GPUS, PROCESSES, MAGIC = 8, 8, 0x414D4421
MI300X, TARGET = "AMD Instinct MI300X (simulated)", 0x942

u32, i32, u64 = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64


class Process(ctypes.Structure):
    _fields_ = (("pid", u32), ("unused", u32), ("bytes", u64))


class Gpu(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_char * 64), ("name", ctypes.c_char * 64), ("bus", u32), ("target", u32),
        ("memory_total", u64), ("memory_used", u64), ("gfx", u32), ("umc", u32), ("temperature", i32), ("lost", i32),
        ("power_w", u32), ("limit_w", u32), ("energy_uj", u64), ("energy_since_ns", u64), ("clock_mhz", u32),
        ("memory_clock_mhz", u32), ("corrected", u64), ("uncorrected", u64), ("pcie_width", u32), ("pcie_speed", u32),
        ("throttled", ctypes.c_uint8 * 5), ("padding", ctypes.c_uint8 * 3),
        ("links", ctypes.c_uint8 * GPUS), ("processes", Process * PROCESSES),
    )  # fmt: skip


class State(ctypes.Structure):
    _fields_ = (
        ("magic", u32), ("count", u32), ("loaded", u32), ("unused", u32), ("driver_version", ctypes.c_char * 64),
        ("gpus", Gpu * GPUS),
    )  # fmt: skip


class SimulatedAmdGpus:
    """GPUs in a state file. Changes take effect in every process at once."""

    def __init__(self, path: Path, n: int = 2) -> None:
        state = State(magic=MAGIC, count=n, loaded=1, driver_version=b"6.14.14 (simulated)")
        for i in range(n):
            state.gpus[i] = Gpu(
                uuid=f"GPU-{0xFEED0000 + i:016x}".encode(), name=MI300X.encode(), bus=0x10 + i, target=TARGET,
                memory_total=192 << 30, memory_used=1 << 30, temperature=40, power_w=140, limit_w=750,
                energy_since_ns=time.monotonic_ns(), clock_mhz=2100, memory_clock_mhz=900, pcie_width=16,
                pcie_speed=32000,
            )  # fmt: skip
            state.gpus[i].links[:] = [int(i // 4 == j // 4 and i != j) for j in range(GPUS)]
        path.write_bytes(bytes(state))
        self.path = path
        with path.open("r+b") as file:
            self.state = State.from_buffer(mmap.mmap(file.fileno(), 0))

    def gpu(self, i: int) -> Gpu:
        gpu: Gpu = self.state.gpus[i]
        return gpu

    def uuid(self, i: int) -> str:
        return bytes(self.gpu(i).uuid).decode()

    def env(self) -> dict[str, str]:
        """The environment in which a child process sees these GPUs. unittest.SkipTest: no C compiler."""
        return {
            VARIABLE: str(self.path), "MGPU_WORKER_ARTIFACTS_DIR": f"{self.path}.artifacts",
            "LD_LIBRARY_PATH": str(build().parent), "ROCM_PATH": "", "ROCM_HOME": "",
        }  # fmt: skip


def build() -> Path:
    """Builds the simulated libamd_smi.so if needed; its path. unittest.SkipTest: there is no C compiler."""
    package = importlib.util.find_spec("amdsmi")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if package is None or package.origin is None or compiler is None:
        raise unittest.SkipTest("the simulated AMD SMI needs the package amdsmi and a C compiler")
    wrapper = (Path(package.origin).parent / "amdsmi_wrapper.py").read_text()
    source = (HERE / "amdsmi.c").read_text()
    ours = set(re.findall(r"^int (amdsmi_\w+)\(", source, re.MULTILINE))
    bound = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper))
    rest = "".join(f"int {name}(void) {{ return 2; }}\n" for name in sorted(bound - ours))
    digest = hashlib.sha256((source + rest).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"multigpu-fakes-{os.getuid()}", digest)
    path = folder / "libamd_smi.so"
    if path.exists():
        return path
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "rest.c").write_text(rest)
    new = folder / f"{os.getpid()}.so"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-shared", "-fPIC"]
    command = [compiler, *flags, "-o", str(new), str(HERE / "amdsmi.c"), str(folder / "rest.c")]
    subprocess.run(command, check=True, timeout=400)
    new.rename(path)
    return path
