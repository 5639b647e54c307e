"""The ledger: all tasks and queues, with the number and bytes of the tasks in each state.

Every task is in exactly one state: queued (in its resource class, or in a pause), leased, or settled. Each move from
one state to another goes through a method here, which adjusts the numbers and bytes. The core forgets a settled task
once the journal has its outcome; after that, queries read the journal.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from multigpu_master.core.events import Commands
from multigpu_master.core.identity import payload_crc
from multigpu_master.core.model import (
    Extra,
    Gang,
    Lease,
    Outcome,
    OutcomeState,
    Queue,
    Task,
    TaskError,
    Worker,
    partition_of,
)
from multigpu_master.core.placement.pins import Pins
from multigpu_master.core.placement.resource_classes import ResourceClass, ResourceClasses
from multigpu_master.core.strategy import Strategy
from multigpu_master.core.task_table import TaskTable
from multigpu_master.core.timers import DUE_MAX, Expiries, TimeLimit, Timers
from multigpu_master.core.workers.fleet import Fleet

# The master revokes an attempt this many seconds after its run_timeout if the worker has not reported its end.
RUN_GRACE_S = 10.0
# A timer that fires more than this many seconds after it was due shows that the master was suspended. It is then set
# again, so that the master first reads what workers have sent meanwhile.
TIMER_LATE_S = 1.0
# The reason for revoking the other leases of a gang once one of them has ended without success.
RANK_ENDED = "the attempt has ended: the lease of rank {rank} was revoked, or ended without success"
# Assumed size of the objects of a settled task, without the result, the payload and Extra.kept_bytes.
OBJECTS_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the core. Times in seconds."""

    tasks_max: int = 10_000_000  # unsettled
    bytes_max: int = 4 << 30  # of unsettled tasks: payloads, partial outputs, checkpoints, logs and last errors
    ephemeral_bytes_max: int = 256 << 20  # settled ephemeral tasks, with their results
    uncommitted_bytes_max: int = 1 << 30  # outcomes that the journal has not written; beyond it nothing is dispatched
    session_timeout_s: float = 5.0
    memory_threshold: float = 0.8  # share of device memory in use above which strategy memory_usage grants no leases
    # The circuit breaker trips if, within breaker_window_s, at least two devices were found sick or suspect, and more
    # than this share of the devices that were connected at some time in the window.
    breaker_share: float = 0.3
    breaker_window_s: float = 600.0

    @property
    def timer_late_s(self) -> float:
        """How late a timer may fire. A timer that fires later is set again, to fire after this many seconds; see
        TIMER_LATE_S for the reason.
        """
        return min(TIMER_LATE_S, self.session_timeout_s / 4)


@dataclass(slots=True)
class Counters:
    """What has happened since the master started."""

    submitted: int = 0
    unwritten: int = 0  # submitted tasks that were rejected later, because the journal could not write them
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    dead_lettered: int = 0
    requeued: int = 0
    stale_reports: int = 0


def settled_bytes(task: Task) -> int:
    """The approximate memory of a settled task, in bytes."""
    assert task.outcome is not None, "settled_bytes needs a settled task"
    size = len(task.outcome.result) + len(task.payload) + OBJECTS_BYTES
    return size if task.extra is None else size + task.extra.kept_bytes


