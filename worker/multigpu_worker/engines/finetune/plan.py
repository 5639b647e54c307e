"""The work of each step, the same on any number of ranks."""

from dataclasses import dataclass

from multigpu._kinds.finetuning import Finetune, TextsError


@dataclass(frozen=True, slots=True)
class Plan:
    """Of the work of each step. `batch`: examples over all ranks; `micro_batch`: of a rank in a pass."""

    batch: int
    micro_batch: int
    accumulation: int
    steps: int
    every: int


def plan_of(tuning: Finetune, examples: int, ranks: int, limit: int | None) -> Plan:
    """`limit`: of the micro-batch, if larger ones ran out of memory. TextsError: there are too few examples."""
    batch, accumulation = tuning.batch, tuning.accumulation
    if examples < batch:
        batch, accumulation = examples // ranks * ranks, 1
    if not batch:
        made = f"{examples} example{'s' * (examples != 1)}"
        raise TextsError(f"the texts make {made} of at least two tokens: each rank needs one, and there are {ranks}")
    of_rank = batch // ranks
    micro = of_rank // accumulation
    if limit is not None:
        micro = max(size for size in range(1, micro + 1) if of_rank % size == 0 and size <= max(1, limit))
    steps = tuning.steps_max or max(1, round(tuning.epochs * (examples // batch)))
    return Plan(batch, micro, of_rank // micro, steps, tuning.every or max(1, steps // 10))
