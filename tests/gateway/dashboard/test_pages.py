"""What pages show agrees with the master, and buttons do what they say."""

import re
from typing import Any

import multigpu
import pytest

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess
from tests.gateway.dashboard.conftest import Visitor

FLEET = {"workers": 2, "handlers": ["trial_handlers"]}
PAGES = (
    "/",
    "/ui/queues",
    "/ui/tasks",
    "/ui/dead-letters",
    "/ui/models",
    "/ui/usage",
    "/ui/devices/w0",
    "/ui/tasks/new",
    "/ui/sign-in",
)
NOBODYS = "nobody has this kind"
EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def admin(fleet: Fleet) -> Any:
    with multigpu.AdminClient(fleet.address) as client:
        yield client


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Any:
    with fleet.client() as client:
        yield client


def submit(client: multigpu.Client, queue: str, n: int, kind: str = NOBODYS, **options: Any) -> list[int]:
    handles = client.submit_many(kind, [b"x"] * n, queue=queue, wait_for_worker=True, **options)
    return [handle.id for handle in handles if not isinstance(handle, multigpu.RejectedError)]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_runs_no_script_but_its_own_and_loads_nothing_from_elsewhere(visitor: Visitor, path: str) -> None:
    response, text = visitor.get(path)
    assert response.status == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert response.headers["cache-control"] == "no-store"
    assert all(link.startswith(("/", "#")) for link in text.links)
    assert visitor.gateway.call("HEAD", path)[0].status == 200


def test_the_fleet_is_shown_by_device_and_state(visitor: Visitor, admin: multigpu.AdminClient) -> None:
    page = visitor.page("/")
    assert "Workers 2 connected" in page.text
    assert [row.split()[0] for row in page.rows[-2:]] == ["w0", "w1"]
    assert "The worker gets no new tasks." in visitor.follow("/ui/devices", worker="w1", action="cordon").text
    page = visitor.page("/")
    assert page.rows[-2].startswith("w1")
    assert "cordoned: in the dashboard" not in page.text  # without a reason
    assert visitor.page("/?state=cordoned").rows[-1].startswith("w1")
    assert "No worker matches." in visitor.page("/?state=sick").text
    assert "cordoned (1)" in page.text
    visitor.follow("/ui/devices", worker="w1", action="uncordon")
    assert not any(worker.cordoned for worker in admin.list_workers())


def test_a_device_shows_its_tasks(visitor: Visitor, client: multigpu.Client) -> None:
    handle = client.submit("sleep", b"600", queue="device")
    until(lambda: client.get(handle.id).worker_id)
    name = client.get(handle.id).worker_id
    assert f"task {handle.id} sleep, attempt 1" in visitor.page(f"/ui/devices/{name}").text
    handle.cancel()
    response, page = visitor.get("/ui/devices/none")
    assert response.status == 404
    assert "the master knows no worker 'none'" in page.text
    response, page = visitor.post("/ui/devices", worker="w0", action="forget")
    assert response.status == 400
    assert "is connected; stop its daemon first" in page.text


def test_queues_are_paused_resumed_and_sorted(
    visitor: Visitor, client: multigpu.Client, admin: multigpu.AdminClient
) -> None:
    submit(client, "long", 5)
    submit(client, "short", 2)
    page = visitor.page("/ui/queues")
    long, short = (next(at for at, row in enumerate(page.rows) if row.startswith(name)) for name in ("long", "short"))
    assert long < short
    assert page.rows[long].startswith("long open 5")
    by_name = visitor.page("/ui/queues?sort=queue").rows
    assert by_name[1:] == sorted(by_name[1:])
    assert "The queue is paused." in visitor.follow("/ui/queues", queue="long", action="pause").text
    assert {queue.queue for queue in admin.list_queues() if queue.paused} == {"long"}
    visitor.follow("/ui/queues", queue="long", action="resume")
    assert not any(queue.paused for queue in admin.list_queues())


