"""What is due: deadlines, pauses, drains, silent workers, and the wait after a restart.

The core is given the time and returns its next timer: everything that is due must have a timer no later than that, and
must not be left undone by an event.
"""

import math
from collections import deque
from collections.abc import Sequence

from multigpu_master.core import events as ev
from multigpu_master.core.ledger import RUN_GRACE_S
from multigpu_master.core.model import Task
from multigpu_master.core.scheduler import Core

from tests.sim.world import ViolationError, check

# Sums of times are rounded.
EARLY_S = 1e-6


class Time:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._hold_until_s = self._hold_at_most_until_s = 0.0
        self._last_s = 0.0  # time of the last event
        self._awaited: dict[str, None] = {}
        self._heard_s: dict[int, float] = {}  # session -> when it last spoke
        self._grace_s = core.ledger.limits.timer_late_s  # a later timer: the master was paused
        self._away: deque[tuple[float, float]] = deque(maxlen=8)  # from when and to when
        self._due_s: float | None = None
        self._taken: dict[Task, None] = {}  # unsettled tasks that a worker took at some time
        self._begun: dict[Task, None] = {}  # and those that one began, for all that the master knows
        self._all_forgotten_s = 0.0  # by when every outcome of an ephemeral task is to be forgotten
        self._ephemeral: dict[Task, float] = {}  # settled ephemeral tasks, and when each may be forgotten

    def before(self, event: ev.Event, now: float) -> None:
        if self._due_s is not None and now > self._due_s + self._grace_s:
            # What was due since the master was away the last time is no other absence.
            since_s = max(self._due_s, self._away[-1][1] if self._away else 0.0)
            if since_s < now:
                self._away.append((since_s, now))
        if self._awaited and self._last_s < self._hold_until_s < now - self._grace_s:
            # The master was away at the end of the hold: the hellos that came meanwhile are read first.
            self._hold_until_s = self._hold_at_most_until_s = now + self._grace_s
        self._last_s = now
        worker_id = ""
        match event:
            case ev.RegisterWorker() if event.expected:
                self._awaited[event.info.worker_id] = None
            case ev.Recover():
                self._hold_until_s = self._hold_at_most_until_s = event.hold_until_s
            case ev.Hello():
                worker_id = event.info.worker_id
                self._awaited.pop(worker_id, None)
            case ev.Forget() if event.worker_id in self._awaited:
                worker_id = event.worker_id
                del self._awaited[worker_id]
            case _:
                pass
        self._hear_begun(event)
        if worker_id and not self._awaited:
            self._hold_until_s = min(self._hold_until_s, now)

    def after(self, event: ev.Event, commands: Sequence[ev.Command], now: float) -> None:
        core = self._core
        if core.hold.active(now) != (now < self._hold_until_s):
            raise ViolationError(f"the fleet is awaited: {core.hold.active(now)}; still to come: {list(self._awaited)}")
        self._due_s = core.next_timer_s()
        for command in commands:
            if isinstance(command, ev.EndSession) and not command.taken_over:
                self._silent(command.session, now)
            elif isinstance(command, ev.Dispatch):
                late = [x for x in command.leases if (x.task.spec.deadline_s or now + 1) <= now]
                late += [x for x in command.leases if x.task not in self._begun and _queue_until_s(x.task) <= now]
                if late:
                    raise ViolationError(f"task {late[0].task.task_id} was dispatched past its time")
        match event:
            case ev.Hello():
                self._heard_s[event.session] = now
            case ev.Heartbeat() | ev.Reports() | ev.Partials() if event.session in self._heard_s:
                self._heard_s[event.session] = now
            case _:
                pass
        self._sessions(now)
        self._tasks(now)
        if core.hold.active(now):
            self._timer("the end of the wait for", "workers", self._hold_until_s)
        self._forgotten(commands, now)

    def _hear_begun(self, event: ev.Event) -> None:
        """An attempt may begin for all that the master knows, and be interrupted, in one event. A rank of a gang may
        succeed before the master hears that it runs.
        """
        begun: list[Task | None] = []
        if isinstance(event, ev.Hello | ev.Heartbeat):
            begun += [self._core.ledger.tasks.get(held.task_id) for held in event.leases if held.running]
        elif isinstance(event, ev.Reports) and event.session in self._core.fleet.sessions:
            leases = self._core.fleet.sessions[event.session].leases
            begun += [leases[lease_id].task for lease_id in event.succeeded if lease_id in leases]
        self._begun |= {task: None for task in begun if task is not None and task.outcome is None}

    def _timer(self, what: str, whose: object, when_s: float) -> None:
        if self._due_s is None or self._due_s > when_s + EARLY_S:
            raise ViolationError(f"nothing wakes the master for {what} {whose}")

    def _silent(self, session: int, now: float) -> None:
        """A session is ended for its silence alone."""
        silent_s = now - self._heard_s[session]
        if silent_s < self._core.ledger.limits.session_timeout_s - EARLY_S:
            raise ViolationError(f"session {session} was ended after a silence of {silent_s} s")
        away_s = sum([min(end, now) - max(begin, now - silent_s) for begin, end in self._away if end > now - silent_s])
        if silent_s - away_s < self._grace_s - EARLY_S:
            raise ViolationError(f"session {session} was ended before its words of while the master was away were read")

    def _sessions(self, now: float) -> None:
        fleet, timeout_s = self._core.fleet, self._core.ledger.limits.session_timeout_s
        for session in [s for s in self._heard_s if s not in fleet.sessions]:
            del self._heard_s[session]
        for session, worker in fleet.sessions.items():
            if worker.heard_s != self._heard_s[session]:
                raise ViolationError(f"{worker.worker_id} was heard at {self._heard_s[session]}: {worker.heard_s}")
            awake_s = self._away[-1][1] if self._away else 0.0
            silent_at_s = max(worker.heard_s + timeout_s, awake_s + 2 * self._grace_s) + self._grace_s
            if now > silent_at_s + EARLY_S:
                raise ViolationError(f"{worker.worker_id} is silent since {worker.heard_s}, and has its session")
            self._timer("the silence of", worker.worker_id, silent_at_s)
            if worker.draining and worker.drain_deadline_s is not None and worker.leases:
                if worker.drain_deadline_s <= now and self._due_s != worker.drain_deadline_s:
                    raise ViolationError(f"{worker.worker_id} holds leases past the deadline of its drain")
                self._timer("the drain of", worker.worker_id, worker.drain_deadline_s)

    def _tasks(self, now: float) -> None:
        core = self._core
        for task in core.ledger.tasks.values():
            if task.outcome is not None:
                continue
            spec, lease = task.spec, task.lease
            if task.attempts > (lease is not None) or (lease is not None and lease.running):
                self._begun[task] = None
            if lease is not None:
                self._taken[task] = None
            if spec.deadline_s is not None:
                until_s = self._applied_by_s(task, spec.deadline_s)
                check(until_s > now, "task %s outlives its deadline", task.task_id)
                self._timer("the deadline of task", task.task_id, until_s)
            # Not those of an earlier session: they are recalled at the latest when the wait for workers would end.
            kept = lease is not None and lease.dispatch_number and task not in self._begun and not lease.recalled_in
            recall_by_s = self._applied_by_s(task, _queue_until_s(task))
            if kept and recall_by_s <= now and not core.hold.active(now):
                raise ViolationError(f"task {task.task_id} waits in a window past its queue timeout")
            if spec.queue_timeout_s is not None and task not in self._begun:
                # A worker that took it has some time to say that it began it.
                grace_s = core.ledger.limits.session_timeout_s if task in self._taken else 0.0
                until_s = max(task.submit_s + spec.queue_timeout_s + grace_s, self._hold_at_most_until_s)
                until_s = max(until_s, self._applied_by_s(task, _queue_until_s(task)))
                check(until_s > now, "task %s outlives its queue timeout", task.task_id)
                self._timer("the queue timeout of task", task.task_id, until_s)
            if lease is None:
                if not task.waiting and task.extra is not None:
                    self._timer("the pause of task", task.task_id, task.extra.not_before_s)
                continue
            if spec.run_timeout_s is not None:
                due_s = (
                    (lease.running_since_s if lease.running else lease.dispatch_s) + spec.run_timeout_s + RUN_GRACE_S
                )
                due_s = self._applied_by_s(task, due_s)
                check(due_s > now, "lease %s outlives its run timeout", lease.lease_id)
                self._timer("the run timeout of task", task.task_id, due_s)

    def _applied_by_s(self, task: Task, limit_s: float) -> float:
        """When a time limit of a task is applied at the latest. If it passed while the master was away, what the worker
        that has the task sent meanwhile is read first.
        """
        awake_s = self._away[-1][1] if self._away else 0.0
        return awake_s + self._grace_s if task in self._taken and awake_s > limit_s else limit_s

    def _forgotten(self, commands: Sequence[ev.Command], now: float) -> None:
        """Ephemeral outcomes are kept for their time, within a limit of bytes."""
        core = self._core
        if [t for t in self._ephemeral if t.task_id in core.ledger.tasks] and now > self._all_forgotten_s + EARLY_S:
            raise ViolationError("outcomes outlive their time")
        for command in commands:
            if isinstance(command, ev.Settled):
                for task in command.tasks:
                    self._taken.pop(task, None)
                    self._begun.pop(task, None)
                    if not task.spec.durable and task.outcome is not None:
                        until_s = self._ephemeral[task] = now + task.spec.result_ttl_s
                        self._all_forgotten_s = max(self._all_forgotten_s, until_s)
        if core.ledger.ephemeral.size_bytes > core.ledger.limits.ephemeral_bytes_max:
            raise ViolationError(f"ephemeral outcomes take {core.ledger.ephemeral.size_bytes} bytes")
        gone = [t for t in self._ephemeral if t.task_id not in core.ledger.tasks]
        early = [t for t in gone if self._ephemeral[t] > now]
        if early:
            size = core.ledger.ephemeral.size_bytes + sum(
                [len(t.outcome.result) + 800 for t in gone if t.outcome is not None]
            )
            if size <= core.ledger.limits.ephemeral_bytes_max:
                raise ViolationError(f"the outcome of task {early[0].task_id} was forgotten before its time")
        for task in gone:
            del self._ephemeral[task]


def _queue_until_s(task: Task) -> float:
    return math.inf if task.spec.queue_timeout_s is None else task.submit_s + task.spec.queue_timeout_s
