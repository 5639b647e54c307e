"""Dead letters: listed, requeued, deleted, and tasks that run again under the request_id of one that failed."""

import time
from pathlib import Path
from typing import Any

import grpc
import multigpu
import pytest
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2

from tests.fleet import Fleet, rejected, until
from tests.integration.restart.test_attempts import DEAD_LETTERED, FLEET, SUCCEEDED, from_now

__all__ = ["FLEET"]  # the settings of the fixture `fleet`


def letters(fleet: Fleet, queue: str, page_size: int = 2) -> list[int]:
    """The dead letters of a queue, newest first, page by page."""
    found: list[int] = []
    token = ""
    while True:
        request = admin_pb.ListDeadLettersRequest(queue=queue, page_size=page_size, page_token=token)
        page = fleet.admin.ListDeadLetters(request, timeout=30)
        assert all(t.outcome.state == DEAD_LETTERED and t.spec.queue == queue for t in page.tasks)
        found += [t.task_id for t in page.tasks]
        token = page.next_page_token
        if not token:
            return found


def bury(fleet: Fleet, queue: str, *payloads: bytes, **spec: Any) -> list[int]:
    """Dead letters, once they are listed as such."""
    ids = fleet.submit("fail", *payloads, queue=queue, attempts_max=1, **spec)
    assert {fleet.outcome(task_id).state for task_id in ids} == {DEAD_LETTERED}
    until(lambda: letters(fleet, queue) == sorted(ids, reverse=True))
    return ids


def requeue(fleet: Fleet, *task_ids: int) -> Any:
    return fleet.admin.RequeueDeadLetters(admin_pb.RequeueDeadLettersRequest(task_ids=task_ids), timeout=30)


def test_dead_letters_are_listed_requeued_and_deleted(fleet: Fleet) -> None:
    queue = "letters"
    ids = bury(fleet, queue, *[b""] * 5)
    with rejected(grpc.StatusCode.INVALID_ARGUMENT, "page_token"):
        fleet.admin.ListDeadLetters(admin_pb.ListDeadLettersRequest(page_token="junk"), timeout=30)

    answer = requeue(fleet, ids[0], 424242)
    assert (list(answer.task_ids), list(answer.unknown_task_ids)) == (ids[:1], [424242])
    # It has all its attempts again, and is a dead letter again.
    assert fleet.outcome(ids[0]).state == DEAD_LETTERED
    until(lambda: letters(fleet, queue) == sorted(ids, reverse=True))

    deleted = fleet.admin.DeleteDeadLetters(admin_pb.DeleteDeadLettersRequest(task_ids=[ids[1], 424242]), timeout=30)
    assert (deleted.deleted, list(deleted.unknown_task_ids)) == (1, [424242])
    fleet.restart_master()
    fleet.wait_for_workers()
    assert letters(fleet, queue) == sorted([ids[0], *ids[2:]], reverse=True)

    answer = fleet.admin.RequeueDeadLetters(admin_pb.RequeueDeadLettersRequest(queue=queue), timeout=30)
    assert len(answer.task_ids) == 4
    for task_id in answer.task_ids:
        fleet.outcome(task_id)
    until(lambda: letters(fleet, queue) == sorted(answer.task_ids, reverse=True))
    assert fleet.admin.DeleteDeadLetters(admin_pb.DeleteDeadLettersRequest(queue=queue), timeout=30).deleted == 4
    assert letters(fleet, queue) == []


@pytest.mark.parametrize("state", ["DEAD_LETTERED", "FAILED", "CANCELLED", "EXPIRED"])
@pytest.mark.parametrize("call", ["run", "submit", "map"])
def test_a_task_that_did_not_succeed_is_run_again_under_its_request_id(fleet: Fleet, state: str, call: str) -> None:
    """With `retry_failed`, also with another payload. Otherwise the first failure is the answer, and another payload an
    error.
    """
    name, queue = f"{call} after {state}", f"queue of {call} after {state}"
    kind = {"DEAD_LETTERED": "fail", "FAILED": "trial.wrong_type"}.get(state, "sleep")
    timeout: Any = {"deadline": from_now(1.0)} if state == "EXPIRED" else {}
    (first,) = fleet.submit(kind, b"60", request_ids=[name], queue=queue, attempts_max=1, **timeout)
    if state == "CANCELLED":
        fleet.tasks.Cancel(task_service_pb2.CancelRequest(task_ids=[first]), timeout=30)
    assert task_pb2.OutcomeState.Name(fleet.outcome(first).state) == f"OUTCOME_STATE_{state}"
    options: Any = {"queue": queue}
    with fleet.client() as client:
        assert client.submit(kind, b"60", request_id=name).id == first
        with pytest.raises(multigpu.AlreadyExistsError):
            client.submit("echo", b"better", request_id=name)
        if call == "run":
            assert client.run("echo", b"better", request_id=name, retry_failed=True, **options) == b"better"
            again = client.get(name).task_id
        elif call == "map":
            item = multigpu.Input(payload=b"better", request_id=name)
            (outcome,) = client.map_outcomes("echo", [item], retry_failed=True, **options)
            again = outcome.task_id
        else:
            again = client.submit("echo", b"better", request_id=name, retry_failed=True, **options).id
        assert again != first
        assert fleet.outcome(again).result == b"better"
        assert client.get(name).task_id == again
        # What has succeeded is not run again, and the first task keeps its own outcome.
        assert client.submit("echo", b"better", request_id=name, retry_failed=True).id == again
        assert fleet.outcome(first).state != SUCCEEDED
    assert letters(fleet, queue) == []
    fleet.restart_master()
    fleet.wait_for_workers()
    assert fleet.submit("echo", b"better", request_ids=[name]) == [again]


