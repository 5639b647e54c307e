"""Opens a worker's device by its name."""

import os

from multigpu_worker.device import amd, nvml
from multigpu_worker.device.cpu import CpuDevice
from multigpu_worker.device.group import DeviceGroup
from multigpu_worker.device.interface import Device, DeviceError


def open_device(name: str) -> Device:
    """Open "cpu", "cuda:N", "rocm:N", a GPU or MIG instance by its NVML UUID, or an AMD GPU by its HIP UUID; several
    GPUs, with commas between them, as a group.

    "auto": the first GPU that CUDA_VISIBLE_DEVICES, or for AMD ROCR_VISIBLE_DEVICES, allows; the CPU if there is none.
    Raises DeviceError.
    """
    if "," in name:
        return DeviceGroup([open_device(each) for each in name.split(",")])
    if name == "cpu":
        return CpuDevice()
    if name.startswith("rocm:"):
        return _open_amd(name)
    count, reason = nvml.count()
    source = ""
    if name == "auto":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
        if visible in ("", "-1"):
            return CpuDevice()
        if not count:
            first = next(iter(amd.visible()), None)
            return CpuDevice() if first is None else _open_amd(first)
        name, source = (
            f"cuda:{visible}" if visible.isdecimal() else visible,
            "CUDA_VISIBLE_DEVICES names a device, but ",
        )
    if name.startswith("cuda:"):
        index: int | None = int(name.removeprefix("cuda:"))
    else:
        index = nvml.index_of(name) if count else None
        if index is None and name.startswith("GPU-") and amd.count()[0]:
            return _open_amd(name)
    if index is None or index >= count:
        there = f"there are {count} NVIDIA devices, counted from cuda:0" if count else f"no NVIDIA device: {reason}"
        raise DeviceError(f"{source}there is no {name} here ({there}); choose another device, such as cpu")
    return nvml.open_at(index, name if name.startswith("MIG-") else "")


def _open_amd(name: str) -> Device:
    count, reason = amd.count()
    index = int(name.removeprefix("rocm:")) if name.startswith("rocm:") else amd.index_of(name)
    if index is None or index >= count:
        there = f"there are {count} AMD devices, counted from rocm:0" if count else f"no AMD device: {reason}"
        raise DeviceError(f"there is no {name} here ({there}); choose another device, such as cpu")
    return amd.open_at(index)
