"""What becomes of a lease, and of its task: rules that the simulator meets too seldom to rely on."""

from dataclasses import replace

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.model import Attempt, Energy, Lease, OutcomeState, Task, TaskError
from multigpu_master.core.placement.explain import explain
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Telemetry, WorkerInfo

from tests.core.stage import (
    FAILED,
    OK,
    RETURNED,
    SPEC,
    ReportState,
    Stage,
    held_lease,
    lease_of,
    leased,
    outcome_of,
    state_of,
)


def test_a_lease_whose_failure_was_reported_does_not_come_back() -> None:
    stage, task = leased(Spec(kind="run", attempts_max=2))
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


def test_a_lease_whose_return_was_reported_does_not_come_back() -> None:
    """It took a later attempt, which had run, off the count; then a queue_timeout ended the task (seed 61008544)."""
    stage, task = leased()
    old = lease_of(task)
    stage.report(old, RETURNED)
    assert lease_of(task) is not old
    stage.beat(running=True)
    stage.handle(ev.SessionClosed(stage.sessions), 0.1)
    assert (task.lease, task.attempts) == (None, 1)
    commands = stage.worker("w", [held_lease(old)])
    assert any(isinstance(c, ev.Revoke) and c.lease_ids == [old.lease_id] for c in commands)
    assert (task.lease, task.attempts) == (None, 1)


def test_an_attempt_that_ended_while_no_session_was_open_has_its_own_times() -> None:
    """Its end was the time of its adoption: a task of 2.4 s seemed to take an hour."""
    stage, task = leased()
    lease = lease_of(task)
    stage.beat(running=True, after_s=0.1)
    start_s = stage.now
    stage.handle(ev.SessionClosed(stage.sessions), 1.0)
    stage.handle(ev.Tick(), 3600.0)
    stage.worker("w", [held_lease(lease, running=True)])
    reports = ev.Reports(stage.sessions, [lease.lease_id], [b""], start_s=start_s, finish_s=start_s + 2.4)
    stage.handle(reports, 0.5)
    outcome = outcome_of(task)
    assert (outcome.dispatch_s, outcome.start_s, outcome.finish_s) == (start_s, start_s, start_s + 2.4)


def test_a_requeued_dead_letter_takes_back_no_lease_of_an_attempt_before() -> None:
    """A worker lists leases whose report may be lost. The failure counted twice: no new attempt was made."""
    stage, task = leased(Spec(kind="run", attempts_max=1))
    old = lease_of(task)
    stage.report(old, FAILED)
    assert state_of(task) is OutcomeState.DEAD_LETTERED
    stage.handle(ev.SettlesDone([task]))
    stage.handle(ev.SessionClosed(stage.sessions))
    again = Task(task.spec, "", b"payload", task_id=task.task_id)
    assert stage.submitted([again]).fresh == [again]
    commands = stage.worker("w", [held_lease(old)])
    assert any(isinstance(c, ev.Revoke) and c.lease_ids == [old.lease_id] for c in commands)
    assert (lease_of(again).attempt, again.attempts) == (1, 1)
    assert lease_of(again).lease_id != old.lease_id


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
    other.pace.leases_max = 0
    stage.report(lease_of(task), FAILED)
    stage.handle(ev.Tick(), 5.0)
    assert lease_of(task).worker is failed_on, "nobody else has room, and it doesn't wait for that"


def test_explain_names_a_device_on_which_the_task_broke_an_engine_only_while_another_accepts_such_tasks() -> None:
    stage = Stage()
    stage.worker("a")
    (task,) = stage.submit()
    stage.fail(lease_of(task), broke_engine=True)

    def excluded() -> dict[str, bool]:
        candidates = explain(stage.core, task, stage.now).candidates
        return {c.worker.worker_id: any("broke an engine" in why for why in c.excluded_by) for c in candidates}

    assert excluded() == {"a": False}, "it will run there again"
    stage.worker("b")
    assert excluded() == {"a": True, "b": False}


def test_a_lease_that_the_worker_has_not_had_time_to_see_stays() -> None:
    stage, task = leased()
    lease = lease_of(task)
    session = lease.worker.session
    stage.handle(ev.Heartbeat(session, [], lease.dispatch_number - 1, Telemetry()))
    assert task.lease is lease
    stage.handle(ev.Heartbeat(session, [], lease.dispatch_number, Telemetry()))
    assert task.lease is not lease


