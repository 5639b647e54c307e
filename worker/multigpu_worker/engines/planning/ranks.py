"""Plans of ranks: a process for each device, all at the same time. Tensor parallelism within groups of devices, and a
pipeline of such groups.
"""

from collections.abc import Sequence
from typing import Any

from multigpu_worker.engines.planning.costs import Costs
from multigpu_worker.engines.planning.structure import Part, Structure, divided_counts
from multigpu_worker.engines.planning.wish import DevicePlan, PlanError, Wish, gib


def plan_ranks(structure: Structure, costs: Costs, devices: list[DevicePlan], wish: Wish) -> dict[str, Any]:
    """The stage of each part. Fills in the devices. Raises PlanError."""
    ranks, stages = wish.tensor_parallel, wish.pipeline
    if ranks > 1:
        check_tensor_parallel(structure, ranks)
    if stages > 1:
        check_pipeline(structure, stages)
    if len(devices) < ranks * stages:
        what = f"{ranks} ranks" if stages == 1 else f"{stages} stages of {ranks} rank(s)"
        raise PlanError(f"{what} need {ranks * stages} devices, and there are {len(devices)}")
    parts, copied = structure.own, 0
    if stages > 1:  # a part that uses the weights of an earlier one has a copy of them on its stage
        by_name = {part.name: part for part in parts}
        for part in structure.parts:
            if part.tied:
                copied += _rank_bytes(by_name[part.tied], ranks)
    sizes = [_rank_bytes(part, ranks) + part.layer * costs.layer_cache_bytes // ranks for part in parts]
    sizes[-1] += copied
    groups = [devices[stage * ranks : (stage + 1) * ranks] for stage in range(stages)]
    rooms = [min(device.left_bytes for device in group) for group in groups]
    placed = stages_of(parts, stages)
    for stage, room in enumerate(rooms):
        need = sum(size for size, its in zip(sizes, placed, strict=True) if its == stage)
        if need > room:
            where = f"stage {stage} of {stages}" if stages > 1 else "the model"
            raise PlanError(f"{where} takes {gib(need)} on each device, and there is room for {gib(room)}")
    for part, size, stage in zip(parts, sizes, placed, strict=True):
        for device in groups[stage]:
            cache_bytes = part.layer * costs.layer_cache_bytes // ranks
            device.weights_bytes += size - cache_bytes
            device.cache_bytes += cache_bytes
            device.modules.append(part.name)
    for device in devices:
        if not device.modules:
            device.activation_bytes = device.process_bytes = 0
    stage_of = {part.name: stage for part, stage in zip(parts, placed, strict=True)}
    for part in structure.parts:
        if part.tied:
            stage_of[part.name] = placed[-1]
    notes = []
    if ranks > 1:
        layers = sum(part.layer for part in parts)
        notes.append(
            f"each token's {costs.hidden_bytes:,} bytes are summed over {ranks} devices {2 * layers} times a step: "
            "slow without NVLink"
        )
    if stages > 1:
        notes.append(f"{stages} stages: a single sequence uses one at a time, as many as stages use all")
    return {"stages": {part.name: stage_of[part.name] for part in structure.parts}, "notes": notes}


def stages_of(parts: Sequence[Part], stages: int) -> list[int]:
    """The stage of each part, as transformers divides them: each has as many layers, and the last one the rest, too.

    What comes before the layers is on the first stage, and what follows them on the last.
    """
    layers = sum(part.layer for part in parts)
    placed, seen = [], 0
    for part in parts:
        placed.append(min(seen // (layers // stages), stages - 1))
        seen += part.layer
    return placed


def check_pipeline(structure: Structure, stages: int) -> None:
    """PlanError: the model can't be divided into so many stages."""
    if not getattr(structure.config, "base_model_pp_plan", None):
        raise PlanError(f"transformers has no pipeline plan for {structure.architecture}: use a device map")
    layers = sum(part.layer for part in structure.own)
    if layers < stages:
        raise PlanError(f"the {layers} layers of {structure.architecture} can't be divided among {stages} stages")


def check_tensor_parallel(structure: Structure, ranks: int) -> None:
    """PlanError: the model's layers can't be divided among so many ranks."""
    if not structure.tensor_plan:
        raise PlanError(f"transformers has no tensor-parallel plan for {structure.architecture}: use a device map")
    counts = divided_counts(structure)
    if wrong := [f"{count} {what}" for what, count in counts.items() if count % ranks]:
        most = counts["key and value heads"]
        possible = [n for n in range(2, most + 1) if not any(count % n for count in counts.values())]
        others = f"possible are {', '.join(map(str, possible))}" if possible else "it can't be divided so at all"
        raise PlanError(f"{ranks} ranks can't share {' and '.join(wrong)} of {structure.architecture}: {others}")


def _rank_bytes(part: Part, ranks: int) -> int:
    """Of a part's weights on each rank."""
    divided = int(part.weights_bytes * part.divided)
    return part.weights_bytes - divided + -(-divided // ranks)
