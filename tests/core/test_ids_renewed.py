"""Ranges of ids: another one is asked for in time, and if it doesn't come nothing gets an id that was given out."""

from multigpu_master.core import events as ev
from multigpu_master.core.model import EPOCH_IDS, Task

from tests.core.stage import SPEC, Stage


def stage_with(ids_left: int) -> Stage:
    stage = Stage()
    stage.core.ids.begin(3 * EPOCH_IDS - ids_left)
    return stage


def asked(commands: list[ev.Command]) -> int:
    return sum(isinstance(c, ev.RenewIds) for c in commands)


def take(stage: Stage, n: int, request: str = "") -> list[Task | ev.Rejection]:
    return stage.submitted([Task(SPEC, request, b"payload") for _ in range(n)]).results


def test_new_ids_are_asked_for_once_when_half_are_used() -> None:
    stage = stage_with(100)
    submit = ev.Submit(SPEC, [Task(SPEC, "", b"payload") for _ in range(49)])
    assert asked(stage.handle(submit)) == 0
    assert asked(stage.handle(ev.Submit(SPEC, [Task(SPEC, "", b"payload")]))) == 1
    assert asked(stage.handle(ev.Submit(SPEC, [Task(SPEC, "", b"payload")]))) == 0
    assert asked(stage.handle(ev.IdsRenewed(5 * EPOCH_IDS))) == 0
    (task,) = stage.submit()
    assert task.task_id == 5 * EPOCH_IDS


def test_tasks_are_rejected_while_there_are_no_ids_and_known_ones_are_not() -> None:
    stage = stage_with(3)
    (known,) = take(stage, 1, "r")
    results = take(stage, 4)
    assert [isinstance(r, Task) for r in results] == [True, True, False, False]
    rejection = results[-1]
    assert isinstance(rejection, ev.Rejection)
    assert rejection.code == 14  # UNAVAILABLE
    assert rejection.retry_delay_s
    assert take(stage, 1, "r") == [known]
    stage.handle(ev.IdsRenewed(3 * EPOCH_IDS))
    assert isinstance(take(stage, 1)[0], Task)
