"""What ends by the clock: deadlines, timeouts, drains and silent sessions."""

from dataclasses import replace
from typing import Any

import pytest
from multigpu_master import settings
from multigpu_master.core import events as ev
from multigpu_master.core.attempts import LOSSES_MAX
from multigpu_master.core.ledger import RUN_GRACE_S
from multigpu_master.core.model import OutcomeState, Task
from multigpu_master.core.scheduler import Limits
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, Model, ModelState, Resident, Telemetry, WorkerInfo
from multigpu_master.core.workers.sessions import MAKES_ROOM

from tests.core.stage import SPEC, Stage, error_of, held_lease, lease_of, leased, outcome_of, state_of


def test_a_lease_that_is_never_begun_is_taken_back_uncharged_and_goes_elsewhere() -> None:
    stage = Stage(Limits(session_timeout_s=1e9))
    stage.worker("a")
    (task,) = stage.submit(spec=Spec(kind="run", run_timeout_s=5.0, attempts_max=1))
    inert = lease_of(task).worker
    stage.worker("b")
    (other,) = stage.submit()
    assert lease_of(other).worker.worker_id == "b"
    stage.beat("a", after_s=4.9 + RUN_GRACE_S)
    assert lease_of(task).worker is inert
    stage.beat("a", after_s=0.2)
    assert lease_of(task).worker.worker_id == "b", "although the inert one has less to do"
    assert (task.attempts, lease_of(task).attempt) == (1, 1)
    for _ in range(100):  # however often that happens, the task is not charged for it
        stage.handle(ev.Tick(), 5.1 + RUN_GRACE_S)
    assert task.outcome is None


def test_a_lease_whose_model_is_being_loaded_is_not_taken_back() -> None:
    stage = Stage(Limits(session_timeout_s=1e9))
    models = (Model(name="m", memory_bytes=1),)
    stage.join(WorkerInfo(worker_id="w", capabilities=(Capability(kind="run", models=("m",)),), models=models))
    (task,) = stage.submit(spec=Spec(kind="run", model="m", run_timeout_s=5.0))
    lease = lease_of(task)
    loading = (Resident(model="m", state=ModelState.LOADING),)
    for _ in range(100):
        stage.handle(ev.Heartbeat(stage.sessions, [held_lease(lease)], 1 << 30, Telemetry(), loading), 1.0)
    assert task.lease is lease
    loaded = (Resident(model="m", state=ModelState.READY),)
    for _ in range(16):
        stage.handle(ev.Heartbeat(stage.sessions, [held_lease(lease)], 1 << 30, Telemetry(), loaded), 1.0)
    assert task.lease is not lease


def test_a_task_that_no_worker_begins_expires_at_its_queue_timeout() -> None:
    stage = Stage()
    grace_s = stage.limits.session_timeout_s
    stage.worker()
    waits, runs = stage.submit(2, spec=Spec(kind="run", queue_timeout_s=5.0))

    def beat(after_s: float) -> None:
        worker = stage.core.fleet.workers["w"]
        held = [held_lease(x, running=x.task is runs) for x in worker.leases.values()]
        stage.handle(ev.Heartbeat(worker.session, held, 1 << 30, Telemetry()), after_s)

    for _ in range(9):
        beat(1.0)
    assert waits.lease is not None, f"the worker has {grace_s:g} s to say that it has begun"
    beat(1.1)
    assert waits.outcome is not None
    assert waits.outcome.error is not None
    assert (state_of(waits), waits.outcome.error.type) == (OutcomeState.EXPIRED, "QueueTimeout")
    for _ in range(100):
        beat(1.0)
    assert runs.lease is not None


def test_the_queue_timeout_of_a_requeued_dead_letter_begins_anew() -> None:
    """Under the same task_id, with which its first instants were noted (simulator seed 38691)."""
    stage = Stage()
    stage.worker()
    spec = Spec(kind="run", queue_timeout_s=5.0, attempts_max=1, wait_for_worker=True)
    (first,) = stage.submit(spec=spec)
    stage.fail(lease_of(first), after_s=1.0)
    assert state_of(first) is OutcomeState.DEAD_LETTERED
    stage.handle(ev.SettlesDone([first]))
    stage.handle(ev.SessionClosed(stage.sessions), 1.0)
    again = Task(spec, "", b"payload")
    again.task_id = first.task_id
    assert stage.submitted([again]).fresh == [again]
    stage.handle(ev.Tick(), 4.0)
    assert again.outcome is None
    stage.handle(ev.Tick(), 1.1)
    assert state_of(again) is OutcomeState.EXPIRED


def test_a_drain_that_is_overruled_or_long_over_revokes_what_it_should() -> None:
    stage, task = leased()
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


def test_drain_deadlines_never_end_a_task() -> None:
    stage, task = leased(Spec(kind="run", attempts_max=1))
    for _ in range(LOSSES_MAX + 2):
        stage.beat(running=True, after_s=1.0)
        stage.handle(ev.Drain("w", stage.now + 1))
        commands = stage.handle(ev.Tick(), 2.0)
        (revoked,) = [c for c in commands if isinstance(c, ev.Revoke)]
        assert revoked.reason == "the drain deadline of worker w has passed"
        assert (task.lease, task.outcome, task.attempts) == (None, None, 0)
        stage.handle(ev.Uncordon("w"))
        assert task.lease is not None, "at once"


