"""The state of the core: one owner for each part of it."""

from dataclasses import dataclass

from multigpu_master.core.ledger import Ledger, Limits
from multigpu_master.core.outbox import Outbox
from multigpu_master.core.placement.pins import Pins
from multigpu_master.core.placement.resource_classes import ResourceClasses
from multigpu_master.core.restart import IdRange, RecoveryHold
from multigpu_master.core.timers import Timers
from multigpu_master.core.workers.fleet import Fleet


@dataclass(frozen=True, slots=True)
class State:
    """Policies (attempts, dispatch, sessions, operators) change fields of tasks, leases and workers directly, and sums
    and indexes through methods of their owner.
    """

    limits: Limits
    ids: IdRange
    hold: RecoveryHold
    timers: Timers
    fleet: Fleet
    classes: ResourceClasses
    pins: Pins
    ledger: Ledger
    outbox: Outbox

    def grants(self, now: float) -> bool:
        """Whether leases can be granted: the recovery hold is over, the journal keeps up, and an id is left."""
        return not self.hold.active(now) and not self.ledger.clogged() and self.ids.next_id < self.ids.end
