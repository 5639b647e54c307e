"""mgpuctl top: what its keys do, what it draws at any size, and a real one in a real terminal against a real master."""

import signal
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from multigpu.cli.fleet import device_columns
from multigpu.cli.top import frame as top_frame
from multigpu.cli.top import state as top_state
from multigpu.cli.top import terminal as top_terminal
from multigpu.cli.top.state import Order, Pane, Verb, View, press
from multigpu.fleet import Queue, Stats
from multigpu.v1 import admin_service_pb2 as admin

from tests.client.cli.fleet.fleet_samples import drawn, gpu_worker, large_fleet, view_of
from tests.client.cli.fleet.terminal import terminal
from tests.client.cli.fleet_up import MGPUCTL
from tests.fleet import Fleet, until


def text_of(view: View, width: int, height: int) -> list[str]:
    lines = [line.rstrip() for line in drawn(view, width, height).export_text().splitlines()]
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    return lines


@pytest.mark.parametrize("count", [0, 1, 8, 64, 500])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (40, 12), (200, 60)])
def test_a_frame_fills_the_screen_and_no_more(count: int, width: int, height: int) -> None:
    for tasks in (0, 3, 200):
        lines = text_of(view_of(count, tasks), width, height)
        assert lines[0].startswith("multigpu 10.0.0.7:7433")
        assert any(line.startswith("DEVICES") for line in lines)
        assert lines[-1].startswith("↑↓ move")


def test_eighty_columns_have_what_matters() -> None:
    lines = text_of(view_of(8), 80, 24)
    assert lines[-1].endswith("q quit")
    heading = next(line for line in lines if "WORKER" in line)
    assert heading.split() == ["WORKER", "DEVICE", "MEMORY", "BUSY", "TEMP", "POWER", "LEASES", "HEALTH"]
    sick = next(line for line in lines if "cuda:3" in line)
    assert sick.split() == ["rack7-box00-GPU-00000003", "cuda:3", "10%", "10%", "44°C", "150", "W", "192", "sick"]
    assert any(line.startswith("QUEUES") for line in lines)
    assert any(line.startswith("RUNNING TASKS") for line in lines)


def test_a_long_fleet_is_shown_whole_as_bars_and_scrolls() -> None:
    view = view_of(64)
    lines = text_of(view, 80, 24)
    assert any(len(line) == 64 and set(line) <= set(top_frame.BARS + "·") for line in lines)
    assert any(line.startswith("DEVICES  1-5 of 64") for line in lines)
    press(view, "end")
    assert any(line.startswith("> rack7-box07-GPU-0000003f") for line in text_of(view, 80, 24))


def test_too_small_a_terminal_is_reported() -> None:
    assert "too small" in drawn(view_of(8), 30, 10).export_text()


def test_the_mark_stays_with_its_device() -> None:
    view = view_of(8)
    for _ in range(3):
        press(view, "down")
    worker_id = view.marked[Pane.DEVICES]
    assert worker_id.startswith("rack7-box00-GPU-00000003")
    while top_state.SORTS[view.sort][0] != "health":
        press(view, "s")
    # The sick one comes first now, and is still the marked one.
    assert top_state.devices(view)[0].worker_id == worker_id
    assert top_state.marked_row(view, Pane.DEVICES) == 0
    assert press(view, "c") == Order(Verb.CORDON, worker_id)
    press(view, "r")
    assert top_state.marked_row(view, Pane.DEVICES) == 7


def test_sorting_puts_unknown_values_last() -> None:
    view = view_of(16)
    while top_state.SORTS[view.sort][0] != "temperature":
        press(view, "s")
    found = [device_columns.value(worker, "temperature_celsius") for worker in top_state.devices(view)]
    assert found[-1] is None
    assert found[:-1] == sorted((t for t in found[:-1] if t is not None), reverse=True)


def test_drain_and_cancel_need_a_yes() -> None:
    view = view_of(8)
    assert press(view, "d") is None
    assert top_state.question(view).startswith("Drain rack7-box00-GPU-00000000? [y/N]")
    assert "[y/N]" in text_of(view, 80, 24)[-2]
    assert press(view, "n") is None
    assert view.message.startswith("not done")
    press(view, "d")
    assert press(view, "y") == Order(Verb.DRAIN, next(iter(view.workers)))
    assert press(view, "x") is None
    assert "mark one of the tasks first" in view.message
    press(view, "back_tab")
    press(view, "x")
    assert top_state.question(view).startswith("Cancel task 9000000? [y/N]")
    assert press(view, "Y") == Order(Verb.CANCEL, "9000000")


def test_a_question_is_about_what_was_marked_when_it_was_asked() -> None:
    view = view_of(8)
    press(view, "d")
    first = view.asked
    assert first is not None
    del view.workers[first.target]
    assert "Drain" in top_state.question(view)
    assert press(view, "y") == first


def test_nothing_to_do_on_an_empty_screen() -> None:
    view = View(address="a:1")
    for key in ("d", "c", "u", "x", "up", "end", "tab", "s", "r", "?", "?", "é", "escape"):
        assert press(view, key) is None
    assert press(view, "q") == Order(Verb.QUIT)
    view.trouble = "no master at a:1"
    assert "no master at a:1" in "\n".join(text_of(view, 80, 24))


