"""mgpuctl tasks and dead-letters, against a scripted master."""

import json
from typing import Any

import grpc
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2
from multigpu.v1 import task_service_pb2 as service

from tests.client.cli.fleet.fleet_samples import ago
from tests.client.cli.test_admin import Run
from tests.client.cli.unary_master import RejectionError, UnaryMaster


def failed_task(task_id: int) -> task_pb2.Task:
    error = task_pb2.TaskError(type="ValueError", message="bad \x1b[31mcolour\nsecond line")
    outcome = task_pb2.Outcome(task_id=task_id, state=task_pb2.OUTCOME_STATE_DEAD_LETTERED, error=error, worker_id="w1")
    spec = task_pb2.TaskSpec(kind="my.kind", queue="default")
    state = task_pb2.TASK_STATE_SETTLED
    return task_pb2.Task(task_id=task_id, spec=spec, state=state, outcome=outcome, attempts=3, submit_time=ago(7200))


def test_dead_letters(master: UnaryMaster, run: Run) -> None:
    master.answers["ListDeadLetters"] = admin.ListDeadLettersResponse(tasks=[failed_task(17)])
    master.answers["RequeueDeadLetters"] = admin.RequeueDeadLettersResponse(task_ids=[40], unknown_task_ids=[18])
    master.answers["DeleteDeadLetters"] = admin.DeleteDeadLettersResponse(deleted=2)
    listed = run("dead-letters", "list")
    assert listed.stderr == ""
    row = listed.output.splitlines()[1]
    assert row.split()[:6] == ["17", "my.kind", "default", "2", "h", "3"]
    assert "ValueError: bad \ufffd[31mcolour" in row
    assert "\x1b" not in row

    master.answers["ListDeadLetters"] = admin.ListDeadLettersResponse(tasks=[failed_task(17)], next_page_token="p")
    assert "only the newest 1; --limit shows more" in run("dead-letters", "list", "--limit", "1").stderr

    requeued = run("dead-letters", "requeue", "17", "18")
    assert (requeued.exit_code, requeued.stdout) == (4, "40\n")
    assert "no dead letters: 18" in requeued.stderr

    pages = [{"task_ids": [40], "next_page_token": "p"}, {"task_ids": [41]}]
    master.answers["RequeueDeadLetters"] = lambda request: admin.RequeueDeadLettersResponse(
        **pages[request.page_token == "p"]
    )
    requeued = run("dead-letters", "requeue", "--queue", "night", "--json")
    assert json.loads(requeued.stdout)["task_ids"] == [40, 41]

    rejected = run("dead-letters", "delete", "--queue", "night", input="n\n")
    assert rejected.exit_code == 1
    assert master.asked("DeleteDeadLetters") == []
    assert run("dead-letters", "delete", "--queue", "night", "--yes").output == "deleted 2\n"
    for command in ("requeue", "delete"):
        assert run("dead-letters", command).exit_code == 2
        assert run("dead-letters", command, "17", "--queue", "night").exit_code == 2


def test_tasks_list_filters_and_stops_at_its_limit(master: UnaryMaster, run: Run) -> None:
    queued = task_pb2.Task(task_id=5, spec=task_pb2.TaskSpec(kind="echo"), state=task_pb2.TASK_STATE_QUEUED)
    master.answers["List"] = lambda request: service.ListResponse(
        tasks=[failed_task(6), queued], next_page_token="more"
    )
    result = run("tasks", "list", "--state", "queued", "--outcome", "dead-lettered", "--kind", "echo", "--limit", "3")
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [
        ["TASK", "STATE"],
        ["6", "dead_lettered"],
        ["5", "queued"],
        ["6", "dead_lettered"],
    ]
    assert "only the newest 3" in result.stderr
    asked = master.asked("List")[0].filter
    assert list(asked.states) == [task_pb2.TASK_STATE_QUEUED]
    assert list(asked.outcomes) == [task_pb2.OUTCOME_STATE_DEAD_LETTERED]
    assert asked.kind == "echo"


def test_tasks_get_shows_the_result(master: UnaryMaster, run: Run, tmp_path: Any) -> None:
    outcome = task_pb2.Outcome(
        task_id=17, state=task_pb2.OUTCOME_STATE_SUCCEEDED, result=b'{"a": [1]}', content_type="application/json"
    )
    state = task_pb2.TASK_STATE_SETTLED
    task = task_pb2.Task(task_id=17, spec=task_pb2.TaskSpec(kind="echo"), state=state, outcome=outcome)
    master.answers["Get"] = service.GetResponse(task=task)
    assert 'Result     {"a": [1]}' in run("tasks", "get", "17").output
    assert json.loads(run("tasks", "get", "17", "--json").output)["outcome"]["result"] == {"a": [1]}
    out = tmp_path / "result"
    assert run("tasks", "get", "--request-id", "mine", "--wait", "2", "-o", str(out)).output == ""
    assert out.read_bytes() == b'{"a": [1]}'
    asked = master.asked("Get")[-1]
    assert asked.request_id == "mine"
    assert 1 < asked.wait.ToTimedelta().total_seconds() <= 2

    outcome.result, outcome.content_type = b"\xff\x00", ""
    task.outcome.CopyFrom(outcome)
    master.answers["Get"] = service.GetResponse(task=task)
    data = json.loads(run("tasks", "get", "17", "--json").output)
    assert data["outcome"]["result_base64"] == "/wA="
    assert "result" not in data["outcome"]
    assert run("tasks", "get", "17", "-o", "-").stdout_bytes == b"\xff\x00"


