"""The dashboard in Chromium: pages follow the fleet while a worker is killed; charts, keyboard, axe-core."""

import re
import shutil
from collections.abc import Iterator
from typing import Any

import multigpu
import pytest
from axe_playwright_python.sync_playwright import Axe
from multigpu.outcome import OutcomeState
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
# A training script that reports three steps, waits for a file, and reports two of them again and one more.
REPORTS = """
import os, time
from multigpu import train

for step in (1, 2, 3):
    train.report({"loss": 1 / step, "norm": float("nan")}, step=step)
while not os.path.exists(os.path.join(os.environ["MULTIGPU_JOB_FOLDER"], "go")):
    time.sleep(0.05)
for step in (2, 3, 4):
    train.report({"loss": 2 / step}, step=step)
    time.sleep(0.1)
"""

expect.set_options(timeout=60_000)  # more than a busy host needs


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> SimulatedGpus:
    return SimulatedGpus(tmp_path_factory.mktemp("gpus") / "state", n=2)


@pytest.fixture(scope="module")
def fleet(gpus: SimulatedGpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two workers on simulated GPUs, and one on the CPU."""
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "train").mkdir()
    (folder / "train" / "reports.py").write_text(REPORTS)
    flags = ["--train-dir", str(folder / "train")]
    with Fleet(folder, workers=0, env=gpus.env(), handlers=["trial_handlers"], worker_flags=flags) as running:
        running.start_worker("gpu-0", "--device", "cuda:0")
        running.start_worker("gpu-1", "--device", "cuda:1")
        running.start_worker("cpu-0")
        running.wait_for_workers()
        yield running


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[multigpu.Client]:
    with fleet.client() as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, gateway: GatewayProcess) -> Iterator[Page]:
    """A tab, which may have no error in its console."""
    context = browser.new_context(base_url=gateway.url, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    yield page
    context.close()
    assert said == []


def figure(page: Page, name: str) -> Any:
    """The value beside a name."""
    return page.locator(".figures div", has=page.get_by_text(name, exact=True)).locator("dd")


def row(page: Page, name: str) -> Any:
    return page.get_by_role("row", name=re.compile(rf"^{re.escape(name)} "))


def test_pages_follow_the_fleet_while_a_worker_is_killed(page: Page, fleet: Fleet, client: multigpu.Client) -> None:
    page.goto("/")
    expect(figure(page, "Workers")).to_have_text("3 connected")
    handles = client.submit_many("sleep", [b"600"] * 7, queue="killed")
    until(lambda: all(worker.leases for worker in fleet.list_workers()))
    expect(figure(page, "At workers")).to_have_text(str(fleet.stats().leased))
    fleet.workers["cpu-0"].kill()
    expect(row(page, "cpu-0")).to_contain_text("lost")
    expect(figure(page, "Workers")).to_have_text("2 connected, 1 lost")
    stats = fleet.stats()
    expect(figure(page, "Tasks waiting")).to_have_text(str(stats.queued))
    expect(figure(page, "At workers")).to_have_text(str(stats.leased))
    fleet.start_worker("cpu-0")
    expect(row(page, "cpu-0")).not_to_contain_text("lost")
    client.cancel(*[handle.id for handle in handles if not isinstance(handle, multigpu.RejectedError)])
    expect(figure(page, "At workers")).to_have_text("0")


def test_a_sick_gpu_is_shown_first_with_the_reason(page: Page, gpus: SimulatedGpus) -> None:
    page.goto("/")
    gpus.ecc(1, uncorrected=1)
    gpus.xid(1, 48)
    first = page.get_by_role("region", name="Workers", exact=True).get_by_role("row").nth(1)
    expect(first).to_contain_text("sick")
    expect(first).to_contain_text("gpu-1")
    expect(first).to_contain_text("xid_48")
    first.get_by_role("link", name="gpu-1").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("gpu-1")
    expect(page.locator(".reasons").first).to_contain_text("xid_48")
    gpus.return_(1, reset=True)


def test_partial_outputs_come_while_the_task_runs(page: Page, client: multigpu.Client) -> None:
    parameters = {"count": "20", "seconds": "0.3"}
    handle = client.submit("trial.stream", b"part", parameters=parameters, queue="live")
    page.goto(f"/ui/tasks/{handle.id}")
    expect(page.locator("#stream")).to_contain_text("part-2")
    assert not handle.done()
    expect(page.locator("#stream")).to_contain_text("part-19")
    expect(page.get_by_role("heading", name="Result")).to_be_visible()
    assert page.locator("#stream").inner_text() == "".join(f"part-{n}" for n in range(20))
    page.reload()
    assert page.locator("#stream").inner_text() == "".join(f"part-{n}" for n in range(20))
    expect(page.locator("svg rect.running")).to_have_count(1)


@pytest.mark.parametrize(
    ("kind", "payload", "shown"),
    [("trial.mixed", {"a": [1, "x"]}, '{"given":{"a":[1,"x"]}}\nrawtext'), ("trial.stream", b"\xff", "3 bytes\n" * 5)],
)
def test_partial_outputs_look_the_same_while_the_task_runs_and_later(
    page: Page, fleet: Fleet, client: multigpu.Client, kind: str, payload: Any, shown: str
) -> None:
    with multigpu.AdminClient(fleet.address) as admin:
        admin.pause_queue("mixed")
        handle = client.submit(kind, payload, queue="mixed")
        page.goto(f"/ui/tasks/{handle.id}")
        expect(page.locator("[data-events]")).to_have_count(1)
        admin.resume_queue("mixed")
    expect(page.get_by_role("heading", name="Result")).to_be_visible()
    live = page.locator("#stream").text_content()
    page.reload()
    assert page.locator("#stream").text_content() == live == shown


def test_the_metrics_of_a_job_are_drawn_as_they_come(page: Page, fleet: Fleet, client: multigpu.Client) -> None:
    pytest.importorskip("torch", reason="the extra `worker` is not installed")
    handle = client.train("reports.py", name="drawn")
    page.goto(f"/ui/tasks/{handle.id}")
    chart = page.get_by_role("img", name="loss by step")
    expect(chart.locator("canvas")).to_be_visible()

    def steps() -> str:
        return str(page.evaluate("reports.metrics.get('loss').steps.join()"))

    until(lambda: steps() == "1,2,3")
    (fleet.folder / "train" / "jobs" / "drawn" / "go").touch()
    assert handle.outcome(timeout=60).succeeded
    expect(page.get_by_role("heading", name="Result")).to_be_visible()
    until(lambda: steps() == "1,2,3,4")
    page.goto("/ui/tasks")
    page.goto(f"/ui/tasks/{handle.id}")
    expect(chart.locator("canvas")).to_be_visible()
    assert page.evaluate("reports.metrics.get('loss').values.join()") == "1,1,0.6666666666666666,0.5"
    assert page.get_by_role("img", name="norm by step").count() == 0


def test_a_person_runs_a_dead_letter_again(page: Page, client: multigpu.Client) -> None:
    handle = client.submit("fail", b"", queue="again", attempts_max=1)
    assert handle.outcome().state is OutcomeState.DEAD_LETTERED
    page.goto("/ui/dead-letters?queue=again")
    page.get_by_role("link", name=re.compile("Run all of these again")).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Run 1 dead letter again?")
    page.get_by_role("button", name="Yes").click()
    expect(page.get_by_role("status").first).to_have_text("Requeued 1 dead letter.")
    page.goto("/ui/tasks/new")
    page.get_by_label("Kind").fill("sleep")
    page.get_by_label("Payload").fill("1.5")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", name="Result")).to_be_visible()
    expect(page.get_by_role("status").first).to_have_text("The task was submitted.")  # also after the task has ended


def test_a_person_deletes_a_dead_letter_after_a_question(page: Page, client: multigpu.Client) -> None:
    handle = client.submit("fail", b"", queue="gone", attempts_max=1)
    assert handle.outcome().state is OutcomeState.DEAD_LETTERED
    page.goto(f"/ui/tasks/{handle.id}")
    expect(page.get_by_role("button", name="Run again")).to_be_visible()
    page.get_by_role("link", name="Delete").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Delete dead letter {handle.id} and its input for good?")
    page.get_by_role("button", name="Yes").click()
    expect(page.get_by_role("status").first).to_have_text("Deleted 1 dead letter.")
    page.goto(f"/ui/tasks/{handle.id}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.get_by_role("button", name="Run again")).to_have_count(0)


def test_charts_are_drawn_of_the_last_hour(page: Page) -> None:
    page.goto("/")
    expect(page.locator(".chart canvas")).to_have_count(5)
    page.wait_for_timeout(3_000)
    expect(page.locator(".chart canvas")).to_have_count(5)  # an update leaves them alone


def test_an_update_keeps_the_focus_and_can_be_paused(page: Page, client: multigpu.Client) -> None:
    handle = client.submit("nobody has this kind", b"", queue="focus", wait_for_worker=True)
    page.goto("/ui/queues")
    button = row(page, "focus").get_by_role("button", name="Pause")
    button.focus()
    handle.cancel()
    client.submit("nobody has this kind", b"", queue="focus2", wait_for_worker=True)
    expect(row(page, "focus2")).to_be_visible()
    assert page.evaluate("document.activeElement.id") == "pause-focus"
    page.get_by_role("link", name="Pause updates").click()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.wait_for_timeout(3_000)
    assert [url for url in requests if "static" not in url] == []
    expect(page.get_by_role("link", name="Resume updates")).to_be_visible()


def test_the_keyboard_alone_is_enough(page: Page) -> None:
    page.goto("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the content")).to_be_focused()
    for _ in range(2):
        page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Queues")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Queues")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    browser: Browser, gateway: GatewayProcess, fleet: Fleet, client: multigpu.Client, scheme: Any
) -> None:
    """On a desktop and on a phone, whose page is not wider than the screen."""
    failed = client.submit("fail", b"", queue="axe", attempts_max=1)
    failed.outcome()
    client.submit("nobody has this kind", b"", queue="axe", wait_for_worker=True)
    paths = [
        "/", "/ui/queues", "/ui/tasks", "/ui/dead-letters", "/ui/models", "/ui/usage", "/ui/devices/gpu-0",
        "/ui/tasks/new", "/ui/sign-in", "/ui/devices/none", f"/ui/tasks/{failed.id}",
        "/ui/tasks?queue=axe&confirm=cancel",
    ]  # fmt: skip
    for width in (1280, 375):
        context = browser.new_context(
            base_url=gateway.url, color_scheme=scheme, viewport={"width": width, "height": 800}
        )
        page = context.new_page()
        for path in paths:
            page.goto(path)
            found = Axe().run(page).response["violations"]
            serious = [
                (each["id"], [node["html"] for node in each["nodes"]])
                for each in found
                if each["impact"] in ("serious", "critical")
            ]
            assert serious == [], path
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
        context.close()
