"""Tasks that the journal rejected, and what comes after them."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.identity import ALREADY_EXISTS
from multigpu_master.core.model import OutcomeState, Task
from multigpu_master.core.spec import Spec

from tests.core.stage import FAILED, SPEC, Stage, lease_of, leased, state_of


@dataclass
class SharedPayload:
    """A payload in a shared file."""

    size: int
    crc: int  # -1: its sender gave none

    def __len__(self) -> int:
        return self.size


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_rejected_task_does_not_affect_the_next_with_its_request_id(succeeds: bool) -> None:
    stage = Stage()
    if succeeds:
        stage.worker()
    (rejected,) = stage.submit(request="r")
    if succeeds:
        stage.report(lease_of(rejected))
    else:
        stage.handle(ev.Cancel([rejected]))
    stage.handle(ev.SubmitFailed([rejected]))  # its outcome is still on its way to the disk
    (taken,) = stage.submit(request="r")
    assert taken is not rejected
    stage.handle(ev.SettlesDone([rejected]))
    assert stage.submit(request="r") == []
    assert stage.core.ledger.requests["r"] is taken


def test_a_task_that_the_journal_rejects_lowers_no_counter() -> None:
    stage = Stage()
    tasks = stage.submit(3)
    stage.handle(ev.SubmitFailed(tasks[:1]))
    counters = stage.core.ledger.counters
    assert (counters.submitted, counters.unwritten, stage.core.ledger.unsettled) == (3, 1, 2)


@pytest.mark.parametrize("withdrawn", [True, False])
def test_a_cancel_that_comes_after_the_outcome_changes_nothing(withdrawn: bool) -> None:
    stage = Stage()
    (task,) = stage.submit(request="r")
    stage.handle(ev.Cancel([task], "first"))
    outcome = task.outcome
    (answer,) = stage.handle(ev.Cancel([task], "second", withdrawn=withdrawn))
    assert answer == ev.Cancelled([])
    assert task.outcome is outcome


@pytest.mark.parametrize("durable", [True, False])
def test_a_request_id_that_its_client_withdrew_makes_a_new_task(durable: bool) -> None:
    stage = Stage()
    spec = Spec(kind="run", wait_for_worker=True, durable=durable)
    (first,) = stage.submit(spec=spec, request="r")
    stage.handle(ev.Cancel([first], withdrawn=True))
    assert state_of(first) is OutcomeState.CANCELLED
    (second,) = stage.submit(spec=spec, request="r")
    assert second is not first
    stage.handle(ev.SettlesDone([first] if durable else []))
    assert stage.core.ledger.requests["r"] is second


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("durable", [True, False])
def test_a_request_id_stands_for_one_task(durable: bool, ended: bool) -> None:
    stage = Stage()
    spec = Spec(kind="run", wait_for_worker=True, durable=durable)
    (first,) = stage.submit(spec=spec, request="r")
    if ended:
        stage.handle(ev.Cancel([first]))

    def answer(payload: bytes, **changes: Any) -> Any:
        return stage.submitted([Task(replace(spec, **changes), "r", payload)]).results[0]

    assert answer(b"payload") is first
    assert answer(b"payload", priority=1, queue="other", attempts_max=9) is first
    for word, other in (
        ("another payload", answer(b"two")),
        ("kind 'run', not 'walk'", answer(b"payload", kind="walk")),
        ("model '', not 'm'", answer(b"payload", model="m")),
        ("parameters", answer(b"payload", identity=7)),
    ):
        assert (other.code, other.retry_delay_s) == (ALREADY_EXISTS, None)
        assert word in other.message
    assert answer(b"payload", durable=False) is first
    if not durable:
        assert "EPHEMERAL" in answer(b"payload", durable=True).message


def test_an_ephemeral_task_without_a_known_crc_is_the_same_as_its_resubmit_after_its_end_too() -> None:
    stage = Stage()
    stage.worker()
    spec = replace(SPEC, durable=False)
    (answer,) = stage.submitted([Task(spec, "r", SharedPayload(7, -1))], 0).results
    assert isinstance(answer, Task)
    stage.report(lease_of(answer))
    assert answer.payload == b""
    assert stage.submitted([Task(spec, "r", b"payload")]).results == [answer]


def test_a_requeued_dead_letter_is_not_forgotten_with_the_task_whose_id_it_has() -> None:
    stage, task = leased(replace(SPEC, attempts_max=1))
    stage.report(lease_of(task), FAILED)
    stage.handle(ev.SubmitFailed([task]))  # the outcome is still on its way to the disk
    again = Task(task.spec, "", b"payload", task_id=task.task_id)
    stage.submitted([again])
    stage.handle(ev.SettlesDone([task]))
    assert stage.core.ledger.tasks.get(again.task_id) is again


def test_an_outcome_is_kept_for_its_time_after_the_report_however_wrong_the_workers_clock_is() -> None:
    stage, task = leased(replace(SPEC, durable=False, result_ttl_s=60.0))
    stage.report(lease_of(task), after_s=600.0, clock_s=stage.now)
    stage.handle(ev.Tick(), 59.0)
    assert task.task_id in stage.core.ledger.tasks
    stage.handle(ev.Tick(), 2.0)
    assert task.task_id not in stage.core.ledger.tasks