class EphemeralOutcomes:
    """Keeps settled ephemeral tasks for their result_ttl, within a limit of bytes. Calls `forget` for each task that it
    no longer keeps.
    """

    def __init__(self, bytes_max: int, timers: Timers, forget: Callable[[Task], None]) -> None:
        self.size_bytes = 0
        self._bytes_max = bytes_max
        self._timers = timers
        self._forget = forget
        self._heap: list[tuple[float, int, Task]] = []  # (when the task expires, task_id, task)
        self._due_s = math.inf  # when the timer fires

    def keep(self, task: Task, now: float) -> None:
        """Keeps a task that has settled now. Beyond the limit of bytes, forgets the tasks that would expire first."""
        assert task.outcome is not None, "keep needs a settled task"
        if task.request_id:
            payload_crc(task)  # stores the CRC in the task: resubmits are compared with it once the payload is gone
        task.payload = b""
        # Not from finish_s: that is a time of the worker's clock, and the report may have come much later.
        expire_s = now + task.spec.result_ttl_s
        heappush(self._heap, (expire_s, task.task_id, task))
        self.size_bytes += settled_bytes(task)
        while self.size_bytes > self._bytes_max:
            self._forget_first()
        if expire_s < self._due_s:
            self._arm(expire_s)

    def _arm(self, due_s: float) -> None:
        self._due_s = due_s
        self._timers.at(due_s, self._expire)

    def _expire(self, now: float) -> None:
        if now < self._due_s:
            return  # another timer has done the work of this one; `_due_s` is when the next one fires
        for _ in range(DUE_MAX):
            if not self._heap or self._heap[0][0] > now:
                break
            self._forget_first()
        self._due_s = math.inf
        if self._heap:
            # After DUE_MAX tasks the next one may be due already, but a callback must set a timer for later than `now`.
            self._arm(max(self._heap[0][0], math.nextafter(now, math.inf)))

    def _forget_first(self) -> None:
        _, _, task = heappop(self._heap)
        self.size_bytes -= settled_bytes(task)
        self._forget(task)


