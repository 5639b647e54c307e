"""The device a worker owns: what it is, and how it is doing. Without torch: NVML for a GPU (nvml.py), /proc and RAPL
for a CPU (cpu.py). What a device doesn't tell is left out, never zero.

All of this may block: a sick driver may not answer at all. sampler.py calls it on a thread of its own.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class DeviceError(Exception):
    """There is no such device here; the message says what there is."""


class DeviceGoneError(Exception):
    """The driver says that the device can't be used now. `code` is for programs: "gpu_is_lost", "reset_required",
    "driver_not_loaded"; the message is for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeer:
    """The way to another device of the host; the fields are those of multigpu.v1.DevicePeer."""

    device_id: str
    nvlinks: int = 0
    common_ancestor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a device is; the fields are those of multigpu.v1.Device."""

    # An NVML UUID, or "cpu".
    device_id: str
    # "cuda:0", "cpu".
    name: str
    product: str
    memory_total_bytes: int
    compute_capability: str = ""
    pci_bus_id: str = ""
    driver_version: str = ""
    cuda_version: str = ""
    mig_enabled: bool = False
    mig_device_ids: tuple[str, ...] = ()
    peers: tuple[DevicePeer, ...] = ()
    # The driver says of itself that it is a simulation.
    simulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemappedRows:
    """Rows of memory replaced by spare ones; the fields are those of multigpu.v1.RemappedRows."""

    correctable: int
    uncorrectable: int
    pending: bool
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProcess:
    """A process that computes on the device; the fields are those of multigpu.v1.DeviceProcess."""

    pid: int
    memory_used_bytes: int | None = None
    mps_client: bool = False
    idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """How a device is doing; the fields, and their units, are those of multigpu.v1.DeviceTelemetry. None: it doesn't
    tell.
    """

    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    # 0 to 1.
    utilization: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    # 0 to 1.
    memory_utilization: float | None = None
    sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    energy_joules: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: RemappedRows | None = None
    pcie_generation: int | None = None
    # In lanes.
    pcie_width: int | None = None
    # Bytes a second.
    pcie_sent_bytes: float | None = None
    pcie_received_bytes: float | None = None
    nvlinks_active: int | None = None
    processes: tuple[DeviceProcess, ...] = ()


class Device(Protocol):
    info: DeviceInfo
    # For CUDA_VISIBLE_DEVICES, so that the engine sees this device and no other.
    visible_devices: str
    # What the engine calls it then.
    engine_name: str
    # Its compute mode lets no process compute.
    compute_prohibited: bool

    def sample(self) -> Telemetry:
        """Read the sensors. May block, even for ever. DeviceGoneError: it can't be used now."""

    def energy_joules(self) -> float | None:
        """All the energy that it has taken since some instant. May block. None: it has no such counter."""

    def power_watts(self) -> float | None:
        """What it takes now. May block. None: it doesn't tell."""


def open_device(name: str) -> Device:
    """Open "cpu", "cuda:N", a GPU or MIG instance by its NVML UUID. With "auto", the MIG instance that comes first in
    CUDA_VISIBLE_DEVICES, else the first GPU, else the CPU.

    DeviceError: there is no such device, or it can't be used.
    """
    from multigpu_worker.device import cpu, nvml  # noqa: PLC0415  they are made of what is here

    if name == "cpu":
        return cpu.CpuDevice()
    count, reason = nvml.count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    if name == "auto" and visible.startswith("MIG-"):
        name = visible
    if name == "auto":
        return nvml.open_at(0) if count else cpu.CpuDevice()
    if not name.startswith("cuda:"):
        index = nvml.index_of(name) if count else None
    else:
        index = int(name.removeprefix("cuda:"))
    if index is None or index >= count:
        there = f"there are {count} NVIDIA devices, counted from cuda:0" if count else f"no NVIDIA device: {reason}"
        raise DeviceError(f"there is no {name} here ({there}); choose another --device, such as cpu")
    return nvml.open_at(index, name if name.startswith("MIG-") else "")


def host_memory_bytes() -> int:
    """Memory of this host, or of the control group that we are in if that is less."""
    total_bytes = meminfo()["MemTotal"]
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total_bytes
    return total_bytes if limit == "max" else min(total_bytes, int(limit))


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
