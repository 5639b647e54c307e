"""Attempts: handlers that misbehave, retries with backoff, deadlines, timeouts, and the dead letters in the end."""

import time
from pathlib import Path
from typing import Any

import grpc
import multigpu
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2

from tests.fleet import Fleet, rejected, until

FLEET = {
    "handlers": ["trial_handlers"],
    "worker_flags": ["--engine-memory-bytes", "600MiB", "--slots", "2", "--result-bytes-max", "1MiB"],
}

SUCCEEDED = task_pb2.OUTCOME_STATE_SUCCEEDED
FAILED = task_pb2.OUTCOME_STATE_FAILED
EXPIRED = task_pb2.OUTCOME_STATE_EXPIRED
DEAD_LETTERED = task_pb2.OUTCOME_STATE_DEAD_LETTERED
SOON = Duration(nanos=20_000_000)


def from_now(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(time.time_ns() + int(seconds * 1e9))
    return stamp


@pytest.mark.parametrize(
    ("kind", "spec", "state", "error", "words"),
    [
        ("trial.raise", {}, DEAD_LETTERED, "LookupError", "not there: x"),
        ("trial.wrong_type", {}, FAILED, "WrongResultType", "neither bytes nor JSON"),
        ("trial.exit", {}, DEAD_LETTERED, "EngineDied", "7"),
        ("trial.hang", {"run_timeout": Duration(nanos=300_000_000)}, DEAD_LETTERED, "RunTimeout", "0.3"),
        ("trial.hoard", {}, DEAD_LETTERED, "OutOfMemory", "engine_memory_bytes"),
        ("trial.big", {"parameters": {"bytes": str(2 << 20)}}, FAILED, "ResultTooLarge", "result_bytes_max"),
        ("fail", {"parameters": {"mode": "segfault"}}, DEAD_LETTERED, "EngineDied", "SIGSEGV"),
    ],
)
def test_a_handler_that_misbehaves_harms_only_its_own_task(
    fleet: Fleet, kind: str, spec: dict[str, Any], state: int, error: str, words: str
) -> None:
    neighbours = fleet.submit("trial.nap", *(b"%d" % n for n in range(4)), parameters={"seconds": "0.05"})
    (task_id,) = fleet.submit(kind, b"x", attempts_max=2, backoff_initial=SOON, **spec)
    outcome = fleet.outcome(task_id)
    assert (outcome.state, outcome.error.type) == (state, error), outcome
    assert words in outcome.error.message
    assert outcome.attempts == (1 if state == FAILED else 2)
    assert not outcome.result
    if kind == "trial.raise":
        assert "trial_handlers.py" in outcome.error.traceback
    for n, neighbour in enumerate(neighbours):
        assert fleet.outcome(neighbour).result == b"%d" % n


def test_a_handler_that_forks_answers_once(fleet: Fleet) -> None:
    ids = fleet.submit("trial.fork", *(b"" for _ in range(5)))
    assert {fleet.outcome(i).result for i in ids} == {b"parent"}


def test_retries_wait_longer_each_time_and_get_the_checkpoint(fleet: Fleet) -> None:
    backoff = Duration(nanos=300_000_000)
    began = time.monotonic()
    (task_id,) = fleet.submit("trial.third_time", b"", backoff_initial=backoff)

    def between() -> Any:
        task = fleet.get(task_id)
        return task if task.HasField("not_before") else None

    waiting = until(between)
    assert waiting.state == task_pb2.TASK_STATE_QUEUED
    assert waiting.last_error.message == "attempt 1 fails"
    assert "more before attempt 2" in fleet.admin.Explain(admin_pb.ExplainRequest(task_id=task_id), timeout=30).summary
    outcome = fleet.outcome(task_id)
    assert (outcome.state, outcome.attempts, outcome.result) == (SUCCEEDED, 3, b"attempt 2")
    # 0.3 s, then 0.6 s, each less up to half.
    assert time.monotonic() - began >= 0.45


def test_backoff_has_a_limit(fleet: Fleet) -> None:
    began = time.monotonic()
    (task_id,) = fleet.submit("trial.raise", b"", attempts_max=14, backoff_initial=SOON, backoff_max=SOON)
    assert fleet.outcome(task_id).attempts == 14
    assert time.monotonic() - began < 30  # without one it would be a minute at least


def test_a_deadline_ends_a_task_wherever_it_is(fleet: Fleet, tmp_path: Path) -> None:
    never = str(tmp_path / "never").encode()
    fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="late"), timeout=30)
    (queued,) = fleet.submit("echo", b"x", queue="late", deadline=from_now(0.5))
    (running,) = fleet.submit("trial.gate", never, deadline=from_now(1.5))
    until(lambda: fleet.get(running).state == task_pb2.TASK_STATE_LEASED)
    for task_id, attempts in ((queued, 0), (running, 1)):
        outcome = fleet.outcome(task_id)
        assert (outcome.state, outcome.error.type, outcome.attempts) == (EXPIRED, "DeadlineExceeded", attempts)
    # The worker was told, and is free again.
    until(lambda: fleet.stats().leased == 0)
    until(lambda: all(w.leases == 0 for w in fleet.list_workers()))


