"""What the simulator meets too seldom to rely on: one short story for each rule."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from multigpu_master.core import events as ev
from multigpu_master.core.attempts import LOSSES_MAX
from multigpu_master.core.ledger import RUN_GRACE_S
from multigpu_master.core.model import (
    Capability,
    Lease,
    OutcomeState,
    ReportState,
    Spec,
    Task,
    TaskError,
    Telemetry,
    WorkerInfo,
)
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.strategies.registry import load_strategies

OK, FAILED, RETURNED = ReportState.SUCCEEDED, ReportState.FAILED, ReportState.RETURNED
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
        self.sessions += 1
        info = WorkerInfo(worker_id=name, capabilities=(Capability(kind="run"),), slots=slots)
        return self.handle(ev.Hello(self.sessions, info, held))

    def submit(self, n: int = 1, spec: Spec = SPEC, request: str = "", key: str = "") -> list[Task]:
        commands = self.handle(ev.Submit(spec, [Task(spec, request, b"payload", key) for _ in range(n)]))
        return next(c for c in commands if isinstance(c, ev.Submitted)).fresh

    def report(self, lease: Lease, state: ReportState = OK, after_s: float = 0.1) -> list[ev.Command]:
        error = None if state is OK else TaskError("ValueError", "no good")
        reports = [ev.Report(lease.lease_id, state, error=error)]
        return self.handle(ev.Reports(lease.worker.session, reports), after_s)

    def beat(self, name: str = "w", *, running: bool = False, last_frame: int = 1 << 30, after_s: float = 0.0) -> None:
        worker = self.core.fleet.workers[name]
        held = [held_lease(x, running=running) for x in worker.leases.values()]
        self.handle(ev.Heartbeat(worker.session, held, last_frame, Telemetry()), after_s)


def held_lease(lease: Lease, *, running: bool = False) -> ev.HeldLease:
    return ev.HeldLease(lease.lease_id, lease.task.task_id, lease.attempt, running)


def lease_of(task: Task) -> Lease:
    assert task.lease is not None
    return task.lease


def state_of(task: Task) -> OutcomeState | None:
    return task.outcome.state if task.outcome is not None else None


# --- the journal -----------------------------------------------------------------------------------------------------


def test_a_task_that_could_not_be_journaled_never_runs() -> None:
    stage = Stage()
    (task,) = stage.submit()
    stage.handle(ev.SubmitFailed([task]))
    stage.worker()
    assert task.lease is None
    assert stage.core.unsettled == stage.core.counters.submitted == 0
    assert not stage.core.tasks
    assert task.task_id == 0
    assert not stage.core.lanes.by_key
    (paused,) = stage.submit()
    stage.report(lease_of(paused), FAILED)
    stage.handle(ev.SubmitFailed([paused]))
    stage.handle(ev.Tick(), 10.0)
    assert paused.lease is None


def test_forgetting_a_task_keeps_the_next_one_of_its_request() -> None:
    stage = Stage()
    stage.worker()
    (first,) = stage.submit(request="r")
    stage.report(lease_of(first))
    stage.handle(ev.SubmitFailed([first]))  # its outcome is still on its way to the disk
    (second,) = stage.submit(request="r")
    assert second is not first
    stage.handle(ev.SettlesCommitted([first]))
    assert stage.submit(request="r") == []
    assert stage.core.requests["r"] is second


def test_recovered_tasks_wait_for_the_workers_that_may_hold_them() -> None:
    stage = Stage()
    spec = Spec(kind="run", queue_timeout_s=0.5)
    stage.handle(ev.RegisterWorker(WorkerInfo(worker_id="w"), expected=True))
    tasks = [Task(spec, "", b"", submit_s=stage.now - 10, task_id=i) for i in (1, 2)]
    stage.handle(ev.Recover(tasks, stage.now + 3))
    stage.worker("other")
    assert [t.lease for t in tasks] == [None, None]
    stage.handle(ev.Tick(), 1.0)  # the queue timeout, for all that is known, was met in the last life
    stage.worker("w", [ev.HeldLease(55, 1, 2, running=True)])
    assert (lease_of(tasks[0]).lease_id, tasks[0].attempts) == (55, 2)
    assert state_of(tasks[1]) is None or lease_of(tasks[1])
    stage.handle(ev.Tick(), 2.0)
    assert tasks[0].outcome is None


def test_nothing_is_dispatched_while_outcomes_pile_up_before_the_journal() -> None:
    stage = Stage(Limits(uncommitted_bytes_max=500))
    stage.worker(slots=1)
    tasks = stage.submit(3)
    stage.report(lease_of(tasks[0]))
    assert lease_of(tasks[1])  # it was dispatched before
    assert tasks[2].lease is None
    stage.handle(ev.SettlesCommitted(tasks[:1]))
    assert lease_of(tasks[2])


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_lease_that_comes_back_during_its_tasks_pause_is_adopted_and_can_be_lost_again() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit()
    lease = lease_of(task)
    stage.beat(running=True)
    stage.handle(ev.SessionClosed(lease.worker.session))
    assert task.lease is None
    assert not task.waiting  # it pauses
    stage.worker("w", [held_lease(lease)])
    assert lease_of(task).lease_id == lease.lease_id
    stage.handle(ev.SessionClosed(stage.sessions))
    assert task.waiting
    stage.worker("w2")
    assert lease_of(task).worker.worker_id == "w2"


def test_a_reconnect_costs_a_running_lease_no_attempt() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit(spec=Spec(kind="run", attempts_max=1))
    stage.beat(running=True)
    lease = lease_of(task)
    stage.worker("w", [held_lease(lease, running=True)])
    assert state_of(task) is None
    assert lease_of(task).lease_id == lease.lease_id
    stage.report(lease_of(task))
    assert state_of(task) is OutcomeState.SUCCEEDED


def test_a_reconnect_leaves_the_lane_of_an_adopted_task_alone() -> None:
    stage = Stage()
    tasks = stage.submit(2)
    held = ev.HeldLease(50, tasks[1].task_id, 1)
    stage.handle(ev.RegisterWorker(WorkerInfo(worker_id="w"), cordoned=True))
    stage.worker("w", [held])  # the task's entry in the lane is hollow now
    stage.worker("w", [held])
    lane = stage.core.lane_for(tasks[0])
    assert lane.live == sum(t.waiting for t in tasks) == 1
    assert lease_of(tasks[1]).lease_id == 50


def test_an_old_lease_that_is_lost_again_takes_nothing_off_the_count() -> None:
    stage = Stage()
    stage.worker("a")
    (task,) = stage.submit()
    old = lease_of(task)
    stage.handle(ev.SessionClosed(old.worker.session))
    stage.worker("b")
    stage.report(lease_of(task), FAILED)
    stage.handle(ev.Tick(), 1.0)
    stage.report(lease_of(task), FAILED)
    assert task.attempts == 2
    stage.worker("a", [held_lease(old)])
    stage.handle(ev.SessionClosed(stage.sessions))
    assert lease_of(task).attempt == 3  # two are charged, this is the third


def test_a_task_that_is_lost_unrun_too_often_is_a_dead_letter_and_pauses_longer_each_time() -> None:
    stage = Stage()
    (task,) = stage.submit()
    pauses = []
    for _ in range(LOSSES_MAX + 1):
        stage.worker()
        began = stage.now
        while task.lease is None:
            due = stage.core.next_timer_s()
            assert due is not None
            stage.now = due
            stage.beat()
        pauses.append(stage.now - began)
        stage.handle(ev.SessionClosed(stage.sessions))
    assert state_of(task) is OutcomeState.DEAD_LETTERED
    assert pauses[:2] == [0.0, 0.0]
    assert pauses[2:] == sorted(pauses[2:])
    assert pauses[-1] > 10


def test_a_lease_is_taken_back_only_after_it_ran_for_its_whole_time() -> None:
    stage = Stage(Limits(session_timeout_s=1e9))
    stage.worker()
    (task,) = stage.submit(spec=Spec(kind="run", run_timeout_s=5.0, attempts_max=1))
    for _ in range(100):
        stage.beat(after_s=1.0)  # it waits in the window
    stage.beat(running=True)
    stage.beat(running=True, after_s=4.9 + RUN_GRACE_S)
    assert task.outcome is None
    stage.beat(running=True, after_s=0.2)
    assert task.outcome is not None
    assert task.outcome.error is not None
    assert task.outcome.error.type == "RunTimeout"


def test_a_lease_that_the_worker_has_not_had_time_to_see_stays() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit()
    lease = lease_of(task)
    session = lease.worker.session
    stage.handle(ev.Heartbeat(session, [], lease.frame - 1, Telemetry()))
    assert task.lease is lease
    stage.handle(ev.Heartbeat(session, [], lease.frame, Telemetry()))
    assert task.lease is not lease


def test_a_checkpoint_is_there_for_the_next_attempt() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit()
    lease = lease_of(task)
    held = ev.HeldLease(lease.lease_id, task.task_id, 1, running=True, fraction=0.5, steps=3, checkpoint=b"half")
    stage.handle(ev.Heartbeat(lease.worker.session, [held], lease.frame, Telemetry()))
    assert (lease.fraction, lease.steps) == (0.5, 3)
    stage.beat(running=True)  # unchanged, so not sent again
    stage.handle(ev.SessionClosed(lease.worker.session))
    stage.worker("other")
    stage.handle(ev.Tick(), 1.0)
    assert lease_of(task).attempt == 2
    assert task.extra is not None
    assert task.extra.checkpoint == b"half"


def test_a_drain_that_is_overruled_or_long_over_revokes_what_it_should() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit()
    lease = lease_of(task)
    stage.handle(ev.Drain("w", stage.now + 1))
    stage.handle(ev.Drain("w", stage.now + 3))
    stage.handle(ev.Tick(), 2.0)
    assert task.lease is lease  # the later deadline counts
    stage.handle(ev.SessionClosed(lease.worker.session))
    stage.handle(ev.Tick(), 2.0)
    commands = stage.worker("w", [held_lease(lease, running=True)])
    assert task.lease is None  # it comes back after the deadline
    assert any(isinstance(c, ev.Revoke) and c.lease_ids == [lease.lease_id] for c in commands)


def test_a_partial_output_beyond_a_gap_ends_the_lease() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit()
    lease = lease_of(task)
    stage.handle(ev.Partials(lease.worker.session, [ev.PartialOutput(lease.lease_id, 2, b"x")]))
    assert task.lease is not lease
    assert task.extra is not None
    assert task.extra.partials == []


def test_a_key_whose_worker_is_lost_while_its_tasks_wait_for_memory_moves_on() -> None:
    stage = Stage()
    stage.handle(ev.SetStrategy("static_partition"))
    for session, name in enumerate("ab", 1):
        info = WorkerInfo(worker_id=name, capabilities=(Capability(kind="run"),), memory_total_bytes=100)
        stage.handle(ev.Hello(session, info))
        stage.handle(ev.Heartbeat(session, [], 0, Telemetry(memory_total_bytes=100, memory_used_bytes=100)))
    (task,) = stage.submit(spec=Spec(kind="run", memory_bytes=50), key="k")
    pin = stage.core.placement.pin(stage.core.strategies["static_partition"], stage.core.lane_for(task).shape)
    assert pin is not None
    other = next(w for w in stage.core.fleet.workers.values() if w is not pin)
    telemetry = Telemetry(memory_total_bytes=100, memory_used_bytes=0)
    stage.handle(ev.Heartbeat(other.session, [], 0, telemetry))
    assert task.lease is None
    stage.handle(ev.SessionClosed(pin.session))
    assert lease_of(task).worker is other


# --- silence ---------------------------------------------------------------------------------------------------------


def test_a_silent_worker_is_lost_at_the_timeout_and_not_before() -> None:
    stage = Stage()
    stage.now = 1000.1  # where (heard + 5) - heard is less than 5
    stage.worker()
    (task,) = stage.submit()
    stage.handle(ev.Tick(), 4.9)
    assert task.lease is not None
    due = stage.core.next_timer_s()
    assert due is not None
    stage.now = due
    stage.handle(ev.Tick())
    assert task.lease is None


def test_a_master_that_was_away_hears_its_workers_out_first() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit()
    stage.handle(ev.Tick(), 60.0)
    assert task.lease is not None
    stage.beat()
    stage.handle(ev.Tick(), 4.0)
    assert task.lease is not None
    stage.handle(ev.Tick(), 1.5)
    assert task.lease is None


# --- pace ------------------------------------------------------------------------------------------------------------


def test_reports_that_come_together_do_not_widen_the_window() -> None:
    stage = Stage()
    stage.worker(slots=1)
    tasks = stage.submit(200)
    for _ in range(20):
        leased = [t for t in tasks if t.lease is not None]
        for i, task in enumerate(leased[:2]):
            stage.report(lease_of(task), after_s=0.0005 if i else 0.2)
    worker = stage.core.fleet.workers["w"]
    assert 2 <= worker.allowed <= 6  # ten tasks a second, half a second ahead
    assert worker.unit_s == {}  # nobody said how long they ran


def test_a_window_that_grows_with_a_stale_report_is_used() -> None:
    stage = Stage()
    stage.worker(slots=1)
    tasks = stage.submit(9)
    for i, after_s in enumerate((0.001, 0.001, 0.001)):
        stage.report(lease_of(tasks[i]), after_s=after_s)  # too soon after the start to say anything of its pace
    assert [t.lease is not None for t in tasks[3:]] == [True, True, False, False, False, False]
    stale = [ev.Report(1, OK)]
    stage.handle(ev.Reports(stage.sessions, stale), 0.004)
    assert all(t.lease is not None for t in tasks[3:])


def test_averages_of_the_fleet_reach_every_ranking() -> None:
    """A worker that has shown no speed ranks by the fleet's: what others learn must move it."""
    stage = Stage()
    for name in ("known", "new"):
        stage.worker(name)
    known, new = stage.core.fleet.workers["known"], stage.core.fleet.workers["new"]
    (task,) = stage.submit()
    lane = stage.core.lane_for(task)
    stage.handle(ev.Cancel([task]))
    auto, ranking = stage.core.strategies["auto"], stage.core.placement._rankings["auto", lane.base]
    stage.core.fleet.learned(known, ("run", ""), 1, 1, 9.0)
    stage.core.fleet.touch(known)
    assert ranking.best(1) in (known, new)
    assert ranking._heap[0][0] == auto.score(lane.base, new, stage.core.fleet) == 9.0


