"""What there is, and the accounts of it: tasks, queues, leases, and what the event at hand has brought about.

Every task is in exactly one account: queued (in its lane, or waiting out a pause), leased, or settled. The methods
here move a task from one account to the next and nothing else does, so the sums can't drift.

A settled task stays until the journal has its outcome; after that the journal answers for it. Ephemeral ones stay for
their time to live, within a limit of bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from multigpu_master.core import events as ev
from multigpu_master.core.identity import payload_crc
from multigpu_master.core.model import EPOCH_IDS, Lease, Outcome, OutcomeState, Queue, Task, Worker
from multigpu_master.core.placement.lanes import Lane, Lanes, partition_of
from multigpu_master.core.placement.ranking import Placement
from multigpu_master.core.task_table import TaskTable
from multigpu_master.core.timers import FIRE_MAX, Due, Expiries, Timers
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.strategies.base import Strategy

# How long after an attempt's run_timeout the master waits for the worker to have ended it.
RUN_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the core holds at most. Times in seconds."""

    tasks_max: int = 10_000_000  # unsettled
    bytes_max: int = 4 << 30  # payloads and partial outputs of unsettled tasks
    ephemeral_bytes_max: int = 256 << 20  # results of settled ephemeral tasks
    uncommitted_bytes_max: int = 1 << 30  # outcomes that the journal has not written yet; past it nothing is dispatched
    session_timeout_s: float = 5.0
    memory_threshold: float = 0.8
    breaker_share: float = 0.3  # of the connected devices; past it nothing more is quarantined by itself
    breaker_window_s: float = 600.0
    retry_delay_s: float = 1.0  # what a client past a limit is told to wait


@dataclass(slots=True)
class Counters:
    """Since the master started."""

    submitted: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    dead_lettered: int = 0
    requeued: int = 0
    stale_reports: int = 0