def test_a_checkpoint_is_there_for_the_next_attempt() -> None:
    stage, task = leased()
    lease = lease_of(task)
    held = ev.HeldLease(lease.lease_id, task.task_id, 1, running=True, fraction=0.5, steps=3, checkpoint=b"half")
    stage.handle(ev.Heartbeat(lease.worker.session, [held], lease.dispatch_number, Telemetry()))
    assert (lease.fraction, lease.steps) == (0.5, 3)
    stage.beat(running=True)  # unchanged, so not sent again
    stage.handle(ev.SessionClosed(lease.worker.session))
    stage.worker("other")
    stage.handle(ev.Tick(), 1.0)
    assert lease_of(task).attempt == 2
    assert task.extra is not None
    assert task.extra.checkpoint == b"half"


def test_the_next_attempt_begins_at_the_checkpoint_of_the_last_partial_output() -> None:
    stage, task = leased()
    lease = lease_of(task)
    outputs = [ev.PartialOutput(lease.lease_id, 0, b"p0"), ev.PartialOutput(lease.lease_id, 1, b"p1", "", b"after p0")]
    stage.handle(ev.Partials(lease.worker.session, outputs))
    assert task.extra is not None
    assert task.extra.checkpoint == b"after p0"
    repeated = ev.PartialOutput(lease.lease_id, 0, b"p0", "", b"older")
    stage.handle(ev.Partials(lease.worker.session, [repeated]))
    assert task.extra.checkpoint == b"after p0"


@pytest.mark.parametrize("state", [OK, FAILED])
def test_an_adopted_lease_was_dispatched_before_it_began(state: ReportState) -> None:
    """Its master died; the next one knows when it began from the worker only."""
    stage = Stage()
    spec = Spec(kind="run", wait_for_worker=True, attempts_max=1)
    task = Task(spec, "", b"payload", submit_s=900.0, task_id=50)
    stage.handle(ev.Recover([task], hold_until_s=1003.0))
    stage.worker("w", [ev.HeldLease(60, 50, 1, running=True, granted_by_this_journal=True)])
    lease = lease_of(task)
    assert lease.lease_id == 60
    failure = ev.Failure(60, TaskError("ValueError", "no good"))
    done = ([60], [b""], "", []) if state is OK else ([], [], "", [failure])
    stage.handle(ev.Reports(lease.worker.session, *done, start_s=950.0, finish_s=1001.0), 2.0)
    outcome = outcome_of(task)
    assert (outcome.dispatch_s, outcome.start_s, outcome.finish_s) == (950.0, 950.0, 1001.0)


def test_of_two_attempts_of_a_task_that_a_worker_reports_the_last_is_adopted() -> None:
    """It had not yet ended the first, which had been revoked, when the master that granted both died."""
    stage = Stage()
    task = Task(Spec(kind="run", wait_for_worker=True), "", b"payload", submit_s=900.0, task_id=50)
    stage.handle(ev.Recover([task], hold_until_s=1003.0))
    stage.worker("w", [ev.HeldLease(59 + n, 50, n, running=True, granted_by_this_journal=True) for n in (1, 2)])
    assert (lease_of(task).lease_id, task.attempts) == (61, 2)


@pytest.mark.parametrize("start_s", [800.0, 2000.0])
def test_the_stages_of_a_task_are_in_order_though_its_workers_clock_is_wrong(start_s: float) -> None:
    stage, task = leased()
    lease = lease_of(task)
    stage.handle(ev.Reports(lease.worker.session, [lease.lease_id], [b""], "", [], start_s, start_s + 1.0), 2.0)
    outcome = outcome_of(task)
    assert outcome.dispatch_s <= outcome.start_s <= outcome.finish_s <= stage.now


def test_a_partial_output_beyond_a_gap_ends_the_lease() -> None:
    stage, task = leased()
    lease = lease_of(task)
    stage.handle(ev.Partials(lease.worker.session, [ev.PartialOutput(lease.lease_id, 2, b"x")]))
    assert task.lease is not lease
    assert task.extra is not None
    assert task.extra.partials == []


def test_a_lease_that_was_handed_back_counts_as_requeued() -> None:
    stage, task = leased()
    stage.report(lease_of(task), RETURNED)
    assert stage.core.ledger.counters.requeued == 1


JOULES = [Energy(float(n), 1, 0.1) for n in range(1, 4)]


def test_energy_goes_to_its_task_whatever_is_stale_beside_it() -> None:
    stage = Stage()
    stage.worker(slots=8)
    first, second = stage.submit(2)
    leases = [lease_of(first).lease_id, 12345, lease_of(second).lease_id]
    stage.handle(ev.Reports(stage.sessions, leases, [b"", b"", b""], energy=JOULES))
    assert first.outcome is not None
    assert (first.outcome.energy, outcome_of(second).energy) == (JOULES[0], JOULES[2])
    assert stage.core.ledger.counters.stale_reports == 1