def test_a_paused_queue_has_no_estimate(visitor: Visitor, client: multigpu.Client) -> None:
    list(client.map("echo", [b"x"] * 50, queue="stopped"))
    visitor.follow("/ui/queues", queue="stopped", action="pause")
    handles = client.submit_many("echo", [b"x"] * 3, queue="stopped")
    (last,) = [handle.id for handle in handles if not isinstance(handle, multigpu.RejectedError)][-1:]
    assert "Estimated start: when its queue is resumed." in visitor.page(f"/ui/tasks/{last}").text
    assert next(row for row in visitor.page("/ui/queues").rows if row.startswith("stopped")).endswith("paused Resume")
    visitor.follow("/ui/queues", queue="stopped", action="resume")


def test_a_queue_that_is_empty_between_two_tasks_stays_listed(
    visitor: Visitor, client: multigpu.Client, admin: multigpu.AdminClient
) -> None:
    client.run("echo", b"x", queue="sparse")
    assert [queue.queued + queue.leased for queue in admin.list_queues() if queue.queue == "sparse"] == [0]
    assert any(re.match(r"sparse open 0 .* empty Pause", row) for row in visitor.page("/ui/queues").rows)


def test_a_dead_letter_has_the_defaults_that_the_master_set(visitor: Visitor, client: multigpu.Client) -> None:
    handle = client.submit("fail", b"", attempts_max=1)
    handle.outcome()
    assert "fail, queue default" in visitor.page(f"/ui/tasks/{handle.id}").text


def test_what_an_action_did_is_said_once_and_not_by_an_address(visitor: Visitor) -> None:
    response, _ = visitor.post("/ui/queues", queue="once", action="pause")
    assert response.headers["location"] == "/ui/queues"
    visitor.get("/ui/queues", **{"hx-request": "true"})  # an update of another tab
    assert "The queue is paused." in visitor.page("/ui/queues").text
    assert "The queue is paused." not in visitor.page("/ui/queues").text
    assert "The queue is served again." not in visitor.page("/ui/queues?done=resumed").text
    visitor.follow("/ui/queues", queue="once", action="resume")
    visitor.get("/ui/queues")
    assert visitor.get("/ui/queues", cookie=f"mgpu_done=cancelled.{'9' * 5000}")[0].status == 200


def test_a_queue_says_when_it_will_be_empty(visitor: Visitor, client: multigpu.Client) -> None:
    list(client.map("echo", [b"x"] * 50, queue="draining"))
    submit(client, "draining", 5)
    page = visitor.page("/ui/queues")
    assert "without new ones" in page.text
    row = next(row for row in page.rows if row.startswith("draining"))
    *_, amount, unit, _button = row.split()
    assert float(amount) > 0
    assert unit in ("s", "ms")


def test_tasks_are_filtered_and_paged_by_the_url(visitor: Visitor, client: multigpu.Client) -> None:
    ids = submit(client, "pages", 120)
    shown: list[int] = []
    path = "/ui/tasks?queue=pages&state=queued&since=1h"
    while path:
        page = visitor.page(path)
        assert "120 tasks: 120 waiting" in page.text
        shown += [int(row.split()[0]) for row in page.rows[1:]]
        older = [link for link in page.links if "page=" in link]
        path = older[-1] if len(shown) < 120 else ""
    assert shown == sorted(ids, reverse=True)
    oldest = visitor.page("/ui/tasks?queue=pages&sort=oldest").rows[1:]
    assert [int(row.split()[0]) for row in oldest] == sorted(ids)[:50]
    assert "No task matches." in visitor.page("/ui/tasks?queue=pages&kind=echo").text
    response, page = visitor.get("/ui/tasks?state=lost")
    assert response.status == 400
    assert "state is 'lost': there are queued, retrying" in page.text


