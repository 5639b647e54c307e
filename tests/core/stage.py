"""A core with a clock that is moved by hand, for tests of one rule each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, Outcome, OutcomeState, Task, TaskError
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, Telemetry, WorkerInfo
from multigpu_master.strategies.registry import load_strategies


class ReportState(Enum):
    """How a worker reports a lease."""

    OK = 1
    FAILED = 2
    RETURNED = 3


OK, FAILED, RETURNED = ReportState
SPEC = Spec(kind="run", wait_for_worker=True)


@dataclass
class Stage:
    """A core with a clock that is moved by hand."""

    limits: Limits = field(default_factory=Limits)
    now: float = 1000.0
    sessions: int = 0

    def __post_init__(self) -> None:
        self.core = Core(load_strategies(), self.limits, 100, lambda: 0.0)

    def handle(self, event: ev.Event, after_s: float = 0.0) -> list[ev.Command]:
        self.now += after_s
        return self.core.handle(event, self.now)

    def worker(self, name: str = "w", held: Sequence[ev.HeldLease] = (), slots: int = 8) -> list[ev.Command]:
        return self.join(WorkerInfo(worker_id=name, capabilities=(Capability(kind="run"),), slots=slots), held)

    def join(self, info: WorkerInfo, held: Sequence[ev.HeldLease] = ()) -> list[ev.Command]:
        """A session of this worker begins."""
        self.sessions += 1
        return self.handle(ev.Hello(self.sessions, info, held))

    def submit(self, n: int = 1, spec: Spec = SPEC, request: str = "", key: str = "") -> list[Task]:
        """Returns the tasks that were taken."""
        return self.submitted([Task(spec, request, b"payload", key) for _ in range(n)]).fresh

    def submitted(self, tasks: Sequence[Task], stream: int = 0) -> ev.Submitted:
        """The answer to a submit of these tasks, which share a spec."""
        (answer,) = [c for c in self.handle(ev.Submit(tasks[0].spec, tasks, stream)) if isinstance(c, ev.Submitted)]
        return answer

    def report(
        self, lease: Lease, state: ReportState = OK, after_s: float = 0.1, clock_s: float = 0.0
    ) -> list[ev.Command]:
        """`clock_s`: when it finished by the worker's clock."""
        if state is OK:
            reports = ev.Reports(lease.worker.session, [lease.lease_id], [b""])
            reports.finish_s = clock_s
            return self.handle(reports, after_s)
        return self.fail(lease, returned=state is RETURNED, after_s=after_s, clock_s=clock_s)

    def fail(
        self, lease: Lease, error: str = "ValueError", *, returned: bool = False, broke_engine: bool = False,
        after_s: float = 0.0, clock_s: float = 0.0,
    ) -> list[ev.Command]:  # fmt: skip
        """The lease did not succeed, with this type of error."""
        failure = ev.Failure(lease.lease_id, TaskError(error, "no good"), returned, broke_engine)
        return self.handle(ev.Reports(lease.worker.session, failures=[failure], finish_s=clock_s), after_s)

    def beat(
        self, name: str = "w", *, running: bool = False, last_dispatch_number: int = 1 << 30, after_s: float = 0.0
    ) -> None:
        worker = self.core.fleet.workers[name]
        held = [held_lease(x, running=running) for x in worker.leases.values()]
        self.handle(ev.Heartbeat(worker.session, held, last_dispatch_number, Telemetry()), after_s)


def held_lease(lease: Lease, *, running: bool = False) -> ev.HeldLease:
    return ev.HeldLease(lease.lease_id, lease.task.task_id, lease.attempt, running, granted_by_this_journal=True)


def lease_of(task: Task) -> Lease:
    assert task.lease is not None
    return task.lease


def state_of(task: Task) -> OutcomeState | None:
    return task.outcome.state if task.outcome is not None else None


def leased(spec: Spec = SPEC) -> tuple[Stage, Task]:
    """A stage with one worker, and a task that it was granted."""
    stage = Stage()
    stage.worker()
    (task,) = stage.submit(spec=spec)
    lease_of(task)
    return stage, task


def outcome_of(task: Task) -> Outcome:
    assert task.outcome is not None
    return task.outcome


def error_of(task: Task) -> str:
    """The type of the error with which the task ended."""
    error = outcome_of(task).error
    assert error is not None
    return error.type
