"""mgpuctl's questions and orders: what it sends, what it prints for people and for programs, how it exits."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from google.protobuf.duration_pb2 import Duration
from multigpu.cli import cli, tables
from multigpu.cli.fleet.workers import COLUMNS
from multigpu.cli.security import authority
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2
from multigpu.v1 import task_service_pb2 as service
from multigpu.v1.device_pb2 import Device, DeviceTelemetry

from tests.client.cli.fleet.fleet_samples import ago
from tests.client.cli.unary_master import RejectionError, UnaryMaster, unary_master

Run = Callable[..., Result]


@pytest.fixture
def master() -> Iterator[UnaryMaster]:
    with unary_master() as script:
        yield script


@pytest.fixture
def run(master: UnaryMaster) -> Run:
    def run(*args: str, **kwargs: Any) -> Result:
        return CliRunner().invoke(cli, args, env={"MGPU_MASTER": master.address}, **kwargs)

    return run


def worker(worker_id: str, **fields: Any) -> admin.Worker:
    defaults: dict[str, Any] = {
        "host": "box",
        "state": admin.WORKER_STATE_ACTIVE,
        "device": Device(name="cuda:0", product="NVIDIA H200", memory_total_bytes=143 << 30),
        "telemetry": DeviceTelemetry(memory_used_bytes=43 << 30, utilization=0.37),
        "leases": 1024,
        "succeeded": 1_234_567,
        "last_heartbeat_time": ago(0.4),
    }
    return admin.Worker(worker_id=worker_id, **defaults | fields)


def knows(master: UnaryMaster, *workers: admin.Worker) -> None:
    master.answers["ListWorkers"] = admin.ListWorkersResponse(workers=workers)


def test_workers_table(master: UnaryMaster, run: Run) -> None:
    lost = worker("box-cpu-1", state=admin.WORKER_STATE_LOST, telemetry=None, device=Device(name="cpu"))
    knows(master, worker("box-GPU-a"), worker("box-GPU-b", cordoned=True), lost)
    result = run("workers")
    assert result.exit_code == 0
    heading, first, second, third = (line.split() for line in result.output.splitlines())
    assert heading == ["WORKER", "STATE", "HEALTH", "DEVICE", "MEMORY", "BUSY", "LEASES", "DONE", "FAILED", "HEARD"]
    assert first[:11] == ["box-GPU-a", "active", "-", "cuda:0", "30%", "of", "143", "GiB", "37%", "1,024", "1,234,567"]
    assert second[:2] == ["box-GPU-b", "cordoned"]
    assert third[:6] == ["box-cpu-1", "lost", "-", "cpu", "-", "-"]


def test_workers_fit_eighty_columns_with_ids_whole() -> None:
    worker_id = "rack7-box12-GPU-8f3b1c1e-7a0f-4a39-9d6f-0d6b1c2a3e4f"
    lines = tables.rendered(tables.grid(tables.fit([worker(worker_id)], COLUMNS, None)), 80)
    assert all(len(line) <= 80 for line in lines)
    assert "".join(line[: lines[0].index("STATE")].strip() for line in lines[1:]) == worker_id
    assert "1,234,567" in lines[1]


def test_workers_fit_forty_columns_with_state_and_id() -> None:
    cells = tables.fit([worker("rack7-box12-GPU-8f3b1c1e")], COLUMNS, 40)
    assert [column.name for column in cells][:2] == ["WORKER", "STATE"]
    lines = tables.rendered(tables.grid(cells), 40)
    assert all(len(line) <= 40 for line in lines)
    assert "active" in lines[1]


def test_workers_json_keeps_numbers_and_leaves_out_what_is_unknown(master: UnaryMaster, run: Run) -> None:
    knows(master, worker("box-GPU-a", labels={"zone": "b"}))
    (only,) = json.loads(run("workers", "--json").output)
    assert only["state"] == "ACTIVE"
    assert only["succeeded"] == 1_234_567
    assert only["labels"] == {"zone": "b"}
    told = {name: value for name, value in only["telemetry"].items() if value != []}
    assert told == {"memory_used_bytes": 43 << 30, "utilization": 0.37}
    assert "drain_deadline" not in only
    assert only["last_heartbeat_time"].endswith("Z")


def test_no_workers_is_said_on_stderr(master: UnaryMaster, run: Run) -> None:
    knows(master)
    result = run("workers")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "mgpuctl up" in result.stderr


def test_pages_are_followed(master: UnaryMaster, run: Run) -> None:
    def page(request: admin.ListWorkersRequest) -> admin.ListWorkersResponse:
        number = int(request.page_token or 0)
        token = str(number + 1) if number < 2 else ""
        return admin.ListWorkersResponse(workers=[worker(f"w{number}")], next_page_token=token)

    master.answers["ListWorkers"] = page
    assert [w["worker_id"] for w in json.loads(run("workers", "--json").output)] == ["w0", "w1", "w2"]


def test_status(master: UnaryMaster, run: Run) -> None:
    knows(master, worker("a"), worker("b"), worker("c", state=admin.WORKER_STATE_LOST))
    stats = admin.GetStatsResponse(
        version="0.1.0",
        start_time=ago(200),
        queued=12_000,
        leased=7,
        succeeded=5,
        journal_bytes=3 << 20,
        strategy="auto",
    )
    master.answers["GetStats"] = stats
    text = run("status").output
    assert f"{master.address}, version 0.1.0, up 3 min" in text
    assert "2 active, 1 lost" in text
    assert "12,000 queued, 7 leased" in text
    assert "3.0 MiB, NOT WRITABLE" in text
    assert "the disk is full, or journal_bytes_max is reached: the master's log says which" in text
    data = json.loads(run("status", "--json").output)
    assert data["workers"] == {"active": 2, "lost": 1}
    assert data["stats"]["queued"] == 12_000


@pytest.mark.parametrize(
    ("command", "method"), [("cordon", "CordonWorker"), ("uncordon", "UncordonWorker"), ("drain", "DrainWorker")]
)
def test_workers_are_named_by_the_beginning_of_an_id(master: UnaryMaster, run: Run, command: str, method: str) -> None:
    knows(master, worker("box-1"), worker("box-10"), worker("rack-1"))
    response = {"cordon": admin.CordonWorkerResponse, "uncordon": admin.UncordonWorkerResponse}
    answer: Any = response.get(command, admin.DrainWorkerResponse)
    master.answers[method] = lambda request: answer(worker=worker(request.worker_id))
    assert run(command, "rack", "box-1").exit_code == 0
    assert [request.worker_id for request in master.asked(method)] == ["rack-1", "box-1"]

    ambiguous = run(command, "rack", "box")
    assert ambiguous.exit_code == 4
    assert "box-1, box-10" in ambiguous.stderr
    unknown = run(command, "nobody")
    assert unknown.exit_code == 4
    assert "'nobody'" in unknown.stderr
    # Names are looked up first: an order with a wrong name in it does nothing.
    assert len(master.asked(method)) == 2


def test_drain_waits_for_the_leases(master: UnaryMaster, run: Run) -> None:
    left = iter([2, 1, 0])

    def listed(_: admin.ListWorkersRequest) -> admin.ListWorkersResponse:
        drained = bool(master.asked("DrainWorker"))
        return admin.ListWorkersResponse(workers=[worker("w", leases=next(left) if drained else 3)])

    master.answers["ListWorkers"] = listed
    master.answers["DrainWorker"] = admin.DrainWorkerResponse(worker=worker("w", leases=3))
    result = run("drain", "w", "--timeout", "1.5", "--wait", "--json")
    assert json.loads(result.output)[0]["leases"] == 0
    (request,) = master.asked("DrainWorker")
    assert request.timeout == Duration(seconds=1, nanos=500_000_000)


def test_strategy(master: UnaryMaster, run: Run) -> None:
    infos = [
        admin.StrategyInfo(name="auto", summary="Earliest expected finish."),
        admin.StrategyInfo(name="memory_usage", summary="Most free memory.", aliases=["memory"]),
    ]
    master.answers["GetStrategy"] = admin.GetStrategyResponse(strategy="auto", inherited=True, available=infos)
    master.answers["SetStrategy"] = lambda request: admin.SetStrategyResponse(strategy=request.strategy or "auto")
    text = run("strategy", "get", "--queue", "night").output
    assert "Queue night: auto, inherited from the fleet" in text
    assert [line.split()[:2] for line in text.splitlines()[3:]] == [["*", "auto"], ["memory_usage", "memory"]]
    assert run("strategy", "set", "memory").output == "Fleet: memory\n"
    assert run("strategy", "set", "--inherit", "--queue", "night").exit_code == 0
    assert [(r.queue, r.strategy) for r in master.asked("SetStrategy")] == [("", "memory"), ("night", "")]
    for wrong in ((), ("auto", "--inherit", "--queue", "q"), ("--inherit",)):
        assert run("strategy", "set", *wrong).exit_code == 2


def test_unknown_strategy_gets_the_masters_words(master: UnaryMaster, run: Run) -> None:
    message = "no strategy 'fast'; there are auto, round_robin"
    master.answers["SetStrategy"] = RejectionError(grpc.StatusCode.INVALID_ARGUMENT, message)
    result = run("strategy", "set", "fast")
    assert (result.exit_code, result.stderr) == (1, f"mgpuctl: {message}\n")


NIGHT_ROW = ["night", "open", "3", "2.0", "KiB", "1", "min", "30", "s", "0", "10", "tasks,", "1.0", "GiB", "fleet's"]


def test_queues(master: UnaryMaster, run: Run) -> None:
    night = admin.Queue(
        queue="night",
        queued=3,
        queued_bytes=2048,
        oldest_age=Duration(seconds=90),
        limits=admin.QueueLimits(tasks_max=10, bytes_max=1 << 30),
    )
    master.answers["ListQueues"] = admin.ListQueuesResponse(queues=[night, admin.Queue(queue="q", paused=True)])
    master.answers["PauseQueue"] = lambda request: admin.PauseQueueResponse(queue=admin.Queue(queue=request.queue))
    master.answers["SetQueueLimits"] = lambda r: admin.SetQueueLimitsResponse(
        queue=admin.Queue(queue=r.queue, limits=r.limits)
    )
    rows = run("queues", "list").output.splitlines()
    assert run("queues").output.splitlines() == rows
    assert rows[1].split() == NIGHT_ROW
    assert rows[2].split()[:2] == ["q", "paused"]
    known = run("queues", "pause", "q")
    assert (known.exit_code, known.stderr) == (0, "")
    for words in (("pause", "nihgt"), ("limits", "nihgt", "--tasks-max", "1")):
        assert "no queue 'nihgt' has tasks or rules" in run("queues", *words).stderr  # it is done all the same
    # A limit that is not named stays as it is.
    assert run("queues", "limits", "night", "--tasks-max", "500").exit_code == 0
    request = master.asked("SetQueueLimits")[-1]
    assert (request.limits.tasks_max, request.limits.bytes_max) == (500, 1 << 30)
    assert run("queues", "limits", "night").exit_code == 2
    assert "not a size" in run("queues", "limits", "night", "--bytes-max", "much").stderr


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
    assert row.split()[:8] == ["17", "my.kind", "default", "2", "h", "0", "min", "3"]
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
    assert "requeued 1 so far" in requeued.stderr

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
    assert master.asked("Get")[-1] == service.GetRequest(request_id="mine", wait=Duration(seconds=2))

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
    assert "Ahead     1,200 tasks of its queue go first" in lines
    assert lines[-2].split(maxsplit=3) == ["w1", "1", "0.25", "expected finish in seconds"]
    assert lines[-1].split(maxsplit=3) == ["w2", "-", "-", "cordoned; window full (64 of 64)"]


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


def test_what_the_journal_does_not_keep_of_a_settled_task_is_left_out(master: UnaryMaster, run: Run) -> None:
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


def test_line_breaks_in_names_do_not_break_a_table(master: UnaryMaster, run: Run) -> None:
    spec = task_pb2.TaskSpec(kind="echo", queue="two\nlines")
    master.answers["List"] = service.ListResponse(tasks=[task_pb2.Task(task_id=17, spec=spec)])
    lines = run("tasks", "list").output.splitlines()
    assert len(lines) == 2
    assert "two lines" in lines[1]


def test_a_server_that_is_no_master(run: Run) -> None:
    result = run("status")  # the script has no answer to GetStats
    assert result.exit_code == 1
    assert "no multigpu master" in result.stderr


def test_tab_completes_worker_ids(master: UnaryMaster, run: Run) -> None:
    knows(master, worker("box-1"), worker("rack-1"))
    words = {"_MGPUCTL_COMPLETE": "bash_complete", "COMP_WORDS": "mgpuctl drain ra", "COMP_CWORD": "2"}
    done = CliRunner().invoke(cli, [], env={"MGPU_MASTER": master.address, **words}, prog_name="mgpuctl")
    assert done.stdout.split(",")[1].strip() == "rack-1"
    nobody = CliRunner().invoke(cli, [], env={"MGPU_MASTER": "127.0.0.1:1", **words}, prog_name="mgpuctl")
    assert nobody.output.strip() == ""


def test_a_token_is_never_written_over_a_file(master: UnaryMaster, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "old.token"
    file.write_text("another token")
    done = run("tokens", "create", "a", "--role", "read", "-o", str(file))
    assert done.exit_code == 1
    assert f"{file} is there already" in done.stderr
    assert file.read_text() == "another token"
    assert master.asked("CreateToken") == []


@pytest.mark.parametrize("damaged", ["w", "ca"])
def test_a_damaged_certificate_does_not_hide_the_others(run: Run, tmp_path: Path, damaged: str) -> None:
    authority.init(tmp_path)
    for kind in ("worker", "client"):
        authority.issue(tmp_path, kind, kind[0], [])
    (tmp_path / f"{damaged}.crt").write_text("damaged")
    done = run("certs", "show", str(tmp_path), "--json")
    assert done.exit_code == 1
    assert f"{damaged}.crt can't be read" in done.stderr
    assert {c["name"] for c in json.loads(done.stdout)} == {"ca", "w", "c"} - {damaged}
