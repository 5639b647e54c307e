"""A real local fleet for tests: `mgpuctl up` as a process, and mgpuctl to talk to it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MGPUCTL = (sys.executable, "-m", "multigpu.cli")


class Up:
    """A running `mgpuctl up`."""

    def __init__(self, folder: Path, *args: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.ready_file = folder / "ready"
        self.log = folder / "log"
        self.address = ""
        argv = [*MGPUCTL, "up", "--listen", "127.0.0.1:0", "--data-dir", str(folder / "data"), "--device", "cpu"]
        argv += ["--ready-file", str(self.ready_file), *args]
        argv += ["--grpc", "127.0.0.1:0"] if "--http" in args else ["--no-gateway"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **(env or {})}, cwd=folder
            )

    def ready(self) -> str:
        """Waits for the ready line; returns the master's address."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready: master "), self.log.read_text()
        assert self.ready_file.read_text() == line
        return line.split()[2].rstrip(",")

    def children(self) -> dict[str, int]:
        """Module of each direct child -> pid; workers by their id."""
        found = {}
        for pid in children_of(self.process.pid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
            if "--worker-id" in words:
                found[words[words.index("--worker-id") + 1]] = pid
            elif len(words) > 2:
                found[words[2]] = pid
        return found

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


@contextmanager
def running(folder: Path, *args: str, env: dict[str, str] | None = None) -> Iterator[Up]:
    """A fleet that is ready, and that stops without an error at the end of the block."""
    up = Up(folder, *args, env=env)
    try:
        up.address = up.ready()
        yield up
    finally:
        status = up.stop()
    assert status == 0
    assert not up.ready_file.exists()


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def mgpuctl(address: str, *args: str, **kwargs: Any) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "MGPU_MASTER": address}
    return subprocess.run(
        [*MGPUCTL, *args], capture_output=True, text=True, timeout=400, check=False, env=env, **kwargs
    )


def ok(address: str, *args: str, **kwargs: Any) -> str:
    done = mgpuctl(address, *args, **kwargs)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)
