"""Server-sent events of a task and of all outcomes: resumed, over restarts, without gap or repetition."""

import base64
import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from multigpu_gateway.http import HEARTBEAT_S

from tests.fleet import Fleet
from tests.gateway.conftest import GatewayProcess
from tests.gateway.rest.test_tasks import ended, submit

FLEET = {"workers": 1, "handlers": ["trial_handlers"]}


class Event(NamedTuple):
    name: str
    id: str
    data: Any


@contextmanager
def events(gateway: GatewayProcess, path: str, last: str = "") -> Iterator[Iterator[Event]]:
    """The events of a stream; leaving the block hangs up."""
    connection = gateway.connect()
    try:
        connection.request("GET", path, headers={"Last-Event-ID": last} if last else {})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8"

        def read() -> Iterator[Event]:
            fields: dict[str, str] = {}
            for line in response:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name:
                    fields[name] = value
                elif "data" in fields:
                    yield Event(fields["event"], fields.get("id", ""), json.loads(fields["data"]))
                    fields = {}

        yield read()
    finally:
        connection.close()


def streaming(gateway: GatewayProcess, count: int, seconds: float = 0.02, **options: Any) -> str:
    parameters = {"count": str(count), "seconds": str(seconds)}
    payload = base64.b64encode(b"part").decode()
    return submit(gateway, kind="trial.stream", payload_base64=payload, parameters=parameters, **options)


def test_partial_outputs_come_while_the_task_runs(gateway: GatewayProcess) -> None:
    task_id = streaming(gateway, 20, 0.1)
    with events(gateway, f"/v1/tasks/{task_id}/events") as found:
        first = next(found)
        assert first == ("partial", "0", {"index": 0, "content_type": "", "data": "part-0"})
        assert gateway.call("GET", f"/v1/tasks/{task_id}")[1]["state"] == "LEASED"
        # A second reader, beside the first one, has all of them too, before the task ends.
        with events(gateway, f"/v1/tasks/{task_id}/events") as others:
            assert [next(others).id for _ in range(3)] == ["0", "1", "2"]
            assert gateway.call("GET", f"/v1/tasks/{task_id}")[1]["state"] == "LEASED"
            assert [each.id for each in others] == [*map(str, range(3, 20)), ""]
        *partials, last = found
    assert [each.data["data"] for each in partials] == [f"part-{n}" for n in range(1, 20)]
    assert (last.name, last.id) == ("outcome", "")
    assert (last.data["state"], last.data["result"]) == ("SUCCEEDED", "end of part")
    assert "partials" not in last.data
    task = ended(gateway, task_id)
    assert task["outcome"]["partials"] == [f"part-{n}" for n in range(20)]


def test_a_reader_that_leaves_continues_after_its_last_event(gateway: GatewayProcess) -> None:
    name = str(uuid.uuid4())
    streaming(gateway, 30, 0.05, request_id=name)
    path = f"/v1/tasks/by-request-id/{name}/events"
    with events(gateway, path) as found:
        seen = [next(found).id for _ in range(5)]
    with events(gateway, path, seen[-1]) as found:
        seen += [next(found).id for _ in range(5)]
    with events(gateway, path, seen[-1]) as found:
        seen += [each.id for each in found if each.name == "partial"]
    assert seen == [str(n) for n in range(30)]
    with events(gateway, path, "27") as found:  # the task has ended
        assert [(each.name, each.id) for each in found] == [("partial", "28"), ("partial", "29"), ("outcome", "")]


@pytest.mark.slow
def test_a_stream_goes_on_over_a_restart_of_the_master_and_of_the_gateway(fleet: Fleet, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, fleet.address) as gateway:
        task_id = streaming(gateway, 40, 0.1)
        with events(gateway, f"/v1/tasks/{task_id}/events") as found:
            seen = [next(found).id for _ in range(5)]
            fleet.restart_master()
            seen += [next(found).id for _ in range(5)]
        gateway.daemon.kill()
    with GatewayProcess(tmp_path, fleet.address) as gateway:
        with events(gateway, f"/v1/tasks/{task_id}/events", seen[-1]) as found:
            *partials, last = found
        assert [*seen, *(each.id for each in partials)] == [str(n) for n in range(40)]
        assert (last.name, last.data["state"]) == ("outcome", "SUCCEEDED")


def test_values_of_every_form_are_read(gateway: GatewayProcess) -> None:
    task_id = submit(gateway, kind="trial.mixed", payload=[1])
    with events(gateway, f"/v1/tasks/{task_id}/events") as found:
        data = [each.data for each in found]
    assert [each.get("data") for each in data[:3]] == [{"given": [1]}, "raw", "text"]
    assert data[3]["result"] == [1.5, None]
    large = submit(gateway, kind="trial.big", payload_base64="", parameters={"bytes": "300000"})
    with events(gateway, f"/v1/tasks/{large}/events") as found:
        (only,) = found
    assert only.data["result"] == "\0" * 300_000