def test_an_idle_worker_is_not_taken_for_a_slow_one() -> None:
    stage = Stage()
    stage.worker(slots=1)
    for _ in range(50):
        (task,) = stage.submit()
        stage.report(lease_of(task), after_s=0.01)
        stage.now += 30.0
        stage.beat()
    assert abs(stage.core.fleet.workers["w"].pace_s - 0.01) < 0.002


# --- limits ----------------------------------------------------------------------------------------------------------


def test_cancelled_tasks_leave_the_memory_of_their_lane() -> None:
    stage = Stage()
    tasks = stage.submit(5000)
    stage.handle(ev.Cancel([*tasks[1:], tasks[1]]))
    lane = stage.core.lane_for(tasks[0])
    assert len(lane.tasks) < 200
    stage.handle(ev.Cancel(tasks[:1]))
    assert not stage.core.lanes.by_key
    assert not stage.core.lanes.parked


def test_a_queue_that_is_forgotten_and_comes_back_keeps_its_accounts() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit(spec=Spec(kind="run", queue="q"))
    stage.report(lease_of(task))
    stage.core.prune_queues()
    assert "q" not in stage.core.queues
    (task,) = stage.submit(spec=Spec(kind="run", queue="q"))
    assert stage.core.queues["q"].leased == 1
    stage.report(lease_of(task))
    assert stage.core.queues["q"].leased == stage.core.queues["q"].queued == 0


