"""Replacing the workers of a host: which process gets the signal."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multigpu.cli.local import roll
from multigpu.fleet import Worker
from multigpu.v1 import admin_service_pb2 as admin


def worker(pid: int) -> Worker:
    return Worker.of(admin.Worker(worker_id="w1", pid=pid, state=admin.WORKER_STATE_ACTIVE))


class Admin:
    """An AdminClient of a master whose only worker has come back under another pid when it is drained."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def list_workers(self) -> list[Worker]:
        return [worker(1)]

    def drain_worker(self, worker_id: str, grace_s: float) -> None:
        self.calls.append(f"drain {worker_id}")

    def uncordon_worker(self, worker_id: str) -> None:
        self.calls.append(f"uncordon {worker_id}")


@contextmanager
def process(name: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process with this word in its command line, which ends with 0 when its stdin ends."""
    command = ["/bin/sh", "-c", "echo begun; read line; exit 0", name]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"begun\n"  # before, /proc may have no command line
        yield child
    finally:
        child.kill()
        child.communicate()


def replaced(pid: int, notes: Path) -> list[str]:
    admin: Any = Admin()
    roll._replace(admin, worker(pid), notes)
    assert [*notes.iterdir()] == []
    calls: list[str] = admin.calls
    return calls


def test_a_worker_gets_sigterm_once_it_is_drained(tmp_path: Path) -> None:
    with process("/usr/bin/mgpu-worker") as child:
        assert replaced(child.pid, tmp_path) == ["drain w1", "uncordon w1"]
        child.communicate()
        assert child.returncode == -signal.SIGTERM


def test_another_process_with_the_pid_of_a_worker_that_has_ended_gets_no_signal(tmp_path: Path) -> None:
    """It was checked when the workers were listed, minutes before the signal."""
    with process("another program") as child:
        assert replaced(child.pid, tmp_path) == ["drain w1", "uncordon w1"]
        child.communicate()
        assert child.returncode == 0


def test_a_worker_that_has_ended_and_come_back_is_resumed(tmp_path: Path) -> None:
    with process("/usr/bin/mgpu-worker") as child:
        child.communicate()
    assert replaced(child.pid, tmp_path) == ["drain w1", "uncordon w1"]