def test_the_outcome_of_a_requeued_dead_letter_replaces_the_old_one_in_every_call(fleet: Fleet, tmp_path: Path) -> None:
    """Watch has both, and a cursor between them is exact: both are of one task."""
    queue, name, gate = "replaced", "replaced", tmp_path / "gate"
    with fleet.client() as client:
        other = client.submit("echo", b"", queue=queue).id
        fleet.outcome(other)
        letter = client.submit("trial.raise", str(gate).encode(), queue=queue, request_id=name, attempts_max=1)
        task_id = letter.id
        fleet.outcome(task_id)
        until(lambda: letters(fleet, queue) == [task_id])

        def check(state: Any) -> None:
            wanted = task_service_pb2.TaskFilter(queue=queue)
            by_name = fleet.tasks.Get(task_service_pb2.GetRequest(request_id=name), timeout=30).task
            assert [fleet.get(task_id).outcome.state, by_name.outcome.state] == [state, state]
            listed = fleet.tasks.List(task_service_pb2.ListRequest(filter=wanted), timeout=30).tasks
            assert [(t.task_id, t.outcome.state) for t in listed] == [(task_id, state), (other, SUCCEEDED)]
            count = client.count(queue=queue)
            assert (count.succeeded, count.dead_lettered) == (1 + (state == SUCCEEDED), int(state == DEAD_LETTERED))

        assert list(requeue(fleet, task_id).task_ids) == [task_id]
        assert fleet.outcome(task_id).state == DEAD_LETTERED
        until(lambda: letters(fleet, queue) == [task_id])
        check(DEAD_LETTERED)
        gate.touch()
        assert list(requeue(fleet, task_id).task_ids) == [task_id]
        assert fleet.outcome(task_id).result == b"there"
        fleet.restart_master()
        fleet.wait_for_workers()
        check(SUCCEEDED)
        assert client.submit("trial.raise", str(gate).encode(), request_id=name).id == task_id
        ends = [(DEAD_LETTERED, task_id), (DEAD_LETTERED, task_id), (SUCCEEDED, task_id)]
        watched: list[tuple[Any, str]] = []
        for ended, cursor in client.watch(queue=queue):
            watched.append((ended, cursor))
            if len(watched) == 4:
                break
        assert [(o.state, o.task_id) for o, _ in watched] == [(SUCCEEDED, other), *ends]
        for n, (_, cursor) in enumerate(watched[:3]):
            outcome: Any = next(client.watch(queue=queue, cursor=cursor))[0]
            assert (outcome.state, outcome.task_id) == ends[n]


def test_a_requeued_dead_letter_runs_after_a_restart(fleet: Fleet, tmp_path: Path) -> None:
    """Its worker reported the attempt from before the requeue once more, which ended it again."""
    queue, gate = "requeued and restarted", tmp_path / "gate"
    (task_id,) = fleet.submit("trial.raise", str(gate).encode(), queue=queue, attempts_max=1)
    assert fleet.outcome(task_id).state == DEAD_LETTERED
    until(lambda: letters(fleet, queue) == [task_id])
    gate.touch()
    fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue=queue), timeout=30)
    assert list(requeue(fleet, task_id).task_ids) == [task_id]
    fleet.restart_master()
    fleet.wait_for_workers()
    time.sleep(0.5)
    assert fleet.get(task_id).state == task_pb2.TASK_STATE_QUEUED
    fleet.admin.ResumeQueue(admin_pb.ResumeQueueRequest(queue=queue), timeout=30)
    assert fleet.outcome(task_id).result == b"there"


def test_a_dead_letter_that_is_requeued_keeps_its_request_id_and_one_that_is_deleted_frees_it(fleet: Fleet) -> None:
    queue = "request ids of letters"
    first, other = bury(fleet, queue, b"a", b"b", request_ids=["requeued", "deleted"])
    (again,) = requeue(fleet, first).task_ids
    assert fleet.submit("fail", b"a", queue=queue, attempts_max=1, request_ids=["requeued"]) == [again]
    assert fleet.outcome(again).state == DEAD_LETTERED
    fleet.admin.DeleteDeadLetters(admin_pb.DeleteDeadLettersRequest(task_ids=[other]), timeout=30)
    (new,) = fleet.submit("echo", b"corrected", request_ids=["deleted"])
    assert fleet.outcome(new).result == b"corrected"