def test_tasks_with_and_without_keys_in_one_batch_stand_in_their_own_lanes() -> None:
    stage = Stage()
    batch = [Task(SPEC, "", b"", key) for key in ("a", "", "b", "", "a")]
    stage.handle(ev.Submit(SPEC, batch))
    assert sorted(lane.live for lane in stage.core.lanes.by_key.values()) == [1, 2, 2]
    stage.handle(ev.Cancel(batch))
    assert not stage.core.lanes.by_key


def test_outcomes_of_ephemeral_tasks_live_for_their_time_within_a_limit_of_bytes() -> None:
    stage = Stage(Limits(ephemeral_bytes_max=2000, session_timeout_s=1e9))
    stage.worker()
    spec = Spec(kind="run", durable=False, result_ttl_s=10.0)
    tasks = stage.submit(5, spec)
    for task in tasks:
        stage.report(lease_of(task), after_s=0.1)
    assert [t.task_id in stage.core.tasks for t in tasks] == [False, False, True, True, True]
    stage.handle(ev.Tick(), 9.85)
    assert [t.task_id in stage.core.tasks for t in tasks] == [False, False, False, True, True]
    stage.handle(ev.Tick(), 1.0)
    assert not stage.core.tasks


def test_limits_refuse_with_a_delay() -> None:
    stage = Stage(Limits(tasks_max=2, bytes_max=100))
    stage.submit(2)
    commands = stage.handle(ev.Submit(SPEC, [Task(SPEC, "", b"x")]))
    rejection = next(c for c in commands if isinstance(c, ev.Submitted)).results[0]
    assert isinstance(rejection, ev.Rejection)
    assert (rejection.code, rejection.retry_delay_s) == (8, 1.0)
    stage = Stage(Limits(bytes_max=10))
    assert len(stage.submit(2)) == 1


def test_a_worker_that_returns_its_tasks_is_not_charged_for() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit(spec=Spec(kind="run", attempts_max=1))
    stage.report(lease_of(task), RETURNED)
    assert state_of(task) is None
    stage.report(lease_of(task))
    assert (state_of(task), task.attempts) == (OutcomeState.SUCCEEDED, 1)
