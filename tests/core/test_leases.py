"""What becomes of a lease, and of its task: rules that the simulator meets too seldom to rely on."""

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.attempts import LOSSES_MAX
from multigpu_master.core.ledger import RUN_GRACE_S
from multigpu_master.core.model import Energy, OutcomeState, Spec, Task, TaskError
from multigpu_master.core.scheduler import Limits
from multigpu_master.core.workers.info import Capability, Telemetry, WorkerInfo

from tests.core.stage import FAILED, OK, RETURNED, ReportState, Stage, held_lease, lease_of, state_of


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


def test_a_reconnect_leaves_the_class_of_an_adopted_task_alone() -> None:
    stage = Stage()
    tasks = stage.submit(2)
    held = ev.HeldLease(50, tasks[1].task_id, 1, proven=True)
    stage.handle(ev.RegisterWorker(WorkerInfo(worker_id="w"), cordoned=True))
    stage.worker("w", [held])  # the task's entry in the class is hollow now
    stage.worker("w", [held])
    resource_class = stage.core.state.ledger.class_of(tasks[0])
    assert resource_class.size == sum(t.waiting for t in tasks) == 1
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


def test_a_task_that_failed_goes_to_another_worker_with_room() -> None:
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
    other.pace.allowed = 0
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


@pytest.mark.parametrize("state", [OK, FAILED])
def test_an_adopted_lease_was_dispatched_before_it_began(state: ReportState) -> None:
    """Its master died; the next one knows when it began from the worker only."""
    stage = Stage()
    spec = Spec(kind="run", wait_for_worker=True, attempts_max=1)
    task = Task(spec, "", b"payload", submit_s=900.0, task_id=50)
    stage.handle(ev.Recover([task], hold_until_s=1003.0))
    stage.worker("w", [ev.HeldLease(60, 50, 1, running=True, proven=True)])
    lease = lease_of(task)
    assert lease.lease_id == 60
    failure = ev.Failure(60, TaskError("ValueError", "no good"))
    done = ([60], [b""], "", []) if state is OK else ([], [], "", [failure])
    stage.handle(ev.Reports(lease.worker.session, *done, start_s=950.0, finish_s=1001.0), 2.0)
    outcome = task.outcome
    assert outcome is not None
    assert (outcome.dispatch_s, outcome.start_s, outcome.finish_s) == (950.0, 950.0, 1001.0)


@pytest.mark.parametrize("start_s", [800.0, 2000.0])
def test_the_stages_of_a_task_are_in_order_though_its_workers_clock_is_wrong(start_s: float) -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit()
    lease = lease_of(task)
    stage.handle(ev.Reports(lease.worker.session, [lease.lease_id], [b""], "", [], start_s, start_s + 1.0), 2.0)
    outcome = task.outcome
    assert outcome is not None
    assert outcome.dispatch_s <= outcome.start_s <= outcome.finish_s <= stage.now


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
    pin = stage.core.state.placement.pin(
        stage.core.strategies["static_partition"], stage.core.state.ledger.class_of(task).shape
    )
    assert pin is not None
    other = next(w for w in stage.core.fleet.workers.values() if w is not pin)
    telemetry = Telemetry(memory_total_bytes=100, memory_used_bytes=0)
    stage.handle(ev.Heartbeat(other.session, [], 0, telemetry))
    assert task.lease is None
    stage.handle(ev.SessionClosed(pin.session))
    assert lease_of(task).worker is other


def test_a_lease_that_was_handed_back_counts_as_requeued() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit()
    stage.report(lease_of(task), RETURNED)
    assert stage.core.counters.requeued == 1


def test_a_new_master_counts_all_attempts_of_which_workers_tell_it() -> None:
    """A worker lists what it reported of late: of several attempts of a task the last one counts."""
    stage = Stage()
    (task,) = stage.submit(spec=Spec(kind="run", wait_for_worker=True))
    stage.worker("a", held=[ev.HeldLease(n, task.task_id, n, running=False, proven=True) for n in (1, 2, 3)])
    assert (lease_of(task).attempt, task.attempts) == (3, 3)
    stage.report(lease_of(task), FAILED)
    assert state_of(task) is OutcomeState.DEAD_LETTERED


JOULES = [Energy(float(n), 1, 0.1) for n in range(1, 4)]


def test_energy_goes_to_its_task_whatever_is_stale_beside_it() -> None:
    stage = Stage()
    stage.worker(slots=8)
    first, second = stage.submit(2)
    leases = [lease_of(first).lease_id, 12345, lease_of(second).lease_id]
    stage.handle(ev.Reports(stage.sessions, leases, [b"", b"", b""], energy=JOULES))
    assert first.outcome is not None
    assert second.outcome is not None
    assert (first.outcome.energy, second.outcome.energy) == (JOULES[0], JOULES[2])
    assert stage.core.counters.stale_reports == 1


def test_a_report_without_energy_leaves_none() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit()
    stage.report(lease_of(task))
    assert task.outcome is not None
    assert task.outcome.energy is None