def test_a_dead_letter_whose_request_id_runs_again_is_not_requeued_besides(fleet: Fleet, tmp_path: Path) -> None:
    """The letter is deleted with the commit of the new task."""
    (first,) = bury(fleet, "again", b"a", request_ids=["again"])
    gate = tmp_path / "gate"
    with fleet.client() as client:
        again = client.submit("trial.gate", str(gate).encode(), request_id="again", retry_failed=True).id
    answer = requeue(fleet, first)
    assert (list(answer.task_ids), list(answer.unknown_task_ids)) == ([], [first])
    gate.touch()
    assert fleet.outcome(again).result == b"opened"


def test_a_dead_letter_that_is_retried_at_once_leaves_none(fleet: Fleet) -> None:
    """The letter is on its way to the disk when the next task takes its request_id."""
    with fleet.client() as client:
        for n in range(20):
            with pytest.raises(multigpu.TaskError):
                client.run("fail", b"", request_id=f"at once {n}", attempts_max=1, queue="at once")
            assert client.run("echo", b"x", request_id=f"at once {n}", retry_failed=True, queue="at once") == b"x"
        until(lambda: client.count(queue="at once").succeeded == 20)
    assert letters(fleet, "at once") == []


def test_a_dead_letter_is_not_requeued_while_another_task_has_its_request_id(fleet: Fleet) -> None:
    """An ephemeral one, which replaces no durable letter."""
    (letter,) = bury(fleet, "ephemeral", b"a", request_ids=["ephemeral"])
    with fleet.client() as client:
        outcome = client.run_outcome("echo", b"", request_id="ephemeral", retry_failed=True, ephemeral=True)
    with rejected(grpc.StatusCode.FAILED_PRECONDITION, f"task {outcome.task_id} has the same request_id 'ephemeral'"):
        requeue(fleet, letter)
    assert letters(fleet, "ephemeral") == [letter]


def test_a_queue_is_listed_while_it_has_tasks_or_dead_letters_and_a_requeued_one_counts_once(fleet: Fleet) -> None:
    queue = "mistyped"

    def listed() -> bool:
        queues = fleet.admin.ListQueues(admin_pb.ListQueuesRequest(page_size=1000), timeout=30).queues
        return queue in {q.queue for q in queues}

    bury(fleet, queue, b"")
    assert listed()
    fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue=queue), timeout=30)
    fleet.admin.RequeueDeadLetters(admin_pb.RequeueDeadLettersRequest(queue=queue), timeout=30)
    wanted = task_service_pb2.CountRequest(filter=task_service_pb2.TaskFilter(queue=queue))
    count = fleet.tasks.Count(wanted, timeout=30)
    assert (count.queued, count.dead_lettered) == (1, 0)
    fleet.admin.ResumeQueue(admin_pb.ResumeQueueRequest(queue=queue), timeout=30)
    until(lambda: len(letters(fleet, queue)) == 1)
    fleet.admin.DeleteDeadLetters(admin_pb.DeleteDeadLettersRequest(queue=queue), timeout=30)
    assert listed(), "its last task ended within a minute"
    fleet.restart_master()
    fleet.wait_for_workers()
    assert not listed()


def test_a_dead_letter_tells_its_payload_and_its_attempts(fleet: Fleet) -> None:
    (task_id,) = bury(fleet, "told", b"seven b")
    fleet.restart_master()
    fleet.wait_for_workers()
    task = fleet.get(task_id)
    assert (task.payload_bytes, task.attempts, task.spec.attempts_max) == (7, 1, 1)


def test_the_dead_letters_of_a_queue_come_back_page_by_page_and_once(fleet: Fleet) -> None:
    ids = fleet.submit("fail", *(b"" for _ in range(2500)), attempts_max=1, queue="pages")
    until(lambda: len(letters(fleet, "pages", 1000)) == len(ids))
    requeued: list[int] = []
    sizes: list[int] = []
    request = admin_pb.RequeueDeadLettersRequest(queue="pages")
    while True:
        answer = fleet.admin.RequeueDeadLetters(request, timeout=30)
        requeued += answer.task_ids
        sizes.append(len(answer.task_ids))
        if not answer.next_page_token:
            break
        request.page_token = answer.next_page_token
    assert sizes == [1000, 1000, 500]
    assert len(set(requeued)) == 2500
    # Each fails again and is a new letter, which the call did not take a second time.
    until(lambda: letters(fleet, "pages", 1000) == sorted(requeued, reverse=True))