class Ledger:
    """See the module. The rooms of the core (attempts, sessions, operators, dispatch) work on one of these."""

    def __init__(self, strategies: dict[str, Strategy], limits: Limits, first_id: int, strategy: str) -> None:
        self.limits = limits
        self.strategies = strategies
        self.strategy = strategy
        self.tasks = TaskTable()
        self.requests: dict[str, Task] = {}
        self.queues: dict[str, Queue] = {}
        self.lanes = Lanes()
        self.fleet = Fleet(limits.memory_threshold)
        self.placement = Placement(self.fleet)
        self.counters = Counters()
        self.unsettled = 0
        self.unsettled_bytes = 0
        self.leased = 0
        self.uncommitted_bytes = 0
        self.begin_ids(first_id)
        self.hold_until_s = 0.0
        self.expected: dict[str, None] = {}  # workers awaited after a restart
        self.timers = Timers()
        self.expiries = Expiries(self.tasks, self.task_due)
        # What this event has brought about.
        self.out: list[ev.Command] = []
        self.settled: list[Task] = []
        self.freed: dict[Worker, None] = {}  # workers that may have room now
        self.retry_all = False  # whatever is parked may have a chance now
        self._ephemeral: list[tuple[float, int, Task]] = []  # settled ephemeral tasks, a heap by when they expire
        self._ephemeral_bytes = 0
        self._ephemeral_due_s = math.inf  # when the timer that drops them fires

    def begin_ids(self, first_id: int) -> None:
        """Gives out ids from this one to the end of its range. Others are asked for when half of them are used."""
        self.next_id = first_id  # of tasks and of leases
        self.ids_end = first_id - first_id % EPOCH_IDS + EPOCH_IDS
        self.renew_id = (first_id + self.ids_end) // 2
        self.renewing = False

    def task_due(self, task: Task, what: Due, now: float) -> None:
        """An instant of an unsettled task has come."""
        raise NotImplementedError

    def held(self, now: float) -> bool:
        """Whether nothing is dispatched yet, because workers that outlived the last master are awaited."""
        return now < self.hold_until_s

    def clogged(self) -> bool:
        """Whether nothing is dispatched, because outcomes pile up that the journal can't write."""
        return self.uncommitted_bytes > self.limits.uncommitted_bytes_max

    def strategy_of(self, queue: Queue) -> Strategy:
        """The strategy that decides for a queue's tasks."""
        return self.strategies[queue.strategy or self.strategy]

    def queue(self, name: str) -> Queue:
        """The queue of that name, made if it is new."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = Queue(name)
        return queue

    def prune_queues(self) -> bool:
        """Forgets the queues that are empty and have no rules of their own; whether there were any."""
        idle = [q for q in self.queues.values() if q.idle]
        for queue in idle:
            del self.queues[queue.name]
        self.lanes.forget_queues(idle)
        return bool(idle)

    def lane_for(self, task: Task) -> Lane:
        """The lane a task stands in, or would."""
        return self.lanes.lane_of(self.queue(task.spec.queue), task.spec, partition_of(task.partition_key))

    def recall(self, worker: Worker, leases: Sequence[Lease]) -> None:
        """Asks a worker to return these, as far as it has not begun them."""
        for lease in leases:
            lease.recalled = worker.session
        if leases:
            self.out.append(ev.Recall(worker.session, [lease.lease_id for lease in leases]))

    # --- from account to account -------------------------------------------------------------------------------------

    def enter(self, task: Task, lane: Lane) -> None:
        """Makes a task one of ours, queued."""
        self.tasks.add(task)
        if task.request_id:
            self.requests[task.request_id] = task
        queue, size = lane.queue, len(task.payload)
        self.unsettled += 1
        self.unsettled_bytes += size
        queue.queued += 1
        queue.queued_bytes += size
        self.lanes.add(lane, task)
        spec = task.spec
        if spec.deadline_s is not None:
            self.expiries.at(spec.deadline_s, task, Due.DEADLINE)
        if spec.queue_timeout_s is not None:
            self.expiries.at(task.submit_s + spec.queue_timeout_s, task, Due.QUEUE_TIMEOUT)

    def book(self, lease: Lease, now: float) -> None:
        """From queued to leased. The task has left its lane."""
        task = lease.task
        self.fleet.grant(lease.worker, lease, now)
        queue, size = self.queues[task.spec.queue], len(task.payload)
        queue.queued -= 1
        queue.queued_bytes -= size
        queue.leased += 1
        queue.leased_bytes += size
        self.leased += 1
        if task.spec.run_timeout_s is not None:
            self.expiries.at(now + task.spec.run_timeout_s + RUN_GRACE_S, task, Due.RUN_TIMEOUT)

    def release(self, lease: Lease) -> None:
        """From leased to queued. The lease is off its worker's dict already; where the task waits is the caller's
        business.
        """
        task = lease.task
        self.fleet.release(lease)
        queue, size = self.queues[task.spec.queue], len(task.payload)
        queue.leased -= 1
        queue.leased_bytes -= size
        queue.queued += 1
        queue.queued_bytes += size
        self.leased -= 1
        self.freed[lease.worker] = None

    def succeed(self, worker: Worker, leases: Sequence[Lease]) -> list[Task]:
        """From leased to settled. The leases are off their worker's dict already, and the tasks have their outcomes."""
        tasks, bytes_total, partials_bytes, uncommitted_bytes = [], 0, 0, 0
        queue, queue_name = None, ""
        for lease in leases:
            task = lease.task
            assert task.lease is lease, "a live lease is its task's"
            task.lease = None
            tasks.append(task)
            spec, size = task.spec, len(task.payload)
            bytes_total += size
            if task.extra is not None:
                partials_bytes += task.extra.partials_bytes
            if queue is None or spec.queue != queue_name:
                queue_name = spec.queue
                queue = self.queues[queue_name]
            queue.leased -= 1
            queue.leased_bytes -= size
            if spec.durable:
                uncommitted_bytes += _outcome_bytes(task)
        self.fleet.released(worker, leases, bytes_total)
        count = len(tasks)
        self.leased -= count
        self.unsettled -= count
        self.unsettled_bytes -= bytes_total + partials_bytes
        self.uncommitted_bytes += uncommitted_bytes
        self.counters.succeeded += count
        self.settled += tasks
        for task in tasks:
            if not task.spec.durable:
                self._keep_ephemeral(task)
        return tasks

    def settle(self, task: Task, outcome: Outcome) -> None:
        """From queued, and in no lane, to settled: an end without success (`succeed` is for those with)."""
        assert task.outcome is None, "a task is settled once"
        self.close(task)
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
        self.settled.append(task)
        if task.spec.durable:
            self.uncommitted_bytes += _outcome_bytes(task)
        else:
            self._keep_ephemeral(task)

    def close(self, task: Task) -> None:
        """From queued, and in no lane, out of every account."""
        assert task.lease is None, "a leased task is released first"
        queue, size = self.queues[task.spec.queue], len(task.payload)
        queue.queued -= 1
        queue.queued_bytes -= size
        self.unsettled -= 1
        self.unsettled_bytes -= size + _partials_bytes(task)

    def committed(self, task: Task) -> None:
        """The journal has the outcome, and answers for the task from now on."""
        self.uncommitted_bytes -= _outcome_bytes(task)
        self.drop(task)

    def drop(self, task: Task) -> None:
        """Forgets a task."""
        self.tasks.discard(task.task_id)
        if self.requests.get(task.request_id) is task:
            del self.requests[task.request_id]

    # --- settled ephemeral tasks -------------------------------------------------------------------------------------

    def _keep_ephemeral(self, task: Task) -> None:
        """Keeps the outcome for its time to live, as far as there is room."""
        assert task.outcome is not None, "it is settled"
        if task.outcome.state is not OutcomeState.DEAD_LETTERED:
            if task.request_id:
                payload_crc(task)
            task.payload = b""
        expire_s = task.outcome.finish_s + task.spec.result_ttl_s
        heappush(self._ephemeral, (expire_s, task.task_id, task))
        self._ephemeral_bytes += _outcome_bytes(task)
        while self._ephemeral_bytes > self.limits.ephemeral_bytes_max:
            self._drop_ephemeral()
        if expire_s < self._ephemeral_due_s:
            self._arm_ephemeral(expire_s)

    def _arm_ephemeral(self, due_s: float) -> None:
        self._ephemeral_due_s = due_s
        self.timers.at(due_s, self._expire_ephemeral)

    def _expire_ephemeral(self, now: float) -> None:
        if now < self._ephemeral_due_s:
            return  # an earlier one was armed since, and has fired
        for _ in range(FIRE_MAX):
            if not self._ephemeral or self._ephemeral[0][0] > now:
                break
            self._drop_ephemeral()
        self._ephemeral_due_s = math.inf
        if self._ephemeral:
            self._arm_ephemeral(max(self._ephemeral[0][0], math.nextafter(now, math.inf)))

    def _drop_ephemeral(self) -> None:
        _, _, task = heappop(self._ephemeral)
        self._ephemeral_bytes -= _outcome_bytes(task)
        self.drop(task)


def _outcome_bytes(task: Task) -> int:
    """What a settled task takes, about."""
    assert task.outcome is not None, "it is settled"
    size = len(task.outcome.result) + len(task.payload) + 512
    return size if task.extra is None else size + task.extra.partials_bytes


def _partials_bytes(task: Task) -> int:
    return task.extra.partials_bytes if task.extra is not None else 0
