"""No task waits in a window for long while a suitable worker has a free slot, or while a more urgent task waits for its
place: its lease is recalled, at most once, or it is known to run.
"""

from collections.abc import Sequence

from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, Task, Worker, shape_of
from multigpu_master.core.placement.candidates import obstacles
from multigpu_master.core.scheduler import Core

from tests.sim.world import ViolationError, check

WAIT_S = 0.1
# Sums of times are rounded.
EARLY_S = 1e-6


class Windows:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._recalled: set[tuple[int, int]] = set()  # (session, lease_id)
        self._recall_s = 0.0  # when a lease was recalled last
        self._since_s: dict[tuple[int, object], float] = {}  # a lease that waits, what for -> since when

    def after(self, commands: Sequence[ev.Command], now: float) -> None:
        core = self._core
        for command in commands:
            if isinstance(command, ev.Recall):
                self._recalls(command, now)
        if not core.can_grant(now):
            self._since_s = {}
            return
        sessions = core.fleet.sessions.values()
        deep = [w for w in sessions if len(w.leases) > w.usable_slots]
        free = [w for w in sessions if w.accepting and len(w.leases) < w.usable_slots and not w.full] if deep else []
        leases = [x for w in deep for x in w.leases.values() if self._waits(x)]
        waits: list[tuple[int, object]] = [(x.lease_id, w) for x in leases for w in free if self._may_have(w, x)]
        waits += [(x.lease_id, t) for x in leases for t in self._more_urgent(x, now)]
        self._since_s = {each: self._since_s.get(each, now) for each in waits}
        if not waits:
            return
        due_s = core.next_timer_s()
        for (lease_id, other), since_s in self._since_s.items():
            until_s = max(since_s, self._recall_s) + WAIT_S
            if now > until_s + EARLY_S:
                raise ViolationError(f"lease {lease_id} waits in a window though {_name(other)} could have its place")
            if due_s is None or due_s > until_s + EARLY_S:
                raise ViolationError(f"nothing wakes the master for lease {lease_id}, which waits for {_name(other)}")

    def _recalls(self, command: ev.Recall, now: float) -> None:
        worker = self._core.fleet.sessions.get(command.session)  # None: it ended in the same event
        for lease_id in command.lease_ids:
            lease = worker.leases.get(lease_id) if worker is not None else None
            check((command.session, lease_id) not in self._recalled, "lease %s is recalled again", lease_id)
            if (
                lease is not None and lease.running and lease.running_since_s < now
            ):  # else this event told so, after the recall
                raise ViolationError(f"lease {lease_id} is recalled, and runs")
            self._recalled.add((command.session, lease_id))
            self._recall_s = now

    def _waits(self, lease: Lease) -> bool:
        """Whether it may be in a window for nothing, and its task would be granted anew."""
        task, core = lease.task, self._core
        if (
            lease.running
            or lease.gang is not None
            or (lease.worker.session, lease.lease_id) in self._recalled
            or (task.extra is not None and task.extra.broke_on_devices)
        ):
            return False
        queue = core.ledger.queues[task.spec.queue]
        return not queue.paused and not core.ledger.strategy_of(queue).pinned

    def _may_have(self, worker: Worker, lease: Lease) -> bool:
        core, task = self._core, lease.task
        shape, strategy = shape_of(task.spec), core.ledger.strategy_of(core.ledger.queues[task.spec.queue])
        if core.fleet.ineligibility(worker, shape) is not None or obstacles(core.fleet, strategy, shape, worker):
            return False
        queued = core.ledger.classes.queued(strategy, shape) + 1
        return strategy.min_backlog(shape, worker, core.fleet) <= queued or core.fleet.reserved(worker, shape)

    def _more_urgent(self, lease: Lease, now: float) -> list[Task]:
        """The tasks that wait for nothing but a place in the lease's window, which has not moved for a while."""
        core, worker = self._core, lease.worker
        if not worker.accepting or now - worker.pace.reported_s < WAIT_S / 2:
            return []
        found = []
        for resource_class in core.ledger.classes.by_key.values():
            strategy, head = core.ledger.strategy_of(resource_class.queue), resource_class.head()
            if (
                head is None
                or resource_class.priority >= lease.task.spec.priority
                or resource_class.queue.paused
                or strategy.pinned
                or resource_class.shape.world_size > 1
            ):
                continue
            shape = resource_class.shape
            why = obstacles(core.fleet, strategy, shape, worker)
            if core.fleet.ineligibility(worker, shape) is None and all("window full" in each for each in why):
                found.append(head)
        return found


def _name(other: object) -> str:
    return other.worker_id if isinstance(other, Worker) else f"task {getattr(other, 'task_id', 0)}"
