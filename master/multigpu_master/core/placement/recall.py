"""Takes back leases that their workers have not begun, where that lets a task begin sooner.

A window holds more leases than its worker has slots, so that a slot that ends a lease can begin the next at once. But a
lease that runs long delays the leases behind it. So leases that have waited in a window are recalled for a worker with
a free slot, and less urgent leases for a task that waits for room in a window. The worker returns the leases that it
has not begun and continues the others: nothing runs twice. Each lease is recalled at most once a session. A lease whose
model its worker still loads is recalled, too, for an idle worker that has the model.

Only workers with more leases than slots, or that load a model, are checked, every LOOK_S: the fast tasks of a wide
window have ended by then.
"""

from collections.abc import Callable
from heapq import nsmallest

from multigpu_master.core.commands import Commands
from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Lease, Shape, Worker, shape_of
from multigpu_master.core.placement.obstacles import backlog_suffices, obstructed
from multigpu_master.core.placement.resource_classes import Backlog
from multigpu_master.core.timers import Timers
from multigpu_master.core.workers.fleet import Fleet

# How often windows are checked, and how long a lease may wait in one before it is recalled.
LOOK_S = 0.05
# Limit of (queue, shape) pairs for which one check determines the possible workers.
CHECKED_MAX = 64


class Recalls:
    """See the module. `grants` says whether leases can be granted now."""

    def __init__(
        self, ledger: Ledger, fleet: Fleet, timers: Timers, commands: Commands, grants: Callable[[float], bool]
    ) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._timers = timers
        self._commands = commands
        self._grants = grants
        self._checked: dict[Worker, None] = {}  # all workers with leases that may wait, and perhaps more workers
        self._armed = False

    def watch(self, worker: Worker, now: float) -> None:
        """Call when a worker was granted leases, or has fewer slots for them."""
        if _may_keep_waiting(worker):
            self._checked[worker] = None
            if not self._armed:
                self._arm(now)

    def _arm(self, now: float) -> None:
        self._armed = True
        self._timers.at(now + LOOK_S, self._look)

    def _look(self, now: float) -> None:
        checked = self._checked = {w: None for w in self._checked if w.session and _may_keep_waiting(w)}
        self._armed = False
        if not checked:
            return
        self._arm(now)
        for worker in self._over_slots():
            self._fleet.adjust_silent_worker(worker, now)
        if self._grants(now):
            self._recall_for_slots(now)
            self._recall_for_urgent(now)
        first = next(iter(checked))  # the next check begins with another worker: this one may have reached its limits
        checked[first] = checked.pop(first)

    def _over_slots(self) -> list[Worker]:
        """The workers with more leases than slots."""
        return [w for w in self._checked if len(w.leases) > w.slots]

    def _recall_for_slots(self, now: float) -> None:
        """Recalls leases that wait in windows, a share for each worker that has free slots."""
        free = [w for w in self._fleet.sessions.values() if w.accepting and len(w.leases) < w.slots]
        promised = dict.fromkeys(free, 0)
        takers: dict[tuple[str, Shape, bool], list[Worker]] = {}
        for worker in self._checked if free else ():
            waiting = self._waiting(worker, now)
            loads = len(worker.leases) <= worker.slots
            if loads:
                waiting = [lease for lease in waiting if lease.model in worker.residency.began_s]
            share = len(waiting) // (len(free) + 1)
            recalled = []
            for lease in waiting:
                others = self._takers(lease, free, takers, loaded=loads)
                while others:
                    other = others[-1]
                    held = len(other.leases)
                    if held + promised[other] < max(other.slots, min(other.pace.leases_max, held + share)):
                        promised[other] += 1
                        recalled.append(lease)
                        break
                    others.pop()
            self._commands.recall(worker, recalled)

    def _takers(
        self, lease: Lease, free: list[Worker], known: dict[tuple[str, Shape, bool], list[Worker]], *, loaded: bool
    ) -> list[Worker]:  # fmt: skip
        """The free workers that may get the lease's task. `loaded`: only those that have its model."""
        fleet, ledger, spec = self._fleet, self._ledger, lease.task.spec
        shape = shape_of(spec)
        found = known.get((spec.queue, shape, loaded))
        if found is None:
            if len(known) >= CHECKED_MAX:
                return []
            strategy, able = ledger.strategy_of(ledger.queues[spec.queue]), fleet.eligible(shape)
            queued = self._ledger.classes.queued(strategy, shape) + 1
            found = known[spec.queue, shape, loaded] = [
                w for w in free
                if w in able and not w.full and not obstructed(fleet, strategy, shape, w)
                and backlog_suffices(fleet, strategy, shape, w, queued)
                and not (loaded and fleet.load_s(w, shape))
            ]  # fmt: skip
        return found

    def _recall_for_urgent(self, now: float) -> None:
        """Recalls leases for more urgent waiting tasks, from workers that have reported nothing for LOOK_S."""
        fleet = self._fleet
        stuck = [w for w in self._over_slots() if w.accepting and now - w.pace.reported_s >= LOOK_S]
        for backlog in self._first_backlogs() if stuck else ():
            head, strategy, shape = backlog.head(), backlog.strategy, backlog.shape
            if head is None or strategy.pinned:
                continue
            if 0 <= now - head.submit_s < LOOK_S:  # below 0: the clock was set back
                continue
            priority = head.spec.priority
            needed, able = backlog.size, fleet.eligible(shape)
            for worker in stuck:
                less_urgent = any(x.task.spec.priority > priority for x in worker.leases.values())
                if needed and less_urgent and worker in able and not obstructed(fleet, strategy, shape, worker):
                    waiting = self._waiting(worker, now, last_first=True)
                    recalled = [x for x in waiting if x.task.spec.priority > priority][:needed]
                    self._commands.recall(worker, recalled)
                    needed -= len(recalled)

    def _first_backlogs(self) -> list[Backlog]:
        """The backlogs with the most urgent first tasks."""
        return nsmallest(CHECKED_MAX, self._ledger.classes.backlogs.values(), key=lambda backlog: backlog.position)

    def _waiting(self, worker: Worker, now: float, last_first: bool = False) -> list[Lease]:
        """A worker's leases that may be recalled, in the order in which they should begin, or the reverse. The oldest
        leases come last in both cases: they likely run, although no heartbeat has reported that yet.
        """
        leases, begun = [], 0
        for lease in worker.leases.values():
            if lease.running or lease.recalled == worker.session:
                begun += 1
            elif lease.dispatch_s <= now - LOOK_S and self._may_recall(lease):
                leases.append(lease)
        likely = max(0, worker.slots - begun)
        order = sorted(leases[likely:], key=lambda x: (x.task.spec.priority, x.task.task_id), reverse=last_first)
        return order + leases[:likely]

    def _may_recall(self, lease: Lease) -> bool:
        """Whether the lease's task would get another lease, and from any worker."""
        task, ledger = lease.task, self._ledger
        queue = ledger.queues[task.spec.queue]
        return not (queue.paused or ledger.strategy_of(queue).pinned or (task.extra is not None and task.extra.broke))


def _may_keep_waiting(worker: Worker) -> bool:
    """Whether a worker has leases that can't begin now: more than its slots, or on a model that it loads."""
    return len(worker.leases) > worker.slots or (bool(worker.leases) and bool(worker.residency.began_s))
