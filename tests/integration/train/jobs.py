"""The processes and files of training jobs that run scripts/steps.py."""

import contextlib
import json
import os
import signal
from pathlib import Path

from tests.fleet import Fleet, until

VICTIMS = ("rank 0", "rank 1", "engine", "worker", "host", "master")


def job_folder(fleet: Fleet, name: str) -> Path:
    return fleet.folder / "train" / "jobs" / name


def weights(fleet: Fleet, name: str) -> list[float]:
    tensors = json.loads((job_folder(fleet, name) / "weights.json").read_text())
    return [value for tensor in tensors for value in tensor]


def pid_of(fleet: Fleet, name: str, rank: int) -> int:
    file = job_folder(fleet, name) / f"pid-{rank}"
    until(lambda: file.exists() and file.read_text() != "", 120)
    return int(file.read_text())


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def worker_of(fleet: Fleet, rank_pid: int) -> str:
    agent = parent_of(parent_of(rank_pid))
    return next(name for name, worker in fleet.workers.items() if worker.pid == agent)


def kill(fleet: Fleet, name: str, victim: str) -> None:
    """kill -9 of one of VICTIMS of a running job. A worker and the master are started again."""
    pid = pid_of(fleet, name, 1)
    if victim == "master":
        fleet.master.kill()
        fleet.start_master()
    elif victim in ("worker", "host"):
        worker = worker_of(fleet, pid)
        below = [parent_of(pid), pid] if victim == "host" else []
        fleet.workers[worker].kill()
        for process in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        fleet.start_worker(worker)
    else:
        victims = {"rank 0": pid_of(fleet, name, 0), "rank 1": pid, "engine": parent_of(pid)}
        os.kill(victims[victim], signal.SIGKILL)
