"""Gives tasks to workers: the lane that comes first, the worker that its strategy ranks first, until one of them runs
out.
"""

from multigpu_master.core import events as ev
from multigpu_master.core.attempts import Attempts
from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Lease, Task, Worker
from multigpu_master.core.placement.lanes import Lane
from multigpu_master.core.placement.ranking import is_one_of, worthwhile
from multigpu_master.core.placement.recall import Recalls
from multigpu_master.core.timers import FIRE_MAX
from multigpu_master.core.workers.load_reservations import Turns
from multigpu_master.strategies.base import Strategy

# Lanes that find no worker in one event. The next event, which is due at once, goes on with the rest.
PARKS_MAX = 1000
# How long a task that broke an engine waits for room on another device, before it is looked at again.
ELSEWHERE_S = 0.05


class Dispatcher:
    """See the module."""

    def __init__(self, ledger: Ledger, attempts: Attempts, turns: Turns, recalls: Recalls) -> None:
        self._ledger = ledger
        self._recalls = recalls
        self._turns = turns
        self._attempts = attempts
        self.unfinished_s: float | None = None  # since when there are lanes left to try
        self._membership = -1
        self._averages = -1

    def run(self, now: float) -> None:
        """Grants every lease that can be granted now."""
        ledger = self._ledger
        self.unfinished_s = None
        if ledger.held(now) or ledger.clogged():
            return
        self._unpark()
        lanes, placement, turns = ledger.lanes, ledger.placement, self._turns
        dispatched = dict[Worker, list[Lease]]()
        expired = parks = 0
        while (first := lanes.first()) is not None and expired < FIRE_MAX and ledger.next_id < ledger.ids_end:
            lane, task = first
            limited = task.spec.deadline_s is not None or task.spec.queue_timeout_s is not None
            if limited and self._attempts.overdue(task, now):  # more were due than fit into an event
                lanes.granted(lane)
                expired += 1
                continue
            strategy = ledger.strategy_of(lane.queue)
            worker = None if lane.queue.paused else placement.choose(strategy, lane)
            if worker is None:
                self._park(lane, strategy, now)
                parks += 1
                if parks == PARKS_MAX:
                    self.unfinished_s = now
                    break
                continue
            lanes.take(lane)
            extra = task.extra
            apart = (extra.broke or (extra.avoids,)) if extra is not None and not strategy.pinned else ()
            if extra is not None and is_one_of(worker, apart):
                others, other = placement.elsewhere(strategy, lane.base, apart)
                if extra.broke and others and other is None:
                    self._attempts.pause(task, now, ELSEWHERE_S)
                    lanes.granted(lane)
                    continue
                if other and (extra.broke or worthwhile(ledger.fleet, strategy, lane.base, other, lane.crowd.live)):
                    worker = other
            lease = self._grant(task, lane, worker, now)
            if ledger.fleet.began_loading is not None:
                self._unpark_loading()
            if turns.turns:
                turns.granted(lane, worker)
            if worker in dispatched:
                dispatched[worker].append(lease)
            else:
                dispatched[worker] = [lease]
            if lane.waited_in is not None or not lane.live:
                lanes.granted(lane)
        for worker, leases in dispatched.items():
            worker.frame += 1
            ledger.out.append(ev.Dispatch(worker.session, worker.frame, leases))
            self._recalls.granted(worker, now)

    def _park(self, lane: Lane, strategy: Strategy, now: float) -> None:
        """Sets aside the lane that came first and found no worker, with those that wait for the same."""
        ledger, lanes, fleet = self._ledger, self._ledger.lanes, self._ledger.fleet
        if lane.queue.paused:
            lanes.pause(lane)
            return
        pin = ledger.placement.pin(strategy, lane.shape) if strategy.pinned else None
        able = fleet.eligible(lane.base)
        if pin is not None and pin.full:
            lanes.park(lane, lanes.pins, pin)
        elif pin is None and fleet.open.keys().isdisjoint(able.keys()):  # the shorter one is walked
            lanes.park(lane, lanes.windows, id(able), able)
        elif pin is None and lane.crowd.waits_to_grow:
            lanes.park(lane, lanes.growths, lane.crowd)
        else:
            lanes.park(lane, lanes.others, (strategy.name, lane.base, pin))
        if fleet.planned:
            self._turns.parked(lane, pin, now)

    def _unpark(self) -> None:
        """Has parked lanes tried again that may have a worker now."""
        ledger = self._ledger
        freed, fleet, lanes = ledger.freed, ledger.fleet, ledger.lanes
        moved = self._averages != fleet.averages  # what a worker is worth may hang on them
        if ledger.retry_all or self._membership != fleet.membership:
            lanes.offer_all()
        elif lanes.parked and (freed or moved):
            roomy = [worker for worker in freed if worker in fleet.open]
            for worker in roomy:
                if (waiting := lanes.pins.get(worker)) is not None:
                    lanes.offer_first(waiting)
            for waiting in list(lanes.windows.values()):
                if not waiting.workers.keys().isdisjoint(roomy):
                    lanes.offer_first(waiting)
            for (_, base, pin), waiting in list(lanes.others.items()):
                able = {pin: None} if pin is not None else fleet.eligible(base)
                if moved or not freed.keys().isdisjoint(able.keys()):
                    lanes.offer_first(waiting)
            for crowd, waiting in list(lanes.growths.items()):
                if moved or not freed.keys().isdisjoint(fleet.eligible(crowd.base).keys()):
                    lanes.offer_first(waiting)
        self._membership, self._averages = fleet.membership, fleet.averages
        if freed:
            ledger.freed = {}
        ledger.retry_all = False

    def _unpark_loading(self) -> None:
        """A worker has just become one that has a model: tasks that were not worth the loading may be worth it now."""
        key, self._ledger.fleet.began_loading = self._ledger.fleet.began_loading, None
        lanes, planned = self._ledger.lanes, self._ledger.fleet.planned
        of_shapes = [(base, waiting) for (_, base, _), waiting in lanes.others.items()]
        of_crowds = [(crowd.base, waiting) for crowd, waiting in lanes.growths.items()]
        for base, waiting in of_shapes + of_crowds:
            # A model that is offered by id has several names.
            if planned or (base.kind, base.model) == key:
                lanes.offer_first(waiting)

    def _grant(self, task: Task, lane: Lane, worker: Worker, now: float) -> Lease:
        ledger = self._ledger
        task.attempts += 1
        cost_s = ledger.fleet.expected_s(worker, lane.base, task.units)
        lease = Lease(ledger.next_id, task, worker, task.attempts, now, worker.frame + 1, cost_s)
        ledger.next_id += 1
        ledger.book(lease, now)
        return lease
