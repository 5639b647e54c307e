"""The interface of a worker's device: identity and telemetry. One module implements it for each vendor.

A value that the device does not report is None or empty, never zero. Every call may block, even forever if the driver
hangs: while the worker runs, only the sampler's thread makes these calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class DeviceError(Exception):
    """The device does not exist or cannot be used; the message lists the devices of this host."""


class DeviceGoneError(Exception):
    """The driver reports that the device cannot be used now. `code` is "gpu_is_lost", "reset_required" or
    "driver_not_loaded".
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeer:
    """The connection to another device of the host. Fields as in multigpu.v1.DevicePeer."""

    device_id: str
    nvlinks: int = 0
    common_ancestor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """Identity of a device. Fields as in multigpu.v1.Device."""

    # NVML's UUID, HIP's UUID, or "cpu". For a group: the first device's id and the number of the others: "GPU-…+1".
    device_id: str
    # "cuda:0", "rocm:0", "cpu", "cuda:0,cuda:1".
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
    # The driver is a simulation.
    simulated: bool = False
    # The devices of a group (group.py), if this describes a group; else empty.
    members: "tuple[DeviceInfo, ...]" = ()

    @property
    def each(self) -> "tuple[DeviceInfo, ...]":
        """The devices of the group, or only this one."""
        return self.members or (self,)

    @property
    def smallest_bytes(self) -> int:
        """The memory of the device that has the least."""
        return min(info.memory_total_bytes for info in self.each)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemappedRows:
    """Memory rows replaced by spare rows. Fields as in multigpu.v1.RemappedRows."""

    correctable: int
    uncorrectable: int
    pending: bool
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProcess:
    """A process that computes on the device. Fields as in multigpu.v1.DeviceProcess."""

    pid: int
    memory_used_bytes: int | None = None
    mps_client: bool = False
    idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """State of a device at one moment. Fields and units as in multigpu.v1.DeviceTelemetry."""

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
    # Only for a group: the free memory of the device that has the least; and the samples of its devices.
    memory_free_bytes: int | None = None
    members: "tuple[Telemetry, ...]" = ()

    @property
    def each(self) -> "tuple[Telemetry, ...]":
        """The samples of the group's devices, or only this one."""
        return self.members or (self,)


class Device(Protocol):
    info: DeviceInfo
    # The environment variable, and its value, with which an engine sees this device only.
    visible_variable: str
    visible_devices: str
    # The device's name inside the engine.
    engine_name: str
    # The compute mode is PROHIBITED.
    compute_prohibited: bool
    # The driver reports events and required recovery actions (events.py). False: only the sensors show faults.
    reports_events: bool

    def sample(self) -> Telemetry:
        """Read the sensors. Raises DeviceGoneError."""

    def release(self) -> None:
        """Close the driver until the next sample, so that the device can be reset."""

    def energy_joules(self) -> float | None:
        """Energy used since a fixed moment in the past. None: no energy counter."""

    def power_watts(self) -> float | None:
        """Current power. None: not reported."""


def visible_environment(devices: Sequence[Device]) -> dict[str, str]:
    """The environment variables with which a process sees only these devices, all of one vendor."""
    variable = devices[0].visible_variable
    environment = {variable: ",".join(device.visible_devices for device in devices)}
    if variable != "CUDA_VISIBLE_DEVICES":
        # HIP reads CUDA_VISIBLE_DEVICES, too; its indexes count only the devices that the vendor's variable leaves.
        environment["CUDA_VISIBLE_DEVICES"] = environment["HIP_VISIBLE_DEVICES"] = ",".join(
            str(index) for index in range(sum(len(device.info.each) for device in devices))
        )
    return environment
