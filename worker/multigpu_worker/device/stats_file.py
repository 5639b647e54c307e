"""A file of JSON lines, one at an interval: what the device is, how it is doing, and what the worker holds.

Several workers may write to one file. It is kept below a size: past it, it becomes FILE.1 in place of the one before. A
thread writes it, so that a slow disk stops nothing else; it is a daemon, so that a disk that hangs doesn't either.
"""

import dataclasses
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from multigpu_worker.device.sampler import Sample
from multigpu_worker.session.wire import Identity

# The file and FILE.1 together take twice that at most.
BYTES_MAX = 64 << 20
# While there is nothing to tell yet.
RETRY_S = 0.2
log = structlog.get_logger()


def record(identity: Identity, sample: Sample | None, leases: int) -> dict[str, Any] | None:
    """A line of the file. What the device doesn't tell is absent; names and units are those of multigpu.v1. None: it
    has told nothing yet.
    """
    if sample is None:
        return None
    line: dict[str, Any] = {
        "time": _instant(time.time_ns()),
        "worker_id": identity.worker_id,
        "host": identity.host,
        "pid": identity.pid,
        "device": _told(dataclasses.asdict(identity.device)),
        "leases": leases,
    }
    line["telemetry"] = {"sample_time": _instant(sample.time_ns), **_told(dataclasses.asdict(sample.telemetry))}
    if sample.gone:
        line["gone"] = sample.gone
    return line


def _told(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "", ())}


def _instant(instant_ns: int) -> str:
    return datetime.fromtimestamp(instant_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class StatsFile:
    """Appends what `collect` gives, as soon as it gives something and then every interval. `collect` is called on the
    thread.
    """

    def __init__(
        self, path: Path, interval_s: float, collect: Callable[[], dict[str, Any] | None], bytes_max: int = BYTES_MAX
    ) -> None:
        self._path = path
        self._interval_s = interval_s
        self._collect = collect
        self._bytes_max = bytes_max
        self._failed = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stats-file", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Ends the thread, if the disk lets it."""
        self._stopped.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            line = None
            try:
                line = self._collect()
                if line is not None:
                    append(self._path, json.dumps(line).encode() + b"\n", self._bytes_max)
                    self._failed = False
            except OSError as error:
                if not self._failed:  # once, until it works again
                    log.warning("stats_file can't be written", path=str(self._path), error=str(error))
                self._failed = True
            except Exception:
                log.exception("a line for stats_file could not be made")
            if self._stopped.wait(self._interval_s if line is not None else min(self._interval_s, RETRY_S)):
                return


def append(path: Path, line: bytes, bytes_max: int) -> None:
    """Appends to the file, or begins a new one if it would get too large. OSError: it can't be done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            size_bytes = os.fstat(file).st_size
            if not _is_at(path, file):  # another worker has just put it aside
                continue
            if size_bytes and size_bytes + len(line) > bytes_max:
                path.replace(path.with_name(path.name + ".1"))
                continue
            written = os.write(file, line)
            if written < len(line):  # no room: half a line is worse than none
                os.ftruncate(file, size_bytes)
                raise OSError(28, "No space left on device")
            return
        finally:
            os.close(file)


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
