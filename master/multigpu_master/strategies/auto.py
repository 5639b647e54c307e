"""auto: the earliest expected finish.

A worker's score is the sum, in seconds, of:
- the expected run time of the leases that it holds, divided by its slots;
- the expected run time of one more task, from the measured time of a unit of work for this model on this worker;
- the time to load the model, if it is not resident.
While other workers have the model loaded, a worker that would have to load it gets a task only once the queued tasks
would keep those other workers busy for longer than the loading takes.
"""

from typing import ClassVar

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.strategy import FleetView, Strategy


class Auto(Strategy):
    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "The earliest expected finish, by measured speed, backlog and the cost of loading a model."
    score_meaning: ClassVar[str] = "expected seconds until the task would be finished"

    def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        return worker.leased_s / worker.info.slots + fleet.expected_s(worker, shape) + fleet.load_s(worker, shape)

    def min_backlog(self, shape: Shape, worker: Worker, fleet: FleetView) -> int:
        load_s = fleet.load_s(worker, shape)
        if load_s == 0.0:
            return 1
        loaded_workers = fleet.resident_workers(shape)
        return 1 + int(load_s * loaded_workers / fleet.expected_s(worker, shape))
