"""Plans how a model is divided among devices: which of its parts are where, and what that takes.

Weights count with the numbers in the files' headers, at the precision they are served at. Each device has also the
keys and values of its layers for `cache_tokens` tokens, the largest intermediate results of a step, and its process.
"""

from dataclasses import asdict
from typing import Any

from multigpu_worker.engines.common.precision import NUMBER_BYTES
from multigpu_worker.engines.planning.costs import GPU_PROCESS_BYTES, Costs, costs_of
from multigpu_worker.engines.planning.maps import plan_map
from multigpu_worker.engines.planning.ranks import plan_ranks
from multigpu_worker.engines.planning.structure import Structure, read_structure
from multigpu_worker.engines.planning.wish import CPU, DevicePlan, PlanError, Wish, gib
from multigpu_worker.repository.model import DIVIDED_KINDS, DIVIDED_SOURCES, ModelSpec
from multigpu_worker.repository.weight_files import weights_bytes


def precision_of(spec: ModelSpec, *, on_gpu: bool) -> str:
    if spec.precision != "auto":
        return spec.precision
    return "bf16" if on_gpu else "fp32"


def make_plan(spec: ModelSpec, wish: Wish) -> dict[str, Any]:
    """The plan, as values of JSON. Raises PlanError, ModelFolderError."""
    on_gpu = [name for name, _ in wish.devices] != [CPU]
    precision = precision_of(spec, on_gpu=on_gpu)
    number_bytes = NUMBER_BYTES.get(precision, 4)
    devices = [DevicePlan(name=name, limit_bytes=limit) for name, limit in wish.devices]
    for device in devices:
        device.process_bytes = GPU_PROCESS_BYTES if on_gpu else 0
    plan: dict[str, Any] = {"model": spec.id, "source": spec.source, "kind": spec.kind, "precision": precision}
    if spec.source in DIVIDED_SOURCES and spec.kind in DIVIDED_KINDS:
        structure = read_structure(spec, number_bytes)
        plan |= _divided(structure, costs_of(spec, structure.config, number_bytes, wish.cache_tokens), devices, wish)
    else:
        plan |= _whole(spec, number_bytes, devices, wish)
    plan["devices"] = [asdict(device) | {"left_bytes": device.left_bytes} for device in devices]
    return plan


def _whole(spec: ModelSpec, number_bytes: int, devices: list[DevicePlan], wish: Wish) -> dict[str, Any]:
    """For formats that are not divided: the device with most room has all of it."""
    if wish.tensor_parallel > 1 or wish.pipeline > 1 or wish.device_map is not None:
        raise PlanError(f"a {spec.source} model of kind {spec.kind} is not divided: it runs on one device")
    device = max(devices, key=lambda each: each.limit_bytes)
    device.weights_bytes = weights_bytes(spec, number_bytes)
    device.modules = ["(the whole model)"]
    if device.left_bytes < 0:
        need = gib(device.limit_bytes - device.left_bytes)
        raise PlanError(f"the model takes {need} on one device, and {device.name} has {gib(device.limit_bytes)}; "
                        f"a {spec.source} model of kind {spec.kind} is not divided")  # fmt: skip
    notes = [f"a {spec.source} model of kind {spec.kind} is not divided: each worker has all of it"]
    return {"weights_bytes": device.weights_bytes, "fewest_devices": 1, "notes": notes}


def _divided(structure: Structure, costs: Costs, devices: list[DevicePlan], wish: Wish) -> dict[str, Any]:
    own = structure.own
    for device in devices:
        device.activation_bytes = costs.activation_bytes
    facts: dict[str, Any] = {
        "architecture": structure.architecture,
        "layers": sum(part.layer for part in own),
        "parameters": sum(part.numbers for part in own),
        "weights_bytes": sum(part.weights_bytes for part in own),
        "cache_tokens": costs.cache_tokens,
        "cache_token_bytes": sum(part.layer for part in own) * costs.layer_cache_bytes // max(1, costs.cache_tokens),
        "tensor_parallel": wish.tensor_parallel,
        "pipeline": wish.pipeline,
    }
    if wish.tensor_parallel > 1 or wish.pipeline > 1:
        if wish.device_map is not None or wish.host_bytes or wish.disk_bytes:
            raise PlanError("tensor parallelism and pipelines take no device map, and no memory of cpu or disk")
        made = plan_ranks(structure, costs, devices, wish)
    else:
        made = plan_map(structure, costs, devices, wish)
    if structure.unused:
        made["notes"].append(f"the files have weights of no module, which are not loaded: {structure.unused}")
    return facts | made
