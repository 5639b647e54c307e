"""/v1/tasks, /v1/workers, /v1/queues and /v1/stats before a real fleet."""

import base64
import threading
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import Fleet
from tests.gateway.conftest import GatewayProcess

FLEET = {"workers": 1, "handlers": ["trial_handlers"]}


def submit(gateway: GatewayProcess, **task: Any) -> str:
    """The task_id."""
    response, body = gateway.call("POST", "/v1/tasks", task)
    assert response.status == 202, body
    task_id: str = body["task_id"]
    return task_id


def ended(gateway: GatewayProcess, task_id: str) -> dict[str, Any]:
    response, body = gateway.call("GET", f"/v1/tasks/{task_id}?wait=30")
    assert response.status == 200, body
    assert body["state"] == "SETTLED", body
    found: dict[str, Any] = body
    return found


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, "ü"]}, None, "text", [], 123456789012345678901234567890])
def test_a_json_value_goes_there_and_back(gateway: GatewayProcess, value: Any) -> None:
    task = ended(gateway, submit(gateway, kind="echo", payload=value))
    assert isinstance(task["task_id"], str)
    assert task["task_id"] == task["outcome"]["task_id"]
    assert (task["outcome"]["state"], task["outcome"]["result"]) == ("SUCCEEDED", value)
    assert task["outcome"]["content_type"] == "application/json"


@pytest.mark.parametrize("data", [b"plain", b"\x00\xff", bytes(300_000)])
def test_bytes_go_there_and_back(gateway: GatewayProcess, data: bytes) -> None:
    outcome = ended(gateway, submit(gateway, kind="echo", payload_base64=base64.b64encode(data).decode()))["outcome"]
    assert outcome["content_type"] == ""
    if data == b"\x00\xff":
        assert base64.b64decode(outcome["result_base64"]) == data
    else:
        assert outcome["result"] == data.decode()


def test_options_reach_the_task(gateway: GatewayProcess) -> None:
    deadline = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    options = {
        "queue": "q1", "priority": 2, "parameters": {"a": "b"}, "labels": {"l": "none"}, "deadline": deadline,
        "queue_timeout_s": 60, "run_timeout_s": 7.5, "result_ttl_s": 600, "attempts_max": 5, "ephemeral": True,
        "wait_for_worker": True, "units": 3, "partition_key": "p", "model": "m",
    }  # fmt: skip
    task_id = submit(gateway, kind="absent", payload=1, **options)
    _, task = gateway.call("GET", f"/v1/tasks/{task_id}")
    assert (task["state"], task["partition_key"]) == ("QUEUED", "p")
    spec = task["spec"]
    assert (spec["queue"], spec["priority"], spec["parameters"], spec["model"]) == ("q1", 2, {"a": "b"}, "m")
    assert (spec["run_timeout"], spec["attempts_max"], spec["durability"]) == (7.5, 5, "EPHEMERAL")
    assert spec["required_labels"] == {"l": "none"}
    assert datetime.fromisoformat(spec["deadline"]) == datetime.fromisoformat(deadline)
    assert "outcome" not in task
    assert gateway.call("DELETE", f"/v1/tasks/{task_id}")[1] == {"cancelled": True}


def test_headers_are_defaults(gateway: GatewayProcess) -> None:
    key = str(uuid.uuid4())
    headers = {"X-Multigpu-Queue": "q2", "Idempotency-Key": key}
    for _ in range(2):
        _, body = gateway.call("POST", "/v1/tasks", {"kind": "echo", "payload": 1}, headers)
        assert body["request_id"] == key
    assert ended(gateway, f"by-request-id/{key}")["spec"]["queue"] == "q2"
    response, body = gateway.call("POST", "/v1/tasks", {"kind": "echo", "payload": 2}, headers)
    assert (response.status, body["error"]["code"], body["error"]["field"]) == (409, "request_id_in_use", "request_id")


