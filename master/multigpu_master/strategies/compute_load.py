"""compute_load: the device with the lowest utilisation.

Utilisation is a figure of the last heartbeat; what was granted since would not show for a second, so leases for each
slot count too, as far as they make a difference of a tenth of a percent each.
"""

from typing import ClassVar

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.strategy import FleetView
from multigpu_master.strategies.base import Base


class ComputeLoad(Base):
    name: ClassVar[str] = "compute_load"
    aliases: ClassVar[tuple[str, ...]] = ("utilization",)
    summary: ClassVar[str] = "The device with the lowest utilisation, then the fewest leases."
    score_meaning: ClassVar[str] = "utilisation, plus a thousandth for each lease of a slot"

    def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        # A device that doesn't say is taken to be half busy: neither shunned nor swamped.
        busy = 0.5 if worker.telemetry.utilization is None else worker.telemetry.utilization
        return busy + len(worker.leases) / worker.info.slots / 1000