def test_alarms_are_shown() -> None:
    view = view_of(8)
    view.stats = Stats.of(admin.GetStatsResponse(journal_writable=False, breaker=admin.Breaker(tripped=True)))
    text = "\n".join(text_of(view, 80, 24))
    assert "BREAKER TRIPPED" in text
    assert "JOURNAL NOT WRITABLE: disk full, or journal_bytes_max? The master's log says" in text
    for _ in range(3):
        press(view, "down")
    assert "xid_79: the GPU has fallen off the bus" in text_of(view, 120, 40)[-2]


def test_foreign_text_reaches_no_terminal() -> None:
    view = view_of(0, 0)
    view.queues = [Queue.of(admin.Queue(queue="evil\x1b[2J\n"))]
    assert "\x1b[2J" not in drawn(view, 80, 24).export_text(styles=False)


def test_short_names_stay_the_beginning_of_one_id() -> None:
    ids = [worker.worker_id for worker in large_fleet(64)]
    short = device_columns.short_names(ids)
    assert all(len(name) == len("rack7-box00-GPU-00000000") for name in short.values())
    assert all(sum(other.startswith(name) for other in ids) == 1 for name in short.values())
    twins = [gpu_worker(1).worker_id, gpu_worker(1).worker_id + "-1"]
    assert next(iter(device_columns.short_names(twins).values())) == twins[0]


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("q", ["q"]),
        ("\x1b[A\x1b[B", ["up", "down"]),
        ("\x1bOA", ["up"]),
        ("\x1b[5~x", ["page_up", "x"]),
        ("\x1b[Z\t", ["back_tab", "tab"]),
        ("\x1b", ["escape"]),
        ("\x1b[1;5Cq", ["q"]),
        ("\x1b[", []),
        ("dy", ["d", "y"]),
    ],
)
def test_keys_of_a_terminal(sent: str, keys: list[str]) -> None:
    assert top_terminal.keys_in(sent) == keys


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("top"), workers=2, handlers=["trial_handlers"]) as started:
        yield started


@pytest.mark.slow
def test_a_real_one_drains_cancels_resizes_and_leaves_the_terminal_as_it_was(fleet: Fleet, tmp_path: Path) -> None:
    gates = [str(tmp_path / f"gate{n}").encode() for n in range(2)]
    task_id, other = fleet.submit("trial.gate", *gates, queue="top")
    with terminal(*MGPUCTL, "--master", fleet.address, "top") as shown:
        text = shown.wait_for(lambda t: "trial.gate" in t and "w1" in t, "workers and tasks")
        assert "RUNNING TASKS" in text
        assert " top " in text
        assert not termios.tcgetattr(shown.slave)[3] & termios.ECHO

        shown.type("jd")
        shown.wait_for(lambda t: "Drain w1? [y/N]" in t, "the question")
        assert fleet.worker("w1").state == admin.WORKER_STATE_ACTIVE
        shown.type("y")
        shown.wait_for(lambda t: "w1: draining" in t, "the answer")
        until(lambda: fleet.worker("w1").state == admin.WORKER_STATE_DRAINING)
        assert fleet.worker("w0").state == admin.WORKER_STATE_ACTIVE
        shown.type("u")
        until(lambda: fleet.worker("w1").state == admin.WORKER_STATE_ACTIVE)

        shown.type("\x1b[Zx")
        shown.wait_for(lambda t: f"Cancel task {task_id}? [y/N]" in t, "the question")
        shown.type("y")
        shown.wait_for(lambda t: f"task {task_id}: cancelled" in t, "the answer")
        assert fleet.outcome(task_id).error.type == "Cancelled"

        shown.resize(120, 40)
        shown.process.send_signal(signal.SIGWINCH)
        shown.wait_for(lambda t: "q quit" in t.splitlines()[-1], "the larger picture")

        shown.type("q")
        assert shown.ended() == 0
        assert termios.tcgetattr(shown.slave) == shown.before
        assert b"\x1b[?1049l" in shown.raw
    fleet.tasks.Cancel(_cancel(other))


def _cancel(task_id: int) -> object:
    from multigpu.v1 import task_service_pb2

    return task_service_pb2.CancelRequest(task_ids=[task_id])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_signals_leave_the_terminal_as_it_was(fleet: Fleet, number: int, code: int) -> None:
    with terminal(*MGPUCTL, "--master", fleet.address, "top") as shown:
        shown.wait_for(lambda t: "w1" in t, "workers")
        shown.process.send_signal(number)
        assert shown.ended() == code
        assert termios.tcgetattr(shown.slave) == shown.before
        assert b"\x1b[?1049l" in shown.raw
        assert b"\x1b[?25h" in shown.raw


def test_without_a_terminal_it_prints_one_picture(fleet: Fleet) -> None:
    done = subprocess.run(
        [*MGPUCTL, "--master", fleet.address, "top"],
        capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "one picture" in done.stderr
    assert "w0" in done.stdout
    assert "w1" in done.stdout
    assert "\x1b" not in done.stdout


def test_without_a_master_it_fails() -> None:
    with terminal(*MGPUCTL, "--master", "127.0.0.1:1", "top") as shown:
        assert shown.ended() == 3


@pytest.mark.slow
def test_it_goes_on_when_the_master_comes_back(fleet: Fleet) -> None:
    with terminal(*MGPUCTL, "--master", fleet.address, "top") as shown:
        shown.wait_for(lambda t: "w1" in t, "workers")
        fleet.master.kill()
        shown.wait_for(lambda t: "no master at" in t, "the trouble")
        fleet.start_master()
        shown.wait_for(lambda t: "no master at" not in t and "2 healthy" in t, "the fleet again")
