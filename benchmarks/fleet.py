"""A master and workers as processes, for the duration of a benchmark."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Self

from benchmarks.measure import children, cpu_seconds


class Fleet:
    """One master and CPU workers of one thread each. The journal is in the working directory: on a real disk."""

    def __init__(
        self, workers: int = 2, *, worker_flags: tuple[str, ...] = (), master_flags: tuple[str, ...] = ()
    ) -> None:
        self._count = workers
        self._worker_flags = worker_flags
        self._master_flags = master_flags
        self.dir = Path(tempfile.mkdtemp(prefix=".bench-", dir="."))
        self.workers: list[subprocess.Popen[bytes]] = []
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self._log = (self.dir / "log").open("wb")
        self.master = subprocess.Popen(
            [sys.executable, "-m", "multigpu_master.main", "--listen", "127.0.0.1:0", "--data-dir", str(self.dir /
            "data"),
             "--log-format", "json", *self._master_flags],
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.master.stderr is not None
        for line in self.master.stderr:
            if b"master ready" in line:
                self.address = json.loads(line)["address"]
                break
        else:
            raise RuntimeError("the master did not start")
        self.workers = [self.start_worker(i) for i in range(self._count)]
        self.wait_ready()
        return self

    def start_worker(self, number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "multigpu_worker.main", "--master", self.address, "--device", "cpu", "--worker-id",
             f"worker-{number}", "--threads", "1", "--log-format", "json", *self._worker_flags],
            stderr=self._log, stdout=self._log,
        )  # fmt: skip

    def wait_ready(self) -> None:
        """Returns when every worker has joined."""
        assert self.master.stderr is not None
        joined = 0
        for line in self.master.stderr:
            joined += b"worker joined" in line
            if joined == self._count:
                break
        os.set_blocking(self.master.stderr.fileno(), False)
        time.sleep(0.3)

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far of each room."""
        engines = [e for w in self.workers for e in children(w.pid)]
        return {
            "master": cpu_seconds(self.master.pid),
            "agents": sum(cpu_seconds(w.pid) for w in self.workers),
            "engines": sum(cpu_seconds(e) for e in engines),
            "client": time.process_time(),
        }

    def __exit__(self, *_: object) -> None:
        for process in (*self.workers, self.master):
            process.send_signal(signal.SIGTERM)
        for process in (*self.workers, self.master):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.master.stderr is not None:
            self.master.stderr.close()
        if self._log is not None:
            self._log.close()
        shutil.rmtree(self.dir, ignore_errors=True)
