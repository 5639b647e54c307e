"""Gives tasks to workers: the lane that comes first, the worker that its strategy ranks first, until one of them runs
out.
"""

from multigpu_master.core import events as ev
from multigpu_master.core.attempts import Attempts
from multigpu_master.core.lanes import Lane
from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Lease, Task, Worker
from multigpu_master.core.placement import worthwhile
from multigpu_master.core.turns import Turns

# How long a task that broke an engine waits for room on another device, before it is looked at again.
ELSEWHERE_S = 0.05


class Dispatcher:
    """See the module."""

    def __init__(self, ledger: Ledger, attempts: Attempts, turns: Turns) -> None:
        self._ledger = ledger
        self._turns = turns
        self._attempts = attempts
        self._membership = -1
        self._averages = -1

    def run(self, now: float) -> None:
        """Grants every lease that can be granted now."""
        ledger = self._ledger
        if ledger.held(now) or ledger.clogged():
            return
        self._unpark()
        lanes, placement, turns = ledger.lanes, ledger.placement, self._turns
        dispatched = dict[Worker, list[Lease]]()
        while (first := lanes.first()) is not None:
            lane, task = first
            strategy = ledger.strategy_of(lane.queue)
            worker = None if lane.queue.paused else placement.choose(strategy, lane)
            if worker is None:
                pin = placement.pin(strategy, lane.shape) if strategy.pinned else None
                lanes.park(lane, pin)
                if ledger.fleet.planned:
                    turns.parked(lane, pin, now)
                continue
            lanes.take(lane)
            extra = task.extra
            if extra is not None and extra.failed_on and not strategy.pinned:
                others, other = placement.elsewhere(strategy, lane.base, extra.broke or (extra.failed_on,))
                if extra.broke and others and other is None:
                    self._attempts.pause(task, now, ELSEWHERE_S)
                    lanes.offer_next(lane.crowd, None)
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
            if lanes.lots:
                lanes.offer_next(lane.crowd, worker if strategy.pinned else None)
        for worker, leases in dispatched.items():
            worker.frame += 1
            ledger.out.append(ev.Dispatch(worker.session, worker.frame, leases))

    def _unpark(self) -> None:
        """Has parked lanes tried again that may have a worker now."""
        ledger = self._ledger
        freed, fleet, lanes = ledger.freed, ledger.fleet, ledger.lanes
        moved = self._averages != fleet.averages  # what a worker is worth may hang on them
        if ledger.retry_all or self._membership != fleet.membership:
            lanes.offer_all()
        elif lanes.lots and (freed or moved):
            for crowd, lots in list(lanes.lots.items()):
                # Those who may wait for one of the freed: those of no worker, and its own.
                for worker in [w for w in (list(lots) if moved else (None, *freed)) if w in lots]:
                    able = fleet.eligible(crowd.base).keys()  # of two views, as here, the shorter one is walked
                    if moved or worker or not freed.keys().isdisjoint(able):
                        lanes.offer_next(crowd, worker)
        self._membership, self._averages = fleet.membership, fleet.averages
        if freed:
            ledger.freed = {}
        ledger.retry_all = False

    def _unpark_loading(self) -> None:
        """A worker has just become one that has a model: tasks that were not worth the loading may be worth it now."""
        key, self._ledger.fleet.began_loading = self._ledger.fleet.began_loading, None
        lanes, planned = self._ledger.lanes, self._ledger.fleet.planned
        for lane in list(lanes.parked):
            # A model that is offered by id has several names.
            if planned or (lane.base.kind, lane.base.model) == key:
                lanes.offer(lane)

    def _grant(self, task: Task, lane: Lane, worker: Worker, now: float) -> Lease:
        ledger = self._ledger
        task.attempts += 1
        cost_s = ledger.fleet.expected_s(worker, lane.base, task.units)
        lease = Lease(ledger.next_id, task, worker, task.attempts, now, worker.frame + 1, cost_s)
        ledger.next_id += 1
        ledger.book(lease, now)
        return lease