def test_a_report_without_energy_leaves_none() -> None:
    stage, task = leased()
    stage.report(lease_of(task))
    assert outcome_of(task).energy is None


def test_a_failure_reported_by_another_worker_does_not_end_a_lease() -> None:
    stage, task = leased()
    stage.worker("other")
    failure = ev.Failure(lease_of(task).lease_id, TaskError("ValueError", "false"))
    stage.handle(ev.Reports(stage.sessions, failures=[failure]))
    assert task.lease is not None


def test_attempts_that_ran_before_are_kept() -> None:
    """One for each that failed or was lost while it ran, with its times; at most 16."""
    stage, task = leased(replace(SPEC, attempts_max=20, backoff_initial_s=0.0))
    first = lease_of(task)
    first.running, first.running_since_s = True, stage.now + 1
    stage.fail(first, "OSError", after_s=3)
    assert task.extra is not None
    assert task.extra.ended_attempts == (Attempt("w", 1000.0, 0.0, 1003.0, "OSError: no good", first.lease_id),)
    for _ in range(17):
        stage.handle(ev.Tick(), 1)
        stage.fail(lease_of(task), after_s=1)
    assert len(task.extra.ended_attempts) == 16
    assert {attempt.reason for attempt in task.extra.ended_attempts} == {"ValueError: no good"}


def reconnect(stage: Stage, lease: Lease, *, running: bool, log: str = "") -> None:
    """The worker's stream breaks, and its next session lists the lease."""
    stage.handle(ev.SessionClosed(lease.worker.session), 1.0)
    stage.worker(held=[replace(held_lease(lease, running=running), log=log)])


def test_the_log_of_an_attempt_is_not_repeated_by_a_reconnect() -> None:
    stage, task = leased()
    log = "line 1\nline 2\n"
    for _ in range(3):
        reconnect(stage, lease_of(task), running=True, log=log)
        assert task.log == log
    stage.report(lease_of(task))
    assert task.log == log
    assert stage.core.ledger.unsettled_bytes == 0


def test_an_attempt_that_goes_on_after_a_reconnect_is_not_listed_as_lost() -> None:
    stage, task = leased()
    lease_of(task).running = True
    reconnect(stage, lease_of(task), running=True)
    assert task.extra is not None
    assert (task.extra.ended_attempts, task.extra.last_error) == ((), None)


def test_only_the_loss_of_the_adopted_lease_is_taken_back() -> None:
    stage, task = leased(replace(SPEC, backoff_initial_s=0.01))
    stage.handle(ev.SessionClosed(stage.sessions))  # it waited in the window: a loss
    stage.worker()
    lease_of(task).running = True
    assert task.extra is not None
    assert task.extra.losses == 1
    reconnect(stage, lease_of(task), running=True)  # it ran: charged
    assert task.extra.losses == 1


def test_a_report_of_the_master_itself_is_no_sign_of_life() -> None:
    """The session of a host without power went on for as long as the master had no descriptor to read a payload."""
    stage, _ = leased()
    worker = stage.core.fleet.workers["w"]
    heard_s = worker.heard_s
    stage.handle(ev.Reports(stage.sessions, failures=[], by_master=True), 1.0)
    assert worker.heard_s == heard_s


def test_device_time_counts_once_if_a_report_has_successes_and_failures() -> None:
    stage = Stage()
    stage.worker()
    tasks = stage.submit(4)
    ids = [lease_of(task).lease_id for task in tasks]
    failure = ev.Failure(ids[3], TaskError("ValueError", "no good"))
    stage.handle(ev.Reports(stage.sessions, ids[:3], [b""] * 3, failures=[failure], device_s=1.0))
    (used,) = stage.core.usage.pop_sums().values()
    assert (used.succeeded, used.failed_attempts) == (3, 1)
    assert used.device_s == pytest.approx(1.0)


def test_a_master_that_was_suspended_past_the_hold_reads_the_hellos_first() -> None:
    """The first worker whose hello it read got the task that another worker still ran."""
    stage = Stage()
    for name in ("a", "b"):
        stage.handle(ev.RegisterWorker(WorkerInfo(worker_id=name), expected=True))
    task = Task(SPEC, "r", b"payload", submit_s=1.0, task_id=50)
    stage.handle(ev.Recover([task], stage.now + 3.0))
    stage.now += 600.0  # SIGSTOP
    stage.worker("a")
    assert task.lease is None
    held = ev.HeldLease(60, 50, 1, running=True, granted_by_this_journal=True)
    stage.worker("b", held=[held])
    assert lease_of(task).worker.worker_id == "b"
    stage.handle(ev.Tick(), 600.0)
