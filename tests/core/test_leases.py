"""What becomes of a lease, and of its task: rules that the simulator meets too seldom to rely on."""

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.attempts import LOSSES_MAX
from multigpu_master.core.ledger import RUN_GRACE_S
from multigpu_master.core.model import Capability, OutcomeState, Spec, Task, Telemetry, WorkerInfo
from multigpu_master.core.scheduler import Limits

from tests.core.stage import FAILED, OK, ReportState, Stage, held_lease, lease_of, state_of


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


@pytest.mark.parametrize("state", [OK, FAILED])
@pytest.mark.parametrize("wrong_s", [-90_000.0, 90_000.0])
def test_a_worker_whose_clock_is_wrong_does_not_decide_how_long_an_outcome_is_kept(
    state: ReportState, wrong_s: float
) -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit(spec=Spec(kind="run", attempts_max=1))
    stage.report(lease_of(task), state, clock_s=stage.now + wrong_s)
    assert task.outcome is not None
    assert task.outcome.dispatch_s <= task.outcome.finish_s <= stage.now


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


def test_a_lease_whose_failure_was_reported_does_not_come_back() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit(spec=Spec(kind="run", attempts_max=2))
    failed = lease_of(task)
    stage.report(failed, FAILED)
    for _ in range(3):  # each would take the attempt off the count when it ends
        commands = stage.worker("w", [held_lease(failed, running=True)])
        assert any(isinstance(c, ev.Revoke) and c.lease_ids == [failed.lease_id] for c in commands)
        assert task.lease is None
    stage.handle(ev.Tick(), 2.0)
    assert lease_of(task).attempt == 2
    stage.report(lease_of(task), FAILED)
    assert state_of(task) is OutcomeState.DEAD_LETTERED


def test_a_deadline_that_passed_while_there_was_no_master_is_kept() -> None:
    stage = Stage()
    stage.worker()
    spec = Spec(kind="run", deadline_s=stage.now - 1)
    task = Task(spec, "r", b"payload", task_id=50, submit_s=stage.now - 5)
    commands = stage.handle(ev.Recover([task]))
    assert state_of(task) is OutcomeState.EXPIRED
    assert not any(isinstance(c, ev.Dispatch) for c in commands)


def test_a_master_that_was_away_listens_before_it_gives_a_worker_up() -> None:
    stage = Stage()
    stage.worker()
    session = stage.sessions
    timeout_s = stage.limits.session_timeout_s
    stage.handle(ev.Tick(), timeout_s + 0.3)  # away all the time, and back soon after the silence was too long
    assert session in stage.core.fleet.sessions
    stage.beat()  # it had spoken all along
    stage.handle(ev.Tick(), 1.0)
    assert session in stage.core.fleet.sessions
    while session in stage.core.fleet.sessions:  # now it is silent, and the master is there to hear it
        due_s = stage.core.next_timer_s()
        assert due_s is not None
        stage.handle(ev.Tick(), due_s - stage.now)
    worker = stage.core.fleet.workers["w"]
    assert not worker.session
    assert stage.now == pytest.approx(1000.0 + 2 * timeout_s + 0.3)


def test_an_old_lease_that_is_lost_again_takes_nothing_off_the_count() -> None:
    stage = Stage()
    stage.worker("a")
    (task,) = stage.submit()
    old = lease_of(task)
    stage.handle(ev.SessionClosed(old.worker.session))
    stage.worker("b")
    stage.beat("b", running=True)
    stage.handle(ev.SessionClosed(stage.sessions))
    assert task.attempts == 1
    stage.handle(ev.Tick(), 1.0)
    stage.worker("b")
    stage.beat("b", running=True)
    stage.handle(ev.SessionClosed(stage.sessions))
    assert task.attempts == 2
    stage.worker("a", [held_lease(old)])
    assert lease_of(task).lease_id == old.lease_id
    stage.handle(ev.SessionClosed(stage.sessions))
    stage.worker("b")
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


def test_a_task_that_failed_goes_elsewhere_if_somebody_has_room() -> None:
    stage = Stage()
    stage.worker("a")
    stage.worker("b")
    (task,) = stage.submit()
    (long,) = stage.submit()
    failed_on, other = lease_of(task).worker, lease_of(long).worker
    assert failed_on is not other
    stage.report(lease_of(task), FAILED)
    stage.handle(ev.Tick(), 5.0)
    assert lease_of(task).worker is other, "although the one on which it failed has less to do"
    other.allowed = 0
    stage.report(lease_of(task), FAILED)
    stage.handle(ev.Tick(), 5.0)
    assert lease_of(task).worker is failed_on, "nobody else has room, and it doesn't wait for that"


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
