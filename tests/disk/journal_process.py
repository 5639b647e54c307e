"""Drives the real journal at random, in a separate process that loads the fault injector and that a trial kills.

    python -m tests.disk.journal_process ROOT SEED STEPS

It writes each appended entry and each acknowledgement to ROOT/events, one JSON line per write, so that the fault
injector's log shows which entries were acknowledged at each instant. Payloads and bodies are computed from their
numbers, so that the checker can recompute them. Some sizes are reduced, so that rare steps (a new segment, a
checkpoint, a sweep) occur often.
"""

import contextlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multigpu_master.errors import JournalError, JournalFullError
from multigpu_master.ids import first_id
from multigpu_master.journal.protocol import Entry, SettleRecord, SubmitRecord
from multigpu_master.journal.sqlite import connections
from multigpu_master.journal.sqlite import journal as journal_sqlite
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.journal.sqlite.segments import LARGE_BYTES

EXIT_FATAL = 7
EVENTS_NAME = "events"
SIZE_MAX_BYTES = 1 << 30
DEAD_LETTERED, SUCCEEDED = 5, 1
FOREVER_S = 1e12  # expiry of outcomes that are kept
EXPIRED_S = 1.0  # expiry of outcomes that may be deleted at once
LIVE_MAX = 300  # with more unsettled tasks, more are settled than submitted
_LARGE_SHARE = 0.02


def shrink() -> None:
    """Reduces sizes and delays in this process."""
    vars(journal_sqlite)["SEGMENTS_IN_RESERVE"] = 16  # so that a segment has 1 MiB
    vars(connections)["WAL_PAGES"] = 24
    vars(connections)["WAL_KEEP_BYTES"] = 1 << 20
    vars(journal_sqlite)["RETRY_S"] = 0.02
    vars(journal_sqlite)["SWEEP_AFTER_S"] = 0.05
    vars(journal_sqlite)["TICK_S"] = 0.02


def data_of(number: int) -> bytes:
    """The payload of the task, or the body of the settle, with this number."""
    rng = random.Random(number)
    size = LARGE_BYTES + rng.randrange(50_000) if rng.random() < _LARGE_SHARE else rng.randrange(3000)
    return rng.randbytes(size)


def submit_record(task_id: int) -> SubmitRecord:
    return SubmitRecord(task_id, f"request-{task_id}", b"spec", data_of(task_id), "", 1, 1000.0)


def settle_record(task_id: int, body: int, state: int, expire_time_s: float) -> SettleRecord:
    dead = submit_record(task_id) if state == DEAD_LETTERED else None
    return SettleRecord(
        task_id, f"request-{task_id}", state, "default", "echo", "", "w0", 1000.0, time.time(), expire_time_s,
        data_of(body), dead,
    )  # fmt: skip


class Driving:
    """See the module."""

    def __init__(self, root: Path, seed: int, steps: int) -> None:
        self._rng = random.Random(seed)
        self._steps = steps
        self._events_fd = os.open(root / EVENTS_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()  # of the next two
        self._numbers: dict[int, int] = {}  # id of an entry on its way -> its number
        self._rejected: set[int] = set()
        self._entries: dict[int, Entry] = {}
        self._next = 0
        self._fatal = threading.Event()
        self._journal = SqliteJournal(root / "data", size_max_bytes=SIZE_MAX_BYTES)

    def run(self) -> int:
        try:
            recovered = self._journal.open(self._on_commit)
        except JournalError as error:
            self._write_event({"fatal": str(error)})
            return EXIT_FATAL
        self._live = [task.task_id for task in recovered.tasks]
        self._next_id = first_id(recovered.epoch)
        letters = self._journal.list_dead_letters(queue="", before_task_id=0, limit=100_000)
        self._letters = [outcome.task_id for outcome in letters]
        self._write_event({
            "opened": recovered.epoch, "tasks": self._live, "last_cursor": recovered.last_cursor,
            "letters": sorted(self._letters), "settings": {k: v.decode() for k, v in recovered.settings.items()},
        })  # fmt: skip
        for _ in range(self._steps):
            if self._fatal.is_set():
                break
            try:
                self._step()
            except JournalError:
                break
            if self._rng.random() < 0.5:
                time.sleep(self._rng.random() * 0.003)
        if not self._fatal.wait(0.05):
            with contextlib.suppress(JournalError):  # the end of it may meet the fault
                self._journal.close(20)
        self._write_event({"ended": True})
        return EXIT_FATAL if self._fatal.is_set() else 0

    def _write_event(self, what: dict[str, Any]) -> None:
        os.write(self._events_fd, json.dumps(what).encode() + b"\n")

    def _step(self) -> None:
        rng = self._rng
        with self._lock:
            rejected, self._rejected = self._rejected, set()
        self._live = [task_id for task_id in self._live if task_id not in rejected]
        kind = rng.random()
        if kind < 0.05:
            self._append({"settings": {f"key-{rng.randrange(5)}": str(rng.random()) if rng.random() < 0.8 else None}})
        elif kind < 0.1 and self._letters:
            gone = self._letters.pop(rng.randrange(len(self._letters)))
            self._append({"deleted": [gone]})
        elif kind < (0.35 if len(self._live) > LIVE_MAX else 0.6) or not self._live:
            ids = [self._next_id + 1 + i for i in range(rng.randint(1, 20))]
            self._next_id = ids[-1]
            self._live += ids
            self._append({"submits": ids})
        else:
            settles = []
            for _ in range(min(rng.randint(1, 20), len(self._live))):
                task_id = self._live.pop(rng.randrange(len(self._live)))
                dead, brief = rng.random() < 0.1, rng.random() < 0.1
                state = DEAD_LETTERED if dead else SUCCEEDED
                settles.append([task_id, rng.getrandbits(60), state, EXPIRED_S if brief else FOREVER_S])
            self._append({"settles": settles})

    def _append(self, what: dict[str, Any]) -> None:
        entry = Entry(
            submits=[submit_record(i) for i in what.get("submits", ())],
            settles=[settle_record(*fields) for fields in what.get("settles", ())],
            settings={k: None if v is None else v.encode() for k, v in what.get("settings", {}).items()},
            deleted_dead_letters=what.get("deleted", ()),
        )
        number = self._next = self._next + 1
        with self._lock:
            self._numbers[id(entry)] = number
            self._entries[number] = entry
        self._write_event({"append": number, **what})
        self._journal.append(entry)

    def _on_commit(self, entries: Sequence[Entry], first_cursor: int, error: JournalError | None) -> None:
        with self._lock:
            numbers = [self._numbers.pop(id(entry)) for entry in entries]
            for number, entry in zip(numbers, entries, strict=True):
                del self._entries[number]
                if error is None:  # before, a deletion would be of an uncommitted dead letter
                    self._letters += [record.task_id for record in entry.settles if record.dead is not None]
                if isinstance(error, JournalFullError):
                    self._rejected.update(record.task_id for record in entry.submits)
        if error is None:
            # On a full disk the journal takes the settles of rejected tasks out of their entries: these are left.
            settled = [[record.task_id for record in entry.settles] for entry in entries]
            self._write_event({"committed": numbers, "settled": settled, "first_cursor": first_cursor})
        elif isinstance(error, JournalFullError):
            self._write_event({"rejected": numbers})
        else:
            self._write_event({"fatal": str(error)})
            self._fatal.set()


def main() -> int:
    root, seed, steps = sys.argv[1:]
    shrink()
    return Driving(Path(root), int(seed), int(steps)).run()


if __name__ == "__main__":
    sys.exit(main())
