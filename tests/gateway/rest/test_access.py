"""Tokens and the routes of tasks: the master decides, by role and queue."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import GatewayProcess
from tests.security.secured import SecuredFleet

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredFleet]:
    with SecuredFleet(tmp_path_factory.mktemp("secured")) as it:
        yield it


@pytest.fixture
def gateway(secured: SecuredFleet, tmp_path: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path, secured.fleet.address) as running:
        yield running


def test_a_task_is_visible_to_tokens_of_its_queue(gateway: GatewayProcess, secured: SecuredFleet) -> None:
    tokens = {name: secured.create(f"rest-{name}", "submit", queues=[name])[1] for name in ("day", "night")}
    tokens["reader"] = secured.create("rest-reader", "read")[1]

    def call(method: str, path: str, who: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {tokens[who]}"} if who else {}
        response, found = gateway.call(method, path, body, headers)
        return response.status, found

    task = {"kind": "echo", "payload": 1, "queue": "night"}
    assert call("POST", "/v1/tasks", "", task)[0] == 401
    assert call("POST", "/v1/tasks", "reader", task)[0] == 403
    assert call("POST", "/v1/tasks", "day", task)[0] == 403
    found, body = call("POST", "/v1/tasks", "day", {"tasks": [task, {**task, "queue": "day"}]})
    assert found == 202
    assert [sorted(each) for each in body["results"]] == [["error"], ["request_id", "task_id"]]
    found, body = call("POST", "/v1/tasks", "night", task)
    assert found == 202
    path = f"/v1/tasks/{body['task_id']}"
    assert call("GET", path, "night")[1]["state"] == "QUEUED"
    assert call("GET", path, "reader")[0] == 200
    for each in (path, f"{path}/events", f"/v1/tasks/by-request-id/{body['request_id']}"):
        assert call("GET", each, "day")[0] == 404
        assert call("GET", each, "")[0] == 401
    assert call("DELETE", path, "day")[0] == 404
    assert call("DELETE", path, "reader")[0] == 403
    assert call("DELETE", path, "night") == (200, {"cancelled": True})
    assert [each["task_id"] for each in call("GET", "/v1/tasks", "night")[1]["tasks"]] == [body["task_id"]]
    assert call("GET", "/v1/outcomes", "")[0] == 401
    assert call("GET", "/v1/workers", "reader")[0] == 200
    assert call("GET", "/v1/workers", "")[0] == 401
    assert call("GET", "/multigpu/health", "")[0] == 401
