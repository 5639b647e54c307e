"""task_type: labels route kinds to workers.

A worker labelled task_type=embed (or task_type=embed+generate) gets only tasks of those kinds. A worker without the
label is the fallback for every kind: it gets a task when no worker with the label for that kind has room.
"""

from typing import ClassVar

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.strategy import FleetView, Strategy

LABEL = "task_type"
# Added to the score of workers without the label: more than any number of leases per slot.
FALLBACK_SCORE = 1e6


class TaskType(Strategy):
    name: ClassVar[str] = "task_type"
    summary: ClassVar[str] = (
        "Workers labelled task_type=KIND[+KIND] serve only these kinds; workers without the label are the fallback."
    )
    score_meaning: ClassVar[str] = "leases per slot, plus a million for a worker without the label"

    def excludes(self, shape: Shape, worker: Worker, fleet: FleetView) -> str | None:
        label = worker.info.labels.get(LABEL)
        if label is not None and shape.kind not in label.split("+"):
            return f"reserved for {LABEL}={label}"
        return None

    def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        load = len(worker.leases) / worker.info.slots
        return load if LABEL in worker.info.labels else FALLBACK_SCORE + load
