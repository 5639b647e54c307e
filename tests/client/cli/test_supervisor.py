"""The supervisor of a local fleet with real processes: restarts, backoff, the order of a stop, no orphans."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from multigpu.cli.local import supervisor as module
from multigpu.cli.local.supervisor import Child, ChildSpec, Supervisor, describe_exit, restart_delay_s

from tests.waiting import until_async

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


class Record:
    """What a supervisor said."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.events: list[tuple[str, str]] = []
        self.supervisor = Supervisor(
            on_line=lambda name, text: self.lines.append((name, text)),
            on_event=lambda name, text: self.events.append((name, text)),
        )

    def add(self, name: str, code: str, *, rejections: Iterable[int] = (), **kwargs: Any) -> Child:
        argv = (sys.executable, "-c", textwrap.dedent(code))
        return self.supervisor.add(ChildSpec(name=name, argv=argv, rejections=frozenset(rejections), **kwargs))


@pytest.fixture
async def record() -> AsyncIterator[Record]:
    record = Record()
    yield record
    for child in record.supervisor._children:
        child.kill_group()
    await asyncio.sleep(0.05)  # their pidfds and pipes are closed by the loop


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_restart_delays_grow_from_nothing_to_the_limit() -> None:
    assert [restart_delay_s(n) for n in range(1, 9)] == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert restart_delay_s(100_000) == module.RESTART_DELAY_MAX_S


def test_exit_descriptions() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "killed by SIGKILL"


async def test_killed_child_is_started_again_at_once(record: Record) -> None:
    child = record.add("worker", SLEEPER)
    first = child.pid
    assert first is not None
    await until_async(lambda: ("worker", "up") in record.lines)
    os.kill(first, signal.SIGKILL)
    # In turns of the loop rather than in seconds, which others on this machine may take.
    turns = 0
    while child.pid in (None, first):
        turns += 1
        assert turns < 100, "a poll, or a first step of backoff"
        await asyncio.sleep(0.005)
    assert ("worker", "died: killed by SIGKILL; starting it again") in record.events
    await until_async(lambda: record.lines.count(("worker", "up")) == 2)


async def test_child_that_keeps_dying_is_started_ever_more_slowly(record: Record) -> None:
    child = record.add("worker", "raise SystemExit(1)")
    await until_async(lambda: child.deaths_in_a_row >= 4)
    deaths = [text for _, text in record.events if text.startswith("died")]
    assert deaths[:4] == [
        "died: exit code 1; starting it again",
        "died: exit code 1; starting it again in 0.1 s",
        "died: exit code 1; starting it again in 0.2 s",
        "died: exit code 1; starting it again in 0.4 s",
    ]
    await record.supervisor.stop(([child], 1.0))


