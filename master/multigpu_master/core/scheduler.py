"""The scheduler. A task walks: Submit -> lane -> lease -> report -> settled -> committed -> forgotten.

`handle` takes one event, changes the state, then dispatches whatever can go. Rules worth knowing:

- A report counts only if its session's worker holds that lease (`worker.leases.pop`). That is the one fence: whatever takes a
  task away from a worker takes the lease out of that dict, and a late word finds nothing.
- A lease that was running when its worker was lost is an attempt. One that only waited in the window is not, but a task that
  is lost too often that way is dead-lettered too: it must not take the fleet down with it.
- A settled task stays here until the journal has its outcome (SettlesCommitted); after that the journal answers for it.
  Ephemeral ones stay for their time to live, within a limit of bytes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from multigpu_master.core import events as ev
from multigpu_master.core.fleet import Fleet
from multigpu_master.core.lanes import Lane, Lanes, partition_of, shape_of
from multigpu_master.core.model import Lease, Outcome, OutcomeState, Queue, ReportState, Spec, Task, TaskError, Worker
from multigpu_master.core.placement import Placement
from multigpu_master.strategies.base import Strategy

INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, FAILED_PRECONDITION = 3, 4, 8, 9
# Times a task may be in the window of a lost worker without having run, before it is suspected of killing workers.
LOSSES_MAX = 16
# How long after an attempt's run_timeout the master waits for the worker to have ended it.
RUN_GRACE_S = 10.0
STREAMS_MAX = 4
PARTIALS_BYTES_MAX = 16 << 20
QUEUES_MAX = 10_000
# What an entry of the expiry heap is about.
_DEADLINE, _QUEUE_TIMEOUT, _BACKSTOP = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the core holds at most. Times in seconds."""

    tasks_max: int = 10_000_000  # unsettled
    bytes_max: int = 4 << 30  # payloads of unsettled tasks
    ephemeral_bytes_max: int = 256 << 20  # results of settled ephemeral tasks
    session_timeout_s: float = 5.0
    memory_threshold: float = 0.8
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


_COUNTER = {
    OutcomeState.SUCCEEDED: "succeeded",
    OutcomeState.FAILED: "failed",
    OutcomeState.CANCELLED: "cancelled",
    OutcomeState.EXPIRED: "expired",
    OutcomeState.DEAD_LETTERED: "dead_lettered",
}


