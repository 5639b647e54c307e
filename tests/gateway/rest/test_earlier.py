"""The monitoring routes of earlier systems before a real fleet."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from multigpu import AdminClient

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess
from tests.integration.models.test_engine_start import HANDLERS

pytestmark = pytest.mark.slow

FLEET = {"workers": 2}


def get(gateway: GatewayProcess, path: str, status: int = 200) -> Any:
    response, body = gateway.call("GET", path)
    assert response.status == status, body
    return body


def test_the_form_of_langchain(gateway: GatewayProcess) -> None:
    assert get(gateway, "/api/v1/gpu/stats")["avg_time_per_batch_ms"] is None
    tasks = [{"kind": "sleep", "payload_base64": "MC4wNQ=="}] * 4  # 0.05 s each
    for result in gateway.call("POST", "/v1/tasks", {"tasks": tasks})[1]["results"]:
        get(gateway, f"/v1/tasks/{result['task_id']}?wait=30")
    until(lambda: all(each["memory_total_mb"] for each in get(gateway, "/api/v1/gpu/stats")["devices"]), 10)
    body = get(gateway, "/api/v1/gpu/stats")
    assert body.keys() == {
        "timestamp", "devices", "total_tasks_completed", "total_tasks_pending", "avg_time_per_batch_ms"
    }  # fmt: skip
    assert [each["index"] for each in body["devices"]] == [0, 1]
    assert sum(each["completed_tasks"] for each in body["devices"]) == body["total_tasks_completed"] == 4
    assert 50 <= body["avg_time_per_batch_ms"] < 1000
    assert body["devices"][0].keys() == {
        "index", "name", "compute_capability", "memory_total_mb", "memory_free_mb", "memory_usage_percent",
        "utilization", "temperature_c", "active_tasks", "completed_tasks",
    }  # fmt: skip


def test_the_form_of_onyx(gateway: GatewayProcess, fleet: Fleet) -> None:
    assert get(gateway, "/multigpu/health") == {"status": "healthy", "total_gpus": 2, "available_gpus": 2}
    with fleet.client() as client:
        client.run("echo", b"x")
    body = get(gateway, "/multigpu/stats")
    assert body["available_gpus"] == [0, 1]
    assert [each["worker_id"] for each in body["gpu_info"]] == ["w0", "w1"]
    assert get(gateway, "/multigpu/gpu/1/stats")["worker_id"] == "w1"
    status = get(gateway, "/multigpu/resources/status")
    assert (len(status["gpus"]), status["queued_tasks"], status["running_tasks"]) == (2, 0, 0)
    assert get(gateway, "/multigpu/performance/metrics")["tasks_succeeded"] >= 1


def test_onyx_config_says_which_gpus_take_tasks(gateway: GatewayProcess, fleet: Fleet) -> None:
    body = get(gateway, "/multigpu/config")
    assert (body.pop("use_multi_gpu"), body.pop("gpu_ids")) == (True, [0, 1])
    assert body == dict.fromkeys(body)
    assert {"backend", "memory_fraction", "mixed_precision"} <= body.keys()
    with AdminClient(fleet.address) as admin:
        admin.cordon_worker("w0")
        assert get(gateway, "/multigpu/config")["gpu_ids"] == [1]
        admin.uncordon_worker("w0")
    assert gateway.call("POST", "/multigpu/config", {"use_multi_gpu": True})[0].status == 405


def test_recommendations_are_the_faults_of_devices(tmp_path: Path) -> None:
    (tmp_path / "mm.py").write_text(HANDLERS)
    sick = Fleet(tmp_path / "fleet", handlers=["mm"], handlers_dir=tmp_path)
    with sick, GatewayProcess(tmp_path, sick.address) as gateway:
        assert get(gateway, "/multigpu/gpu/recommendations") == {"recommendations": []}
        (tmp_path / "broken").touch()
        os.kill(sick.workers["w0"].children()[0], signal.SIGKILL)
        (found,) = until(lambda: get(gateway, "/multigpu/gpu/recommendations")["recommendations"], 30)
        assert (found["gpu_id"], found["code"]) == (0, "engine_fails")
        assert "ZeroDivisionError" in found["message"]
        assert get(gateway, "/multigpu/config")["gpu_ids"] == [1]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/multigpu/gpu/2/stats", 404, "there is no GPU 2; the fleet has 2"),
        ("/multigpu/gpu/x/stats", 400, "gpu_id"),
        ("/multigpu/gpu/1", 404, "/multigpu/gpu/ID/stats"),
        ("/multigpu/gpu", 404, "/multigpu/gpu/ID/stats"),
    ],
)
def test_a_wrong_request_is_rejected(gateway: GatewayProcess, path: str, status: int, says: str) -> None:
    assert says in get(gateway, path, status)["error"]["message"]


def test_gpus_are_tested(gateway: GatewayProcess, fleet: Fleet) -> None:
    response, body = gateway.call("POST", "/multigpu/gpu/test")
    assert (response.status, body["passed"]) == (200, True), body
    passed: list[Any] = [{"gpu_id": i, "worker_id": f"w{i}", "passed": True, "faults": []} for i in (0, 1)]
    assert body["tests"] == passed
    assert gateway.call("POST", "/multigpu/gpu/test", {"gpu_ids": [1]})[1]["tests"] == passed[1:]
    for wrong, says in (({"gpu_ids": [1, 2]}, "2 is no number"), ({"gpus": [1]}, "unknown field `gpus`")):
        response, body = gateway.call("POST", "/multigpu/gpu/test", wrong)
        assert (response.status, says in str(body)) == (400, True), body
    assert gateway.call("POST", "/multigpu/gpu/test", {"gpu_ids": []})[0].status == 503
    with AdminClient(fleet.address) as admin:
        checked = [each.health.checks_passed for each in admin.list_workers() if each.health is not None]
        assert checked == [1, 2], "the wrong requests tested none"


def test_health_says_how_many_gpus_take_tasks(gateway: GatewayProcess, fleet: Fleet) -> None:
    with AdminClient(fleet.address) as admin:
        admin.cordon_worker("w0")
        assert get(gateway, "/multigpu/health")["status"] == "degraded"
        admin.cordon_worker("w1")
        assert get(gateway, "/multigpu/health", 503)["status"] == "unhealthy"
        for name in ("w0", "w1"):
            admin.uncordon_worker(name)
