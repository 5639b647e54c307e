"""mgpuctl top: what it draws at any size, and a real one in a real terminal against a real master."""

import dataclasses
import signal
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from multigpu.cli.fleet import device_columns
from multigpu.cli.fleet.top import BARS, View
from multigpu.fleet import Queue, Stats
from multigpu.v1 import admin_service_pb2 as admin

from tests.client.cli.fleet.fleet_samples import drawn, gpu_worker, large_fleet, view_of
from tests.client.cli.fleet.terminal import terminal
from tests.client.cli.fleet_up import MGPUCTL
from tests.fleet import Fleet


def text_of(view: View, width: int, height: int, problem: str = "") -> list[str]:
    lines = [line.rstrip() for line in drawn(view, width, height, problem).export_text().splitlines()]
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    return lines


@pytest.mark.parametrize("count", [0, 1, 8, 64, 500])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (40, 12), (200, 60)])
def test_a_frame_fits_the_screen(count: int, width: int, height: int) -> None:
    for tasks in (0, 3, 201):
        lines = text_of(view_of(count, tasks), width, height)
        assert lines[0].startswith("multigpu 10.0.0.7:7433")
        for title in ("DEVICES", "QUEUES", "RUNNING TASKS") if height > 12 else ("DEVICES",):
            assert any(line.startswith(title) for line in lines)


def test_eighty_columns_have_what_matters() -> None:
    lines = text_of(view_of(8), 80, 24)
    heading = next(line for line in lines if "WORKER" in line)
    assert heading.split() == ["WORKER", "DEVICE", "MEMORY", "BUSY", "TEMP", "POWER", "LEASES", "HEALTH"]
    sick = next(line for line in lines if "cuda:3" in line)
    assert sick.split() == ["rack7-box00-GPU-00000003", "cuda:3", "10%", "10%", "44°C", "150", "W", "192", "sick"]
    assert lines.index(sick) == lines.index(heading) + 1, "the sickest is first"


def test_a_long_fleet_is_shown_whole_as_bars() -> None:
    lines = text_of(view_of(64, 201), 80, 24)
    assert any(len(line) == 64 and set(line) <= set(BARS + "·") for line in lines)
    assert any(line.startswith("DEVICES  5 of 64") for line in lines)
    assert any(line.startswith("RUNNING TASKS  4 of 200+") for line in lines)


def test_too_small_a_terminal_is_reported() -> None:
    assert "too small" in drawn(view_of(8), 30, 10).export_text()


def test_alarms_are_shown() -> None:
    stats = Stats.of(admin.GetStatsResponse(journal_writable=False, breaker=admin.Breaker(tripped=True)))
    text = "\n".join(text_of(dataclasses.replace(view_of(8), stats=stats), 80, 24))
    assert "BREAKER TRIPPED" in text
    assert "JOURNAL NOT WRITABLE: disk full, or journal_bytes_max? The master's log says" in text
    assert "xid_79: the GPU has fallen off the bus" in "\n".join(text_of(view_of(8), 120, 40))
    assert "no master at a:1" in text_of(view_of(8), 80, 24, "no master at a:1")


def test_foreign_text_reaches_no_terminal() -> None:
    view = dataclasses.replace(view_of(0, 0), queues=[Queue.of(admin.Queue(queue="evil\x1b[2J\n"))])
    assert "\x1b[2J" not in drawn(view, 80, 24).export_text(styles=False)


def test_short_names_stay_the_beginning_of_one_id() -> None:
    ids = [worker.worker_id for worker in large_fleet(64)]
    short = device_columns.short_names(ids)
    assert all(len(name) == len("rack7-box00-GPU-00000000") for name in short.values())
    assert all(sum(other.startswith(name) for other in ids) == 1 for name in short.values())
    twins = [gpu_worker(1).worker_id, gpu_worker(1).worker_id + "-1"]
    assert next(iter(device_columns.short_names(twins).values())) == twins[0]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("top"), workers=2, handlers=["trial_handlers"]) as started:
        yield started


@pytest.mark.slow
def test_it_follows_tasks_and_the_size_of_its_terminal(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    (task_id,) = fleet.submit("trial.gate", str(gate).encode(), queue="top")
    with terminal(*MGPUCTL, "--master", fleet.address, "top") as shown:
        text = shown.wait_for(lambda t: "trial.gate" in t and "w1" in t, "workers and tasks")
        assert str(task_id) in text
        assert " top " in text
        shown.resize(120, 40)
        shown.wait_for(lambda t: len(t.splitlines()[0].rstrip()) > 80, "the larger picture")
        gate.touch()
        shown.wait_for(lambda t: "nothing runs" in t, "the end of the task")


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
        capture_output=True, text=True, timeout=400, check=True, stdin=subprocess.DEVNULL,
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
