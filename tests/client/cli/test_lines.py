"""`mgpuctl submit` that ends early, and the command that continues it, with a real fleet and real handlers."""

import json
import os
import pty
import shlex
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.cli.fleet_up import MGPUCTL, mgpuctl, ok, running
from tests.waiting import until

# Lines above 20 wait for the file `gate`, and multiples of 7 fail until the file `repaired` exists.
HANDLERS = """
import time
from pathlib import Path
import multigpu

def append(file, line):
    with file.open("ab", buffering=0) as opened:
        opened.write(line + b"\\n")

@multigpu.handler("lines.count")
def count(line: bytes):
    ctx = multigpu.context()
    folder = Path(ctx.parameters["folder"])
    append(folder / "begun", line)
    while int(line) > 20 and not (folder / "gate").exists():
        if ctx.cancelled:
            append(folder / "stopped", line)
            return b""
        time.sleep(0.01)
    append(folder / "ran", line)
    if int(line) % 7 == 0 and not (folder / "repaired").exists():
        raise ValueError("a multiple of 7")
    return line
"""
TEXT = "".join(f"{number}\n" for number in range(1, 41))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "lines_handlers.py").write_text(HANDLERS)
    with running(folder, "--workers", "2", "--handlers", "lines_handlers") as up:
        yield up.address


def count_command(folder: Path, *args: str) -> list[str]:
    (folder / "lines").write_text(TEXT)
    argv = ["submit", "--kind", "lines.count", "--lines", str(folder / "lines"), "--wait", "--attempts-max", "1"]
    return [*argv, "--parameter", f"folder={folder}", "--queue", folder.name, *args]


def runs(folder: Path, name: str = "ran") -> Counter[str]:
    file = folder / name
    return Counter(file.read_text().split()) if file.exists() else Counter()


def continuing(stderr: str) -> list[str]:
    """The arguments of the command that the message names."""
    (line,) = (line for line in stderr.splitlines() if "this continues: mgpuctl " in line)
    return shlex.split(line.partition("this continues: mgpuctl ")[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=str
)
def test_lines_that_are_interrupted_continue_and_run_once(
    address: str, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    argv = count_command(tmp_path)
    (tmp_path / "repaired").touch()
    if number == signal.SIGKILL:  # it can print nothing: the ID must be known
        argv += ["--request-id", tmp_path.name]
    env = {**os.environ, "MGPU_MASTER": address}
    out = tmp_path / "out"
    with (
        out.open("wb") as stdout,
        subprocess.Popen([*MGPUCTL, *argv], env=env, stdout=stdout, stderr=subprocess.PIPE, text=True) as process,
    ):
        until(lambda: len(out.read_text().splitlines()) == 20 and runs(tmp_path, "begun").total() > 20)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=400)
    assert process.returncode == status
    if number != signal.SIGKILL:
        assert "Traceback" not in stderr
        assert "40 lines read, 20 results printed; pending tasks are cancelled if the master answers" in stderr
        argv = continuing(stderr)
        until(lambda: runs(tmp_path, "begun") == runs(tmp_path) + runs(tmp_path, "stopped"))
    (tmp_path / "gate").touch()
    assert ok(address, *argv) == TEXT
    assert runs(tmp_path) == Counter(TEXT.split())


@pytest.mark.slow
def test_lines_continue_on_a_fleet_that_was_stopped_and_started_again(tmp_path: Path) -> None:
    (tmp_path / "lines_handlers.py").write_text(HANDLERS)
    (tmp_path / "repaired").touch()
    argv = count_command(tmp_path)
    flags = ("--workers", "1", "--handlers", "lines_handlers", "--stop-timeout", "1")
    out = tmp_path / "out"
    with out.open("wb") as stdout:
        with running(tmp_path, *flags) as up:
            env = {**os.environ, "MGPU_MASTER": up.address}
            process = subprocess.Popen([*MGPUCTL, *argv], env=env, stdout=stdout, stderr=subprocess.PIPE, text=True)
            until(lambda: len(out.read_text().splitlines()) == 20 and runs(tmp_path, "begun").total() > 20)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=400)
    assert process.returncode == 130
    (tmp_path / "gate").touch()
    with running(tmp_path, *flags) as up:
        assert ok(up.address, *continuing(stderr)) == TEXT
    assert runs(tmp_path) == Counter(TEXT.split())


def test_a_single_task_that_is_interrupted_is_said_to_be_cancelled(address: str, tmp_path: Path) -> None:
    argv = ["submit", "--kind", "lines.count", "--payload", "21", "--wait", "--parameter", f"folder={tmp_path}"]
    env = {**os.environ, "MGPU_MASTER": address}
    with subprocess.Popen([*MGPUCTL, *argv], env=env, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: runs(tmp_path, "begun").total() == 1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=400)
    assert process.returncode == 130
    assert "ended early: the task is cancelled if the master answers" in stderr
    until(lambda: runs(tmp_path, "stopped") == Counter(["21"]))


