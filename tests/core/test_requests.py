"""Tasks that the journal rejected, and what comes after them."""

from dataclasses import replace
from typing import Any

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.identity import ALREADY_EXISTS
from multigpu_master.core.model import OutcomeState, Task
from multigpu_master.core.spec import Spec

from tests.core.stage import Stage, lease_of, state_of


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
    stage.handle(ev.SettlesCommitted([rejected]))
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
    stage.handle(ev.SettlesCommitted([first] if durable else []))
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
