"""Replaces the workers of this host one after the other: drain, end, wait for the successor, resume. For the deploy
script's --upgrade: `python -m multigpu.cli.local.roll HOST:PORT NOTES_DIR`.

systemd or `mgpuctl up` starts the successor with the code that is installed by then. NOTES_DIR has a file for each
worker that was drained and not resumed yet, so that an interrupted run can be repeated. An operator's earlier cordon or
drain stays.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from multigpu import AdminClient, UnavailableError
from multigpu.cli.admin import connection
from multigpu.cli.failures import Failure
from multigpu.fleet import Worker, WorkerState

DRAIN_TIMEOUT_S = 60.0
# Engines import their libraries, several at the same time.
RETURN_TIMEOUT_S = 300.0
RECONNECT_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.1


def roll(address: str, notes: Path) -> int:
    """Returns how many workers it replaced. Raises Failure if one did not come back."""
    notes.mkdir(parents=True, exist_ok=True)
    with connection(address) as admin:
        host = socket.gethostname()
        for name in sorted(path.name for path in notes.iterdir()):  # of an interrupted run
            _resume(admin, name, notes)
        workers = _workers_of(admin, host)
        end_s = time.monotonic() + RECONNECT_TIMEOUT_S  # the master may be new, and workers still connecting
        while any(w.state == WorkerState.LOST for w in workers) and time.monotonic() < end_s:
            time.sleep(POLL_INTERVAL_S)
            workers = _workers_of(admin, host)
        for number, worker in enumerate(workers, 1):
            print(f"    worker {number} of {len(workers)}: {worker.worker_id}", flush=True)  # noqa: T201  for the script's output
            _replace(admin, worker, notes)
    return len(workers)


def _workers_of(admin: AdminClient, host: str) -> list[Worker]:
    return [worker for worker in admin.list_workers() if worker.host == host and _runs(worker)]


def _replace(admin: AdminClient, worker: Worker, notes: Path) -> None:
    active = not worker.cordoned and worker.state == WorkerState.ACTIVE
    if active:
        (notes / worker.worker_id).touch()
        admin.drain_worker(worker.worker_id, grace_s=DRAIN_TIMEOUT_S)
        _wait(admin, worker.worker_id, lambda found: not found.leases, DRAIN_TIMEOUT_S + 5, "hand back its tasks")
    _terminate(worker)
    _wait(
        admin,
        worker.worker_id,
        lambda found: found.pid != worker.pid and found.state != WorkerState.LOST,
        RETURN_TIMEOUT_S,
        "come back",
    )
    if active:
        _resume(admin, worker.worker_id, notes)


def _terminate(worker: Worker) -> None:
    """Sends SIGTERM to the worker. Nothing if it has ended: its successor already has the installed code."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(worker.pid)
        try:
            # Minutes have passed since the worker was listed, and its pid may be another process's.
            if _runs(worker):
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        finally:
            os.close(pidfd)


def _resume(admin: AdminClient, worker_id: str, notes: Path) -> None:
    if any(worker.worker_id == worker_id for worker in admin.list_workers()):
        admin.uncordon_worker(worker_id)
    (notes / worker_id).unlink(missing_ok=True)


def _wait(admin: AdminClient, worker_id: str, there: Callable[[Worker], bool], timeout_s: float, what: str) -> None:
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            if any(there(worker) for worker in admin.list_workers() if worker.worker_id == worker_id):
                return
        except UnavailableError:  # it may be starting
            if time.monotonic() > end_s:
                raise
        if time.monotonic() > end_s:
            raise Failure(
                f"worker {worker_id} did not {what} within {timeout_s:g} s: see its log, then run --upgrade again"
            )
        time.sleep(POLL_INTERVAL_S)


def _runs(worker: Worker) -> bool:
    """Whether the pid is a worker on this host: a container's pid is another process here."""
    try:
        words = Path(f"/proc/{worker.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(b"multigpu_worker" in word or word.endswith(b"mgpu-worker") for word in words)


def main() -> None:
    try:
        print(f"    {roll(sys.argv[1], Path(sys.argv[2]))} workers replaced")  # noqa: T201  as above
    except Failure as failure:
        failure.show()
        sys.exit(failure.exit_code)


if __name__ == "__main__":
    main()
