"""Takes back leases that their workers have not begun, where that lets a task begin sooner.

A window holds more leases than its worker has slots, so that the next one is there when one ends. But one that runs
long holds up those behind it. So leases that have waited in a window are recalled for a worker that has a free slot,
and less urgent ones for a task that waits for room in a window. Their worker returns those that it has not begun and
runs the others on: nothing runs twice. Each lease is recalled at most once a session.

Only workers that hold more leases than they have slots are looked at; a slot in which a cancelled call runs on is none.
They are looked at by the clock, so that the fast tasks of a wide window cost nothing: they are gone by then.
"""

from itertools import islice

from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Lease, Shape, Worker
from multigpu_master.core.placement.lanes import shape_of
from multigpu_master.core.placement.ranking import barred, worthwhile

# How often windows are looked at, and how long a lease may wait in one before it is recalled.
LOOK_S = 0.05
# Of how many sorts of tasks (queue and shape) one look finds out who takes them.
SORTS_MAX = 64


class Recalls:
    """See the module."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._deep: dict[Worker, None] = {}  # workers that hold more leases than they have slots, and perhaps others
        self._armed = False

    def granted(self, worker: Worker, now: float) -> None:
        """A worker has got leases, or has fewer slots for them."""
        if len(worker.leases) > worker.slots:
            self._deep[worker] = None
            if not self._armed:
                self._arm(now)

    def _arm(self, now: float) -> None:
        self._armed = True
        self._ledger.timers.at(now + LOOK_S, self._look)

    def _look(self, now: float) -> None:
        deep = self._deep = {w: None for w in self._deep if w.session and len(w.leases) > w.slots}
        self._armed = False
        if not deep:
            return
        self._arm(now)
        ledger = self._ledger
        for worker in deep:
            ledger.fleet.learn_from_silence(worker, now)
        if not ledger.held(now) and not ledger.clogged():
            self._recall_for_slots(now)
            self._recall_for_urgent(now)
        first = next(iter(deep))  # the next look begins with another, in case that it can't get through all
        deep[first] = deep.pop(first)

    def _recall_for_slots(self, now: float) -> None:
        """Shares out what waits in windows among the workers that have free slots."""
        free = [w for w in self._ledger.fleet.sessions.values() if w.accepting and len(w.leases) < w.slots]
        promised = dict.fromkeys(free, 0)
        takers: dict[tuple[str, Shape], list[Worker]] = {}
        for worker in self._deep if free else ():
            waiting = self._waiting(worker, now)
            share = len(waiting) // (len(free) + 1)
            recalled = []
            for lease in waiting:
                others = self._takers(lease, free, takers)
                while others:
                    other = others[-1]
                    held = len(other.leases)
                    if held + promised[other] < max(other.slots, min(other.allowed, held + share)):
                        promised[other] += 1
                        recalled.append(lease)
                        break
                    others.pop()
            self._ledger.recall(worker, recalled)

    def _takers(
        self, lease: Lease, free: list[Worker], known: dict[tuple[str, Shape], list[Worker]]
    ) -> list[Worker]:  # fmt: skip
        """Those of the free workers that may have such a task."""
        ledger, spec = self._ledger, lease.task.spec
        shape = shape_of(spec)
        found = known.get((spec.queue, shape))
        if found is None:
            if len(known) >= SORTS_MAX:
                return []
            strategy, able = ledger.strategy_of(ledger.queues[spec.queue]), ledger.fleet.eligible(shape)
            queued = ledger.lane_for(lease.task).crowd.live + 1
            found = known[spec.queue, shape] = [
                w for w in free
                if w in able and not w.full and not barred(ledger.fleet, strategy, shape, w)
                and worthwhile(ledger.fleet, strategy, shape, w, queued)
            ]  # fmt: skip
        return found

    def _recall_for_urgent(self, now: float) -> None:
        """Makes room for tasks that wait, in windows that hold less urgent ones and have not moved for a while."""
        fleet = self._ledger.fleet
        stuck = [w for w in self._deep if w.accepting and now - w.reported_s >= LOOK_S]
        for lane in islice(self._ledger.lanes.waiting_first(), SORTS_MAX) if stuck else ():
            head, strategy = lane.head(), self._ledger.strategy_of(lane.queue)
            if head is None or lane.queue.paused or strategy.pinned:
                continue
            if 0 <= now - head.submit_s < LOOK_S:  # below 0: the clock was set back
                continue
            wanted, able = lane.live, fleet.eligible(lane.base)
            for worker in stuck:
                less_urgent = any(x.task.spec.priority > lane.priority for x in worker.leases.values())
                if wanted and less_urgent and worker in able and not barred(fleet, strategy, lane.base, worker):
                    waiting = self._waiting(worker, now, last_first=True)
                    recalled = [x for x in waiting if x.task.spec.priority > lane.priority][:wanted]
                    self._ledger.recall(worker, recalled)
                    wanted -= len(recalled)

    def _waiting(self, worker: Worker, now: float, last_first: bool = False) -> list[Lease]:
        """A worker's leases that may be recalled, in the order in which they should begin, or the reverse. Those that
        run, though no heartbeat has told so yet, are likely the oldest: they come at the end in both cases.
        """
        leases, begun = [], 0
        for lease in worker.leases.values():
            if lease.running or lease.recalled == worker.session:
                begun += 1
            elif lease.dispatch_s <= now - LOOK_S and self._may(lease):
                leases.append(lease)
        likely = max(0, worker.slots - begun)
        order = sorted(leases[likely:], key=lambda x: (x.task.spec.priority, x.task.task_id), reverse=last_first)
        return order + leases[:likely]

    def _may(self, lease: Lease) -> bool:
        """Whether its task would be granted anew, and to any worker."""
        task, ledger = lease.task, self._ledger
        queue = ledger.queues[task.spec.queue]
        return not (queue.paused or ledger.strategy_of(queue).pinned or (task.extra is not None and task.extra.broke))
