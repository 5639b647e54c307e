"""The NVIDIA driver and its GPUs as one JSON value on stdout.

A separate process (`python -m multigpu.cli.doctor.nvml`): a broken driver may hang or crash its caller.
"""

import json
from collections.abc import Callable
from typing import Any


def survey() -> dict[str, Any]:
    """{"error": why NVML doesn't work} or driver, cuda, devices. Unknown values are omitted."""
    try:
        import pynvml as nvml  # noqa: PLC0415  may not be installed
    except ImportError:
        return {"error": "the package nvidia-ml-py is not installed", "missing": "nvidia-ml-py"}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"error": str(error), "code": error.value}
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    found = [_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    return {
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "devices": found,
    }


def _device(nvml: Any, index: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"index": index}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        facts |= {"uuid": nvml.nvmlDeviceGetUUID(handle), "name": nvml.nvmlDeviceGetName(handle)}
        nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        return {**facts, "error": str(error)}

    def add_fact(name: str, query: Callable[[], Any]) -> None:
        try:
            facts[name] = query()
        except nvml.NVMLError:
            return

    add_fact("minor", lambda: nvml.nvmlDeviceGetMinorNumber(handle))
    add_fact("mig", lambda: nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    add_fact("compute_mode", lambda: nvml.nvmlDeviceGetComputeMode(handle))
    return {**facts, "nvlinks_up": _nvlinks_up(nvml, handle)}


def _nvlinks_up(nvml: Any, handle: Any) -> int:
    up = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            up += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:  # no such link, or no NVLink at all
            break
    return up


if __name__ == "__main__":
    print(json.dumps(survey()))  # noqa: T201  for the parent process