class Ledger:
    def __init__(
        self, limits: Limits, strategies: dict[str, Strategy], strategy: str, fleet: Fleet, pins: Pins, timers: Timers,
        commands: Commands,
    ) -> None:  # fmt: skip
        self.limits = limits
        self.strategies = strategies
        self.strategy = strategy  # the fleet's
        self.tasks = TaskTable()
        self.requests: dict[str, Task] = {}
        self.queues: dict[str, Queue] = {}
        self.classes = ResourceClasses(self.strategy_of, pins)
        self.counters = Counters()
        self.unsettled = 0
        self.unsettled_bytes = 0
        self.leased = 0
        self.uncommitted_bytes = 0
        self.expiries = Expiries(self.tasks)
        self.ephemeral = EphemeralOutcomes(limits.ephemeral_bytes_max, timers, self.forget)
        self._fleet = fleet
        self._commands = commands

    def clogged(self) -> bool:
        """Whether too many bytes of outcomes wait for the journal: nothing is dispatched meanwhile."""
        return self.uncommitted_bytes > self.limits.uncommitted_bytes_max

    # --- queues ------------------------------------------------------------------------------------------------------

    def queue(self, name: str) -> Queue:
        """The queue of that name; creates it if it is new."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = Queue(name)
        return queue

    def prune_queues(self) -> bool:
        """Forgets the queues that have neither tasks nor rules. Returns whether there were any."""
        idle = [q for q in self.queues.values() if q.idle]
        for queue in idle:
            del self.queues[queue.name]
        return bool(idle)

    def strategy_of(self, queue: Queue) -> Strategy:
        return self.strategies[queue.strategy or self.strategy]

    def class_of(self, task: Task) -> ResourceClass:
        """The resource class of a task, whether it waits or not."""
        return self.classes.get(self.queue(task.spec.queue), task.spec, partition_of(task.partition_key))

    # --- from state to state -----------------------------------------------------------------------------------------

    def add_queued(self, task: Task, resource_class: ResourceClass, *, requeued_letter: bool = False) -> None:
        """Adds a queued task. `requeued_letter`: it is a requeued dead letter; its old task_id decides its place."""
        self.tasks.add(task)
        if task.request_id:
            self.requests[task.request_id] = task
        queue, size = resource_class.queue, len(task.payload)
        self.unsettled += 1
        self.unsettled_bytes += size
        queue.queued += 1
        queue.queued_bytes += size
        if requeued_letter:
            self.classes.put_back(resource_class, task)
        else:
            self.classes.add(resource_class, task)
        spec = task.spec
        if spec.deadline_s is not None:
            self.expiries.at(spec.deadline_s, task, TimeLimit.DEADLINE)
        if spec.queue_timeout_s is not None:
            self.expiries.at(task.submit_s + spec.queue_timeout_s, task, TimeLimit.QUEUE_TIMEOUT)

    def record_lease(self, lease: Lease, now: float) -> bool:
        """Moves a task, which has left its class, from queued to leased. Returns whether the worker has to load the
        task's model.
        """
        task = lease.task
        loads = self._fleet.add_lease(lease.worker, lease, now)
        queue, size = self.queues[task.spec.queue], len(task.payload)
        queue.queued -= 1
        queue.queued_bytes -= size
        queue.leased += 1
        queue.leased_bytes += size
        self.leased += 1
        if task.spec.run_timeout_s is not None and not task.run_timeout_armed:
            # At most one run_timeout expiry per task: a task may be leased any number of times, and the expiries would
            # pile up.
            task.run_timeout_armed = True
            self.expiries.at(now + task.spec.run_timeout_s + RUN_GRACE_S, task, TimeLimit.RUN_TIMEOUT)
        return loads

    def record_gang(self, leases: Sequence[Lease], now: float) -> None:
        """As record_lease, with a lease for each rank of one task."""
        self.record_lease(leases[0], now)
        for lease in leases[1:]:
            self._fleet.add_lease(lease.worker, lease, now)

    def release(self, lease: Lease) -> None:
        """Moves a task from leased to queued. If the lease is a gang's, the whole attempt ends: releases and revokes
        the leases of the other ranks. The caller then puts the task into its class, pauses it or settles it.
        """
        task = lease.task
        if task.lease is not None and task.lease.log:
            self._keep_log(task)
        if lease.gang is None:
            self._fleet.remove_lease(lease)
        else:
            self._release_gang(lease.gang, lease)
        queue, size = self.queues[task.spec.queue], len(task.payload)
        queue.leased -= 1
        queue.leased_bytes -= size
        queue.queued += 1
        queue.queued_bytes += size
        self.leased -= 1

    def _release_gang(self, gang: Gang, ended: Lease) -> None:
        """Releases the leases of a gang's ranks that have not succeeded, and revokes all of these except `ended`."""
        for lease in gang.leases:
            if lease.lease_id not in lease.worker.leases:  # its rank has succeeded
                continue
            self._fleet.remove_lease(lease)
            if lease is not ended:
                self._commands.revoke(lease.worker.session, [lease.lease_id], RANK_ENDED.format(rank=ended.rank))
        ended.task.lease = None

    def add_partial(self, task: Task, data: bytes, content_type: str, size: int) -> None:
        """Adds a partial output, which counts as `size` bytes."""
        extra = task.ensure_extra()
        extra.partials.append(data)
        extra.partial_content_types.append(content_type)
        extra.outputs_and_log_bytes += size
        self._grow(extra, size)

    def keep_checkpoint(self, task: Task, checkpoint: bytes) -> bool:
        """Replaces the task's checkpoint. Without room for a larger one, the older one stays, and returns False."""
        extra = task.ensure_extra()
        grown = len(checkpoint) - len(extra.checkpoint)
        if grown > 0 and self.unsettled_bytes + grown > self.limits.bytes_max:
            return False
        extra.checkpoint = checkpoint
        self._grow(extra, grown)
        return True

    def keep_error(self, task: Task, error: TaskError | None) -> None:
        """Replaces the error of the task's last attempt, if there is room for its texts; else removes it."""
        extra = task.ensure_extra()
        self._grow(extra, -_chars(extra.last_error))
        extra.last_error = error if self.unsettled_bytes + _chars(error) <= self.limits.bytes_max else None
        self._grow(extra, _chars(extra.last_error))

    def _grow(self, extra: Extra, size: int) -> None:
        extra.kept_bytes += size
        self.unsettled_bytes += size

    def _keep_log(self, task: Task) -> None:
        """Moves the log of the task's lease, which ends now, to the end of Extra.log, and stores its length."""
        log, extra, lease = task.log, task.ensure_extra(), task.lease
        assert lease is not None, "the task must be leased"
        self._set_log(extra, log)
        extra.log_lease_id, extra.log_part_chars = lease.lease_id, len(lease.log)

    def drop_log(self, task: Task, lease_id: int) -> None:
        """Removes the part of the task's log that this lease has added, if it is the last part."""
        extra = task.ensure_extra()
        if extra.log_lease_id == lease_id:
            self._set_log(extra, extra.log[: max(0, len(extra.log) - extra.log_part_chars)])
            extra.log_lease_id = 0

    def _set_log(self, extra: Extra, log: str) -> None:
        grown = len(log) - len(extra.log)
        extra.log = log
        extra.outputs_and_log_bytes += grown
        self._grow(extra, grown)

    def succeed(self, worker: Worker, leases: Sequence[Lease], now: float) -> list[Task]:
        """Moves the leases' tasks from leased to settled, and returns them. The caller has removed the leases from
        worker.leases, and has set the outcomes.
        """
        tasks, bytes_total, kept_bytes, uncommitted_bytes = [], 0, 0, 0
        for lease in leases:
            task = lease.task
            assert task.lease is lease, "a live lease must be the lease of its task"
            if lease.log:
                self._keep_log(task)
            task.lease = None
            tasks.append(task)
            spec, size = task.spec, len(task.payload)
            bytes_total += size
            if task.extra is not None:
                kept_bytes += task.extra.kept_bytes
            queue = self.queues[spec.queue]
            queue.leased -= 1
            queue.leased_bytes -= size
            if spec.durable:
                uncommitted_bytes += settled_bytes(task)
        self._fleet.subtract_leases(worker, leases)
        count = len(tasks)
        self.leased -= count
        self.unsettled -= count
        self.unsettled_bytes -= bytes_total + kept_bytes
        self.uncommitted_bytes += uncommitted_bytes
        self.counters.succeeded += count
        self._commands.settled(tasks)
        for task in tasks:
            if not task.spec.durable:
                self.ephemeral.keep(task, now)
        return tasks

    def settle(self, task: Task, outcome: Outcome, now: float) -> None:
        """Settles a queued task that is in no class, without success."""
        assert task.outcome is None, "a task is settled once"
        self.remove_from_counts(task)
        task.outcome = outcome
        counters = self.counters
        match outcome.state:
            case OutcomeState.FAILED:
                counters.failed += 1
            case OutcomeState.CANCELLED:
                counters.cancelled += 1
            case OutcomeState.EXPIRED:
                counters.expired += 1
            case OutcomeState.DEAD_LETTERED:
                counters.dead_lettered += 1
        self._commands.settled((task,))
        if task.spec.durable:
            self.uncommitted_bytes += settled_bytes(task)
        else:
            self.ephemeral.keep(task, now)

    def remove_from_counts(self, task: Task) -> None:
        """No longer counts a queued task, which must be in no class."""
        assert task.lease is None, "a leased task is released first"
        queue, size = self.queues[task.spec.queue], len(task.payload)
        queue.queued -= 1
        queue.queued_bytes -= size
        self.unsettled -= 1
        self.unsettled_bytes -= size + (task.extra.kept_bytes if task.extra is not None else 0)

    def forget_settled(self, task: Task) -> None:
        """Forgets a settled task, and no longer counts its outcome as uncommitted."""
        self.uncommitted_bytes -= settled_bytes(task)
        self.forget(task)

    def forget(self, task: Task) -> None:
        self.tasks.discard(task)
        if self.requests.get(task.request_id) is task:
            del self.requests[task.request_id]


def _chars(error: TaskError | None) -> int:
    return 0 if error is None else len(error.type) + len(error.message) + len(error.traceback)
