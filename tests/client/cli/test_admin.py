"""mgpuctl's questions and orders: what it sends, what it prints for people and for programs, how it exits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from google.protobuf.duration_pb2 import Duration
from multigpu.cli import cli, tables
from multigpu.cli.fleet.workers import COLUMNS
from multigpu.fleet import Worker
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2
from multigpu.v1 import task_service_pb2 as service
from multigpu.v1.device_pb2 import HEALTH_STATE_HEALTHY, HEALTH_STATE_SICK, Device, DeviceHealth, DeviceTelemetry

from tests.client.cli.fleet.fleet_samples import ago
from tests.client.cli.unary_master import RejectionError, UnaryMaster

Run = Callable[..., Result]


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
    assert heading == ["WORKER", "STATE", "DEVICE", "MEMORY", "BUSY", "LEASES", "HEALTH", "DONE", "FAILED", "HEARD"]
    assert first[:8] == ["box-GPU-a", "active", "cuda:0", "43.0", "GiB", "of", "143", "GiB"]
    assert first[8:12] == ["37%", "1,024", "healthy", "1,234,567"]
    assert second[:2] == ["box-GPU-b", "cordoned"]
    assert third[:5] == ["box-cpu-1", "lost", "cpu", "-", "-"]


def test_workers_fit_eighty_columns_with_whole_ids() -> None:
    worker_id = "rack7-box12-GPU-8f3b1c1e-7a0f-4a39-9d6f-0d6b1c2a3e4f"
    lines = tables.rendered(tables.grid(tables.fit([Worker.of(worker(worker_id))], COLUMNS, 80)), 80)
    assert all(len(line) <= 80 for line in lines)
    assert "".join(line[: lines[0].index("STATE")].strip() for line in lines[1:]) == worker_id
    assert "1,234,567" in lines[1]


def test_workers_fit_forty_columns_with_state_and_id() -> None:
    cells = tables.fit([Worker.of(worker("rack7-box12-GPU-8f3b1c1e"))], COLUMNS, 40)
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
    known = {name: value for name, value in only["telemetry"].items() if value != []}
    assert known == {"memory_used_bytes": 43 << 30, "utilization": 0.37}
    assert "drain_deadline" not in only
    assert only["last_heartbeat_time"].endswith("Z")


def test_no_workers_is_reported_on_stderr(master: UnaryMaster, run: Run) -> None:
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


def test_a_device_that_is_not_fit_fails_the_check(master: UnaryMaster, run: Run) -> None:
    fit = DeviceHealth(state=HEALTH_STATE_HEALTHY, checks_passed=1)
    sick = DeviceHealth(state=HEALTH_STATE_SICK, unusable=True)
    sick.reasons.add(code="canary_wrong", message="a wrong product; have the GPU looked at")
    known = {"a": worker("a", health=fit), "b": worker("b", health=sick)}
    knows(master, *known.values(), worker("gone", state=admin.WORKER_STATE_LOST))
    master.answers["CheckWorker"] = lambda request: admin.CheckWorkerResponse(worker=known[request.worker_id], check=1)
    assert run("check", "a").exit_code == 0
    found = run("check", "--all", "--json")
    assert found.exit_code == 1
    assert (
        "2 of 3 devices are not fit\nb: a wrong product; have the GPU looked at\ngone: its worker is lost"
        in found.stderr
    )
    assert [each["worker_id"] for each in json.loads(found.stdout)] == ["a", "b", "gone"]
    assert run("check").exit_code == run("check", "a", "--all").exit_code == 2


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


def test_an_unknown_strategy_shows_the_masters_message(master: UnaryMaster, run: Run) -> None:
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


@pytest.mark.parametrize("group", ["queues", "models", "tokens"])
def test_a_group_that_lists_by_default_takes_json(master: UnaryMaster, run: Run, group: str) -> None:
    for message in (admin.ListQueuesResponse(), admin.ListModelsResponse(), admin.ListTokensResponse()):
        master.answers[type(message).__name__.removesuffix("Response")] = message
    assert json.loads(run(group, "--json").stdout) == json.loads(run(group, "list", "--json").stdout) == []
    misplaced = run(group, "--json", "list")
    assert misplaced.exit_code == 2
    assert "write it after 'list'" in misplaced.stderr


def test_reload_of_all_handlers_needs_a_worker_with_handlers(master: UnaryMaster, run: Run) -> None:
    knows(master, worker("box-1"))
    for words in ((), ("--json",)):
        result = run("handlers", "reload", "--all", *words)
        assert (result.exit_code, result.stdout) == (4, "")
        assert "no connected worker has handlers" in result.stderr


def test_line_breaks_in_names_do_not_break_a_table(master: UnaryMaster, run: Run) -> None:
    spec = task_pb2.TaskSpec(kind="echo", queue="two\nlines")
    master.answers["List"] = service.ListResponse(tasks=[task_pb2.Task(task_id=17, spec=spec)])
    lines = run("tasks", "list").output.splitlines()
    assert len(lines) == 2
    assert "two lines" in lines[1]


def test_a_server_that_is_not_a_master(run: Run) -> None:
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