def test_all_tasks_of_a_filter_are_cancelled_after_their_number_was_shown(
    visitor: Visitor, client: multigpu.Client, admin: multigpu.AdminClient
) -> None:
    submit(client, "bulk", 2_500)
    submit(client, "kept", 1)
    page = visitor.page("/ui/tasks?queue=bulk&confirm=cancel")
    assert "Cancel 2,500 tasks that have not ended?" in page.text
    assert "queue: bulk" in page.text
    assert "Cancelled 2,500 tasks." in visitor.follow("/ui/tasks", **page.forms[-1]).text
    assert admin.count(queue="bulk").queued == 0
    assert admin.count(queue="kept").queued == 1


def test_dead_letters_run_again_and_are_deleted(
    visitor: Visitor, client: multigpu.Client, admin: multigpu.AdminClient
) -> None:
    first, second, third = submit(client, "dead", 3, "fail", attempts_max=1)
    until(lambda: admin.count(queue="dead").dead_lettered == 3)
    page = visitor.page("/ui/dead-letters?queue=dead")
    assert "3 tasks failed every attempt." in page.text
    assert [int(row.split()[0]) for row in page.rows[1:]] == [third, second, first]
    assert "queue dead" in visitor.page(f"/ui/tasks/{first}").text
    assert "Deleted 1 dead letter." in visitor.follow("/ui/dead-letters", action="delete", task_id=first).text
    assert "Run again" not in visitor.page(f"/ui/tasks/{first}").text
    again = visitor.follow("/ui/dead-letters", action="requeue", task_id=first).text
    assert "Requeued 0 dead letters. None was left." in again
    page = visitor.page("/ui/dead-letters?queue=dead&confirm=requeue")
    assert "Run 2 dead letters again?" in page.text
    assert "Requeued 2 dead letters." in visitor.follow("/ui/dead-letters", **page.forms[-1]).text
    until(lambda: admin.count(queue="dead").dead_lettered == 2)  # they fail again
    page = visitor.page("/ui/dead-letters?queue=dead&confirm=delete")
    visitor.follow("/ui/dead-letters", **page.forms[-1])
    assert admin.count(queue="dead").dead_lettered == 0


def test_a_task_shows_its_attempts_its_error_and_why_it_waits(visitor: Visitor, client: multigpu.Client) -> None:
    failing = client.submit("fail", b"", queue="one", attempts_max=3, backoff_initial_s=0.01)
    assert not failing.outcome().succeeded
    page = visitor.page(f"/ui/tasks/{failing.id}")
    assert [row.split()[0] for row in page.rows[1:4]] == ["1", "2", "3"]
    assert all("waiting" in row and "running" in row for row in page.rows[3:4])
    assert page.rows[3].endswith("dead lettered: RuntimeError")
    (waiting,) = submit(client, "one", 1)
    page = visitor.page(f"/ui/tasks/{waiting}")
    assert f"kind '{NOBODYS}'" in page.text
    assert "Cancelled 1 task." in visitor.follow("/ui/tasks", action="cancel", task_id=waiting).text
    assert visitor.get("/ui/tasks/1")[0].status == 404
    assert visitor.get("/ui/tasks/abc")[0].status == 400


def test_a_task_shows_what_its_handler_has_logged(visitor: Visitor, client: multigpu.Client) -> None:
    handle = client.submit("trial.says", b"<b>loaded</b>")
    handle.result(timeout=120)
    _, page = visitor.get(f"/ui/tasks/{handle.id}")
    assert "attempt 1 INFO <b>loaded</b>" in page.text


def test_a_task_is_submitted_and_its_result_shown(visitor: Visitor) -> None:
    page = visitor.follow("/ui/tasks", action="submit", kind="echo", payload='{"a": [1, "é"]}', queue="form")
    assert "The task was submitted." in page.text
    (task_id,) = [row.split()[0] for row in visitor.page("/ui/tasks?queue=form").rows[1:]]
    until(lambda: '"a": [' in visitor.page(f"/ui/tasks/{task_id}").text)
    given = {"kind": "trial.says", "payload": "hello", "type": "text", "priority": "1", "queue": "said"}
    visitor.follow("/ui/tasks", action="submit", **given)
    (task_id,) = [row.split()[0] for row in visitor.page("/ui/tasks?queue=said").rows[1:]]
    until(lambda: "attempt 1 INFO hello" in visitor.page(f"/ui/tasks/{task_id}").text)
    assert "echo" in visitor.page("/ui/tasks/new").text
    response, page = visitor.post("/ui/tasks", action="submit", kind="echo", payload="{")
    assert response.status == 400
    assert "the payload is no JSON value" in page.text
    response, page = visitor.post("/ui/tasks", action="submit", kind="ecko", payload="1")
    assert response.status == 404
    assert "ecko" in page.text