def test_a_task_is_found_by_its_request_id(gateway: GatewayProcess) -> None:
    name = f"order/{uuid.uuid4()} ü"
    task_id = submit(gateway, kind="echo", payload=1, request_id=name)
    path = f"by-request-id/{name.replace(' ', '%20').replace('ü', '%C3%BC')}"
    assert ended(gateway, path)["task_id"] == task_id
    assert submit(gateway, kind="echo", payload=1, request_id=name) == task_id
    for path in ("/v1/tasks/by-request-id/nobody", "/v1/tasks/1", "/v1/tasks/99999999999999999999"):
        for method in ("GET", "DELETE"):
            response, body = gateway.call(method, path)
            assert (response.status, body["error"]["code"]) == (404, "not_found")


def test_a_wait_ends_with_the_task_or_its_time(gateway: GatewayProcess, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    task_id = submit(gateway, kind="trial.gate", payload_base64=base64.b64encode(str(gate).encode()).decode())
    begin = time.monotonic()
    _, task = gateway.call("GET", f"/v1/tasks/{task_id}?wait=0.5")
    assert time.monotonic() - begin >= 0.5
    assert task["state"] in {"QUEUED", "LEASED"}
    connection = gateway.connect()  # a caller that hangs up
    connection.request("GET", f"/v1/tasks/{task_id}?wait=60")
    time.sleep(0.2)
    connection.close()
    threading.Timer(0.3, gate.touch).start()
    assert ended(gateway, task_id)["outcome"]["result"] == "opened"


def test_a_cancelled_task_has_its_reason(gateway: GatewayProcess) -> None:
    task_id = submit(gateway, kind="sleep", payload_base64=base64.b64encode(b"600").decode())
    assert gateway.call("DELETE", f"/v1/tasks/{task_id}?reason=paid%20twice")[1] == {"cancelled": True}
    outcome = ended(gateway, task_id)["outcome"]
    assert (outcome["state"], outcome["error"]["message"]) == ("CANCELLED", "paid twice")
    assert gateway.call("DELETE", f"/v1/tasks/{task_id}")[1] == {"cancelled": False}


def test_many_tasks_are_answered_one_by_one(gateway: GatewayProcess) -> None:
    tasks: list[Any] = [{"kind": "echo", "payload": n, "queue": f"many{n % 3}"} for n in range(1000)]
    tasks[7] = {"kind": "echo", "payload": 1, "priority": 9}
    tasks[8] = {"kind": "nobody.has.it", "payload": 1}
    tasks[9] = {"kind": "echo"}
    tasks[10] = []
    response, body = gateway.call("POST", "/v1/tasks", {"tasks": tasks})
    assert response.status == 202
    results = body["results"]
    assert [at for at, each in enumerate(results) if "error" in each] == [7, 8, 9, 10]
    assert results[7]["error"]["field"] == "priority"
    assert results[8]["error"]["code"] == "unplaceable"
    assert results[9]["error"]["field"] == "payload"
    for at in (0, 500, 999):
        assert ended(gateway, results[at]["task_id"])["outcome"]["result"] == at


def test_a_list_has_pages(gateway: GatewayProcess) -> None:
    results = gateway.call(
        "POST", "/v1/tasks", {"tasks": [{"kind": "echo", "payload": n, "queue": "pages"} for n in range(7)]}
    )
    ids = [each["task_id"] for each in results[1]["results"]]
    for task_id in ids:
        ended(gateway, task_id)
    found: list[str] = []
    token = ""
    sizes = []
    while True:
        query = f"queue=pages&kind=echo&state=settled&outcome=SUCCEEDED,FAILED&limit=3&page_token={token}"
        _, page = gateway.call("GET", f"/v1/tasks?{query}")
        found += [task["task_id"] for task in page["tasks"]]
        sizes.append(len(page["tasks"]))
        if not (token := page["next_page_token"]):
            break
    assert (found, sizes) == (ids[::-1], [3, 3, 1])
    for query in (
        "queue=pages&state=QUEUED",
        "queue=pages&outcome=FAILED",
        "queue=pages&submitted_before=2000-01-01T00:00:00Z",
    ):
        assert gateway.call("GET", f"/v1/tasks?{query}")[1] == {"tasks": [], "next_page_token": ""}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"payload": 1}, "kind"),
        ({"kind": "echo", "payload": 1, "retries": 3}, "retries"),
        ({"kind": "k" * 129, "payload": 1}, "kind"),
        ({"kind": "echo", "payload": 1, "parameters": {str(n): "" for n in range(65)}}, "parameters"),
        (b'{"kind": "echo", "payload": 1e400}', "payload"),
        ({"kind": "", "payload": 1}, "kind"),
        ({"kind": 7, "payload": 1}, "kind"),
        ({"kind": "echo"}, "payload"),
        ({"kind": "echo", "payload": 1, "payload_base64": ""}, "payload"),
        ({"kind": "echo", "payload_base64": "*"}, "payload_base64"),
        ({"kind": "echo", "payload_base64": "ü"}, "payload_base64"),
        ({"kind": "echo", "payload": 1, "priority": 0}, "priority"),
        ({"kind": "echo", "payload": 1, "priority": 6}, "priority"),
        ({"kind": "echo", "payload": 1, "parameters": {"a": 1}}, "parameters[...]"),
        ({"kind": "echo", "payload": 1, "labels": []}, "labels"),
        ({"kind": "echo", "payload": 1, "deadline": "tomorrow"}, "deadline"),
        ({"kind": "echo", "payload": 1, "deadline": "2100-01-01T00:00:00"}, "deadline"),
        ({"kind": "echo", "payload": 1, "run_timeout_s": -1}, "run_timeout_s"),
        ({"kind": "echo", "payload": 1, "queue_timeout_s": "1"}, "queue_timeout_s"),
        ({"kind": "echo", "payload": 1, "result_ttl_s": 1e300}, "result_ttl_s"),
        ({"kind": "echo", "payload": 1, "attempts_max": 101}, "attempts_max"),
        ({"kind": "echo", "payload": 1, "deadline": "0001-01-01T00:00:00+14:00"}, "deadline"),
        ({"kind": "echo", "payload": 1, "ephemeral": 1}, "ephemeral"),
        ({"kind": "echo", "payload": 1, "wait_for_worker": "yes"}, "wait_for_worker"),
        ({"kind": "echo", "payload": 1, "request_id": ""}, "request_id"),
        ({"kind": "echo", "payload": 1, "units": 1 << 32}, "units"),
        ({"kind": "echo", "payload": 1, "partition_key": None}, "partition_key"),
        ({"tasks": []}, "tasks"),
        ({"tasks": [{}] * 10_001}, "tasks"),
        ({"tasks": [{"kind": "echo"}], "more": 1}, "more"),
    ],
)  # fmt: skip
def test_a_wrong_task_is_rejected_with_the_field(gateway: GatewayProcess, body: Any, field: str) -> None:
    response, found = gateway.call("POST", "/v1/tasks", body)
    assert response.status == 400, found
    assert found["error"]["code"] == "invalid_request"
    assert found["error"].get("field", "") == field


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"payload": 1}, "missing required field `kind`"),
        ({"kind": "echo", "payload": 1, "retries": 3}, "unknown field `retries`"),
        ({"kind": "echo", "payload": 1, "deadline": "2000-01-01T00:00:00Z"}, "deadline"),
        ({"kind": "echo", "payload": 1, "queue": "q" * 129}, "queue"),
        ({"kind": "echo", "payload": 1, "request_id": "ü" * 128}, "request_id"),
        (b"{", "not valid JSON"),
        (b"[]", "Expected `object`"),
    ],
)
def test_a_wrong_task_is_rejected_with_a_message(gateway: GatewayProcess, body: Any, says: str) -> None:
    response, found = gateway.call("POST", "/v1/tasks", body)
    assert response.status == 400, found
    assert says in found["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "field"),
    [
        ("GET", "/v1/tasks/x", 400, "task_id"),
        ("GET", "/v1/tasks/by-request-id/", 400, "task_id"),
        ("GET", "/v1/tasks/1?wait=61", 400, "wait"),
        ("GET", "/v1/tasks/1?wait=-1", 400, "wait"),
        ("GET", "/v1/tasks/1?wait=nan", 400, "wait"),
        ("GET", "/v1/tasks?limit=0", 400, "limit"),
        ("GET", "/v1/tasks?limit=1001", 400, "limit"),
        ("GET", "/v1/tasks?state=DONE", 400, "state"),
        ("GET", "/v1/tasks?outcome=unspecified", 400, "outcome"),
        ("GET", "/v1/tasks?page_token=x", 400, "page_token"),
        ("GET", "/v1/tasks?submitted_after=now", 400, "submitted_after"),
        ("GET", "/v1/tasks?more=1", 400, "more"),
        ("GET", "/v1/stats?more=1", 400, "more"),
        ("GET", "/v1/usage?by=price", 400, "by"),
        ("GET", "/v1/usage?begin=soon", 400, "begin"),
        ("GET", "/v1/usage?begin=0001-01-01T00:00:00%2B14:00", 400, "begin"),
        ("GET", "/v1/tasks?submitted_before=9999-12-31T23:59:59-14:00", 400, "submitted_before"),
        ("DELETE", "/v1/tasks/1?reason=" + "x" * 1025, 400, "reason"),
        ("DELETE", "/v1/tasks", 405, None),
        ("POST", "/v1/tasks/1", 405, None),
        ("DELETE", "/v1/tasks/1/events", 405, None),
        ("POST", "/v1/workers", 405, None),
    ],
)
def test_a_wrong_query_is_rejected_with_the_parameter(
    gateway: GatewayProcess, method: str, path: str, status: int, field: str | None
) -> None:
    response, found = gateway.call(method, path)
    assert response.status == status, found
    assert found["error"].get("field") == field
    assert field is None or field in found["error"]["message"]


