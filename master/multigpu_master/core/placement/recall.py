"""Takes back leases that their workers have not begun, where that lets a task begin sooner.

A window holds more leases than its worker has slots, so that a slot that ends a lease can begin the next at once. But a
lease that runs long delays the leases behind it. So the master recalls leases that have waited in a window, if another
worker has a free slot, or if a more urgent task waits for room in a window. The worker returns the leases that it has
not begun and continues the others: nothing runs twice. Each lease is recalled at most once a session. A lease whose
model its worker still loads is recalled, too, if a worker with a free slot has loaded the model.

Only workers that have more leases than slots, or load a model, are checked. They are not checked at each event but
every CHECK_S seconds, WORKERS_MAX of them at a time: meanwhile, most leases of fast tasks end without a recall.
"""

from collections.abc import Callable
from heapq import nsmallest
from itertools import islice

from multigpu_master.core.events import Commands
from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Lease, Shape, Worker, shape_of
from multigpu_master.core.placement.candidates import backlog_suffices, obstacle_now
from multigpu_master.core.placement.resource_classes import Backlog
from multigpu_master.core.timers import Timers
from multigpu_master.core.workers.fleet import Fleet

# Seconds between two checks of the windows, and seconds that a lease waits in a window before it may be recalled.
CHECK_S = 0.05
# Limit of the different queues and shapes for which one check looks for workers with free slots, and of the backlogs
# for which it looks for less urgent leases.
CHECKED_MAX = 64
# Limit of the workers in one check. If more are to be checked, each check takes the next ones.
WORKERS_MAX = 256


