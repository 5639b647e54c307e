"""Journals for tests: records, an open journal with the answers of its callback, and a disk without room."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from multigpu.v1 import task_pb2
from multigpu_master import main
from multigpu_master.errors import JournalError, JournalFullError
from multigpu_master.journal.protocol import Entry, SettleRecord, SubmitRecord
from multigpu_master.journal.sqlite.journal import SqliteJournal

from tests.waiting import until

SUCCEEDED, FAILED, CANCELLED, DEAD_LETTERED = 1, 2, 3, 5
SIZE_MAX_BYTES = 1 << 30
# Bodies of these tests are no messages.
CHECKS = main.CHECKS._replace(body=lambda _body: "")
SPEC = task_pb2.TaskSpec(kind="embed").SerializeToString()

Commit = tuple[Sequence[Entry], int, JournalError | None]


def submit(task_id: int, payload: Any = b"in", spec: bytes = SPEC) -> SubmitRecord:
    return SubmitRecord(
        task_id, f"request-{task_id}", spec, payload, f"key-{task_id % 3}", 1 + task_id % 5, 1000.0 + task_id
    )


def settle(task_id: int, body: Any = b"out", expire_time_s: float = 5000.0, **changes: Any) -> SettleRecord:
    values: dict[str, Any] = {
        "task_id": task_id, "request_id": f"request-{task_id}", "state": SUCCEEDED, "queue": "default", "kind": "embed",
        "model": "minilm", "worker_id": "host-0", "submit_time_s": 1000.0 + task_id, "settle_time_s": 2000.0,
        "expire_time_s": expire_time_s, "body": body, "dead": None,
    }  # fmt: skip
    return SettleRecord(**(values | changes))


def cancel(task_id: int) -> SettleRecord:
    return settle(task_id, b"cancelled", state=CANCELLED)


def dead(task_id: int, payload: bytes) -> SettleRecord:
    return settle(task_id, state=DEAD_LETTERED, dead=submit(task_id, payload))


@contextmanager
def opened(
    data_dir: Path, size_max_bytes: int = SIZE_MAX_BYTES, **options: Any
) -> Iterator[tuple[SqliteJournal, list[Commit]]]:
    commits: list[Commit] = []
    journal = SqliteJournal(data_dir, size_max_bytes=size_max_bytes, **options)
    list(journal.open(lambda *commit: commits.append(commit)).tasks)
    try:
        yield journal, commits
    finally:
        journal.close(20)


def answered(commits: list[Commit], entry: Entry) -> JournalError | str:
    """What became of an entry: "committed" or its error."""
    until(lambda: any(known is entry for group, _, _ in commits for known in group))
    return next(error or "committed" for group, _, error in commits if any(known is entry for known in group))


def commit(journal: SqliteJournal, commits: list[Commit], *entries: Entry) -> None:
    """Appends entries, of which the last must be committed."""
    journal.append(*entries)
    assert answered(commits, entries[-1]) == "committed"


def reject(journal: SqliteJournal, commits: list[Commit], entry: Entry) -> str:
    """Appends an entry, which must be rejected because there is no room. The error."""
    journal.append(entry)
    error = answered(commits, entry)
    assert isinstance(error, JournalFullError), error
    return str(error)


@contextmanager
def mounted(disk: Path, size: str) -> Iterator[Path]:
    """A file system of this size. Skips the test if it cannot be mounted."""
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)  # a process that was just killed may still hold it


def fill(disk: Path, name: str = "ballast") -> Path:
    """Fills the disk. Returns the file that takes the space."""
    ballast = disk / name
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return ballast
