"""Answers `multigpu.plan`, in a separate process, because it imports torch and calls this host's drivers.

    python -m multigpu_worker.planning REQUEST

REQUEST and the answer on stdout are JSON. If there is no answer, stderr says why, and the exit code is 2 if the request
is wrong, else 1.
"""

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multigpu.config.values import from_text

from multigpu_worker.device.cpu import host_memory_bytes
from multigpu_worker.device.interface import DeviceError
from multigpu_worker.device.open import open_device
from multigpu_worker.energy.availability import all_gpus
from multigpu_worker.engines.planning.wish import CPU, DISK, USABLE_SHARE, PlanError, Wish
from multigpu_worker.repository.model import STRATEGIES, ModelFolderError, ModelSpec
from multigpu_worker.repository.scan import is_model, read_model

WRONG = 2


class RequestError(ValueError):
    """The request is wrong. The message says what would be right."""


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Make the plan that a request asks for. Raises RequestError, PlanError, ModelFolderError, DeviceError."""
    limits = dict(request["max_memory"])
    ranked = request["tensor_parallel"] > 1 or request["pipeline"] > 1
    if request["strategy"] != "auto" and (ranked or request["device_map"] is not None):
        raise RequestError("a strategy makes a device map: leave it out with a map of your own, and with ranks")
    wish = Wish(
        devices=_devices(request["devices"], limits),
        strategy=_strategy(request["strategy"]),
        host_bytes=limits.pop(CPU, 0),
        disk_bytes=limits.pop(DISK, 0),
        tensor_parallel=request["tensor_parallel"],
        pipeline=request["pipeline"],
        cache_tokens=request["cache_tokens"],
        device_map=request["device_map"],
    )
    if limits:
        raise RequestError(f"max_memory has {min(limits)!r}: there are {len(wish.devices)} devices, counted from 0")
    spec = _read_spec(Path(request["model"]))
    # Imported after the checks: it imports torch, which takes seconds.
    plan = importlib.import_module("multigpu_worker.engines.planning.plan")
    made: dict[str, Any] = plan.make_plan(spec, wish)
    return made


def _strategy(name: str) -> str:
    if name not in STRATEGIES:
        raise RequestError(f"there is no strategy {name!r}; there are {', '.join(STRATEGIES)}")
    return name


def _devices(names: Sequence[str], limits: dict[str, int]) -> list[tuple[str, int]]:
    """The name and memory limit of each device. Removes the limits of these devices from `limits`."""
    if names == [CPU]:  # the limit is for the host's memory; the plan may put parts that don't fit on the disk
        return [(CPU, limits.pop(CPU, int(host_memory_bytes() * USABLE_SHARE)))]
    try:
        found = [_device(name) for name in names or [f"cuda:{index}" for index in all_gpus()]]
    except DeviceError as error:
        if names:
            raise
        raise RequestError(f"{error}; say for which devices to plan: --devices 24GiB,24GiB, or cpu") from error
    devices = []
    for index, (name, total_bytes) in enumerate(found):
        limit = limits.pop(str(index), int(total_bytes * USABLE_SHARE))
        if limit > total_bytes:
            raise RequestError(f"max_memory of device {index} is {limit:,} bytes, and {name} has {total_bytes:,}")
        devices.append((name, limit))
    return devices


def _device(name: str) -> tuple[str, int]:
    """Name and memory of a device: one of this host or, if `name` is a size, any device with this memory."""
    if name[:1].isdigit() or name.startswith(("-", ".")):
        try:
            return name, int(from_text(name, int, "size_bytes"))
        except ValueError as error:
            raise RequestError(f"{name!r} is neither a device nor a size: {error}") from error
    if name == CPU:
        raise RequestError("cpu is planned for alone; with GPUs, give the host's share as max_memory cpu=SIZE")
    info = open_device(name).info
    return info.name, info.memory_total_bytes


def _read_spec(path: Path) -> ModelSpec:
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise RequestError(f"there is no {path}: give the folder of the model's files, on this host")
    if not is_model(folder):
        raise RequestError(f"{folder} is no model: it has no files of a known form (docs/models.md)")
    specs, errors = read_model(folder, folder.absolute().name.replace(" ", "-") or "model", None)
    if not specs:
        raise ModelFolderError(next(iter(errors.values())))
    return specs[-1]


def main() -> int:
    try:
        plan = answer(json.loads(sys.argv[1]))
    except (RequestError, PlanError, ModelFolderError, DeviceError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return WRONG if isinstance(error, RequestError) else 1
    sys.stdout.write(f"{json.dumps(plan)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