def test_tasks_get_of_a_failed_task_tells_the_error(master: UnaryMaster, run: Run) -> None:
    master.answers["Get"] = service.GetResponse(task=failed_task(17))
    text = run("tasks", "get", "17").output
    assert "State      DEAD_LETTERED" in text
    assert "ValueError: bad" in text
    rejected = run("tasks", "get", "17", "-o", "-")
    assert rejected.exit_code == 1
    assert "DEAD_LETTERED" in rejected.stderr


def test_not_found_is_exit_code_4(master: UnaryMaster, run: Run) -> None:
    master.answers["Get"] = RejectionError(grpc.StatusCode.NOT_FOUND, "no task 99")
    result = run("tasks", "get", "99")
    assert (result.exit_code, result.stderr) == (4, "mgpuctl: no task 99\n")


def test_tasks_cancel(master: UnaryMaster, run: Run) -> None:
    master.answers["Cancel"] = service.CancelResponse(cancelled_task_ids=[1], settled_task_ids=[2], unknown=["3", "x"])
    result = run("tasks", "cancel", "1", "2", "3", "--request-id", "x", "--reason", "enough")
    assert result.exit_code == 4
    assert result.stdout == "cancelled 1, ended before 1\n"
    assert "3, x" in result.stderr
    assert run("tasks", "cancel").exit_code == 2


def test_tasks_explain(master: UnaryMaster, run: Run) -> None:
    candidates = [
        admin.Candidate(worker_id="w1", rank=1, score=0.25, score_meaning="expected finish in seconds"),
        admin.Candidate(worker_id="w2", excluded_by=["cordoned", "window full (64 of 64)"]),
    ]
    queued = task_pb2.Task(task_id=17, state=task_pb2.TASK_STATE_QUEUED)
    master.answers["Explain"] = admin.ExplainResponse(
        summary="It waits for a place.", task=queued, strategy="auto", ahead=1200, candidates=candidates
    )
    lines = run("tasks", "explain", "17").output.splitlines()
    assert lines[0] == "It waits for a place."
    assert "Ahead     1,200 of its queue's tasks" in lines
    assert lines[-2].split(maxsplit=3) == ["w1", "1", "0.25", "expected finish in seconds"]
    assert lines[-1].split(maxsplit=3) == ["w2", "-", "-", "cordoned; window full (64 of 64)"]


def test_tasks_explain_by_request_id(master: UnaryMaster, run: Run) -> None:
    master.answers["Get"] = service.GetResponse(task=task_pb2.Task(task_id=17, request_id="order-4711"))
    master.answers["Explain"] = lambda request: admin.ExplainResponse(summary=f"task {request.task_id} waits")
    assert run("tasks", "explain", "--request-id", "order-4711").output.startswith("task 17 waits\n")
    assert [request.request_id for request in master.asked("Get")] == ["order-4711"]
    for wrong in ((), ("17", "18"), ("17", "--request-id", "order-4711")):
        result = run("tasks", "explain", *wrong)
        assert result.exit_code == 2
        assert "give one TASK_ID or one --request-id" in result.stderr


def test_tasks_explain_of_a_settled_task_asks_no_worker(master: UnaryMaster, run: Run) -> None:
    master.answers["Explain"] = admin.ExplainResponse(summary="It SUCCEEDED.", task=failed_task(17), strategy="auto")
    result = run("tasks", "explain", "17")
    assert "It SUCCEEDED." in result.stdout
    assert "no workers" not in result.output


def test_tasks_get_of_several_names_is_a_list(master: UnaryMaster, run: Run) -> None:
    def answer(request: service.GetRequest) -> service.GetResponse:
        return service.GetResponse(task=task_pb2.Task(task_id=request.task_id or 99, request_id=request.request_id))

    master.answers["Get"] = answer
    found = json.loads(run("tasks", "get", "17", "18", "--request-id", "mine", "--json").output)
    assert [(task["task_id"], task["request_id"]) for task in found] == [(17, ""), (18, ""), (99, "mine")]
    assert run("tasks", "get", "17", "18", "-o", "-").exit_code == 2
    assert run("tasks", "get").exit_code == 2


def test_fields_that_the_journal_does_not_keep_are_omitted(master: UnaryMaster, run: Run) -> None:
    task = task_pb2.Task(task_id=17, state=task_pb2.TASK_STATE_SETTLED, attempts=1)
    master.answers["Get"] = service.GetResponse(task=task)
    text = run("tasks", "get", "17").output
    assert "Payload" not in text
    assert "of 3" not in text
    task.spec.attempts_max, task.payload_bytes = 1, 7
    master.answers["Get"] = service.GetResponse(task=task)
    text = run("tasks", "get", "17").output
    assert "1 of 1" in text
    assert "7 B" in text
