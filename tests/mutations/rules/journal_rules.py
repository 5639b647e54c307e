"""The journal against a slow and obvious model: any order of entries, small and large, on a disk that fills up and has
room again, closed and opened, or copied as it lies.

The journal is the real one, on real files. Whatever it says is committed must be there for a reader of its own at that
moment, and in a copy of the files: that is what a process killed now would leave behind.
"""

import random
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multigpu_master.errors import JournalError
from multigpu_master.journal.protocol import Entry, SettleRecord, SubmitRecord
from multigpu_master.journal.sqlite import failures
from multigpu_master.journal.sqlite import journal as journal_sqlite
from multigpu_master.journal.sqlite import room as journal_room
from multigpu_master.journal.sqlite import schema as journal_schema
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.journal.sqlite.room import is_small_or_frees
from multigpu_master.journal.sqlite.schema import PAGE_BYTES
from multigpu_master.journal.sqlite.segments import LARGE_BYTES

from tests.waiting import until

SIZES = (0, 100, LARGE_BYTES - 1, LARGE_BYTES)
TIMEOUT_S = 20.0
TRANSACTION_BYTES = 16 << 10  # that any transaction takes


class SmallDisk(SqliteJournal):
    """The journal on a simulated disk: its transactions fail where SQLite would say that the disk is full.

    A transaction that is let through must not fill more than the disk, from which nothing could be deleted then. So
    each record counts as a page, in the log and in the database.
    """

    def _commit(self, batch: Sequence[Entry], bytes_total: int) -> None:
        records = sum(len(entry.submits) + len(entry.settles) for entry in batch)
        if journal_room.free_bytes(self._data_dir) < 2 * (bytes_total + records * PAGE_BYTES) + TRANSACTION_BYTES:
            self._writer.execute("BEGIN IMMEDIATE")  # it fails in the middle
            raise failures.full_error(self._path)
        super()._commit(batch, bytes_total)


def set_disk_bytes(size_bytes: int) -> None:
    """All journals are on disks of this size from now on, each on its own."""
    journal_room.free_bytes = lambda path: max(0, size_bytes - _files_bytes(path))


class Model:
    """What must be on the disk."""

    def __init__(self) -> None:
        self.tasks: dict[int, SubmitRecord] = {}
        self.outcomes: list[SettleRecord] = []  # in order of their cursors
        self.dead: dict[int, SubmitRecord] = {}
        self.settings: dict[str, bytes] = {}

    def apply(self, entry: Entry) -> None:
        for row in entry.submits:
            self.tasks[row.task_id] = row
        for task_id in entry.deleted_dead_letters:
            self.dead.pop(task_id, None)
        for settle in entry.settles:
            self.tasks.pop(settle.task_id, None)
            self.outcomes.append(settle)
            if settle.dead is not None:
                self.dead[settle.task_id] = settle.dead
        for key, value in entry.settings.items():
            self.settings[key] = value or b""
            if value is None:
                del self.settings[key]


