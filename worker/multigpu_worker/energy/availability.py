"""Which devices of this host a benchmark can use, how they are doing, and a configuration for them."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from multigpu_worker.device import nvml
from multigpu_worker.device.cpu import CpuDevice
from multigpu_worker.device.interface import Device, DeviceError, DeviceGoneError, Telemetry
from multigpu_worker.device.open import open_device
from multigpu_worker.energy.config import BenchmarkConfig, unsupported

MIB = 1 << 20
GB = 10**9


def check(config: BenchmarkConfig) -> dict[str, Any]:
    """The report on the GPUs of a configuration, with the keys that are not followed."""
    gpus = config.backend.device_ids if config.backend.device == "cuda" else ()
    return report(gpus, config.backend.memory_limits_bytes()) | {
        "unsupported": unsupported(config), "output_dir": config.output_dir,
        "output_file": config.reporter.output_file,
    }  # fmt: skip


def open_devices(config: BenchmarkConfig) -> tuple[list[Device], list[Device]]:
    """The devices that compute, and those that are recorded beside them. Raises DeviceError."""
    cpu = CpuDevice()
    if config.backend.device == "cpu":
        return [cpu], []
    return [open_device(f"cuda:{index}") for index in config.backend.device_ids], [cpu]


def report(gpus: Sequence[int], limits_bytes: Mapping[int, int]) -> dict[str, Any]:
    """For JSON: the earlier system's report on these GPUs, with the state of each, and the processor.

    `limits_bytes`: the memory that a GPU must have free. The GPUs are read once, one after the other.
    """
    states: dict[str, dict[str, Any]] = {}
    errors: dict[int, str] = {}
    for index in gpus:
        try:
            device = open_device(f"cuda:{index}")
            try:
                telemetry = device.sample()
            finally:
                device.release()
        except (DeviceError, DeviceGoneError) as error:
            errors[index] = str(error)
            continue
        states[f"gpu_{index}"] = {"name": device.info.product, **gpu_stats(telemetry), "processes": _users(telemetry)}
        if device.compute_prohibited:
            errors[index] = f"its compute mode is prohibited; run nvidia-smi -i {index} -c DEFAULT"
        elif problem := _too_little_memory(telemetry, limits_bytes.get(index, 0)):
            errors[index] = problem
    cpu = CpuDevice()
    return {
        "requested_gpus": [*gpus],
        "available_gpus": [index for index in gpus if index not in errors],
        "unavailable_gpus": [*errors],
        "errors": errors,
        "all_available": not errors,
        "gpu_stats": states,
        "cpu": {"name": cpu.info.product, "energy_readable": cpu.energy_joules() is not None},
    }


def gpu_stats(telemetry: Telemetry) -> dict[str, float | None]:
    """A GPU's state under the earlier system's names. "mb" is MiB, as there. None: not reported."""
    used, total = _mib(telemetry.memory_used_bytes), _mib(telemetry.memory_total_bytes)
    return {
        "utilization_percent": None if telemetry.utilization is None else telemetry.utilization * 100,
        "memory_used_mb": used,
        "memory_total_mb": total,
        "memory_percent": used / total * 100 if used is not None and total else None,
        "temperature_c": telemetry.temperature_celsius,
        "power_draw_w": telemetry.power_watts,
    }


def _users(telemetry: Telemetry) -> list[dict[str, Any]]:
    return [{"pid": each.pid, "memory_used_mb": _mib(each.memory_used_bytes)} for each in telemetry.processes]


def _mib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / MIB


def _too_little_memory(telemetry: Telemetry, limit_bytes: int) -> str:
    """Empty: there is enough, or the device does not report it."""
    total_bytes, used_bytes = telemetry.memory_total_bytes, telemetry.memory_used_bytes
    if total_bytes is None or used_bytes is None or total_bytes - used_bytes >= limit_bytes:
        return ""
    pids = ", ".join(str(process.pid) for process in telemetry.processes)
    users = f"; processes on it: {pids}" if pids else ""
    limit, used, total = (f"{size / GB:.1f} GB" for size in (limit_bytes, used_bytes, total_bytes))
    return f"max_memory is {limit}, and {used} of {total} are in use{users}"


def all_gpus() -> range:
    """The indexes of this host's GPUs. Raises DeviceError: there is none, or the driver can't be used."""
    count, reason = nvml.count()
    if not count:
        raise DeviceError(f"there is no NVIDIA GPU here: {reason}")
    return range(count)


def recommended() -> dict[str, Any]:
    """For JSON: a configuration (YAML) for the GPUs that are available, and why others are not.

    max_memory is 90 % of each GPU's memory, in whole GB. Raises DeviceError: there is none.
    """
    found = report(all_gpus(), {})
    if not found["available_gpus"]:
        raise DeviceError("no GPU is available: " + "; ".join(found["errors"].values()))
    memory_mib = {index: found["gpu_stats"][f"gpu_{index}"]["memory_total_mb"] for index in found["available_gpus"]}
    limits = {index: f"{int(mib * MIB * 0.9 / GB)}GB" for index, mib in memory_mib.items() if mib is not None}
    backend = {"type": "pytorch", "device": "cuda", "device_ids": [*memory_mib], "device_map": "auto"}
    config = {"backend": backend | {"max_memory": limits}}
    return {"yaml": yaml.safe_dump(config, sort_keys=False, default_flow_style=None), "errors": found["errors"]}