def test_what_waits_in_a_worker(fleet: Fleet, tmp_path: Path) -> None:
    """Behind others, in the worker itself: what is past its deadline never begins, and the urgent go first."""
    gate, log = tmp_path / "gate", tmp_path / "log"
    logged: dict[str, Any] = {"parameters": {"log": str(log), "seconds": "0.01"}}
    fleet.admin.CordonWorker(admin_pb.CordonWorkerRequest(worker_id="w1"), timeout=30)
    try:
        # A worker that is fast is given more than its engine can take.
        for task_id in fleet.submit("echo", *([b"x"] * 2000)):
            fleet.outcome(task_id)
        # More than fit in an engine of two slots.
        running = fleet.submit("trial.gate", *([str(gate).encode()] * 6))
        until(lambda: fleet.stats().leased == 6)
        (late,) = fleet.submit("trial.logged", b"late", deadline=from_now(1), **logged)
        patient = fleet.submit("trial.logged", *([b"patient"] * 5), priority=5, **logged)
        (urgent,) = fleet.submit("trial.logged", b"urgent", priority=1, **logged)
        until(lambda: fleet.stats().leased == 13)
        outcome = fleet.outcome(late)
        assert (outcome.state, outcome.error.type, outcome.attempts) == (EXPIRED, "DeadlineExceeded", 1)
        gate.touch()
        assert all(fleet.outcome(i).state == SUCCEEDED for i in (*running, *patient, urgent))
    finally:
        fleet.admin.UncordonWorker(admin_pb.UncordonWorkerRequest(worker_id="w1"), timeout=30)
    began = [line.rsplit(" ", 1)[1] for line in log.read_text().splitlines()]
    assert sorted(began) == [*["patient"] * 5, "urgent"]
    # Two run at a time: neighbours may swap.
    assert began.index("urgent") <= 1


def test_queue_timeout_counts_until_the_first_dispatch_only(fleet: Fleet) -> None:
    half_a_second = Duration(nanos=500_000_000)
    fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="late"), timeout=30)
    (waits,) = fleet.submit("echo", b"x", queue="late", queue_timeout=half_a_second)
    (runs,) = fleet.submit("trial.nap", b"x", parameters={"seconds": "1"}, queue_timeout=half_a_second)
    outcome = fleet.outcome(waits)
    assert (outcome.state, outcome.error.type, outcome.attempts) == (EXPIRED, "QueueTimeout", 0)
    assert fleet.outcome(runs).state == SUCCEEDED


# --- dead letters ----------------------------------------------------------------------------------------------------


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


