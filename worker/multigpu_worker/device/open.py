"""Opens a worker's device by its name."""

import os

from multigpu_worker.device import cpu, nvml
from multigpu_worker.device.interface import Device, DeviceError


def open_device(name: str) -> Device:
    """Open "cpu", "cuda:N", or a GPU or MIG instance by its NVML UUID. Raises DeviceError.

    "auto": the first device in CUDA_VISIBLE_DEVICES, else the first GPU; the CPU if there is none, or none is visible.
    """
    if name == "cpu":
        return cpu.CpuDevice()
    count, reason = nvml.count()
    source = ""
    if name == "auto":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
        if not count or visible in ("", "-1"):
            return cpu.CpuDevice()
        name, source = (
            f"cuda:{visible}" if visible.isdecimal() else visible,
            "CUDA_VISIBLE_DEVICES names a device, but ",
        )
    if name.startswith("cuda:"):
        index: int | None = int(name.removeprefix("cuda:"))
    else:
        index = nvml.index_of(name) if count else None
    if index is None or index >= count:
        there = f"there are {count} NVIDIA devices, counted from cuda:0" if count else f"no NVIDIA device: {reason}"
        raise DeviceError(f"{source}there is no {name} here ({there}); choose another device, such as cpu")
    return nvml.open_at(index, name if name.startswith("MIG-") else "")