class Life:
    """One opening of the journal, whose commits are checked on the journal's thread when it acknowledges them."""

    def __init__(self, directory: Path, model: Model, rng: random.Random, size_max_bytes: int) -> None:
        self.directory, self.model, self.rng = directory, model, rng
        self.wrong: list[str] = []
        self.closing = False
        self.rejected: set[int] = set()  # tasks, since the disk was full
        self.acked: set[int] = set()  # entries, by identity
        self.wanted: list[Entry] = []
        self.changed = threading.Condition()
        self.journal = SmallDisk(directory, now=lambda: 3000.0, size_max_bytes=size_max_bytes)
        recovered = self.journal.open(self.on_commit)
        tasks = {record.task_id: record for record in recovered.tasks}
        assert tasks == model.tasks, f"tasks recovered: {sorted(tasks)}, expected: {sorted(model.tasks)}"
        assert recovered.settings == model.settings, "settings are other than they were"
        assert recovered.last_cursor == len(model.outcomes), "the last cursor is another"

    def on_commit(self, entries: Sequence[Entry], first_cursor: int, error: JournalError | None) -> None:
        try:
            self._check(entries, first_cursor, error)
        except Exception as problem:
            self.wrong.append(f"{type(problem).__name__}: {problem}")
        with self.changed:
            self.acked.update(id(entry) for entry in entries)
            self.changed.notify_all()

    def _check(self, entries: Sequence[Entry], first_cursor: int, error: JournalError | None) -> None:
        order = [e for e in self.wanted if any(e is entry for entry in entries)]
        # What empties a full journal goes ahead of the rest.
        acked, wanted = ([id(e) for e in some if not is_small_or_frees(e)] for some in (entries, order))
        assert acked == wanted, "entries are acknowledged out of order"
        assert not [e for e in entries if id(e) in self.acked], "an entry is acknowledged twice"
        if error is not None:
            assert self.closing or all(entry.submits for entry in entries), "what is not a submit was rejected"
            self.rejected.update(record.task_id for entry in entries for record in entry.submits)
            return
        settles = [s for entry in entries for s in entry.settles]
        # Later on an outcome may come of a task that the master did not know to be rejected; that does no harm.
        assert not [s for s in settles if s.task_id in self.rejected], "a rejected task was settled"
        self.rejected.clear()
        assert not settles or first_cursor == len(self.model.outcomes) + 1, "the cursors have a gap"
        for entry in entries:
            self.model.apply(entry)
        if self.rng.random() < 0.3:
            self._compare(self.directory)
        elif self.rng.random() < 0.2:
            with tempfile.TemporaryDirectory(dir=self.directory.parent) as copy:
                shutil.copytree(self.directory, copy, dirs_exist_ok=True)
                self._compare(Path(copy))

    def _compare(self, directory: Path) -> None:
        reader = sqlite3.connect(directory / journal_schema.DATABASE_NAME, isolation_level=None)
        try:
            rows = reader.execute("SELECT task_id FROM task ORDER BY task_id").fetchall()
            assert [i for (i,) in rows] == sorted(self.model.tasks), "an acknowledged commit is not on the disk"
            rows = reader.execute("SELECT cursor, task_id, state FROM outcome ORDER BY cursor").fetchall()
            expected = [(at, s.task_id, s.state) for at, s in enumerate(self.model.outcomes, 1)]
            assert rows == expected, "outcomes are missing, or not in order"
            dead = [i for (i,) in reader.execute("SELECT task_id FROM dead_letter ORDER BY task_id")]
            assert dead == sorted(self.model.dead), "dead letters are others"
        finally:
            reader.close()

    def append(self, *entries: Entry) -> None:
        self.wanted += entries
        self.journal.append(*entries)

    def make_room(self) -> None:
        """The disk grows, and the journal must find out by itself."""
        self.journal._room.size_max_bytes = 1 << 30
        set_disk_bytes(1 << 30)
        until(lambda: self.journal.writable, TIMEOUT_S, "the journal to accept tasks")

    def empty(self) -> None:
        """Without room for tasks, dead letters can be deleted."""
        if self.journal.writable:
            return
        letters = sorted(self.model.dead)
        self.append(entry := Entry(deleted_dead_letters=letters))
        with self.changed:
            assert self.changed.wait_for(lambda: id(entry) in self.acked, TIMEOUT_S), "a full disk can't be emptied"
        assert not set(letters) & self.model.dead.keys(), "what empties a full disk was not written"

    def end(self) -> None:
        """Closes it, which writes all there is, and looks once more."""
        self.closing = True  # what has found no room by then is not written
        self.journal.close(TIMEOUT_S)
        with self.changed:
            missing = [e for e in self.wanted if id(e) not in self.acked]
        assert not missing, f"{len(missing)} entries were never acknowledged"
        assert not self.wrong, self.wrong[0]
        self._compare(self.directory)