def test_dead_letters_are_listed_requeued_and_deleted(fleet: Fleet) -> None:
    queue = "letters"
    ids = fleet.submit("fail", *(b"" for _ in range(5)), queue=queue, attempts_max=1)
    for task_id in ids:
        assert fleet.outcome(task_id).state == DEAD_LETTERED
    until(lambda: len(letters(fleet, queue)) == 5)
    assert letters(fleet, queue) == sorted(ids, reverse=True)

    request = admin_pb.RequeueDeadLettersRequest(task_ids=[ids[0], 424242])
    answer = fleet.admin.RequeueDeadLetters(request, timeout=30)
    assert list(answer.unknown_task_ids) == [424242]
    (new,) = answer.task_ids
    assert new not in ids
    # A new task, with all its attempts; and the old letter is gone, the new one takes its place.
    assert fleet.outcome(new).state == DEAD_LETTERED
    until(lambda: letters(fleet, queue) == [new, *sorted(ids[1:], reverse=True)])

    deleted = fleet.admin.DeleteDeadLetters(admin_pb.DeleteDeadLettersRequest(task_ids=[ids[1], 424242]), timeout=30)
    assert (deleted.deleted, list(deleted.unknown_task_ids)) == (1, [424242])
    fleet.restart_master()
    fleet.wait_for_workers()
    assert letters(fleet, queue) == [new, *sorted(ids[2:], reverse=True)]

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
        assert client.submit(kind, b"60", request_id=name) == first
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
            again = client.submit("echo", b"better", request_id=name, retry_failed=True, **options)
        assert again != first
        assert fleet.outcome(again).result == b"better"
        assert client.get(name).task_id == again
        # What has succeeded is not run again, and the first task keeps its own outcome.
        assert client.submit("echo", b"better", request_id=name, retry_failed=True) == again
        assert fleet.outcome(first).state != SUCCEEDED
    assert letters(fleet, queue) == []
    fleet.restart_master()
    fleet.wait_for_workers()
    assert fleet.submit("echo", b"better", request_ids=[name]) == [again]


def test_a_dead_letter_that_is_requeued_keeps_its_request_id_and_one_that_is_deleted_frees_it(fleet: Fleet) -> None:
    queue = "request ids of letters"
    first, other = fleet.submit("fail", b"a", b"b", queue=queue, attempts_max=1, request_ids=["requeued", "deleted"])
    for task_id in (first, other):
        fleet.outcome(task_id)
    until(lambda: len(letters(fleet, queue)) == 2)
    (again,) = fleet.admin.RequeueDeadLetters(admin_pb.RequeueDeadLettersRequest(task_ids=[first]), timeout=30).task_ids
    assert fleet.submit("fail", b"a", queue=queue, attempts_max=1, request_ids=["requeued"]) == [again]
    assert fleet.outcome(again).state == DEAD_LETTERED
    fleet.admin.DeleteDeadLetters(admin_pb.DeleteDeadLettersRequest(task_ids=[other]), timeout=30)
    (new,) = fleet.submit("echo", b"corrected", request_ids=["deleted"])
    assert fleet.outcome(new).result == b"corrected"


def test_a_dead_letter_whose_request_id_runs_again_is_not_requeued_besides(fleet: Fleet, tmp_path: Path) -> None:
    """The letter is deleted with the commit of the new task."""
    (first,) = fleet.submit("fail", b"a", attempts_max=1, request_ids=["again"], queue="again")
    fleet.outcome(first)
    until(lambda: letters(fleet, "again") == [first])
    gate = tmp_path / "gate"
    with fleet.client() as client:
        again = client.submit("trial.gate", str(gate).encode(), request_id="again", retry_failed=True)
    answer = fleet.admin.RequeueDeadLetters(admin_pb.RequeueDeadLettersRequest(task_ids=[first]), timeout=30)
    assert (list(answer.task_ids), list(answer.unknown_task_ids)) == ([], [first])
    gate.touch()
    assert fleet.outcome(again).result == b"opened"


