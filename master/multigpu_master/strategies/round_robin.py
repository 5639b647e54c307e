"""round_robin: every worker in turn."""

from typing import ClassVar

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.strategy import FleetView, Strategy


class RoundRobin(Strategy):
    name: ClassVar[str] = "round_robin"
    summary: ClassVar[str] = "Every worker in turn."
    score_meaning: ClassVar[str] = "the fleet's dispatch count when the worker last got a task"

    def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        return float(worker.newest_lease_number)
