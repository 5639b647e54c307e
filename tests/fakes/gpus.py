"""A host with simulated NVIDIA GPUs: what tests write here, real pynvml and a simulated `nvidia-smi` read at once.

    gpus = SimulatedGpus(tmp_path / "gpus", n=8)
    worker = subprocess.Popen([...], env={**os.environ, **gpus.env()})
    gpus.heat(3, 95)
    gpus.lose(3)

Every process that has `gpus.env()` sees the same GPUs, and may change them: `SimulatedGpus.attached()`. Only the
standard library is needed. See README.md beside this.
"""

import fcntl
import mmap
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

try:
    from tests.fakes import layout
except ImportError:  # the simulated nvidia-smi runs from this folder
    import layout  # type: ignore[import-not-found, no-redef]

VARIABLE = "FAKE_NVML_STATE"
PRODUCT = "Simulated H200"
DRIVER_VERSION = "580.159.03 (simulated)"
NVML_VERSION = "13.580.159.03 (simulated)"

EVENT_DOUBLE_BIT_ECC, EVENT_XID, EVENT_UNAVAILABLE, EVENT_RECOVERY_ACTION = 0x2, 0x8, 0x4000, 0x8000
EVENT_TYPES = 0x1 | EVENT_DOUBLE_BIT_ECC | EVENT_XID | EVENT_UNAVAILABLE | EVENT_RECOVERY_ACTION
NOT_SUPPORTED = 3
TOPOLOGY_INTERNAL, TOPOLOGY_SINGLE, TOPOLOGY_HOST_BRIDGE, TOPOLOGY_SYSTEM = 0, 10, 30, 50
# GPUs of one half of the host: two NVLinks to each of the other three, none to the other half.
_HALF = 4


