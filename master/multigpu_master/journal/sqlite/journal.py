"""The embedded journal: one SQLite file, one thread that writes it, and readers that never wait for the writer.

`append` puts entries into a queue. The journal's thread writes all entries that were queued during the last commit as
one transaction. Of a task submitted and settled in one transaction, only the outcome is written. After each call into
SQLite the thread waits for the interpreter, so a transaction is as few calls as possible (statements.py).

At the size limit submits are rejected, and everything else is written. On a full disk outcomes wait for space. Entries
that empty the journal (deletions, cancellations) and settings are written first, with the space of the reserve
(room.py). After any other disk failure the journal reports it once and stops: the next process reads what was written.
"""

import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from multigpu_master.errors import JournalError, JournalFullError
from multigpu_master.ids import Incarnation
from multigpu_master.journal.protocol import CommitCallback, Entry, Recovered
from multigpu_master.journal.sqlite import connections, directory, failures, schema
from multigpu_master.journal.sqlite.reads import JournalReads
from multigpu_master.journal.sqlite.room import PROBE_BYTES, Reserve, Room, frees
from multigpu_master.journal.sqlite.segments import Segments
from multigpu_master.journal.sqlite.statements import setting, transaction
from multigpu_master.journal.sqlite.sweep import Sweeper

RETRY_S = 0.5  # between two tries on a full disk
TICK_S = 1.0  # between two sweeps
SWEEP_SHARE_BUSY, SWEEP_SHARE_IDLE = 0.2, 0.5  # of the journal thread's time, for sweeping
SWEEP_AFTER_S = 5.0  # the first sweep, after `open`: the tasks are recovered first
_DAMAGE = (ValueError, LookupError, TypeError)  # of a setting
_CLOSE = Entry()  # in the queue: the journal is being closed


