"""Opens a worker's device by its name."""

import os

from multigpu_worker.device import cpu, nvml
from multigpu_worker.device.interface import Device, DeviceError


def open_device(name: str) -> Device:
    """Open "cpu", "cuda:N", or a GPU or MIG instance by its NVML UUID. Raises DeviceError.

    "auto": the MIG instance that is first in CUDA_VISIBLE_DEVICES, else the first GPU, else the CPU.
    """
    if name == "cpu":
        return cpu.CpuDevice()
    count, reason = nvml.count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    if name == "auto" and visible.startswith("MIG-"):
        name = visible
    if name == "auto":
        return nvml.open_at(0) if count else cpu.CpuDevice()
    if name.startswith("cuda:"):
        index: int | None = int(name.removeprefix("cuda:"))
    else:
        index = nvml.index_of(name) if count else None
    if index is None or index >= count:
        there = f"there are {count} NVIDIA devices, counted from cuda:0" if count else f"no NVIDIA device: {reason}"
        raise DeviceError(f"there is no {name} here ({there}); choose another --device, such as cpu")
    return nvml.open_at(index, name if name.startswith("MIG-") else "")