async def test_a_fleet_that_was_never_ready_ends_with_a_child_that_dies_each_time(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESTART_DELAY_MAX_S", 0.05)
    child = record.add("master", "raise SystemExit('no module named multigpu_master')")
    async with asyncio.timeout(120):
        await record.supervisor.stop_asked.wait()
    assert record.supervisor.rejected is child
    assert child.pid is None
    assert record.events[-1] == ("master", "died 8 times in a row; its last lines above say why")
    # Once it was ready, whatever it is may pass.
    record.supervisor.proven = True
    worker = record.add("worker", "raise SystemExit(1)")
    await until_async(lambda: worker.deaths_in_a_row > module.HOPELESS_DEATHS)
    assert record.supervisor.rejected is child
    await record.supervisor.stop(([worker], 1.0))


async def test_long_life_resets_the_backoff(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEALTHY_AFTER_S", 0.0)
    child = record.add("worker", "raise SystemExit(1)")
    await until_async(lambda: len(record.events) > 8)
    assert child.deaths_in_a_row == 1
    assert not any(" in 0.1 s" in text for _, text in record.events)
    await record.supervisor.stop(([child], 1.0))


async def test_rejection_is_not_retried_and_ends_the_fleet(record: Record) -> None:
    child = record.add("master", "print('the journal is newer than I am'); raise SystemExit(3)", rejections={2, 3})
    async with asyncio.timeout(120):
        await record.supervisor.stop_asked.wait()
    assert record.supervisor.rejected is child
    assert child.pid is None
    assert child.deaths_in_a_row == 1
    await until_async(lambda: ("master", "the journal is newer than I am") in record.lines)


async def test_rejection_of_a_worker_is_passing_trouble_once_the_fleet_was_ready(record: Record) -> None:
    record.supervisor.proven = True
    worker = record.add("worker", "raise SystemExit(3)", rejections={3}, may_recover=True)
    await until_async(lambda: worker.deaths_in_a_row >= 2)
    assert record.supervisor.rejected is None
    master = record.add("master", "raise SystemExit(3)", rejections={3})
    await until_async(lambda: record.supervisor.rejected is master)
    await record.supervisor.stop(([worker], 1.0))


async def test_stop_ends_round_after_round_and_kills_children_that_do_not_comply(record: Record) -> None:
    polite = """
        import signal, sys, time
        def end(*_):
            time.sleep(0.3)
            print("drained", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("up", flush=True)
        while True: time.sleep(1)
    """
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    worker, stubborn = record.add("polite", polite), record.add("deaf", deaf)
    master = record.add("master", SLEEPER)
    await until_async(lambda: len(record.lines) == 3)
    await record.supervisor.stop(([worker, stubborn], 1.0), ([master], 1.0))
    assert record.events[-4:] == [
        ("polite", "stopped: exit code 0"),
        ("deaf", "did not stop within 1.0 s: killing it"),
        ("deaf", "stopped: killed by SIGKILL"),
        ("master", "stopped: killed by SIGTERM"),
    ]
    await until_async(lambda: ("polite", "drained") in record.lines)


async def test_stop_cancels_a_restart_that_waits(record: Record) -> None:
    child = record.add("worker", "raise SystemExit(1)")
    await until_async(lambda: child.deaths_in_a_row >= 4)
    assert child.restart_timer is not None
    await record.supervisor.stop(([child], 1.0))
    await asyncio.sleep(0.6)
    assert child.pid is None


async def test_probe_runs_once(record: Record) -> None:
    record.add("probe", "raise SystemExit(0)", once=True)
    await until_async(lambda: record.supervisor.finished_once)
    assert record.supervisor.finished_once == {"probe": 0}
    assert record.events == [("probe", "ended: exit code 0")]


async def test_lines_are_cut_whole_even_when_long_or_unfinished(record: Record) -> None:
    code = f"""
        import sys
        sys.stdout.buffer.write(b"caf\\xc3\\xa9\\n" + b"x" * {3 * module.LINE_BYTES_MAX} + b"\\nlast \\xff words")
    """
    record.add("probe", code, once=True)
    await until_async(lambda: record.lines and record.lines[-1][1].endswith("words"))
    assert record.lines[0] == ("probe", "café")
    assert sum(text.count("x") for _, text in record.lines) == 3 * module.LINE_BYTES_MAX
    assert record.lines[-1] == ("probe", "last \ufffd words")


async def test_missing_program_is_tried_again_not_fatal(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_DELAY_MAX_S", 0.05)
    child = record.supervisor.add(ChildSpec(name="worker", argv=("/nonexistent/program",)))
    await until_async(lambda: len(record.events) >= 2)
    assert all("can't be started" in text for _, text in record.events)
    await record.supervisor.stop(([child], 1.0))


def test_children_die_with_a_supervisor_that_is_killed() -> None:
    program = f"""
        import asyncio, sys
        from multigpu.cli.local.supervisor import ChildSpec, Supervisor
        async def main():
            supervisor = Supervisor(on_line=lambda *_: None, on_event=lambda *_: None)
            argv = (sys.executable, "-c", {SLEEPER!r})
            children = [supervisor.add(ChildSpec(name=str(i), argv=argv)) for i in range(3)]
            print(*(child.pid for child in children), flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """
    argv = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
        process.kill()
    give_up_at = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in pids)