def test_names_from_tasks_and_callers_are_text(
    gateway: GatewayProcess, visitor: Visitor, client: multigpu.Client
) -> None:
    submit(client, EVIL, 1, EVIL)
    for path in ("/ui/queues", "/ui/tasks", "/ui/tasks?queue=%3Cscript%3Ealert(1)%3C/script%3E"):
        _, body = gateway.call("GET", path)
        assert "&lt;script&gt;alert(1)" in body
        assert EVIL not in body


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none", ""])
def test_a_form_of_another_site_does_nothing(visitor: Visitor, admin: multigpu.AdminClient, site: str) -> None:
    response, page = visitor.post("/ui/queues", site, queue="default", action="pause")
    assert response.status == 403
    assert "not of this dashboard" in page.text
    assert not any(queue.paused for queue in admin.list_queues())


def test_the_origin_of_older_browsers_counts(gateway: GatewayProcess) -> None:
    body = b"queue=default&action=resume"
    for origin, expected in ((f"http://{gateway.address}", 303), ("http://evil.example", 403)):
        assert gateway.call("POST", "/ui/queues", body, {"origin": origin})[0].status == expected


def test_an_action_that_there_is_not_is_an_error(visitor: Visitor) -> None:
    for path in ("/ui/tasks", "/ui/queues", "/ui/models", "/ui/dead-letters", "/ui/devices"):
        response, page = visitor.post(path, action="explode")
        assert response.status == 400
        assert "there is no action 'explode'" in page.text


def test_updates_can_be_paused(visitor: Visitor, gateway: GatewayProcess) -> None:
    assert "hx-trigger" in gateway.call("GET", "/ui/tasks?queue=x")[1]
    _, body = gateway.call("GET", "/ui/tasks?queue=x&live=off")
    assert "hx-trigger" not in body
    assert "Resume updates" in body
    assert 'href="/ui/tasks?queue=x"' in body


def test_usage_is_summed_by_queue_and_kind(visitor: Visitor, client: multigpu.Client) -> None:
    client.run("sleep", b"0.1", queue="used")
    _, page = visitor.get("/ui/usage?period=hour")
    (queue,) = (row for row in page.rows if row.startswith("used "))
    assert re.fullmatch(r"used 1 0 \d+ ms 0 % -", queue)
    assert any(row.startswith("sleep 1 0 ") for row in page.rows)
    assert re.search(r"\d+ tasks?, .+ of device time, since", page.text)
    assert visitor.get("/ui/usage?period=eternity")[0].status == 200


def test_the_history_is_json_for_the_charts(gateway: GatewayProcess) -> None:
    response, history = gateway.call("GET", "/ui/history")
    assert response.status == 200
    assert len({len(values) for values in history.values()}) == 1
    assert set(history) >= {"time", "succeeded", "wait", "run", "queued", "power"}


@pytest.mark.slow
def test_pages_say_soon_that_the_master_does_not_answer(fleet: Fleet, visitor: Visitor) -> None:
    """And a form says where one sees whether it took effect. The last test: the master is killed."""
    fleet.master.kill()
    response, page = visitor.get("/ui/queues")
    assert response.status == 503
    assert "did not answer within 4 s" in page.text  # the client waits for 10 s
    response, page = visitor.post("/ui/queues", queue="default", action="pause")
    assert response.status == 503
    assert "it shows whether the action took effect" in page.text
    fleet.restart_master()
    until(lambda: visitor.get("/ui/queues")[0].status == 200)
