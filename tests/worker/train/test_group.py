"""The processes that a script has started end with it, and with its engine."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from multigpu_worker.engines.train import launch

from tests.waiting import until

pytest.importorskip("torch", reason="the extra `worker` is not installed")

# Starts two processes: one needs half a second to end, the other does not end by SIGTERM.
SCRIPT = """
import signal, subprocess, sys, time
tidy = '''
import pathlib, signal, sys, time
def end(*_):
    time.sleep(0.5)
    pathlib.Path("tidied").touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(120)
'''
deaf = tidy.replace("end)", "signal.SIG_IGN)")
children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for code in (tidy, deaf)]
for child in children:
    child.stdout.readline()
with open("pids.new", "w") as file:
    file.write(" ".join(str(child.pid) for child in children))
__import__("os").rename("pids.new", "pids")
if "fail" in sys.argv:
    sys.exit(3)
time.sleep(120)
"""
# An engine that runs the script. The task is cancelled as soon as the script has started its processes, if so asked.
ENGINE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from multigpu import _ranks
from multigpu._kinds.training import Job
from multigpu_worker.engines.train.engine import Rank
from multigpu_worker.engines.train.errors import ScriptError

folder, argument = Path(sys.argv[1]), sys.argv[2]

class Reporter:
    def cancelled(self, item):
        return argument == "stop" and (folder / "pids").exists()
    def __getattr__(self, name):
        return lambda *_, **__: None

item = SimpleNamespace(lease_id=1, task_id=1, attempt=1, partials_received=0, partials=(), payload=b"")
job = Job(name="j", script="script.py", args=[argument])
try:
    Rank(job, SimpleNamespace(train_dir=str(folder), device="cpu", threads=1), _ranks.ALONE, item, Reporter()).run()
except ScriptError as error:
    print(error.error_type, error)
"""


@pytest.fixture
def engine(tmp_path: Path) -> Callable[[str], "subprocess.Popen[str]"]:
    (tmp_path / "script.py").write_text(SCRIPT)

    def engine(argument: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", ENGINE, str(tmp_path), argument]
        return subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)

    return engine


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def guards(folder: Path) -> list[int]:
    """The processes that would kill the script's group (launch.py)."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = file.read_bytes().split(b"\0")
            if os.fsencode(launch.__file__) in words and os.fsencode(folder) in words:
                found.append(int(file.parent.name))
    return found


def started(folder: Path) -> list[int]:
    """The pids of what the script has started."""
    return [int(pid) for pid in (folder / "pids").read_text().split()]


@pytest.mark.parametrize(
    ("argument", "says"), [("fail", "ScriptFailed rank 0 ended with exit code 3"), ("stop", "")]
)  # fmt: skip
def test_the_processes_of_a_script_get_time_to_end_and_are_gone_when_its_task_ends(
    engine: Callable[[str], "subprocess.Popen[str]"], tmp_path: Path, argument: str, says: str
) -> None:
    with engine(argument) as process:
        output, _ = process.communicate(timeout=120)
    left = [pid for pid in started(tmp_path) if runs(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert output.startswith(says), output
    assert process.returncode == 0
    assert (tmp_path / "tidied").exists()
    until(lambda: not guards(tmp_path), what="the end of the guard")


def test_the_processes_of_a_script_are_killed_when_its_engine_dies(
    engine: Callable[[str], "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    end_s = time.monotonic() + 120
    with engine("wait") as process:
        while not (tmp_path / "pids").exists() and time.monotonic() < end_s:
            time.sleep(0.05)
        assert guards(tmp_path), "there is one before the script begins"
        os.killpg(process.pid, signal.SIGKILL)
    pids = started(tmp_path)
    end_s = time.monotonic() + 10
    while any(map(runs, pids)) and time.monotonic() < end_s:
        time.sleep(0.05)
    left = [pid for pid in pids if runs(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
