"""Journals for tests: records, an open journal with the answers of its callback, and a disk without room."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multigpu_master.journal.protocol import Entry, JournalError, SettleRecord, SubmitRecord
from multigpu_master.journal.sqlite.journal import SqliteJournal

SUCCEEDED, FAILED, CANCELLED, DEAD_LETTERED = 1, 2, 3, 5
SIZE_MAX_BYTES = 1 << 30

Commit = tuple[Sequence[Entry], int, JournalError | None]


def submit(task_id: int, payload: Any = b"in", spec: bytes = b"spec") -> SubmitRecord:
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


def until(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s, "it did not become true"
        time.sleep(0.005)


def answered(commits: list[Commit], entry: Entry) -> JournalError | str:
    """What became of an entry: "committed" or its error."""
    until(lambda: any(known is entry for group, _, _ in commits for known in group))
    return next(error or "committed" for group, _, error in commits if any(known is entry for known in group))


def fill(disk: Path, name: str = "ballast") -> None:
    """Takes all the room there is."""
    with (disk / name).open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
