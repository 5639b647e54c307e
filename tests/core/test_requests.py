"""Tasks that the journal refused, and what comes after them."""

from multigpu_master.core import events as ev
from multigpu_master.core.model import OutcomeState

from tests.core.stage import FAILED, Stage, lease_of, state_of


def test_what_is_left_of_a_refused_task_does_not_touch_the_next_with_its_request_id() -> None:
    stage = Stage()
    (refused,) = stage.submit(request="r")
    stage.handle(ev.Cancel([refused]))
    stage.handle(ev.SubmitFailed([refused]))
    (taken,) = stage.submit(request="r")
    assert taken is not refused
    stage.handle(ev.SettlesCommitted([refused]))
    assert stage.submit(request="r") == []
    assert stage.core.requests["r"] is taken


def test_a_task_that_is_refused_in_its_pause_stays_away() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit()
    stage.report(lease_of(task), FAILED)
    assert not task.waiting
    stage.handle(ev.SubmitFailed([task]))
    stage.handle(ev.Tick(), 10.0)
    assert task.lease is None
    assert stage.core.unsettled == 0


def test_a_task_that_is_cancelled_in_its_pause_stays_away() -> None:
    stage = Stage()
    stage.worker()
    (task,) = stage.submit()
    stage.report(lease_of(task), FAILED)
    stage.handle(ev.Cancel([task]))
    stage.handle(ev.Tick(), 10.0)
    assert state_of(task) is OutcomeState.CANCELLED
    assert task.lease is None