class SimulatedGpus:
    """GPUs in a state file. Methods take effect in every process at once; all numbers of GPUs count from 0."""

    def __init__(self, path: str | Path, n: int = 8) -> None:
        """A host with `n` healthy idle GPUs (at most 64), whose state is kept in a new file at `path`."""
        if not 0 <= n <= layout.GPUS:
            raise ValueError(f"a simulated host has 0 to {layout.GPUS} GPUs, not {n}")
        self.path = Path(path).resolve()
        state = layout.State(magic=layout.MAGIC, count=n, cuda_version=13000)
        state.size = len(bytes(state))
        state.driver_version, state.nvml_version = DRIVER_VERSION.encode(), NVML_VERSION.encode()
        for i in range(n):
            _furnish(state.gpus[i], i, n)
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_bytes(bytes(state))
        new.rename(self.path)
        self._map()

    @classmethod
    def attached(cls, path: str | Path | None = None) -> Self:
        """The GPUs of a file that is there; by default the one that this process' environment names."""
        self = cls.__new__(cls)
        self.path = Path(path or os.environ[VARIABLE])
        self._map()
        return self

    def _map(self) -> None:
        with self.path.open("r+b") as file:
            self._state = layout.State.from_buffer(mmap.mmap(file.fileno(), 0))
        if self._state.magic != layout.MAGIC:
            raise ValueError(f"{self.path} is not a state file of this version of tests/fakes")

    def env(self) -> dict[str, str]:
        """The environment in which a child process sees these GPUs. Raises unittest.SkipTest without a C compiler.

        A worker's artifacts go beside the state file: what it notes about a simulated GPU must not stay in ~/.cache.
        """
        libraries = [str(layout.build_nvml().parent), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            VARIABLE: str(self.path),
            "MGPU_WORKER_ARTIFACTS_DIR": f"{self.path}.artifacts",
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "PATH": os.pathsep.join([str(layout.HERE / "bin"), os.environ.get("PATH", os.defpath)]),
        }

    def __len__(self) -> int:
        return int(self._state.count)

    def gpu(self, i: int) -> layout.Gpu:
        """All of a GPU's state, to read and to write: the fields of layout.Gpu."""
        if not 0 <= i < len(self):
            raise IndexError(f"there are {len(self)} simulated GPUs, counted from 0; there is no {i}")
        gpu: layout.Gpu = self._state.gpus[i]
        return gpu

    def uuid(self, i: int) -> str:
        return bytes(self.gpu(i).uuid).decode()

    @property
    def uuids(self) -> list[str]:
        return [self.uuid(i) for i in range(len(self))]

    def index(self, device_id: str) -> int:
        """The number of the GPU that has this UUID."""
        return self.uuids.index(device_id)

    def set_driver(self, version: str = DRIVER_VERSION, cuda_version: int = 13000) -> None:
        """13000 is CUDA 13.0, 12040 is 12.4."""
        self._state.driver_version, self._state.cuda_version = version.encode(), cuda_version

    # --- how a GPU is doing -------------------------------------------------------------------------------------------

    def heat(self, i: int, celsius: int) -> None:
        self.gpu(i).temperature = celsius

    def use(self, i: int, utilization: float, memory_utilization: float | None = None) -> None:
        """Shares of 1, kept in percent as NVML does."""
        gpu = self.gpu(i)
        gpu.utilization = round(utilization * 100)
        if memory_utilization is not None:
            gpu.memory_utilization = round(memory_utilization * 100)

    def use_memory(self, i: int, used_bytes: int) -> None:
        """Memory that is taken besides what the listed processes have, and what the driver reserves."""
        self.gpu(i).memory_used = used_bytes

    def process(
        self, i: int, pid: int, used_bytes: int, *, mps: bool = False, sm_utilization: int = 0, instance: int = 0
    ) -> None:
        """`pid` computes on the GPU with this much memory, until it ends. Called again: that much from now on.
        `instance`: of MIG, counted from 0.
        """
        processes = self.gpu(i).processes
        with self._locked():
            own = [p for p in processes if p.pid == pid]
            free = [p for p in processes if not p.pid or not Path(f"/proc/{p.pid}").exists()]
            entry = (own or free)[0]
            entry.bytes, entry.mps, entry.sm_util = used_bytes, mps, sm_utilization
            entry.instance = instance
            entry.pid = pid

    def no_process(self, i: int, pid: int) -> None:
        """`pid` no longer computes on the GPU."""
        for entry in self.gpu(i).processes:
            if entry.pid == pid:
                entry.pid = 0

    def power(self, i: int, watts: float, limit_watts: float | None = None) -> None:
        """The energy counter grows by this from now on, unless it was set by set_energy."""
        gpu = self.gpu(i)
        now_ns = time.monotonic_ns()
        if gpu.energy_runs:
            gpu.energy_mj += (now_ns - gpu.energy_since_ns) * gpu.power_mw // 10**9
            gpu.energy_since_ns = now_ns
        gpu.power_mw = round(watts * 1000)
        if limit_watts is not None:
            gpu.power_limit_mw = round(limit_watts * 1000)

    def set_energy(self, i: int, joules: float) -> None:
        """The counter stands at this, and no longer grows by itself."""
        gpu = self.gpu(i)
        gpu.energy_runs = 0
        gpu.energy_mj = round(joules * 1000)

    def run_energy(self, i: int, *, joules: float = 0.0, period_s: float = 0.02) -> None:
        """The counter grows by the GPU's power, a step every `period_s`, from `joules` on."""
        gpu = self.gpu(i)
        gpu.energy_mj, gpu.energy_period_ns = round(joules * 1000), round(period_s * 1e9)
        gpu.energy_since_ns = time.monotonic_ns()
        gpu.energy_runs = 1

    def clocks(self, i: int, sm_mhz: int, memory_mhz: int) -> None:
        gpu = self.gpu(i)
        gpu.clocks_mhz[0] = gpu.clocks_mhz[1] = sm_mhz
        gpu.clocks_mhz[2] = memory_mhz

    def throttle(self, i: int, reasons: int) -> None:
        """Bits of NVML's nvmlClocksEventReason…; 0: nothing holds it down."""
        self.gpu(i).throttle_reasons = reasons

    def pcie(self, i: int, *, generation: int = 5, width: int = 16, sent_kib: int = 0, received_kib: int = 0) -> None:
        """The link as it is now; KiB a second."""
        gpu = self.gpu(i)
        gpu.pcie_generation, gpu.pcie_width = generation, width
        gpu.pcie_kib[:] = [sent_kib, received_kib]

    def nvlink(self, i: int, link: int, *, up: bool, remote: int | None = None) -> None:
        """One link of a GPU (not its other end), to the GPU `remote`, or to a switch (None)."""
        entry = self.gpu(i).links[link]
        entry.active, entry.remote = up, -1 if remote is None else remote

    def mig(self, i: int, instances: int | None) -> None:
        """Cuts the GPU into so many MIG instances, up to seven; None: MIG is off."""
        gpu = self.gpu(i)
        gpu.mig_count = instances or 0
        for j in range(gpu.mig_count):
            gpu.mig_uuids[j].value = f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, f'{self.uuid(i)}/{j}')}".encode()
        gpu.mig_mode = instances is not None

    def mig_uuids(self, i: int) -> list[str]:
        gpu = self.gpu(i)
        return [gpu.mig_uuids[j].value.decode() for j in range(gpu.mig_count)]

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def event(self, i: int, kind: int, data: int = 0, instance: int | None = None) -> None:
        """Tells every event set that waits for such an event of this GPU: EVENT_…"""
        with self._locked():
            number = self._state.events_begun + 1
            entry = self._state.events[(number - 1) % layout.EVENTS]
            entry.number, entry.type, entry.data, entry.gpu = number, kind, data, i
            entry.part = 0 if instance is None else instance + 1
            self._state.events_begun = number

    def xid(self, i: int, code: int, instance: int | None = None) -> None:
        """The event alone, of the GPU or of a MIG instance. For 79 with what comes of it: lose()."""
        self.gpu(i)
        self.event(i, EVENT_XID, code, instance)

    def ecc(self, i: int, *, corrected: int = 0, uncorrected: int = 0) -> None:
        """So many more errors; uncorrected ones are an event too."""
        for kind, more in enumerate((corrected, uncorrected)):
            for counter in range(2):
                self.gpu(i).ecc[kind][counter] += more
        if uncorrected:
            self.event(i, EVENT_DOUBLE_BIT_ECC)

    def remap(self, i: int, *, correctable: int = 0, uncorrectable: int = 0, pending: bool, failed: bool) -> None:
        self.gpu(i).remapped[:] = [correctable, uncorrectable, pending, failed]

    def recovery_action(self, i: int, action: int) -> None:
        """NVML_GPU_RECOVERY_ACTION_…: 0 none, 1 reset, 2 reboot, 4 drain and reset. An event too."""
        self.gpu(i).recovery_action = action
        self.event(i, EVENT_RECOVERY_ACTION, action)

    def lose(self, i: int, xid: int | None = 79) -> None:
        """It falls off the bus: every call on it says GPU_IS_LOST; its processes are not ended by that."""
        gpu = self.gpu(i)
        if xid is not None:
            self.event(i, EVENT_XID, xid)
        gpu.lost = 1

    def return_(self, i: int, *, reset: bool = False) -> None:
        """It is back, needs nothing, and none computes on it. After a `reset`, a process that had seen it goes on
        getting GPU_IS_LOST until it has called nvmlShutdown and nvmlInit."""
        gpu = self.gpu(i)
        gpu.recovery_action = 0
        for process in gpu.processes:
            process.pid = 0
        if reset:
            gpu.generation += 1
            for counters in gpu.ecc:
                counters[0] = 0  # the volatile ones
        gpu.lost = 0

    def reset(self, i: int) -> bool:
        """`nvidia-smi --gpu-reset`: False if a process has opened the GPU."""
        with Path(f"{self.path}.gpu{i}").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self.return_(i, reset=True)
            return True

    def hang(self, i: int) -> None:
        """The driver doesn't answer calls on this GPU, until answer_()."""
        self.gpu(i).hangs = 1

    def slow(self, i: int, delay_s: float) -> None:
        """Delays every call on this GPU."""
        self.gpu(i).delay_us = round(delay_s * 1e6)

    def answer_(self, i: int) -> None:
        """The end of hang() and slow()."""
        gpu = self.gpu(i)
        gpu.hangs = gpu.delay_us = 0

    def fail(self, function: str, i: int | None = None, code: int = NOT_SUPPORTED) -> None:
        """A C function ("nvmlDeviceGetPowerUsage"), or "field 230", gives this code, for one GPU or for all."""
        with self._locked():
            free = next(f for f in self._state.failures if not f.function)
            free.gpu, free.code = -1 if i is None else i, code
            free.function = function.encode()

    def mend(self) -> None:
        """The end of every fail()."""
        for failure in self._state.failures:
            failure.function = b""

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Among all that write."""
        with self.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _furnish(gpu: layout.Gpu, i: int, n: int) -> None:
    """A healthy idle GPU."""
    gpu.uuid = f"GPU-{uuid.uuid4()}".encode()  # workers keep notes by it
    gpu.name, gpu.serial = PRODUCT.encode(), f"SIM{i:04}".encode()
    gpu.bus = 0x10 + i
    gpu.bus_id = f"00000000:{gpu.bus:02X}:00.0".encode()
    gpu.capability[:] = [9, 0]
    gpu.memory_total, gpu.memory_reserved = 143771 << 20, 600 << 20
    gpu.temperature, gpu.memory_temperature = 30, 35
    gpu.power_mw, gpu.power_limit_mw = 75_000, 700_000
    gpu.energy_since_ns, gpu.energy_period_ns, gpu.energy_runs = time.monotonic_ns(), 20_000_000, 1
    gpu.clocks_mhz[:], gpu.clocks_max_mhz[:] = [1980, 1980, 3201, 1545], [1980, 1980, 3201, 1545]
    gpu.ecc_enabled = 1
    gpu.pcie_generation, gpu.pcie_width = 5, 16
    gpu.event_types = EVENT_TYPES
    neighbours = [j for j in range(n) if j != i and j // _HALF == i // _HALF]
    for k, j in enumerate(sorted(neighbours * 2)):
        gpu.links[k].active, gpu.links[k].remote = 1, j
    gpu.topology[:n] = [_ancestor(i, j) for j in range(n)]


def _ancestor(i: int, j: int) -> int:
    if i == j:
        return TOPOLOGY_INTERNAL
    if i // 2 == j // 2:
        return TOPOLOGY_SINGLE
    return TOPOLOGY_HOST_BRIDGE if i // _HALF == j // _HALF else TOPOLOGY_SYSTEM