def test_a_kind_that_nobody_has_is_rejected(gateway: GatewayProcess) -> None:
    response, body = gateway.call("POST", "/v1/tasks", {"kind": "nobody.has.it", "payload": 1})
    assert (response.status, body["error"]["code"]) == (409, "unplaceable")


def test_submitted_tasks_survive_the_master(gateway: GatewayProcess, fleet: Fleet) -> None:
    task_id = submit(gateway, kind="trial.nap", payload_base64="YWJj", parameters={"seconds": "1"})
    fleet.restart_master()
    assert ended(gateway, task_id)["outcome"]["result"] == "cba"
    fleet.wait_for_workers()


def test_usage_is_summed(gateway: GatewayProcess) -> None:
    ended(gateway, submit(gateway, kind="sleep", payload_base64="MC4x", queue="used"))
    _, body = gateway.call("GET", "/v1/usage?by=queue,kind")
    (used,) = (each for each in body["usage"] if each["queue"] == "used")
    assert (used["kind"], used["model"], used["tasks_succeeded"]) == ("sleep", "", 1)
    assert used["device_duration"] >= 0.1
    response, body = gateway.call("GET", "/v1/usage?begin=2026-11-02T00:00:00Z&end=2026-11-01T00:00:00Z")
    assert (response.status, body["error"]["message"].partition(":")[0]) == (400, "the period ends before it begins")


def test_the_fleet_is_listed(gateway: GatewayProcess) -> None:
    ended(gateway, submit(gateway, kind="echo", payload=1))
    _, body = gateway.call("GET", "/v1/workers")
    (worker,) = body["workers"]
    assert (worker["worker_id"], worker["state"], worker["device"]["device_id"]) == ("w0", "ACTIVE", "cpu")
    paused = submit(gateway, kind="absent", payload=1, queue="listed", wait_for_worker=True)
    _, body = gateway.call("GET", "/v1/queues")
    assert [each["queued"] for each in body["queues"] if each["queue"] == "listed"] == [1]
    gateway.call("DELETE", f"/v1/tasks/{paused}")
    _, stats = gateway.call("GET", "/v1/stats")
    assert stats["succeeded"] >= 1
    assert stats["workers_active"] == 1
