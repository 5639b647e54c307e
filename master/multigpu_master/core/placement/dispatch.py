"""Grants leases: takes the first resource class and the worker that its strategy ranks first, until no class can get a
worker.
"""

from multigpu_master.core import events as ev
from multigpu_master.core.attempts import Attempts
from multigpu_master.core.model import Lease, Task, Worker
from multigpu_master.core.placement.obstacles import backlog_suffices, is_one_of
from multigpu_master.core.placement.recall import Recalls
from multigpu_master.core.placement.resource_classes import ResourceClass
from multigpu_master.core.state import State
from multigpu_master.core.strategy import Strategy
from multigpu_master.core.timers import FIRE_MAX
from multigpu_master.core.workers.load_reservations import LoadReservations
from multigpu_master.core.workers.pace import Key

# Limit of classes that find no worker in one event. The next event, which is due at once, tries the other classes.
PARKS_MAX = 1000
# A task that broke an engine waits for this long, again and again, until another device has room.
ELSEWHERE_S = 0.05


class Dispatcher:
    def __init__(self, state: State, attempts: Attempts, reservations: LoadReservations, recalls: Recalls) -> None:
        self._state = state
        self._attempts = attempts
        self._reservations = reservations
        self._recalls = recalls
        self.unfinished_s: float | None = None  # when `run` stopped with classes left to try; None: it tried all
        self._membership = -1
        self._averages = -1

    def run(self, now: float) -> None:
        """Grants every lease that can be granted now."""
        state = self._state
        self.unfinished_s = None
        if state.hold.active(now) or state.ledger.clogged():
            return
        self._offer_changed()
        classes, ledger, ids, reservations = state.classes, state.ledger, state.ids, self._reservations
        dispatched = dict[Worker, list[Lease]]()
        expired = parks = 0
        while (first := classes.first()) is not None and expired < FIRE_MAX and ids.next_id < ids.end:
            resource_class, task = first
            limited = task.spec.deadline_s is not None or task.spec.queue_timeout_s is not None
            if limited and self._attempts.overdue(task, now):  # its expiry is due, but beyond FIRE_MAX
                classes.granted(resource_class)
                expired += 1
                continue
            queue = resource_class.queue
            strategy = ledger.strategy_of(queue)
            worker = None if queue.paused else state.placement.choose(strategy, resource_class)
            if worker is None:
                self._park(resource_class, strategy, now)
                parks += 1
                if parks == PARKS_MAX:
                    self.unfinished_s = now
                    break
                continue
            classes.take(resource_class)
            if task.extra is not None and not strategy.pinned:
                worker = self._elsewhere(task, resource_class, strategy, worker)
                if worker is None:
                    self._attempts.pause(task, now, ELSEWHERE_S)
                    classes.granted(resource_class)
                    continue
            task.attempts += 1
            cost_s = state.fleet.expected_s(worker, resource_class.base, task.units)
            lease = Lease(ids.take(), task, worker, task.attempts, now, worker.frame + 1, cost_s)
            loads = ledger.book(lease, now)
            if loads is not None:
                self._offer_loading(loads)
            if reservations.by_class:
                reservations.granted(resource_class, worker)
            if worker in dispatched:
                dispatched[worker].append(lease)
            else:
                dispatched[worker] = [lease]
            if resource_class.wait_list is not None or not resource_class.size:
                classes.granted(resource_class)
        for worker, leases in dispatched.items():
            worker.frame += 1
            state.outbox.add(ev.Dispatch(worker.session, worker.frame, leases))
            self._recalls.granted(worker, now)

    def _elsewhere(
        self, task: Task, resource_class: ResourceClass, strategy: Strategy, worker: Worker
    ) -> Worker | None:  # fmt: skip
        """The chosen worker, or another one if the task failed on the chosen worker. None: the task broke an engine
        there, and waits for another device.
        """
        extra = task.ensure_extra()
        avoided = extra.broke or (extra.avoids,)
        if not is_one_of(worker, avoided):
            return worker
        backlog, fleet = resource_class.backlog, self._state.fleet
        others, other = self._state.placement.elsewhere(strategy, backlog, avoided)
        if extra.broke and others and other is None:
            return None
        if other and (extra.broke or backlog_suffices(fleet, strategy, backlog.base, other, backlog.size + 1)):
            return other
        return worker

    def _park(self, resource_class: ResourceClass, strategy: Strategy, now: float) -> None:
        """Parks the first class, which found no worker, with the classes blocked by the same condition."""
        state, classes, fleet, base = self._state, self._state.classes, self._state.fleet, resource_class.base
        if resource_class.queue.paused:
            classes.pause(resource_class)
            return
        pin = state.placement.pin(strategy, resource_class.shape) if strategy.pinned else None
        able = {pin: None} if pin is not None else fleet.eligible(base)
        if pin is not None and pin.full:
            classes.park(resource_class, classes.pinned_windows, pin, able)
        elif pin is None and fleet.open.keys().isdisjoint(able.keys()):  # iterates over the shorter one
            classes.park(resource_class, classes.windows, id(able), able)
        elif pin is None and resource_class.backlog.waits_to_grow:
            classes.park(resource_class, classes.conditions, resource_class.backlog, able, base)
        else:
            classes.park(resource_class, classes.conditions, (strategy.name, base, pin), able, base)
        if fleet.planned:
            self._reservations.parked(resource_class, pin, now)

    def _offer_changed(self) -> None:
        """Requeues the parked classes that changes of workers may have unblocked."""
        fleet, classes = self._state.fleet, self._state.classes
        freed = fleet.take_freed()
        moved = self._averages != fleet.averages
        if self._membership != fleet.membership:
            classes.offer_all()
        elif classes.parked and (freed or moved):
            classes.offer_freed(freed, fleet.open, averages_moved=moved)
        self._membership, self._averages = fleet.membership, fleet.averages

    def _offer_loading(self, key: Key) -> None:
        """Requeues the classes of a model that a worker will load: their tasks need no larger backlog there."""
        classes, planned = self._state.classes, self._state.fleet.planned
        for wait_list in list(classes.conditions.values()):
            shape = wait_list.shape
            assert shape is not None, "wait lists for conditions have a shape"
            # A model that is offered by id has several names.
            if planned or (shape.kind, shape.model) == key:
                classes.offer_first(wait_list)
