"""The queue_timeout ends tasks that no worker has begun, and no others."""

from dataclasses import replace

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.model import Cordon, Task
from multigpu_master.core.workers.info import Capability, WorkerInfo
from multigpu_master.core.workers.sessions import MAKES_ROOM

from tests.core.stage import RETURNED, SPEC, Stage, error_of, lease_of
from tests.core.test_elastic_gangs import ELASTIC
from tests.core.test_gangs import PAIR, host, ranks, save

TIMEOUT_S = 60.0


def run_for(stage: Stage, after_s: float, *, running: bool = True) -> None:
    """All workers send heartbeats for so many seconds."""
    for _ in range(int(after_s)):
        stage.now += 1.0
        for name in stage.core.fleet.workers:
            stage.beat(name, running=running)


def begun(stage: Stage) -> Task:
    """A task that one of two workers runs for longer than its queue_timeout."""
    stage.worker("a")
    stage.worker("b")
    (task,) = stage.submit(spec=replace(SPEC, queue_timeout_s=TIMEOUT_S))
    run_for(stage, 2 * TIMEOUT_S)
    return task


@pytest.mark.parametrize("end", ["drain", "stop", "model makes room"])
def test_a_task_that_ran_begins_again_after_its_queue_timeout(end: str) -> None:
    stage = Stage()
    task = begun(stage)
    lease = lease_of(task)
    if end == "drain":
        stage.handle(ev.Drain(lease.worker.worker_id, stage.now + 5.0))
        run_for(stage, 6.0)
    elif end == "stop":
        stage.handle(ev.Cordon(lease.worker.worker_id, "it stops"))
        stage.report(lease, RETURNED)
    else:
        stage.fail(lease, MAKES_ROOM, returned=True)
        run_for(stage, 1.0)
    assert task.outcome is None
    assert lease_of(task) is not lease


def test_a_task_whose_lease_came_back_before_it_began_ends_at_its_queue_timeout() -> None:
    stage = Stage()
    stage.worker("a")
    (task,) = stage.submit(spec=replace(SPEC, queue_timeout_s=TIMEOUT_S))
    run_for(stage, TIMEOUT_S + 1.0, running=False)
    assert lease_of(task).recalled_in
    stage.report(lease_of(task), RETURNED)
    assert error_of(task) == "QueueTimeout"


def test_a_gang_of_which_one_rank_ran_begins_again_after_its_queue_timeout() -> None:
    stage = Stage()
    host(stage, "a", "b", "c")
    (gang,) = stage.submit(spec=replace(PAIR, queue_timeout_s=3.0))
    first, second = ranks(gang)
    stage.beat(second.worker.worker_id, running=True, after_s=3.5)
    stage.handle(ev.SessionClosed(first.worker.session))
    assert gang.outcome is None
    assert ranks(gang) != [first, second]


def test_a_gang_that_is_interrupted_to_grow_is_not_ended_by_its_queue_timeout() -> None:
    stage = Stage()
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=replace(ELASTIC, queue_timeout_s=TIMEOUT_S))
    run_for(stage, 2 * TIMEOUT_S)
    host(stage, "c")
    stage.beat("c")
    save(stage, lease_of(gang))
    assert gang.outcome is None
    assert len(ranks(gang)) == 3


def test_a_gang_that_ran_when_the_master_ended_is_not_ended_by_its_queue_timeout() -> None:
    """Its ranks are not adopted, so nothing else shows the new master that it has begun."""
    stage = Stage()
    task = Task(replace(PAIR, queue_timeout_s=TIMEOUT_S), "", b"payload", submit_s=stage.now - 2 * TIMEOUT_S, task_id=7)
    stage.handle(ev.Recover([task], stage.now + 5.0))
    held = [ev.HeldLease(n, 7, 1, running=True, granted_by_this_journal=True) for n in (8, 9)]
    for name, lease in zip("ab", held, strict=True):
        info = WorkerInfo(
            worker_id=name, host="h", capabilities=(Capability(kind="run"),), slots=1, store_address="h:1"
        )
        stage.join(info, [lease])
    run_for(stage, 6.0)
    assert task.outcome is None
    assert len(ranks(task)) == 2


def test_a_lease_that_an_overdue_drain_takes_back_waits_for_workers_that_may_have_begun_the_task() -> None:
    stage = Stage()
    for name in ("a", "b"):
        cordon = Cordon("drained", draining=True, drain_deadline_s=stage.now - 1.0) if name == "a" else None
        stage.handle(ev.RegisterWorker(WorkerInfo(worker_id=name), cordon, expected=True))
    task = Task(replace(SPEC, queue_timeout_s=5.0), "", b"payload", submit_s=stage.now - 6.0, task_id=7)
    stage.handle(ev.Recover([task], stage.now + 5.0))
    stage.worker("a", [ev.HeldLease(8, 7, 1, running=False, granted_by_this_journal=True)])
    assert task.outcome is None
    stage.worker("b", [ev.HeldLease(9, 7, 1, running=True, granted_by_this_journal=True)])
    assert lease_of(task).worker.worker_id == "b"