class Recalls:
    """See the module. `can_grant` returns whether leases can be granted now."""

    def __init__(
        self, ledger: Ledger, fleet: Fleet, timers: Timers, commands: Commands, can_grant: Callable[[float], bool]
    ) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._timers = timers
        self._commands = commands
        self._can_grant = can_grant
        self._to_check: dict[Worker, None] = {}  # includes all for which _has_waiting_leases is true
        self._armed = False  # whether the timer of the next check is set

    def watch(self, worker: Worker, now: float) -> None:
        """Call when a worker was granted leases, has fewer slots for leases, or may have begun to load a model. If
        leases may wait there, the checks include the worker from now on.
        """
        if _has_waiting_leases(worker):
            self._to_check[worker] = None
            if not self._armed:
                self._arm(now)

    def _arm(self, now: float) -> None:
        self._armed = True
        self._timers.at(now + CHECK_S, self._check_windows)

    def _check_windows(self, now: float) -> None:
        self._armed = False
        workers = list(islice(self._to_check, WORKERS_MAX))
        for worker in workers:
            del self._to_check[worker]
        workers = [w for w in workers if w.session and _has_waiting_leases(w)]
        # The next check begins with another worker: the first workers may use up CHECKED_MAX.
        self._to_check |= dict.fromkeys(workers[1:] + workers[:1])
        if not self._to_check:
            return
        self._arm(now)
        over_slots = [w for w in workers if len(w.leases) > w.usable_slots]
        for worker in over_slots:
            self._fleet.adjust_silent_worker(worker, now)
        if self._can_grant(now):
            self._recall_for_slots(workers, now)
            self._recall_for_urgent(over_slots, now)

    def _recall_for_slots(self, workers: list[Worker], now: float) -> None:
        """Recalls each waiting lease that a worker with a free slot may get. Such a worker is promised as many leases
        as it has free slots; or, if these are more, as many as its window has room for, but at most `quota`. If n
        leases wait in a window, and f workers have free slots, `quota` is the equal share n // (f + 1).
        """
        free = [w for w in self._fleet.sessions.values() if w.accepting and len(w.leases) < w.usable_slots]
        promised = dict.fromkeys(free, 0)  # recalled leases that the worker is to get
        takers: dict[tuple[str, Shape, bool], list[Worker]] = {}
        for worker in workers if free else ():
            waiting = self._waiting(worker, now)
            only_loading = len(worker.leases) <= worker.usable_slots  # it is checked only because it loads a model
            if only_loading:
                waiting = [lease for lease in waiting if lease.model in worker.residency.loading_since_s]
            quota = len(waiting) // (len(free) + 1)
            recalled = []
            for lease in waiting:
                others = self._takers(lease, free, takers, loaded=only_loading)
                while others:
                    other = others[-1]
                    held = len(other.leases)
                    if held + promised[other] < max(other.usable_slots, min(other.pace.leases_max, held + quota)):
                        promised[other] += 1
                        recalled.append(lease)
                        break
                    others.pop()  # also from the list in the cache: this check offers `other` no more such leases
            self._commands.recall(worker, recalled)

    def _takers(
        self, lease: Lease, free: list[Worker], cache: dict[tuple[str, Shape, bool], list[Worker]], *, loaded: bool
    ) -> list[Worker]:  # fmt: skip
        """The free workers that may get the lease's task. `loaded`: only those that have loaded its model."""
        fleet, ledger, spec = self._fleet, self._ledger, lease.task.spec
        shape = shape_of(spec)
        found = cache.get((spec.queue, shape, loaded))
        if found is None:
            if len(cache) >= CHECKED_MAX:
                return []
            strategy, able = ledger.strategy_of(ledger.queues[spec.queue]), fleet.eligible(shape)
            queued = ledger.classes.queued(strategy, shape) + 1  # with the lease's own task
            found = cache[spec.queue, shape, loaded] = [
                w for w in free
                if w in able and not w.full and not obstacle_now(fleet, strategy, shape, w)
                and backlog_suffices(fleet, strategy, shape, w, queued)
                and (not loaded or _has_loaded(fleet, w, shape))
            ]  # fmt: skip
        return found

    def _recall_for_urgent(self, over_slots: list[Worker], now: float) -> None:
        """Recalls leases of workers that have reported nothing for CHECK_S, in favour of more urgent waiting tasks."""
        fleet = self._fleet
        stuck = [w for w in over_slots if now - w.pace.reported_s >= CHECK_S and w.accepting]
        backlogs = self._first_backlogs() if stuck else []
        backlogs = [b for b in backlogs if not b.strategy.pinned]
        if not backlogs:
            return
        # All leases are read once, not for each backlog: usually none is less urgent than the most urgent task.
        most_urgent = backlogs[0].position[0]  # a smaller number is more urgent
        stuck = [w for w in stuck if any(x.task.spec.priority > most_urgent for x in w.leases.values())]
        less_urgent: dict[Worker, list[Lease] | None] = dict.fromkeys(stuck)  # None: not computed
        for backlog in backlogs:
            priority, needed, able = backlog.position[0], backlog.size, fleet.eligible(backlog.shape)
            for worker, known in less_urgent.items():
                if not needed:
                    break
                if known == [] or worker not in able or obstacle_now(fleet, backlog.strategy, backlog.shape, worker):
                    continue
                waiting = self._waiting(worker, now, last_first=True) if known is None else known
                leases = [x for x in waiting if x.task.spec.priority > priority]  # no later backlog is more urgent
                self._commands.recall(worker, leases[:needed])
                less_urgent[worker] = leases[needed:]
                needed = max(0, needed - len(leases))

    def _first_backlogs(self) -> list[Backlog]:
        """The backlogs with the most urgent first tasks."""
        return nsmallest(CHECKED_MAX, self._ledger.classes.backlogs.values(), key=lambda backlog: backlog.position)

    def _waiting(self, worker: Worker, now: float, last_first: bool = False) -> list[Lease]:
        """A worker's leases that may be recalled, the best to recall first: by priority and task_id, or with last_first
        in the reverse order. Last come the leases that likely run already, although no heartbeat has reported it yet:
        the oldest, one for each slot that no running or recalled lease takes.
        """
        leases, busy = [], 0
        for lease in worker.leases.values():
            if lease.running or lease.recalled_in == worker.session:
                busy += 1
            elif lease.dispatch_s <= now - CHECK_S and self._may_recall(lease):
                leases.append(lease)
        likely = max(0, worker.usable_slots - busy)  # number of leases that likely run
        order = sorted(leases[likely:], key=lambda x: (x.task.spec.priority, x.task.task_id), reverse=last_first)
        return order + leases[:likely]

    def _may_recall(self, lease: Lease) -> bool:
        """Whether the task could be leased to any other eligible worker: its queue is not paused, its strategy is not
        pinned, and the task has broken no engine and is no gang.
        """
        task, ledger = lease.task, self._ledger
        if lease.gang is not None:
            return False
        queue = ledger.queues[task.spec.queue]
        return not (
            queue.paused or ledger.strategy_of(queue).pinned or (task.extra is not None and task.extra.broke_on_devices)
        )


def _has_loaded(fleet: Fleet, worker: Worker, shape: Shape) -> bool:
    """Whether the worker has loaded the shape's model."""
    loading = fleet.model_id(worker, shape.kind, shape.model) in worker.residency.loading_since_s
    return not loading and fleet.load_s(worker, shape) == 0.0


def _has_waiting_leases(worker: Worker) -> bool:
    """Whether a worker has leases that can't begin now: more than its slots, or on a model that it loads."""
    return len(worker.leases) > worker.usable_slots or (bool(worker.leases) and bool(worker.residency.loading_since_s))
