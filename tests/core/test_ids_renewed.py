"""Ranges of ids: another one is asked for in time, and if it doesn't come nothing gets an id that was given out."""

from multigpu_master.core import events as ev
from multigpu_master.core.model import EPOCH_IDS, Task
from multigpu_master.core.workers.info import Capability, WorkerInfo

from tests.core.stage import SPEC, Stage, held_lease, lease_of


def stage_with(ids_left: int) -> Stage:
    stage = Stage()
    stage.core.state.ids.begin(3 * EPOCH_IDS - ids_left)
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


def test_leases_wait_for_ids_and_none_is_granted_twice() -> None:
    stage = stage_with(6)
    tasks = stage.submit(4)
    stage.worker()
    assert [task.lease is not None for task in tasks] == [True, True, False, False]
    stage.handle(ev.IdsRenewed(3 * EPOCH_IDS))
    given = [task.task_id for task in tasks] + [lease_of(task).lease_id for task in tasks]
    assert len(set(given)) == 8
    assert [lease_of(task).lease_id for task in tasks[2:]] == [3 * EPOCH_IDS, 3 * EPOCH_IDS + 1]


def test_leases_of_another_journal_are_not_taken_back() -> None:
    stage = Stage()
    waiting, mine = stage.submit(2)
    held = ev.HeldLease(mine.task_id + 500, mine.task_id, 1, proven=True)
    hello = ev.Hello(1, stage_info(stage), [held], ids_end=0)
    commands = stage.handle(hello)
    (welcome,) = [c for c in commands if isinstance(c, ev.Welcome)]
    assert welcome.adopted == []
    assert [c.lease_ids for c in commands if isinstance(c, ev.Revoke)] == [[held.lease_id]]
    assert lease_of(mine).lease_id != held.lease_id
    # Nor are those that have the ids of live leases; they were another master's.
    old = lease_of(waiting)
    commands = stage.handle(ev.Hello(2, stage_info(stage), [held_lease(old)], ids_end=old.lease_id))
    (welcome,) = [c for c in commands if isinstance(c, ev.Welcome)]
    assert welcome.adopted == []
    assert old.lease_id not in [x.lease_id for c in commands if isinstance(c, ev.Dispatch) for x in c.leases]
    assert lease_of(waiting).lease_id != old.lease_id


def stage_info(stage: Stage) -> WorkerInfo:
    return WorkerInfo(worker_id="w", capabilities=(Capability(kind="run"),), slots=8)
