"""Gives tasks to workers: the lane that comes first, the worker that its strategy ranks first, until one of them runs
out.
"""

from multigpu_master.core import events as ev
from multigpu_master.core.lanes import Lane
from multigpu_master.core.ledger import Ledger
from multigpu_master.core.model import Lease, Task, Worker


class Dispatcher:
    """See the module."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def run(self, now: float) -> None:
        """Grants every lease that can be granted now."""
        ledger = self._ledger
        if ledger.held(now):
            return
        self._unpark()
        lanes, dispatched = ledger.lanes, dict[Worker, list[Lease]]()
        while (first := lanes.first()) is not None:
            lane, task = first
            worker = None
            if not lane.queue.paused:
                worker = ledger.placement.choose(ledger.strategy_of(lane.queue), lane)
            if worker is None:
                lanes.park(lane)
                continue
            lanes.take(lane)
            lease = self._grant(task, lane, worker, now)
            if worker in dispatched:
                dispatched[worker].append(lease)
            else:
                dispatched[worker] = [lease]
        for worker, leases in dispatched.items():
            worker.frame += 1
            ledger.out.append(ev.Dispatch(worker.session, worker.frame, leases))

    def _unpark(self) -> None:
        """Has the parked lanes tried again that the workers freed since might serve."""
        ledger = self._ledger
        freed, lanes = ledger.freed, ledger.lanes
        if not freed and not ledger.retry_all:
            return
        if lanes.parked:
            eligible = ledger.fleet.eligible
            for lane in list(lanes.parked):
                if ledger.retry_all or not freed.keys().isdisjoint(eligible(lane.base)):
                    lanes.offer(lane)
        ledger.freed = {}
        ledger.retry_all = False

    def _grant(self, task: Task, lane: Lane, worker: Worker, now: float) -> Lease:
        ledger = self._ledger
        task.attempts += 1
        cost_s = ledger.fleet.expected_s(worker, lane.base, task.units)
        lease = Lease(ledger.next_id, task, worker, task.attempts, now, worker.frame + 1, cost_s)
        ledger.next_id += 1
        ledger.book(lease, now)
        return lease
