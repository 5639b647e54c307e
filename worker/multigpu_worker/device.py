"""The device a worker owns: what it is, and how it is doing. Without torch: NVML for a GPU, /proc for a CPU.

NVML is read in a thread, since a sick driver may not answer. What a device doesn't tell is left out, never zero.
"""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

try:
    import pynvml
except ImportError:  # the worker's extra is not installed: a CPU worker does without
    pynvml = None


class DeviceError(Exception):
    """There is no such device here; the message says what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a device is; the fields are those of multigpu.v1.Device."""

    # An NVML UUID, or "cpu".
    device_id: str
    # "cuda:0", "cpu".
    name: str
    product: str
    memory_total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """How a device is doing; the fields are those of multigpu.v1.DeviceTelemetry. None: it doesn't tell."""

    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    # 0 to 1.
    utilization: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


class Device(Protocol):
    info: DeviceInfo
    # For CUDA_VISIBLE_DEVICES, so that the engine sees this device and no other.
    visible_devices: str
    # What the engine calls it then.
    engine_name: str

    def sample(self) -> Telemetry:
        """Read the sensors. May block."""


class CpuDevice:
    def __init__(self) -> None:
        memory = _meminfo()
        self.info = DeviceInfo(
            device_id="cpu", name="cpu", product=_processor_name(), memory_total_bytes=memory["MemTotal"]
        )
        self.visible_devices = ""
        self.engine_name = "cpu"

    def sample(self) -> Telemetry:
        memory = _meminfo()
        return Telemetry(
            memory_total_bytes=memory["MemTotal"],
            memory_used_bytes=memory["MemTotal"] - memory["MemAvailable"],
            utilization=min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)),
        )


class NvmlDevice:
    def __init__(self, index: int) -> None:
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        device_id = pynvml.nvmlDeviceGetUUID(self._handle)
        self.info = DeviceInfo(
            device_id=device_id,
            name=f"cuda:{index}",
            product=pynvml.nvmlDeviceGetName(self._handle),
            memory_total_bytes=pynvml.nvmlDeviceGetMemoryInfo(self._handle).total,
        )
        self.visible_devices = device_id
        self.engine_name = "cuda:0"

    def sample(self) -> Telemetry:
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        temperature = self._ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
        power_milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        return Telemetry(
            memory_total_bytes=None if memory is None else memory.total,
            memory_used_bytes=None if memory is None else memory.used,
            utilization=None if rates is None else rates.gpu / 100,
            temperature_celsius=None if temperature is None else float(temperature),
            power_watts=None if power_milliwatts is None else power_milliwatts / 1000,
        )

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, function)(self._handle, *arguments)
        except pynvml.NVMLError:  # this device doesn't tell (MIG, vGPU, old boards)
            return None


def open_device(name: str) -> Device:
    """Open "cpu", "cuda:N", or with "auto" the first GPU if there is one. DeviceError: there is no such device."""
    if name == "cpu":
        return CpuDevice()
    count, reason = _nvml_count()
    if name == "auto":
        return NvmlDevice(0) if count else CpuDevice()
    index = int(name.removeprefix("cuda:"))
    if index >= count:
        there = f"there are {count} NVIDIA devices, counted from cuda:0" if count else f"no NVIDIA device: {reason}"
        raise DeviceError(f"there is no {name} here ({there}); choose another --device, such as cpu")
    return NvmlDevice(index)


def _nvml_count() -> tuple[int, str]:
    """How many NVIDIA devices there are, and why there are none."""
    if pynvml is None:
        return 0, "nvidia-ml-py is not installed, it comes with multigpu[worker]"
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount(), "none is visible to the driver"
    except pynvml.NVMLError as error:
        return 0, str(error)


def host_memory_bytes() -> int:
    """Memory of this host, or of the control group that we are in if that is less."""
    total_bytes = _meminfo()["MemTotal"]
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total_bytes
    return total_bytes if limit == "max" else min(total_bytes, int(limit))


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _processor_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else platform.machine()
