"""Plans how a model is divided among devices, before anything is loaded: `multigpu.plan`."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multigpu import _extras
from multigpu.config.values import from_text
from multigpu.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The model's configuration is read with torch and transformers, which takes seconds to import.
TIMEOUT_S = 300.0
_WRONG = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """What a plan puts on one device, in bytes.

    Attributes:
        name: of the device, or its size as it was given.
        limit_bytes: what the rest of these may be in all.
        weights_bytes: weights of its modules.
        cache_bytes: keys and values of its layers, for the plan's `cache_tokens`.
        activation_bytes: the largest intermediate results of a step.
        process_bytes: what a process takes there without a model.
        left_bytes: what is left.
        modules: its modules, by their names in the model, in the order in which they run.
    """

    name: str
    limit_bytes: int
    weights_bytes: int
    cache_bytes: int
    activation_bytes: int
    process_bytes: int
    left_bytes: int
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is divided.

    Attributes:
        model: the folder's name.
        source, kind: of the model (docs/models.md).
        precision: of the weights in memory.
        architecture: its class in transformers; "": its format is not divided.
        layers, parameters: how many it has; 0: its format is not divided.
        weights_bytes: all weights in memory, once.
        cache_tokens: tokens of keys and values that the plan has room for.
        cache_token_bytes: bytes of one token's keys and values, in all layers.
        devices: what is on each device.
        device_map: module -> index of its device, "cpu" or "disk", as accelerate takes it. Empty: ranks were asked for.
        stages: with ranks, module -> its stage; stage n has the n-th `tensor_parallel` of the devices.
        host_bytes, disk_bytes: of modules on no device.
        tensor_parallel, pipeline: ranks that share each layer, and stages one after the other.
        fewest_devices: as many of the largest device hold the model; None: no number does, or ranks were asked for.
        notes: what is expected to be slow, and other remarks.
    """

    model: str
    source: str
    kind: str
    precision: str
    weights_bytes: int
    devices: tuple[DevicePlan, ...]
    notes: tuple[str, ...]
    device_map: Mapping[str, int | str] = dataclasses.field(default_factory=dict)
    stages: Mapping[str, int] = dataclasses.field(default_factory=dict)
    architecture: str = ""
    layers: int = 0
    parameters: int = 0
    cache_tokens: int = 0
    cache_token_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    tensor_parallel: int = 1
    pipeline: int = 1
    fewest_devices: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The plan as values of JSON."""
        return dataclasses.asdict(self)


def plan(
    model: str | os.PathLike[str],
    *,
    devices: Sequence[str | int] = (),
    strategy: str = "auto",
    max_memory: Mapping[int | str, int | str] | None = None,
    tensor_parallel: int = 1,
    pipeline: int = 1,
    cache_tokens: int | None = None,
    device_map: Mapping[str, int | str] | None = None,
) -> Plan:
    """Plans how a model is divided among devices. Reads the headers of its files; loads nothing.

    Args:
        model: the folder of the model's files, or a file in it, on this host.
        devices: devices of this host ("cuda:0", a UUID, "cpu" alone), or sizes of devices anywhere ("80GiB", bytes).
            Default: the GPUs of this host.
        strategy: "auto" (balanced over as few devices as hold the model), "balanced", "balanced_low_0" (the first has
            as little as possible), "sequential" (one after the other is filled).
        max_memory: limits, by the index of the device, in bytes or as "20GiB"; "cpu" and "disk" let what fits on no
            device be there. Default: 95 % of each device, nothing on the host or its disk.
        tensor_parallel: so many ranks share each layer.
        pipeline: so many stages have layers one after the other; each is `tensor_parallel` devices.
        cache_tokens: leave room for keys and values of so many tokens, of all sequences together. Default: one sequence
            of the longest context.
        device_map: check this map instead of making one.

    Raises:
        PlanError: the model does not fit, can't be divided so, or its files can't be read.
        ValueError: an argument is wrong.
    """
    if missing := _extras.missing("multigpu.plan", "worker"):
        raise PlanError(missing)
    if isinstance(devices, str) or not os.fspath(model):
        raise ValueError("devices is a list, such as ['24GiB'], and model a path")
    request = {
        "model": os.fspath(Path(model).expanduser().absolute()),
        "devices": list(map(str, devices)),
        "strategy": strategy,
        "max_memory": {str(name): _bytes(name, limit) for name, limit in (max_memory or {}).items()},
        "tensor_parallel": _at_least(1, "tensor_parallel", tensor_parallel),
        "pipeline": _at_least(1, "pipeline", pipeline),
        "cache_tokens": None if cache_tokens is None else _at_least(0, "cache_tokens", cache_tokens),
        "device_map": None if device_map is None else dict(device_map),
    }
    argv = [sys.executable, "-m", "multigpu_worker.planning", json.dumps(request)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise PlanError(f"planning took more than {TIMEOUT_S:g} s: does a driver hang?") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise (ValueError if done.returncode == _WRONG else PlanError)(reason)
    found = json.loads(done.stdout)
    places = tuple(DevicePlan(**each | {"modules": tuple(each["modules"])}) for each in found.pop("devices"))
    return Plan(**found | {"devices": places, "notes": tuple(found["notes"])})


def _bytes(name: int | str, limit: int | str) -> int:
    size = limit if isinstance(limit, int) else int(from_text(limit, int, "size_bytes"))
    return _at_least(0, f"max_memory {name}", size)


def _at_least(least: int, name: str, value: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}: it is a number from {least} up")
    return value