class SqliteJournal(JournalReads):
    """A journal in a directory of its own. At `size_max_bytes` it rejects submits. The callback given to `open` runs on
    the journal's thread; it must neither raise nor wait. Reads may be made from any thread.
    """

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], float] = time.time,
        dedupe_window_s: float = 24 * 3600.0,
        size_max_bytes: int,
    ) -> None:
        super().__init__(path, now)
        self._dedupe_window_s = dedupe_window_s
        self._size_max_bytes = size_max_bytes
        self._reserve = Reserve(path, size_max_bytes)
        self._queue: queue.SimpleQueue[Sequence[Entry]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._fatal: JournalError | None = None
        # Only the journal's thread changes the following fields, once it runs.
        self._pending: deque[Entry] = deque()  # taken from the queue, not yet written
        self._closing = False
        self._busy_since_s = 0.0  # on the monotonic clock; 0: it waits for something to do
        self._last_cursor = 0
        self._full: JournalFullError | None = None  # submits are rejected
        self._over = False  # submits are rejected for the size limit alone: the disk is not full
        self._freeing: deque[Entry] = deque()  # while the disk is full: the entries that are written first
        self._singly = False  # the entries of one queue don't fit into one transaction: one at a time
        self._free_at_s = self._retry_at_s = 0.0  # on the monotonic clock, as is the next
        self._sweep_at_s = 0.0
        self._rejected: set[int] = set()  # tasks whose submit found no room, while there is none

    @property
    def writable(self) -> bool:
        """False while there is no room: submits would be rejected. From any thread."""
        return self._full is None

    def room_bytes(self) -> int:
        return self._reserve.room_bytes()

    def works(self, within_s: float) -> bool:
        """Whether its thread runs, and no operation of it has taken longer than `within_s`. From any thread."""
        busy_since_s = self._busy_since_s
        late = busy_since_s > 0 and time.monotonic() - busy_since_s > within_s
        return self._thread is not None and self._thread.is_alive() and not late

    def open(
        self, on_commit: CommitCallback, begin_clock: Callable[[float], None] = lambda _newest_s: None
    ) -> Recovered:
        """`begin_clock` is called with the newest time in the journal, before anything expires; 0.0: there is none."""
        assert self._thread is None, "a journal is opened once"
        try:
            epoch, incarnations, lease_key = self._open()
        except JournalFullError:
            if not self._reserve.give_up():
                raise
            epoch, incarnations, lease_key = self._open()
        settings = self.settings()
        begin_clock(self.newest_time_s())
        downtime_s = self._retention.resume(self._last_cursor + 1)
        try:
            connections.empty_log(self._writer)  # so that the database says that the journal is open
            self._sweeper.save_time()  # before outcomes are written that the next master must not take for older ones
            self._reserve.make()
            self._over = self._room.is_over()
            if self._over:
                self._full = failures.full(self._path)
            self._limit()
        except (OSError, sqlite3.Error) as error:
            problem = failures.explain(error, self._path)
            if not isinstance(problem, JournalFullError):
                connections.close_keeping_log(self._path, self._writer)
                self._lock_file.release()
                raise problem from error
            self._begin_full(problem)
        self._on_commit = on_commit
        self._sweep_at_s = time.monotonic() + SWEEP_AFTER_S
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()
        return Recovered(self.recover_tasks(), settings, epoch, incarnations, self._last_cursor, lease_key, downtime_s)

    def _open(self) -> tuple[int, list[Incarnation], bytes]:
        """Locks, checks and opens the files, and begins an incarnation."""
        self._lock_file = directory.prepare(self._data_dir)
        writer: sqlite3.Connection | None = None
        try:
            connections.secure_log(self._path)
            writer = self._writer = connections.connect_writer(self._path)
            self.payloads.open()
            self._segments = Segments(self._data_dir, self.payloads, self._size_max_bytes)
            self._room = Room(self._path, self._writer, self._segments, self._reserve, self._size_max_bytes)
            self._room.limit()
            self._last_cursor = self.newest_cursor()
            begun = schema.begin_incarnation(self._writer, self._now(), self._last_cursor)
            if saved := schema.read_private(self._writer, schema.SETTING_TIME):
                self._retention.load(saved)
            self._sweeper = Sweeper(self._writer, self._segments, self._retention, self._dedupe_window_s)
            self._files = directory.OpenFiles(self._path)
        except (sqlite3.Error, OSError, JournalError, *_DAMAGE) as error:
            if writer is not None:
                connections.close_keeping_log(self._path, writer)
            self._lock_file.release()
            raise failures.explain(error, self._path) from error
        return begun

    def append(self, *entries: Entry) -> None:
        for entry in entries:
            assert not (entry.submits and entry.settles), "submits may be rejected, settles may not: keep them apart"
        if self._fatal is not None:
            raise self._fatal
        self._queue.put(entries)

    def close(self, timeout_s: float) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put((_CLOSE,))
        thread.join(timeout_s)
        if thread.is_alive():
            raise JournalError(
                f"The journal {self._path} could not be closed within {timeout_s:.1f} s: the disk is too slow. It "
                "stays locked until this process ends; what was acknowledged is safe."
            )
        self.payloads.close()
        self.close_readers()
        self._lock_file.release()

    def oldest_cursor(self) -> int:
        ((cursor,),) = self._rows("SELECT min(cursor) FROM outcome", ())
        return self._last_cursor + 1 if cursor is None else int(cursor)

    @property
    def removed_cursor(self) -> int:
        """The newest cursor whose outcome is deleted: a reader at an earlier cursor may have missed outcomes."""
        return self._sweeper.removed_cursor

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take()
                self._busy_since_s = time.monotonic()
                wrote = self._write()
                self._sweep(busy=wrote)
                self._busy_since_s = 0.0
            self._retry_at_s = self._free_at_s = 0.0  # a last try
            while self._write():
                pass
            if self._pending or self._freeing:
                assert self._full is not None
                self._on_commit((*self._freeing, *self._pending), 0, self._full)
            self.close_readers()
            connections.close_writer(self._path, self._writer)
            self._segments.close()
        except Exception as error:  # noqa: BLE001  # the callback is how the driver learns that this thread failed
            self._fail(error)

    def _take(self) -> None:
        """Moves entries from the queue to `_pending`. Waits for entries or the next sweep if there is nothing to do."""
        now = time.monotonic()
        if self._full is not None and not (self._over and self._pending):
            timeout_s = self._next_try_s() - now
        else:
            timeout_s = 0.0 if self._pending else self._sweep_at_s - now
        try:
            taken = [*self._queue.get(timeout=max(timeout_s, 0.0001)), *self._rest()]
        except queue.Empty:
            return
        if any(entry is _CLOSE for entry in taken):
            self._closing = True  # entries that a session appended after _CLOSE are written as well
            taken = [entry for entry in taken if entry is not _CLOSE]
        if self._full is None:
            self._pending.extend(taken)
        else:
            self._sort_out(taken)

    def _rest(self) -> list[Entry]:
        """The entries that are in the queue now."""
        return [entry for _ in range(self._queue.qsize()) for entry in self._queue.get_nowait()]

    def _write(self) -> bool:
        """Writes waiting entries as one transaction, if there may be room. True if it was written."""
        if self._full is None:
            return bool(self._attempt(self._pending, self._commit))
        if time.monotonic() < self._next_try_s():
            return self._over and bool(self._attempt(self._pending, self._commit))
        if self._freeing:  # all of them if they fit into one transaction, else one
            return self._punch(self._attempt(self._freeing, self._commit_with_reserve, singly=self._singly))
        return self._write_one() if self._singly else self._look_for_room()

    def _next_try_s(self) -> float:
        """When to write again on a full disk, on the monotonic clock."""
        return self._free_at_s if self._freeing else self._retry_at_s

    def _write_one(self) -> bool:
        """Writes one outcome: that deletes its task, which makes room for the next outcome."""

        def commit(batch: Sequence[Entry], bytes_total: int) -> None:
            # Half of the reserve is for entries that only empty the journal.
            self._commit_with_reserve(batch, bytes_total, bytes_total + self._reserve.wanted_bytes // 2)

        return self._punch(self._attempt(self._pending, commit, singly=True))

    def _look_for_room(self) -> bool:
        """Writes the pending entries, or a probe, if the disk has room for that and for the whole reserve."""

        def commit(batch: Sequence[Entry], bytes_total: int) -> None:
            self._room.take_reserve()
            self._room.need(self._reserve.size_bytes // 2)  # room for more than the next few tasks
            if batch:
                self._commit(batch, bytes_total)
            else:
                self._probe()

        written = self._attempt(self._pending, commit)
        if written is None:
            return False
        self._over = self._room.is_over()
        self._retry_at_s = time.monotonic() + RETRY_S
        if not self._over:
            self._full = None
            self._rejected.clear()
            self._limit()
            self._on_commit([], self._last_cursor + 1, None)
        return bool(written)

    def _attempt(
        self, waiting: deque[Entry], commit: Callable[[Sequence[Entry], int], None], *, singly: bool = False
    ) -> int | None:
        """Commits the next waiting entries; returns how many. None: there was no room, and the entries wait again."""
        batch, bytes_total = self._room.batch(waiting, singly=singly)
        first_cursor = self._last_cursor + 1
        try:
            commit(batch, bytes_total)
        except Exception as error:
            waiting.extendleft(reversed(batch))
            problem = failures.explain(error, self._path)
            if not isinstance(problem, JournalFullError):
                raise
            self._note_full(problem, waiting)
            return None
        self._singly = singly and bool(waiting)
        if batch:
            self._on_commit(batch, first_cursor, None)
        return len(batch)

    def _commit(self, batch: Sequence[Entry], bytes_total: int) -> None:
        """Writes the entries as one transaction, and syncs it."""
        self._room.need_for_transaction(bytes_total)
        statements, outcomes = transaction(batch, self._last_cursor + 1, bytes_total, self._segments)
        if self._segments.waiting:
            self._room.need_for_segments()
            self._segments.flush()
            self._room.limit()
        alone = len(statements) == 1  # a transaction by itself: fewer calls
        if not alone:
            self._writer.execute("BEGIN IMMEDIATE")
        for sql, parameters in statements:
            self._writer.execute(sql, parameters)
        if not alone:
            self._writer.execute("COMMIT")
        self._files.check()
        self._last_cursor += outcomes
        self._sweeper.note_commit(self._last_cursor, [i for entry in batch for i in entry.deleted_dead_letters])

    def _commit_with_reserve(self, batch: Sequence[Entry], bytes_total: int, needed_bytes: int = 0) -> None:
        """Commits as `_commit` does, on a full disk: with the space of the reserve."""
        self._room.give_up_reserve()
        self._room.need(needed_bytes)
        self._commit(batch, bytes_total)
        self._room.take_some_reserve()

    def _punch(self, written: int | None) -> bool:
        """After `written` entries: returns unused space of a segment to the file system. Whether any were written."""
        if written and self._segments.punch_next(self._writer):
            self._room.take_some_reserve()
        return bool(written)

    def _probe(self) -> None:
        """Finds out whether there is room, by taking some and giving it back."""
        self._writer.execute(*setting(schema.SETTING_PROBE, bytes(PROBE_BYTES)))
        self._writer.execute(*setting(schema.SETTING_PROBE, None))

    def _note_full(self, problem: JournalFullError, waiting: deque[Entry]) -> None:
        """Handles a transaction for which there was no room."""
        self._segments.abandon()
        if self._writer.in_transaction:
            self._writer.execute("ROLLBACK")
        if waiting is self._freeing:
            # Write one at a time. Settings keep their order: a later one may have the same key.
            self._singly = True
            if not (waiting[0].settings or waiting[0].epoch):
                waiting.rotate(-1)
            self._free_at_s = time.monotonic() + RETRY_S
            return
        self._retry_at_s = time.monotonic() + RETRY_S
        pending = deque[Entry]()
        if self._full is not None and not self._over:  # outcomes one by one: some may fit
            self._singly = bool(self._pending)
        else:
            pending, self._pending = self._pending, pending
            self._on_commit([], 0, problem)  # no entries: only outcomes may wait, and they are not rejected
        self._over = False
        self._begin_full(problem)
        self._sort_out(pending)

    def _begin_full(self, problem: JournalFullError) -> None:
        """Begins to accept only entries that empty the journal."""
        self._full = problem
        self._room.limited = False
        self._room.give_up_reserve()
        self._room.take_some_reserve()

    def _limit(self) -> None:
        """Applies the size limit, unless submits are rejected anyway."""
        self._room.limited = self._full is None
        self._room.limit()

    def _sort_out(self, entries: Iterable[Entry]) -> None:
        """On a full disk: rejects submits, and keeps the other entries without the settles of rejected tasks."""
        assert self._full is not None
        rejected: list[Entry] = []
        for entry in entries:
            if entry.submits:
                rejected.append(entry)
                self._rejected.update([record.task_id for record in entry.submits])
                continue
            if any(record.task_id in self._rejected for record in entry.settles):
                entry.settles = [record for record in entry.settles if record.task_id not in self._rejected]  # in place
            (self._freeing if frees(entry) and not self._over else self._pending).append(entry)
        if rejected:
            self._on_commit(rejected, 0, self._full)

    def _sweep(self, *, busy: bool) -> None:
        started = time.monotonic()
        if started < self._sweep_at_s:
            return
        self._files.check()
        full = self._full is not None and not self._over
        if full:
            self._room.give_up_reserve()
        try:
            more = self._sweeper.step(full=full)
        except (sqlite3.Error, OSError) as error:
            if not isinstance(failures.explain(error, self._path), JournalFullError):
                raise
            more = False  # there is no room for the sweep's deletions
        if full:
            self._room.take_some_reserve()
        ended = time.monotonic()
        if more:
            share = SWEEP_SHARE_BUSY if busy else SWEEP_SHARE_IDLE
            self._sweep_at_s = ended + (ended - started) * (1 / share - 1)
        else:
            self._room.limit()
            self._sweep_at_s = ended + TICK_S

    def _fail(self, error: Exception) -> None:
        """Stops the journal: writes nothing more, and leaves the log for the next master to read."""
        self._fatal = failures.explain(error, self._path)
        connections.close_keeping_log(self._path, self._writer)
        entries = [*self._freeing, *self._pending, *self._rest()]
        self._on_commit([entry for entry in entries if entry is not _CLOSE], 0, self._fatal)
