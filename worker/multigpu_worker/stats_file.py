"""Appends a JSON line about the device and the worker to a file at an interval.

Several workers may share the file. At its size limit it is renamed to FILE.1, which replaces the previous FILE.1. A
daemon thread writes the file, so that a slow or hanging disk stops nothing else.
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

# Size limit of FILE and of FILE.1.
BYTES_MAX = 64 << 20
# Interval until there is a first sample.
RETRY_S = 0.2
log = structlog.get_logger()


def record(identity: Identity, sample: Sample | None, leases: int) -> dict[str, Any] | None:
    """One line, without the values that the device does not report. Names and units as in multigpu.v1.

    None: there is no sample yet.
    """
    if sample is None:
        return None
    line: dict[str, Any] = {
        "time": _time(time.time_ns()),
        "worker_id": identity.worker_id,
        "host": identity.host,
        "pid": identity.pid,
        "device": _present(dataclasses.asdict(identity.device)),
        "leases": leases,
    }
    line["telemetry"] = {"sample_time": _time(sample.time_ns), **_present(dataclasses.asdict(sample.telemetry))}
    if sample.gone:
        line["gone"] = sample.gone
    return line


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "", ())}


def _time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class StatsFile:
    """`collect` returns the next line, or None if there is none yet. It is called on the file's thread."""

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
        """End the thread. Waits at most `timeout_s`: the disk may hang."""
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
                if not self._failed:  # log it once, until it works again
                    log.warning("stats_file can't be written", path=str(self._path), error=str(error))
                self._failed = True
            except Exception:
                log.exception("a line for stats_file could not be made")
            if self._stopped.wait(self._interval_s if line is not None else min(self._interval_s, RETRY_S)):
                return


def append(path: Path, line: bytes, bytes_max: int) -> None:
    """Append a line. If the file would exceed `bytes_max`, rename it and begin a new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            size_bytes = os.fstat(file).st_size
            if not _is_at(path, file):  # another worker has just renamed it
                continue
            if size_bytes and size_bytes + len(line) > bytes_max:
                path.replace(path.with_name(path.name + ".1"))
                continue
            written = os.write(file, line)
            if written < len(line):  # the disk is full: remove the incomplete line
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