@pytest.mark.parametrize("hello_after_s", [1.0, 120.0])
def test_a_drain_and_its_deadline_survive_a_restart_of_the_master(hello_after_s: float) -> None:
    before, _ = leased()
    before.handle(ev.Drain("w", before.now + 60.0))
    kept = {k: v for k, v in settings.worker_setting(before.core.fleet.workers["w"]).items() if v is not None}
    after = Stage(now=before.now)
    settings.restore(after.handle, after.core.ledger.strategies, kept)
    worker = after.core.fleet.workers["w"]
    assert worker.cordon == before.core.fleet.workers["w"].cordon
    task = Task(SPEC, "", b"payload", task_id=50)
    after.handle(ev.Recover([task], after.now + 300.0))
    after.now += hello_after_s
    after.worker("w", [ev.HeldLease(60, 50, 1, running=True, granted_by_this_journal=True)])
    while after.now < 1060.0:
        assert worker.leases
        after.beat(running=True, after_s=1.0)
    assert not worker.leases
    assert task.outcome is None


def test_a_drain_until_later_than_any_timestamp_survives_a_restart() -> None:
    stage, _ = leased()
    stage.handle(ev.Drain("w", 1e11 + 1.0))
    kept = {k: v for k, v in settings.worker_setting(stage.core.fleet.workers["w"]).items() if v is not None}
    after = Stage()
    settings.restore(after.handle, after.core.ledger.strategies, kept)
    assert after.core.fleet.workers["w"].draining


def test_a_task_that_its_worker_did_not_end_says_how_long_it_ran() -> None:
    stage = Stage()
    stage.worker()
    spec = Spec(kind="run", wait_for_worker=True, run_timeout_s=5.0, attempts_max=1)
    (task,) = stage.submit(spec=spec)
    stage.beat(running=True, after_s=1.0)
    began_s = stage.now
    for _ in range(20):
        stage.beat(running=True, after_s=1.0)
    assert task.outcome is not None
    assert task.outcome.error is not None
    assert (task.outcome.error.type, task.outcome.start_s) == ("RunTimeout", began_s)
    (cancelled,) = stage.submit()
    stage.beat(running=True, after_s=1.0)
    stage.handle(ev.Cancel([cancelled]), 2.0)
    assert outcome_of(cancelled).start_s == stage.now - 2.0


@pytest.mark.parametrize(
    ("limit", "error"),
    [({"deadline_s": 1005.0}, "DeadlineExceeded"), ({"run_timeout_s": 5.0, "attempts_max": 1}, "RunTimeout")],
)
def test_a_suspended_master_reads_what_workers_sent_before_it_applies_a_time_limit(
    limit: dict[str, Any], error: str
) -> None:
    stage = Stage()
    stage.worker()
    ended, runs = stage.submit(2, spec=Spec(kind="run", wait_for_worker=True, **limit))
    stage.beat(running=True, after_s=1.0)
    lease = lease_of(ended)
    stage.handle(ev.Tick(), 60.0)
    assert (ended.outcome, runs.outcome) == (None, None)
    stage.report(lease)
    assert state_of(ended) is OutcomeState.SUCCEEDED
    stage.beat(running=True)
    stage.handle(ev.Tick(), stage.limits.timer_late_s)
    assert error_of(runs) == error


def test_a_waiting_task_ends_at_its_deadline_although_the_master_was_suspended() -> None:
    stage = Stage()
    (task,) = stage.submit(spec=Spec(kind="run", wait_for_worker=True, deadline_s=1005.0))
    stage.handle(ev.Tick(), 60.0)
    assert error_of(task) == "DeadlineExceeded"


def test_a_master_that_is_away_between_two_looks_looks_again() -> None:
    stage = Stage()
    stage.worker()
    session = stage.sessions
    due_s = stage.core.next_timer_s()
    assert due_s is not None
    stage.handle(ev.Tick(), due_s - stage.now)  # the first look, in time: nothing heard so far
    stage.handle(ev.Tick(), 60.0)  # the second comes late, and what the worker said meanwhile is still unread
    assert session in stage.core.fleet.sessions
    stage.beat()
    stage.handle(ev.Tick(), 1.0)
    assert session in stage.core.fleet.sessions


def test_a_run_timeout_after_a_suspension_is_not_later_than_that_of_the_last_lease() -> None:
    """Seed 20186161: the expiry of an earlier lease was late, and set again to after the timeout."""
    stage, task = leased(replace(SPEC, run_timeout_s=2.0))
    begin_s = stage.now
    stage.fail(lease_of(task), MAKES_ROOM, returned=True)
    stage.handle(ev.Tick(), 2.0)
    stage.beat(running=True)
    running_since_s = lease_of(task).running_since_s
    stage.handle(ev.Tick(), begin_s + 2.0 + RUN_GRACE_S + 1.5 - stage.now)  # SIGSTOP until then
    assert task.lease is not None
    assert stage.core.next_timer_s() == running_since_s + 2.0 + RUN_GRACE_S