class Core:
    """See the module. `first_id` must be above every task_id and lease_id ever given; `random` yields 0.0 <= x < 1.0."""

    def __init__(
        self,
        strategies: dict[str, Strategy],
        limits: Limits,
        first_id: int,
        random: Callable[[], float],
        strategy: str = "auto",
    ) -> None:
        self.limits = limits
        self.strategies = strategies
        self.strategy = strategy
        self.tasks: dict[int, Task] = {}
        self.requests: dict[str, Task] = {}
        self.queues: dict[str, Queue] = {}
        self.lanes = Lanes()
        self.fleet = Fleet(limits.memory_threshold)
        self.placement = Placement(self.fleet)
        self.counters = Counters()
        self.unsettled = 0
        self.unsettled_bytes = 0
        self.leased = 0
        self._random = random
        self._next_id = first_id
        self._hold_until_s = 0.0
        self._expected: dict[str, None] = {}  # workers awaited after a restart
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._timer_ticket = 0
        self._expiries: list[tuple[float, int, int]] = []  # (when, task_id, what: one of the three below)
        self._freed: dict[Worker, None] = {}
        self._retry_all = False
        self._ephemeral: deque[Task] = deque()  # settled ephemeral tasks, in order of settling
        self._ephemeral_bytes = 0
        self._out: list[ev.Command] = []
        self._settled: list[Task] = []
        self._handlers: dict[type, Callable[..., None]] = {
            ev.Submit: self._submit, ev.Cancel: self._cancel, ev.SubmitFailed: self._submit_failed,
            ev.SettlesCommitted: self._committed, ev.Recover: self._recover, ev.Hello: self._hello,
            ev.Heartbeat: self._heartbeat, ev.Reports: self._reports, ev.Partials: self._partials,
            ev.SessionClosed: self._session_closed, ev.Cordon: self._cordon, ev.Uncordon: self._uncordon,
            ev.Drain: self._drain, ev.Forget: self._forget, ev.RegisterWorker: self._register,
            ev.SetStrategy: self._set_strategy, ev.ConfigureQueue: self._configure_queue, ev.Tick: self._tick,
        }  # fmt: skip

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        """Takes one event at a time `now` (seconds since the epoch, never less than before); returns what is to be done."""
        self._fire_timers(now)
        self._handlers[type(event)](event, now)
        self._dispatch(now)
        if self._settled:
            self._out.append(ev.Settled(self._settled))
            self._settled = []
        out, self._out = self._out, []
        return out

    def next_timer_s(self) -> float | None:
        """When the next Tick is due; None: nothing is waited for."""
        return min((heap[0][0] for heap in (self._timers, self._expiries) if heap), default=None)

    def held(self, now: float) -> bool:
        """Whether nothing is dispatched yet, because workers that outlived the last master are awaited."""
        return now < self._hold_until_s

    def strategy_of(self, queue: Queue) -> Strategy:
        """The strategy that decides for a queue's tasks."""
        return self.strategies[queue.strategy or self.strategy]

    def queue(self, name: str) -> Queue:
        """The queue of that name, made if it is new."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = Queue(name)
        return queue

    def lane_for(self, task: Task) -> Lane:
        """The lane a task stands in, or would."""
        return self.lanes.lane_of(self.queue(task.spec.queue), task.spec, partition_of(task.partition_key))

    # --- submit ------------------------------------------------------------------------------------------------------

    def _submit(self, event: ev.Submit, now: float) -> None:
        spec = event.spec
        reason = self._refusal(spec, now)
        results: list[Task | ev.Rejection] = []
        fresh: list[Task] = []
        lane: Lane | None = None
        streams = (event.stream,) if event.stream else ()
        for task in event.tasks:
            known = self.requests.get(task.request_id) if task.request_id else None
            if known is not None:
                self._attach(known, event.stream)
                results.append(known)
                continue
            full = reason or self._full(spec, len(task.payload))
            if full is not None:
                results.append(full)
                continue
            task.task_id = self._next_id
            self._next_id += 1
            task.submit_s = now
            task.streams = streams
            if lane is None or task.partition_key:
                lane = self.lane_for(task)
            self._enter(task, lane)
            self._arm_expiry(task)
            results.append(task)
            fresh.append(task)
        self.counters.submitted += len(fresh)
        if lane is not None and lane in self.lanes.parked and not self.strategy_of(lane.queue).pinned:
            self.lanes.offer(lane)  # a longer queue can make a worker worth its loading
        self._out.append(ev.Submitted(results, fresh))

    def _refusal(self, spec: Spec, now: float) -> ev.Rejection | None:
        """Why no task of this spec can be taken."""
        if spec.deadline_s is not None and spec.deadline_s <= now:
            return ev.Rejection(DEADLINE_EXCEEDED, "the deadline has already passed; set a later one or none")
        if spec.queue not in self.queues and len(self.queues) >= QUEUES_MAX and not self._prune_queues():
            return ev.Rejection(RESOURCE_EXHAUSTED, f"there are {QUEUES_MAX} queues already; use one of them")
        if spec.wait_for_worker:
            return None
        if self.fleet.eligible(shape_of(spec)):
            return None
        return ev.Rejection(FAILED_PRECONDITION, self.unplaceable(spec))

    def _prune_queues(self) -> bool:
        """Forgets the queues that are empty and have no rules of their own; whether there were any."""
        idle = [q.name for q in self.queues.values() if q == Queue(q.name)]
        for name in idle:
            del self.queues[name]
        return bool(idle)

    def unplaceable(self, spec: Spec) -> str:
        """Why no worker that the master knows could ever take a task of this spec, in words."""
        workers = list(self.fleet.workers.values())
        wait = "start one, or set wait_for_worker to queue the task until one comes"
        if not workers:
            return f"no worker has joined this master yet; {wait}"
        kinds = sorted({c.kind for w in workers for c in w.info.capabilities})
        if spec.kind not in kinds:
            return f"no worker runs kind {spec.kind!r} (the fleet runs {', '.join(kinds)}); {wait}"
        models = sorted({m for w in workers for c in w.info.capabilities if c.kind == spec.kind for m in c.models})
        if spec.model and models and spec.model not in models:
            return (
                f"no worker has model {spec.model!r} for kind {spec.kind!r} (the fleet has {', '.join(models)}); {wait}"
            )
        shape = shape_of(spec)
        why = "; ".join(f"{w.worker_id}: {self.fleet.unfit(w, shape)}" for w in workers[:5])
        return f"no worker could ever take this task ({why}); {wait}"

    def _full(self, spec: Spec, size: int) -> ev.Rejection | None:
        """Why there is no room for another task."""
        limits, queue = self.limits, self.queue(spec.queue)
        if self.unsettled >= limits.tasks_max:
            what = f"the master holds its limit of {limits.tasks_max} unsettled tasks (queue_tasks_max)"
        elif self.unsettled_bytes + size > limits.bytes_max:
            what = f"payloads would exceed the master's limit of {limits.bytes_max} bytes (queue_bytes_max)"
        elif queue.tasks_max and queue.queued + queue.leased >= queue.tasks_max:
            what = f"queue {queue.name!r} holds its limit of {queue.tasks_max} tasks"
        elif queue.bytes_max and queue.queued_bytes + queue.leased_bytes + size > queue.bytes_max:
            what = f"payloads in queue {queue.name!r} would exceed its limit of {queue.bytes_max} bytes"
        else:
            return None
        return ev.Rejection(RESOURCE_EXHAUSTED, what + "; try again later", limits.retry_delay_s)

    def _enter(self, task: Task, lane: Lane) -> None:
        """Makes a task one of ours, queued."""
        self.tasks[task.task_id] = task
        if task.request_id:
            self.requests[task.request_id] = task
        size = len(task.payload)
        self.unsettled += 1
        self.unsettled_bytes += size
        lane.queue.queued += 1
        lane.queue.queued_bytes += size
        self.lanes.add(lane, task)

    def _attach(self, task: Task, stream: int) -> None:
        if stream and stream not in task.streams:
            task.streams = (*task.streams, stream)[-STREAMS_MAX:]

    def _arm_expiry(self, task: Task) -> None:
        spec = task.spec
        if spec.deadline_s is not None:
            heappush(self._expiries, (spec.deadline_s, task.task_id, _DEADLINE))
        if spec.queue_timeout_s is not None:
            heappush(self._expiries, (task.submit_s + spec.queue_timeout_s, task.task_id, _QUEUE_TIMEOUT))

    def _expire(self, task: Task, kind: str, message: str, now: float) -> None:
        self._end(task, Outcome(OutcomeState.EXPIRED, now, error=TaskError(kind, message, retryable=False)), kind)

    def _recover(self, event: ev.Recover, now: float) -> None:
        self._hold_until_s = event.hold_until_s
        self._at(event.hold_until_s, lambda _now: None)
        for task in event.tasks:
            assert 0 < task.task_id < self._next_id, "recovered ids are older than new ones"
            self._enter(task, self.lane_for(task))
            self._arm_expiry(task)

    def _submit_failed(self, event: ev.SubmitFailed, now: float) -> None:
        for task in event.tasks:
            if task.outcome is None:
                self._leave(task, "the master could not write the task to its journal")
            self._drop(task)

    def _cancel(self, event: ev.Cancel, now: float) -> None:
        ended = [t for t in event.tasks if t.outcome is None]
        for task in ended:
            error = TaskError("Cancelled", event.reason or "cancelled by the client", retryable=False)
            if task.outcome is None:  # named twice
                self._end(task, Outcome(OutcomeState.CANCELLED, now, error=error), "cancelled")
        self._out.append(ev.Cancelled(ended))

    # --- settle ------------------------------------------------------------------------------------------------------

    def _end(self, task: Task, outcome: Outcome, why: str) -> None:
        """Settles a task that is queued or leased, by no report of its worker."""
        lease = task.lease
        if lease is not None:
            outcome.dispatch_s = lease.dispatch_s
            outcome.worker_id = lease.worker.worker_id
            outcome.device_id = lease.worker.info.device_id
        self._leave(task, why)
        self._settle(task, outcome)

    def _leave(self, task: Task, why: str) -> None:
        """Takes a task from where it is; a worker that holds it is told."""
        lease = task.lease
        if lease is not None:
            del lease.worker.leases[lease.lease_id]
            self._release(lease)
            self.fleet.touch(lease.worker)
            self._out.append(ev.Revoke(lease.worker.session, [lease.lease_id], why))
        else:
            self._hollow(task)
        queue, size = self.queue(task.spec.queue), len(task.payload)
        queue.queued -= 1
        queue.queued_bytes -= size
        self.unsettled -= 1
        self.unsettled_bytes -= size

    def _hollow(self, task: Task) -> None:
        """A queued task leaves its lane from where it stands; one that waits out a pause stands in none."""
        if task.in_lane:
            self.lane_for(task).live -= 1

    def _release(self, lease: Lease) -> None:
        """Ends a lease: its task counts as queued again."""
        task = lease.task
        self.fleet.release(lease)
        queue, size = self.queue(task.spec.queue), len(task.payload)
        queue.leased -= 1
        queue.leased_bytes -= size
        queue.queued += 1
        queue.queued_bytes += size
        self.leased -= 1
        self._freed[lease.worker] = None

    def _settle(self, task: Task, outcome: Outcome) -> None:
        """The task is out of every account; this is its end."""
        assert task.outcome is None, "a task is settled once"
        task.outcome = outcome
        name = _COUNTER[outcome.state]
        setattr(self.counters, name, getattr(self.counters, name) + 1)
        self._settled.append(task)
        if not task.spec.durable:
            if outcome.state is not OutcomeState.DEAD_LETTERED:
                task.payload = b""
            self._keep_ephemeral(task, outcome)

    def _keep_ephemeral(self, task: Task, outcome: Outcome) -> None:
        """Keeps the outcome for its time to live, as far as there is room."""
        self._ephemeral.append(task)
        self._ephemeral_bytes += _outcome_bytes(task)
        if len(self._ephemeral) == 1:
            self._at(outcome.finish_s + task.spec.result_ttl_s, self._forget_ephemeral)
        while self._ephemeral_bytes > self.limits.ephemeral_bytes_max:
            self._drop_ephemeral()

    def _forget_ephemeral(self, now: float) -> None:
        while self._ephemeral:
            task = self._ephemeral[0]
            assert task.outcome is not None, "only settled tasks are kept"
            expire_s = task.outcome.finish_s + task.spec.result_ttl_s
            if expire_s > now:
                self._at(expire_s, self._forget_ephemeral)
                break
            self._drop_ephemeral()

    def _drop_ephemeral(self) -> None:
        task = self._ephemeral.popleft()
        self._ephemeral_bytes -= _outcome_bytes(task)
        self._drop(task)

    def _committed(self, event: ev.SettlesCommitted, now: float) -> None:
        for task in event.tasks:
            assert task.outcome is not None, "only outcomes are committed"
            self._drop(task)

    def _drop(self, task: Task) -> None:
        """Forgets a task."""
        self.tasks.pop(task.task_id, None)
        if self.requests.get(task.request_id) is task:
            del self.requests[task.request_id]

    # --- dispatch ----------------------------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        if self.held(now):
            return
        self._unpark()
        lanes, dispatched = self.lanes, dict[Worker, list[Lease]]()
        while (first := lanes.first()) is not None:
            lane, task = first
            worker = None
            if not lane.queue.paused:
                worker = self.placement.choose(self.strategy_of(lane.queue), lane.shape, lane.live)
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
            worker.frame = leases[0].frame
            self._out.append(ev.Dispatch(worker.session, worker.frame, leases))

    def _unpark(self) -> None:
        """Has the parked lanes tried again that the workers freed since might serve."""
        if not self._freed and not self._retry_all:
            return
        parked = self.lanes.parked
        if parked:
            eligible = self.fleet.eligible
            freed = self._freed
            for lane in list(parked):
                if self._retry_all or not freed.keys().isdisjoint(eligible(lane.shape)):
                    self.lanes.offer(lane)
        self._freed = {}
        self._retry_all = False

    def _grant(self, task: Task, lane: Lane, worker: Worker, now: float) -> Lease:
        task.attempts += 1
        cost_s = self.fleet.expected_s(worker, lane.shape, task.units)
        lease = Lease(self._next_id, task, worker, task.attempts, now, worker.frame + 1, cost_s)
        self._next_id += 1
        self._book(lease, now)
        return lease

    def _book(self, lease: Lease, now: float) -> None:
        """Accounts for a lease, whether granted or adopted."""
        task = lease.task
        self.fleet.grant(lease.worker, lease, now)
        queue, size = self.queue(task.spec.queue), len(task.payload)
        queue.queued -= 1
        queue.queued_bytes -= size
        queue.leased += 1
        queue.leased_bytes += size
        self.leased += 1
        if task.spec.run_timeout_s is not None:
            heappush(self._expiries, (now + task.spec.run_timeout_s + RUN_GRACE_S, task.task_id, _BACKSTOP))

    def _backstop(self, task: Task, now: float) -> None:
        """Should the worker fail to end an attempt that runs too long, the master takes the lease back itself. The clock
        starts anew for as long as the lease is not known to run: it may wait in the window behind others.
        """
        lease, timeout_s = task.lease, task.spec.run_timeout_s
        if lease is None or timeout_s is None:
            return
        if not lease.running or now < lease.dispatch_s + timeout_s + RUN_GRACE_S:
            heappush(self._expiries, (now + timeout_s + RUN_GRACE_S, task.task_id, _BACKSTOP))
            return
        self._take_back(lease, TaskError("RunTimeout", "the attempt ran too long and its worker did not end it"), now)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _hello(self, event: ev.Hello, now: float) -> None:
        worker = self.fleet.workers.get(event.info.worker_id)
        if worker is not None and worker.session:
            self._out.append(ev.EndSession(worker.session, "the worker began another session"))
            self._lose(worker, now)
        worker = self.fleet.register(event.info)
        self.fleet.new_session(worker, event.session, now)
        adopted = [h.lease_id for h in event.leases if self._adopt(worker, h, now)]
        revoked = [h.lease_id for h in event.leases if h.lease_id not in worker.leases]
        self._out.append(ev.Welcome(event.session, adopted))
        if revoked:
            self._out.append(ev.Revoke(event.session, revoked, "the lease no longer counts"))
        if worker.draining:
            self._out.append(ev.Desire(event.session, draining=True, drain_deadline_s=worker.drain_deadline_s))
        self._watch_silence(worker, event.session, now)
        self._expected.pop(worker.worker_id, None)
        if not self._expected:
            self._hold_until_s = min(self._hold_until_s, now)
        self._retry_all = True
        self._out.append(ev.WorkerChanged(worker, remember=True))

    def _adopt(self, worker: Worker, held: ev.HeldLease, now: float) -> bool:
        """Takes back a lease of an earlier session, if its task still waits for one."""
        task = self.tasks.get(held.task_id)
        if task is None or task.outcome is not None or task.lease is not None:
            return False
        self._hollow(task)
        task.attempts = max(task.attempts, held.attempt)
        lease = Lease(held.lease_id, task, worker, held.attempt, now, 0, 0.0)
        self._book(lease, now)
        self._observe(lease, held)
        return True

    def _observe(self, lease: Lease, held: ev.HeldLease) -> None:
        lease.running = held.running
        lease.fraction, lease.steps, lease.note = held.fraction, held.steps, held.note
        if held.checkpoint:
            lease.task.more().checkpoint = held.checkpoint

    def _heartbeat(self, event: ev.Heartbeat, now: float) -> None:
        worker = self.fleet.sessions.get(event.session)
        if worker is None:
            return
        worker.heard_s = now
        worker.telemetry = event.telemetry
        if event.resident_models != worker.resident_models or event.stopping != worker.stopping:
            worker.resident_models = event.resident_models
            worker.stopping = event.stopping
            self.fleet.members_changed(worker)
        self.fleet.touch(worker)
        self._freed[worker] = None
        held = set()
        for h in event.leases:
            held.add(h.lease_id)
            lease = worker.leases.get(h.lease_id)
            if lease is not None:
                self._observe(lease, h)
        unknown = [h.lease_id for h in event.leases if h.lease_id not in worker.leases]
        if unknown:
            self._out.append(ev.Revoke(event.session, unknown, "the lease no longer counts"))
        if len(worker.leases) > len(event.leases) - len(unknown):
            gone = [x for x in worker.leases.values() if x.lease_id not in held and x.frame <= event.last_frame]
            for lease in gone:
                self._take_back(lease, None, now)
        self._out.append(ev.WorkerChanged(worker))

    def _reports(self, event: ev.Reports, now: float) -> None:
        worker = self.fleet.sessions.get(event.session)
        if worker is None:
            self.counters.stale_reports += len(event.reports)
            return
        worker.heard_s = now
        units, counted = 0, 0
        key = None
        pop = worker.leases.pop
        for report in event.reports:
            lease = pop(report.lease_id, None)
            if lease is None:
                self.counters.stale_reports += 1
                continue
            task = lease.task
            self._release(lease)
            if report.state is ReportState.RETURNED:
                task.attempts -= 1
                self._lost(lease, f"worker {worker.worker_id} returned the task", now)
                continue
            counted += 1
            units += task.units
            if key is None:
                key = (task.spec.kind, task.spec.model)
            if report.state is ReportState.SUCCEEDED:
                worker.succeeded += 1
                self._close(task)
                self._settle(
                    task,
                    Outcome(
                        OutcomeState.SUCCEEDED, event.finish_s or now, report.result, report.content_type, None,
                        lease.dispatch_s, event.start_s, worker.info.worker_id, worker.info.device_id,
                    ),
                )  # fmt: skip
            else:
                worker.failed += 1
                error = report.error or TaskError("Unknown", "the worker gave no reason")
                self._failed(lease, error, event.start_s, event.finish_s or now, now)
        if counted:
            assert key is not None, "what was counted has a kind"
            self.fleet.measured(worker, now, counted, key, units, event.finish_s - event.start_s)
        self.fleet.touch(worker)

    def _close(self, task: Task) -> None:
        """Takes a task whose lease has just ended out of the accounts."""
        queue, size = self.queue(task.spec.queue), len(task.payload)
        queue.queued -= 1
        queue.queued_bytes -= size
        self.unsettled -= 1
        self.unsettled_bytes -= size

    def _failed(self, lease: Lease, error: TaskError, start_s: float, finish_s: float, now: float) -> None:
        """An attempt failed: the next one after a pause, or the end."""
        task, worker = lease.task, lease.worker
        task.more().last_error = error
        if error.retryable and task.attempts < task.spec.attempts_max:
            self._requeue(task, now, self._backoff_s(task))
            return
        self._close(task)
        state = OutcomeState.DEAD_LETTERED if error.retryable else OutcomeState.FAILED
        self._settle(
            task,
            Outcome(
                state, finish_s, error=error, dispatch_s=lease.dispatch_s, start_s=start_s,
                worker_id=worker.worker_id, device_id=worker.info.device_id,
            ),
        )  # fmt: skip

    def _backoff_s(self, task: Task) -> float:
        """Doubles with each attempt, and jitters by up to half, so that tasks that failed together don't return together."""
        spec = task.spec
        pause_s = min(spec.backoff_initial_s * 2.0 ** max(0, task.attempts - 1), spec.backoff_max_s)
        return pause_s * (1.0 - 0.5 * self._random())

    def _requeue(self, task: Task, now: float, after_s: float = 0.0) -> None:
        """Puts an unleased task back into its lane, now or after a pause."""
        if after_s <= 0.0:
            self.lanes.put_back(self.lane_for(task), task)
            return
        not_before_s = task.more().not_before_s = now + after_s

        def due(now: float) -> None:
            extra = task.extra
            waits = task.outcome is None and task.lease is None and not task.in_lane
            if waits and extra is not None and extra.not_before_s == not_before_s:
                extra.not_before_s = 0.0
                self.lanes.put_back(self.lane_for(task), task)

        self._at(not_before_s, due)

    def _take_back(self, lease: Lease, error: TaskError | None, now: float) -> None:
        """Takes a lease from its worker, which is told. With an error the attempt counts."""
        worker = lease.worker
        del worker.leases[lease.lease_id]
        self._release(lease)
        self.fleet.touch(worker)
        self._out.append(ev.Revoke(worker.session, [lease.lease_id], "taken back by the master"))
        self.counters.requeued += 1
        if error is not None:
            self._failed(lease, error, 0.0, now, now)
        else:
            lease.task.attempts -= 1
            self._lost(lease, f"worker {worker.worker_id} lost or gave up the lease", now)

    def _lost(self, lease: Lease, message: str, now: float) -> None:
        """A lease ended before the task is known to have run: another try costs nothing, but there is an end to it."""
        task = lease.task
        extra = task.more()
        extra.losses += 1
        if extra.losses <= LOSSES_MAX:
            self._requeue(task, now, 0.0 if extra.losses == 1 else self._backoff_s(task))
            return
        task.attempts = max(1, task.attempts)
        self._close(task)
        self._settle(
            task,
            Outcome(
                OutcomeState.DEAD_LETTERED, now, error=TaskError("WorkerLost", f"{message}; so ended {extra.losses} leases"),
                dispatch_s=lease.dispatch_s, worker_id=lease.worker.worker_id, device_id=lease.worker.info.device_id,
            ),
        )  # fmt: skip

    def _session_closed(self, event: ev.SessionClosed, now: float) -> None:
        worker = self.fleet.sessions.get(event.session)
        if worker is not None:
            self._lose(worker, now)

    def _lose(self, worker: Worker, now: float) -> None:
        """The master stopped hearing a worker: its tasks go back to the queue at once."""
        leases = sorted(worker.leases.values(), key=lambda x: x.task.task_id)
        worker.leases.clear()
        for lease in leases:
            self._release(lease)
        self.fleet.close_session(worker)
        worker.heard_s = now
        self.counters.requeued += len(leases)
        for lease in leases:
            if lease.running:
                message = f"worker {worker.worker_id} was lost while it ran the task"
                self._failed(lease, TaskError("WorkerLost", message), 0.0, now, now)
            else:
                lease.task.attempts -= 1
                self._lost(lease, f"worker {worker.worker_id} was lost", now)
        self._out.append(ev.WorkerChanged(worker, remember=True))

    def _watch_silence(self, worker: Worker, session: int, now: float) -> None:
        def check(now: float) -> None:
            if worker.session != session:
                return
            if now - worker.heard_s >= self.limits.session_timeout_s:
                self._out.append(ev.EndSession(session, f"nothing heard for {now - worker.heard_s:.1f} s"))
                self._lose(worker, now)
                return
            self._at(worker.heard_s + self.limits.session_timeout_s, check)

        self._at(now + self.limits.session_timeout_s, check)

    def _partials(self, event: ev.Partials, now: float) -> None:
        worker = self.fleet.sessions.get(event.session)
        if worker is None:
            return
        worker.heard_s = now
        fresh: dict[Task, ev.Forward] = {}
        for partial in event.partials:
            lease = worker.leases.get(partial.lease_id)
            if lease is None:
                continue
            task = lease.task
            extra = task.more()
            if partial.index != len(extra.partials):
                continue  # repeated after a reconnect
            extra.partials_bytes += len(partial.data)
            if extra.partials_bytes > PARTIALS_BYTES_MAX:
                error = TaskError(
                    "ResultTooLarge", f"partial outputs exceed {PARTIALS_BYTES_MAX} bytes", retryable=False
                )
                self._take_back(lease, error, now)
                continue
            extra.partials.append(partial.data)
            if task.streams:
                fresh.setdefault(task, ev.Forward(task)).partials.append((partial.index, partial.data))
        self._out.extend(fresh.values())

    # --- operators ---------------------------------------------------------------------------------------------------

    def _register(self, event: ev.RegisterWorker, now: float) -> None:
        worker = self.fleet.register(event.info)
        worker.cordoned, worker.cordon_reason = event.cordoned, event.cordon_reason
        worker.heard_s = now
        if event.expected:
            self._expected[worker.worker_id] = None

    def _cordon(self, event: ev.Cordon, now: float) -> None:
        worker = self.fleet.workers[event.worker_id]
        worker.cordoned, worker.cordon_reason = True, event.reason
        self._changed(worker)

    def _uncordon(self, event: ev.Uncordon, now: float) -> None:
        worker = self.fleet.workers[event.worker_id]
        if worker.draining and worker.session:
            self._out.append(ev.Desire(worker.session, draining=False))
        worker.cordoned, worker.cordon_reason = False, ""
        worker.draining, worker.drain_deadline_s = False, None
        self._changed(worker)

    def _drain(self, event: ev.Drain, now: float) -> None:
        worker = self.fleet.workers[event.worker_id]
        worker.cordoned, worker.draining, worker.drain_deadline_s = True, True, event.deadline_s
        worker.cordon_reason = "drained"
        if worker.session:
            self._out.append(ev.Desire(worker.session, draining=True, drain_deadline_s=event.deadline_s))
        if event.deadline_s is not None:
            self._at(event.deadline_s, lambda now: self._end_drain(worker, event.deadline_s, now))
        self._changed(worker)

    def _end_drain(self, worker: Worker, deadline_s: float | None, now: float) -> None:
        if worker.draining and worker.drain_deadline_s == deadline_s:
            for lease in list(worker.leases.values()):
                self._take_back(lease, None, now)

    def _changed(self, worker: Worker) -> None:
        self.fleet.members_changed(worker)
        self._retry_all = True
        self._out.append(ev.WorkerChanged(worker, remember=True))

    def _forget(self, event: ev.Forget, now: float) -> None:
        worker = self.fleet.workers[event.worker_id]
        assert not worker.session, "a connected worker is not forgotten"
        self.fleet.forget(worker)
        self._expected.pop(event.worker_id, None)
        self._out.append(ev.WorkerChanged(worker, remember=True, gone=True))

    def _set_strategy(self, event: ev.SetStrategy, now: float) -> None:
        assert not event.name or event.name in self.strategies, "names are checked before they come here"
        if event.queue:
            self.queue(event.queue).strategy = event.name
        else:
            assert event.name, "the fleet has a strategy"
            self.strategy = event.name
        self._retry_all = True

    def _configure_queue(self, event: ev.ConfigureQueue, now: float) -> None:
        queue = self.queue(event.queue)
        if event.paused is not None:
            queue.paused = event.paused
        if event.tasks_max is not None:
            queue.tasks_max = event.tasks_max
        if event.bytes_max is not None:
            queue.bytes_max = event.bytes_max
        self._retry_all = True

    # --- time --------------------------------------------------------------------------------------------------------

    def _tick(self, event: ev.Tick, now: float) -> None:
        """The timers have fired already."""

    def _at(self, when_s: float, what: Callable[[float], None]) -> None:
        self._timer_ticket += 1
        heappush(self._timers, (when_s, self._timer_ticket, what))

    def _fire_timers(self, now: float) -> None:
        timers = self._timers
        while timers and timers[0][0] <= now:
            heappop(timers)[2](now)
        expiries = self._expiries
        while expiries and expiries[0][0] <= now:
            _, task_id, what = heappop(expiries)
            task = self.tasks.get(task_id)
            if task is None or task.outcome is not None:
                continue
            if what == _DEADLINE:
                self._expire(task, "DeadlineExceeded", "the deadline passed before the task ended", now)
            elif what == _BACKSTOP:
                self._backstop(task, now)
            elif task.attempts == 0:
                self._expire(task, "QueueTimeout", "no worker took the task within its queue_timeout", now)
        if len(expiries) > 2 * self.unsettled + 1024:
            # Most are of tasks that ended long before their time.
            tasks = self.tasks
            expiries[:] = [e for e in expiries if (t := tasks.get(e[1])) is not None and t.outcome is None]
            heapify(expiries)


def _outcome_bytes(task: Task) -> int:
    """What a settled ephemeral task takes, about."""
    assert task.outcome is not None, "it is settled"
    partials = task.extra.partials_bytes if task.extra is not None else 0
    return len(task.outcome.result) + len(task.payload) + partials + 512