def test_a_failed_task_has_an_outcome(gateway: GatewayProcess) -> None:
    task_id = submit(gateway, kind="trial.wrong_type", payload_base64="")
    with events(gateway, f"/v1/tasks/{task_id}/events") as found:
        (only,) = found
    assert (only.name, only.data["state"], only.data["error"]["type"]) == ("outcome", "FAILED", "WrongResultType")


def test_a_task_without_a_request_id_has_events(gateway: GatewayProcess, fleet: Fleet) -> None:
    (task_id,) = fleet.submit("trial.stream", b"x", parameters={"count": "2"})
    with events(gateway, f"/v1/tasks/{task_id}/events", "0") as found:
        assert [(each.name, each.id) for each in found] == [("partial", "1"), ("outcome", "")]


def test_outcomes_continue_after_a_cursor_also_over_a_restart_of_the_master(
    gateway: GatewayProcess, fleet: Fleet
) -> None:
    queue = "watched"
    names = [{"kind": "echo", "payload": n, "queue": queue} for n in range(50)]
    _, body = gateway.call("POST", "/v1/tasks", {"tasks": [*names, {"kind": "echo", "payload": 0, "queue": "other"}]})
    ids = {each["task_id"] for each in body["results"][:50]}
    seen: list[Event] = []
    path = f"/v1/outcomes?queue={queue}&kind=echo"
    with events(gateway, path) as found:
        seen += [next(found) for _ in range(7)]
    with events(gateway, path, seen[-1].id) as found:
        seen += [next(found) for _ in range(8)]
        fleet.restart_master()
        seen += [next(found) for _ in range(35)]
    assert {each.name for each in seen} == {"outcome"}
    assert len(seen) == 50
    assert {each.data["task_id"] for each in seen} == ids
    assert sorted(each.data["result"] for each in seen) == list(range(50))
    fleet.wait_for_workers()
    # ?cursor= is the same; another stream reads what comes.
    cursor = seen[48].id
    with events(gateway, f"{path}&cursor={cursor.replace('#', '%23')}") as found:
        assert next(found).data == seen[49].data  # the id names the master that gave it out
        late = submit(gateway, kind="echo", payload="late", queue=queue)
        assert next(found).data["task_id"] == late


def test_outcomes_from_now_begin_with_a_cursor(gateway: GatewayProcess) -> None:
    ended(gateway, submit(gateway, kind="echo", payload="early"))
    with events(gateway, "/v1/outcomes?from_now=true") as found:
        begin = next(found)
        assert (begin.name, begin.data) == ("cursor", {"cursor": begin.id})
        task_id = submit(gateway, kind="echo", payload="late")
        assert next(found).data["task_id"] == task_id
    with events(gateway, "/v1/outcomes", begin.id) as found:
        assert next(found).data["task_id"] == task_id


def test_a_stream_without_outcomes_begins_at_once(gateway: GatewayProcess) -> None:
    begun = time.monotonic()
    with events(gateway, "/v1/outcomes?queue=nobody"):
        assert time.monotonic() - begun < HEARTBEAT_S / 2
    assert gateway.call("HEAD", "/v1/outcomes?queue=nobody")[0].status == 200


def test_a_cursor_of_another_journal_is_gone(gateway: GatewayProcess) -> None:
    response, body = gateway.call("GET", "/v1/outcomes?cursor=w.0123456789abcdef.5")
    assert (response.status, body["error"]["code"], body["error"]["field"]) == (410, "cursor_expired", "cursor")


@pytest.mark.parametrize(
    ("path", "last", "status", "field"),
    [
        ("/v1/tasks/1/events", "", 404, None),
        ("/v1/tasks/by-request-id/nobody/events", "", 404, None),
        ("/v1/tasks/x/events", "", 400, "task_id"),
        ("/v1/tasks/1/events", "x", 400, "Last-Event-ID"),
        ("/v1/tasks/1/events", "-1", 400, "Last-Event-ID"),
        ("/v1/tasks/1/events?more=1", "", 400, "more"),
        ("/v1/outcomes?cursor=x", "", 400, "cursor"),
        ("/v1/outcomes", "x", 400, "cursor"),
        ("/v1/outcomes?cursor=x&from_now=true", "", 400, "from_now"),
        ("/v1/outcomes?from_now=perhaps", "", 400, "from_now"),
        ("/v1/outcomes?state=FAILED", "", 400, "state"),
    ],
)
def test_a_wrong_stream_is_rejected(
    gateway: GatewayProcess, path: str, last: str, status: int, field: str | None
) -> None:
    response, body = gateway.call("GET", path, headers={"Last-Event-ID": last} if last else {})
    assert (response.status, body["error"].get("field")) == (status, field), body
    assert gateway.call("HEAD", path, headers={"Last-Event-ID": last} if last else {})[0].status == status