def test_a_queue_is_listed_while_it_has_tasks_or_dead_letters_and_a_requeued_one_counts_once(fleet: Fleet) -> None:
    queue = "mistyped"

    def listed() -> bool:
        queues = fleet.admin.ListQueues(admin_pb.ListQueuesRequest(page_size=1000), timeout=30).queues
        return queue in {q.queue for q in queues}

    (task_id,) = fleet.submit("fail", b"", queue=queue, attempts_max=1)
    fleet.outcome(task_id)
    until(lambda: letters(fleet, queue) == [task_id])
    assert listed()
    fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue=queue), timeout=30)
    fleet.admin.RequeueDeadLetters(admin_pb.RequeueDeadLettersRequest(queue=queue), timeout=30)
    count = fleet.tasks.Count(
        task_service_pb2.CountRequest(filter=task_service_pb2.TaskFilter(queue=queue)), timeout=30
    )
    assert (count.queued, count.dead_lettered) == (1, 0)
    fleet.admin.ResumeQueue(admin_pb.ResumeQueueRequest(queue=queue), timeout=30)
    until(lambda: len(letters(fleet, queue)) == 1)
    fleet.admin.DeleteDeadLetters(admin_pb.DeleteDeadLettersRequest(queue=queue), timeout=30)
    until(lambda: not listed())


def test_an_attempt_whose_engine_was_ended_says_how_long_it_ran(fleet: Fleet) -> None:
    (task_id,) = fleet.submit("trial.hang", b"", run_timeout=Duration(nanos=300_000_000), attempts_max=1)
    stages = fleet.outcome(task_id).stages
    ran_s = stages.finish_time.ToNanoseconds() / 1e9 - stages.start_time.ToNanoseconds() / 1e9
    assert ran_s >= 0.3
    assert stages.dispatch_time.ToNanoseconds() <= stages.start_time.ToNanoseconds()


def test_a_dead_letter_tells_its_payload_and_its_attempts(fleet: Fleet) -> None:
    (task_id,) = fleet.submit("fail", b"seven b", queue="told", attempts_max=1)
    fleet.outcome(task_id)
    until(lambda: letters(fleet, "told") == [task_id])
    fleet.restart_master()
    fleet.wait_for_workers()
    task = fleet.get(task_id)
    assert (task.payload_bytes, task.attempts, task.spec.attempts_max) == (7, 1, 1)


def test_a_requeued_letter_has_its_payload(fleet: Fleet) -> None:
    (task_id,) = fleet.submit("trial.raise", b"the payload", attempts_max=1, queue="payload")
    fleet.outcome(task_id)
    until(lambda: letters(fleet, "payload") == [task_id])
    (new,) = fleet.admin.RequeueDeadLetters(admin_pb.RequeueDeadLettersRequest(task_ids=[task_id]), timeout=30).task_ids
    assert fleet.outcome(new).error.message == "not there: the payload"


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


@pytest.mark.slow
def test_a_task_that_kills_its_engines_does_not_take_down_the_fleet(fleet: Fleet) -> None:
    pids = {name: worker.pid for name, worker in fleet.workers.items()}
    killers = fleet.submit("trial.exit", *(b"" for _ in range(3)), backoff_initial=SOON)
    good = fleet.submit("echo", *(b"%d" % n for n in range(50)))
    assert {fleet.outcome(i).state for i in killers} == {DEAD_LETTERED}
    assert all(fleet.outcome(i).state == SUCCEEDED for i in good)
    assert {name: worker.pid for name, worker in fleet.workers.items() if worker.alive} == pids


@pytest.mark.slow
def test_an_unknown_dead_letter_is_no_error_of_the_call(fleet: Fleet) -> None:
    answer = fleet.admin.DeleteDeadLetters(admin_pb.DeleteDeadLettersRequest(task_ids=[99]), timeout=30)
    assert (answer.deleted, list(answer.unknown_task_ids)) == (0, [99])
    with rejected(grpc.StatusCode.INVALID_ARGUMENT, "page_token"):
        fleet.admin.ListDeadLetters(admin_pb.ListDeadLettersRequest(page_token="junk"), timeout=30)
