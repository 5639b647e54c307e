"""least_loaded: the worker with the fewest leases per slot."""

from typing import ClassVar

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.strategy import FleetView, Strategy


class LeastLoaded(Strategy):
    name: ClassVar[str] = "least_loaded"
    summary: ClassVar[str] = "The worker with the fewest leases per slot."
    score_meaning: ClassVar[str] = "leases per slot"

    def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        return len(worker.leases) / worker.info.slots