def test_lines_on_standard_input_continue_without_wait(address: str) -> None:
    lines = [f"line {number}" for number in range(2000)]
    argv = ["submit", "--kind", "echo", "--lines", "-", "--queue", "piped", "--json"]
    env = {**os.environ, "MGPU_MASTER": address}
    pipe = subprocess.PIPE
    with subprocess.Popen([*MGPUCTL, *argv], env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n".join(lines[:1500]) + "\n")
        process.stdin.flush()
        printed = [process.stdout.readline() for _ in range(1000)]
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=400)
    assert (process.returncode, rest) == (130, "")
    assert "1,000 lines submitted, and their tasks go on" in stderr
    again = ok(address, *continuing(stderr), input="\n".join(lines)).splitlines(keepends=True)
    assert again[:1000] == printed
    assert len({json.loads(line)["task_id"] for line in again}) == 2000
    counted = ("tasks", "count", "--queue", "piped", "--json")
    until(lambda: json.loads(ok(address, *counted))["succeeded"] == 2000)
    assert json.loads(ok(address, *counted))["cancelled"] == 0


def test_retry_failed_runs_the_failed_lines_again_and_no_others(address: str, tmp_path: Path) -> None:
    argv = count_command(tmp_path, "--request-id", tmp_path.name)
    (tmp_path / "gate").touch()
    failed = mgpuctl(address, *argv)
    assert failed.returncode == 5
    assert "5 of 40 tasks did not succeed" in failed.stderr
    assert "ended early" not in failed.stderr
    assert f"this runs them again: {shlex.join(['mgpuctl', *argv, '--retry-failed'])}" in failed.stderr
    (tmp_path / "repaired").touch()
    assert mgpuctl(address, *argv).stdout == failed.stdout
    assert runs(tmp_path) == Counter(TEXT.split())
    changed = TEXT.replace("\n7\n", "\n107\n")  # a line that failed may change
    (tmp_path / "lines").write_text(changed)
    assert ok(address, *argv, "--retry-failed") == changed
    assert runs(tmp_path) == Counter(TEXT.split()) + Counter(["107", "14", "21", "28", "35"])


def test_a_line_that_changed_is_rejected(address: str, tmp_path: Path) -> None:
    argv = ["submit", "--kind", "echo", "--lines", str(tmp_path / "lines"), "--request-id", "changed", "--wait"]
    (tmp_path / "lines").write_text("one\ntwo\n")
    assert ok(address, *argv) == "one\ntwo\n"
    (tmp_path / "lines").write_text("one\nanother\n")
    changed = mgpuctl(address, *argv)
    assert changed.returncode == 1
    assert "--request-id 'changed:2' is that of task" in changed.stderr
    assert "which has another payload" in changed.stderr
    assert "this continues" not in changed.stderr


def test_lines_that_were_all_rejected_are_no_early_end(address: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("one\ntwo\n")
    rejected = mgpuctl(address, "submit", "--kind", "no.such.kind", "--lines", str(tmp_path / "lines"))
    assert rejected.returncode == 1
    assert "2 of 2 tasks were rejected" in rejected.stderr
    assert "ended early" not in rejected.stderr


def test_a_line_that_is_no_json_can_be_repaired_and_the_run_continued(address: str, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("1\n2\nthree\n")
    argv = ["submit", "--kind", "echo", "--lines", str(file), "--parse-json", "--wait", "--queue", "json"]
    wrong = mgpuctl(address, *argv)
    assert wrong.returncode == 1
    file.write_text("1\n2\n3\n")
    assert ok(address, *continuing(wrong.stderr)) == "1\n2\n3\n"


def test_progress_of_lines_is_a_bar_on_stderr_and_stdout_stays_json(address: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("x\n" * 3000)
    leader, follower = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        while data := os.read(leader, 65536):
            shown.append(data)
            if b"the end" in data:
                return

    reader = threading.Thread(target=read)
    reader.start()
    argv = [*MGPUCTL, "submit", "--kind", "echo", "--lines", str(tmp_path / "lines"), "--wait", "--json"]
    env = {**os.environ, "MGPU_MASTER": address, "TERM": "xterm", "COLUMNS": "100"}
    try:
        done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=follower, timeout=400, check=True)
        os.write(follower, b"the end")
        reader.join(20)
    finally:
        os.close(follower)
        os.close(leader)
    assert [json.loads(line)["result"] for line in done.stdout.splitlines()] == ["x"] * 3000
    assert b"3,000 of 3,000 lines" in b"".join(shown)
    assert b"task_id" not in b"".join(shown)
