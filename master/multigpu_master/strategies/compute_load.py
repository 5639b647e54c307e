"""compute_load: the device with the lowest utilisation.

The reported utilisation is as old as the last heartbeat, and does not include leases granted since. So the score
adds a thousandth of the leases per slot.
"""

from typing import ClassVar

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.strategy import FleetView, Strategy


class ComputeLoad(Strategy):
    name: ClassVar[str] = "compute_load"
    aliases: ClassVar[tuple[str, ...]] = ("utilization",)
    summary: ClassVar[str] = "The device with the lowest utilisation; each lease per slot counts as 0.1 %."
    score_meaning: ClassVar[str] = "utilisation (0 to 1), plus a thousandth of its leases per slot"

    def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        # A device that reports no utilisation counts as half busy: as 0 it would get all tasks, as 1 none.
        busy = 0.5 if worker.telemetry.utilization is None else worker.telemetry.utilization
        return busy + len(worker.leases) / worker.info.slots / 1000