class Writer:
    """Makes entries as the master would: outcomes of tasks that were submitted, once each."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.open, self.last = rng, list[int](), 0

    def entry(self, dead: dict[int, SubmitRecord]) -> Entry:
        rng = self.rng
        kind = rng.randrange(6)
        if kind < 3 or (not self.open and kind < 5):
            ids = [self.last + i for i in range(1, 1 + rng.choice((1, 3, 20)))]
            self.last = ids[-1]
            self.open += ids
            return Entry(submits=[self._submit(i) for i in ids])
        if kind < 5:
            ids = [self.open.pop(rng.randrange(len(self.open))) for _ in range(min(len(self.open), rng.choice((1, 7))))]
            return Entry(settles=[self._settle(i) for i in ids])
        letters = rng.sample(sorted(dead), min(len(dead), 2))
        return Entry(settings={f"k{rng.randrange(3)}": rng.choice((b"v", b"w", None))}, deleted_dead_letters=letters)

    def _submit(self, i: int) -> SubmitRecord:
        return SubmitRecord(
            i, f"request-{i}", b"spec", bytes([i % 251]) * self.rng.choice(SIZES), f"k{i % 3}", 1 + i % 5, 1.0
        )

    def _settle(self, i: int) -> SettleRecord:
        dead = self._submit(i) if self.rng.random() < 0.2 else None
        state = 5 if dead else 3 if self.rng.random() < 0.3 else 1
        values: dict[str, Any] = {
            "task_id": i, "request_id": f"request-{i}", "state": state, "queue": "q", "kind": "k",
            "model": "", "worker_id": "w", "submit_time_s": 1.0, "settle_time_s": 2.0, "expire_time_s": 9e9,
            "body": b"b" * self.rng.choice(SIZES), "dead": dead,
        }  # fmt: skip
        return SettleRecord(**values)


def check(seed: int) -> None:
    """AssertionError: a rule is broken."""
    rng = random.Random(seed)
    model, writer = Model(), Writer(rng)
    journal_sqlite.RETRY_S = journal_sqlite.TICK_S = 0.02
    journal_sqlite.SWEEP_AFTER_S = 0.0
    journal_room.TRANSACTION_RECORDS = rng.choice((1, 10, 8192))
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "data"
        for _ in range(rng.choice((1, 2, 3))):
            size_max_bytes = 1 << 30 if rng.random() < 0.6 else _size(directory) + rng.choice((0, 200_000))
            # The disk ends where the limit does, or there is room beyond it for all but submits.
            set_disk_bytes(size_max_bytes if rng.random() < 0.7 else 1 << 30)
            life = Life(directory, model, rng, size_max_bytes)
            for _ in range(rng.randrange(40)):
                entries = [writer.entry(model.dead) for _ in range(rng.choice((1, 1, 2, 5)))]
                life.append(*entries)
                if rng.random() < 0.2:
                    with life.changed:
                        life.changed.wait(0.01)
            life.empty()
            if rng.random() < 0.7:
                life.make_room()
            life.end()


def check_reserve(_seed: int) -> None:
    """A journal on a disk that has just filled up has room for what operators set."""
    journal_sqlite.RETRY_S = 0.02
    set_disk_bytes(1 << 20)
    with tempfile.TemporaryDirectory() as place:
        life = Life(Path(place) / "data", Model(), random.Random(1), 1 << 20)
        at = 0
        while life.journal.writable:
            at += 1
            life.append(entry := Entry(submits=[SubmitRecord(at, "", b"spec", bytes(4000), "", 1, 1.0)]))
            with life.changed:
                assert life.changed.wait_for(lambda entry=entry: id(entry) in life.acked, TIMEOUT_S)  # type: ignore[misc]
        log_bytes = (life.directory / f"{journal_schema.DATABASE_NAME}-wal").stat().st_size
        set_disk_bytes(_files_bytes(life.directory) - log_bytes)  # another program takes the rest
        life.append(entry := Entry(settings={"large": bytes(10_000)}))
        with life.changed:
            assert life.changed.wait_for(lambda: id(entry) in life.acked, 5.0), "a full journal has no reserve"
        life.end()


def _size(directory: Path) -> int:
    return _files_bytes(directory) + (1 << 20)


def _files_bytes(directory: Path) -> int:
    return sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())
