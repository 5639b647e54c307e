"""The embedded journal: one SQLite file, one thread that writes it, and readers that never wait.

`append` puts an entry into a queue. The journal's thread takes all that queued up while the disk was busy, writes it
as one transaction and tells the driver. It shares the interpreter with the driver's event loop, and whenever a call
into SQLite returns it has to win the interpreter back. So a transaction is as few calls as possible: rows go in by
the hundred, with one statement each for tasks and for outcomes, prepared for a few sizes and filled up with rows of
NULL that the statement skips.

When the journal has reached its limit, submits are rejected at once, and all else goes on. When the disk is full,
outcomes are kept as well, and tried again until there is room. What empties the journal (deletions, cancellations)
and what operators set does not wait for that: it is written first, with the room of the reserve. Any other failure of
the disk leaves it unknown what was written: the journal says so once and stops, and the process has to start anew
from what is on the disk.
"""

# statements are put together from this package's constants; values are always bound

import contextlib
import itertools
import queue
import shutil
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from multigpu.v1 import task_pb2

from multigpu_master.ids import Incarnation
from multigpu_master.journal.protocol import (
    CommitCallback,
    Entry,
    JournalError,
    JournalFullError,
    Recovered,
    SubmitRecord,
)
from multigpu_master.journal.sqlite import connections, directory, failures, schema
from multigpu_master.journal.sqlite import specs as journal_specs
from multigpu_master.journal.sqlite.disk_reserve import BYTES_MIN, Reserve
from multigpu_master.journal.sqlite.reads import JournalReads
from multigpu_master.journal.sqlite.segments import LARGE_BYTES, Segments
from multigpu_master.journal.sqlite.statements import (
    OUTCOME_FIELDS,
    TASK_FIELDS,
    Statement,
    deletes,
    inserts,
    outcome_values,
    setting,
    task_values,
)
from multigpu_master.journal.sqlite.sweep import Sweeper

TRANSACTION_RECORDS = 8192  # a transaction takes no more entries once it has as many records,
TRANSACTION_BYTES = 16 << 20  # or as many bytes of payloads and bodies,
LOG_SHARE = 16  # or as much as may be this part of the journal's limit once it is in the log
RETRY_S = 0.5  # between two tries on a full disk
TICK_S = 1.0  # between two looks at what may be forgotten
SWEEP_SHARE_BUSY, SWEEP_SHARE_IDLE = 0.2, 0.5  # of the journal thread's time, for forgetting
SWEEP_AFTER_S = 5.0  # once it is open: the clock learns its skew first, and the tasks are recovered
UNLIMITED_BYTES = 1 << 60  # for what is no submit
_PROBE_BYTES = 64 << 10
SMALL_BODY_BYTES = 4 << 10  # a cancellation's outcome, if the task had yielded little
_CLOSE = Entry()  # in the queue: the end is near


class SqliteJournal(JournalReads):
    """A `Journal` in a directory of its own. With more than `size_max_bytes` it takes no submits; a second master is
    told the `address`.

    The callback given to `open` is called on the journal's thread; it must neither raise nor wait.
    """

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], float] = time.time,
        dedupe_window_s: float = 24 * 3600.0,
        size_max_bytes: int,
        address: str = "",
    ) -> None:
        super().__init__(path, now)
        self._dedupe_window_s = dedupe_window_s
        self._size_max_bytes = size_max_bytes
        self._address = address
        self._reserve = Reserve(path, size_max_bytes)
        self._transaction_bytes = min(size_max_bytes // LOG_SHARE, TRANSACTION_BYTES)
        # Each record may change a page of its own in an index.
        pages = size_max_bytes // LOG_SHARE // schema.PAGE_BYTES
        self._transaction_records = min(max(pages, 16), TRANSACTION_RECORDS)
        self._queue: queue.SimpleQueue[Sequence[Entry]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._fatal: JournalError | None = None
        # The rest is the journal thread's own, once it runs.
        self._pending: deque[Entry] = deque()  # taken from the queue, not yet written
        self._closing = False
        self._busy_since_s = 0.0  # on the monotonic clock; 0: it waits for something to do
        self._last_cursor = 0
        self._full: JournalFullError | None = None  # submits are rejected
        self._over = False  # for the limit alone: the disk took the last transaction
        self._freeing: deque[Entry] = deque()  # while there is no room: what goes ahead of the rest
        self._singly = False  # they don't fit into one transaction
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
        """Whether its thread lives, and no piece of its work has taken longer than this. From any thread."""
        busy_since_s = self._busy_since_s
        late = busy_since_s > 0 and time.monotonic() - busy_since_s > within_s
        return self._thread is not None and self._thread.is_alive() and not late

    def open(self, on_commit: CommitCallback) -> Recovered:
        assert self._thread is None, "a journal is opened once"
        try:
            epoch, incarnations, lease_key = self._open()
        except JournalFullError:
            if not self._reserve.give_up():
                raise
            epoch, incarnations, lease_key = self._open()
        settings = self.settings()
        try:
            connections.empty_log(self._writer)  # so that the database says that the journal is open
            self._reserve.make()
            self._over = self._is_over()
            if self._over:
                self._full = failures.full(self._path)
            self._limit_size()
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
        return Recovered(self.recover_tasks(), settings, epoch, incarnations, self._last_cursor, lease_key)

    def _open(self) -> tuple[int, list[Incarnation], bytes]:
        """Locks, checks and opens the files, and begins an incarnation."""
        self._lock_file = directory.prepare(self._data_dir, self._address)
        writer: sqlite3.Connection | None = None
        try:
            connections.secure_log(self._path)
            writer = self._writer = connections.connect_writer(self._path)
            schema.migrate(self._writer)
            self.payloads.open()
            self._segments = Segments(self._data_dir, self.payloads, self._size_max_bytes)
            self._limit_size(UNLIMITED_BYTES)
            self._last_cursor = self.newest_cursor()
            begun = schema.begin_incarnation(self._writer, self._now(), self._last_cursor)
            self._sweeper = Sweeper(self._writer, self._segments, self._now, self._dedupe_window_s)
        except (sqlite3.Error, OSError, JournalError) as error:
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

    # The journal's thread.

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
        except Exception as error:  # noqa: BLE001  # whatever it is, nobody waits for this thread but through the callback
            self._fail(error)

    def _take(self) -> None:
        """Moves what is queued to what is pending. Waits for something to do if there is nothing."""
        now = time.monotonic()
        if self._full is not None and not (self._over and self._pending):
            timeout_s = (self._free_at_s if self._freeing else self._retry_at_s) - now
        else:
            timeout_s = 0.0 if self._pending else self._sweep_at_s - now
        try:
            taken = [*self._queue.get(timeout=max(timeout_s, 0.0001)), *self._rest()]
        except queue.Empty:
            return
        if any(entry is _CLOSE for entry in taken):
            # What was appended behind it (a session that ended just then) is written as well.
            self._closing = True
            taken = [entry for entry in taken if entry is not _CLOSE]
        if self._full is None:
            self._pending.extend(taken)
        else:
            self._sort_out(taken)

    def _rest(self) -> list[Entry]:
        """What is queued now."""
        return [entry for _ in range(self._queue.qsize()) for entry in self._queue.get_nowait()]

    def _write(self) -> bool:
        """One transaction of what waits, if anything does and there is hope of room. True if it was written."""
        if self._full is None:
            return self._write_some(self._pending)
        if time.monotonic() < (self._free_at_s if self._freeing else self._retry_at_s):
            return self._over and self._write_some(self._pending)
        return self._write_some(self._freeing) if self._freeing else self._write_some(self._pending, after_full=True)

    def _write_some(self, waiting: deque[Entry], *, after_full: bool = False) -> bool:
        """`after_full`: to find out whether there is room again."""
        freeing, singly = waiting is self._freeing, self._singly
        batch, bytes_total = self._batch(waiting, 1 if singly else TRANSACTION_RECORDS)
        first_cursor = self._last_cursor + 1
        try:
            if after_full and not singly:
                self._take_reserve()
                self._need_room(self._reserve.size_bytes // 2)  # not for the next few tasks only
            elif after_full or freeing:
                self._give_up_reserve()
                if after_full:  # an outcome makes room for the next: its task is gone. Half is for what only empties
                    self._need_room(bytes_total + self._reserve.wanted_bytes // 2)
            if batch:
                self._commit(batch, bytes_total)
                if freeing or (after_full and singly):
                    self._take_some_reserve()
            elif after_full:
                self._probe()
        except Exception as error:
            waiting.extendleft(reversed(batch))
            problem = failures.explain(error, self._path)
            if not isinstance(problem, JournalFullError):
                raise
            self._note_full(problem, waiting)
            return False
        if batch and (freeing or after_full) and self._segments.punch_next(self._writer):
            self._take_some_reserve()
        self._singly = singly and bool(waiting)
        again = after_full and not singly
        if again:
            self._over = self._is_over()
            self._retry_at_s = time.monotonic() + RETRY_S
            if not self._over:
                self._full = None
                self._rejected.clear()
                self._limit_size()
        if batch:
            self._on_commit(batch, first_cursor, None)
        if again and self._full is None:
            self._on_commit([], self._last_cursor + 1, None)
        return bool(batch)

    def _batch(self, waiting: deque[Entry], entries_max: int) -> tuple[list[Entry], int]:
        """The entries of the next transaction, with their bytes of payloads and bodies."""
        batch: list[Entry] = []
        records = bytes_total = 0
        records_max, bytes_max = self._transaction_records, self._transaction_bytes
        while waiting and len(batch) < entries_max and records < records_max and bytes_total < bytes_max:
            entry = waiting.popleft()
            records += len(entry.submits) + len(entry.settles)
            bytes_total += sum([len(record.payload) for record in entry.submits])
            bytes_total += sum([len(record.body) for record in entry.settles])
            batch.append(entry)
        return batch, bytes_total

    def _commit(self, batch: Sequence[Entry], bytes_total: int) -> None:
        """Writes the entries as one transaction, down to the disk."""
        if bytes_total > BYTES_MIN:  # for the log, and for the database, or the log could not be emptied any more
            ((empty_pages,),) = self._writer.execute("PRAGMA freelist_count").fetchall()
            self._need_room(bytes_total + max(0, bytes_total - empty_pages * schema.PAGE_BYTES))
        statements, outcomes = self._statements(batch, bytes_total)
        if self._segments.waiting:
            self._flush_segments()
        alone = len(statements) == 1  # a transaction by itself: fewer calls
        if not alone:
            self._writer.execute("BEGIN IMMEDIATE")
        for sql, parameters in statements:
            self._writer.execute(sql, parameters)
        if not alone:
            self._writer.execute("COMMIT")
        self._last_cursor += outcomes
        self._sweeper.note_commit(self._last_cursor, [i for entry in batch for i in entry.deleted_dead_letters])

    def _statements(self, batch: Sequence[Entry], bytes_total: int) -> tuple[list[Statement], int]:
        """What SQLite is to do for these entries, and how many outcomes are among them."""
        submits: Iterable[SubmitRecord] = itertools.chain.from_iterable([entry.submits for entry in batch])
        settles = list(itertools.chain.from_iterable([entry.settles for entry in batch]))
        if settles:  # what begins and ends in this transaction is written as its outcome only
            settled = {record.task_id for record in settles}
            submits = [record for record in submits if record.task_id not in settled]
        large = self._segments if bytes_total >= LARGE_BYTES else None
        specs = dict[str, bytes]()
        statements = list(inserts("task", TASK_FIELDS, task_values(submits, large, specs), bytes_total))
        outcomes = outcome_values(settles, self._last_cursor + 1, large)
        statements += inserts("outcome", OUTCOME_FIELDS, outcomes, bytes_total)
        statements += deletes([record.task_id for record in settles if record.submitted])
        letters = [record.dead for record in settles if record.dead is not None]
        if letters:
            large = self._segments if max(len(letter.payload) for letter in letters) >= LARGE_BYTES else None
            letter_bytes = sum([len(letter.payload) for letter in letters])
            statements += inserts("dead_letter", TASK_FIELDS, task_values(letters, large, specs), letter_bytes)
        statements += [(journal_specs.INSERT, each) for each in specs.items()]
        for entry in batch:
            statements += [setting(key, value) for key, value in entry.settings.items()]
            statements += [("DELETE FROM dead_letter WHERE task_id = ?", (i,)) for i in entry.deleted_dead_letters]
            if entry.epoch:
                statements.append(setting(schema.SETTING_EPOCH, b"%d" % entry.epoch))
        return statements, len(settles)

    def _note_full(self, problem: JournalFullError, waiting: deque[Entry]) -> None:
        """After a transaction that failed for want of room, which may come back."""
        self._segments.abandon()
        if self._writer.in_transaction:
            self._writer.execute("ROLLBACK")
        if waiting is self._freeing:
            # One at a time, then. Settings keep their order: a later one may be of the same key.
            self._singly = True
            if not (waiting[0].settings or waiting[0].epoch):
                waiting.rotate(-1)
            self._free_at_s = time.monotonic() + RETRY_S
            return
        self._retry_at_s = time.monotonic() + RETRY_S
        pending = deque[Entry]()
        if self._full is not None and not self._over:  # outcomes one by one: some may fit
            self._singly = bool(self._pending)
            self._take_some_reserve()
        else:
            pending, self._pending = self._pending, pending
            self._on_commit([], 0, problem)  # outcomes alone wait, and are in no entry that is answered
        self._over = False
        self._begin_full(problem)
        self._sort_out(pending)

    def _begin_full(self, problem: JournalFullError) -> None:
        """From now on there is room for what empties the journal, and for nothing else."""
        self._full = problem
        self._give_up_reserve()
        self._take_some_reserve()

    def _give_up_reserve(self) -> None:
        self._reserve.give_up()
        self._limit_size()

    def _take_reserve(self) -> None:
        """OSError or sqlite3.Error: there is no room for all of it."""
        connections.empty_log(self._writer)
        self._reserve.make()
        self._limit_size()

    def _take_some_reserve(self) -> None:
        """So that nobody else takes the room before the next transaction, or a new master, needs it."""
        with contextlib.suppress(OSError, sqlite3.OperationalError):  # the next transaction says what is wrong
            self._take_reserve()

    def _sort_out(self, entries: Iterable[Entry]) -> None:
        """Without room: rejects submits, and keeps the rest but for the settles of rejected tasks."""
        assert self._full is not None
        rejected: list[Entry] = []
        for entry in entries:
            if entry.submits:
                rejected.append(entry)
                self._rejected.update([record.task_id for record in entry.submits])
                continue
            if any(record.task_id in self._rejected for record in entry.settles):
                # The same object: the driver knows its entries by identity.
                entry.settles = [record for record in entry.settles if record.task_id not in self._rejected]
            (self._freeing if frees(entry) and not self._over else self._pending).append(entry)
        if rejected:
            self._on_commit(rejected, 0, self._full)

    def _need_room(self, size_bytes: int) -> None:
        """JournalFullError: the disk has less."""
        if shutil.disk_usage(self._data_dir).free < size_bytes:
            raise failures.full(self._path)

    def _probe(self) -> None:
        """Finds out whether there is room again, by taking some and giving it back."""
        self._writer.execute(*setting(schema.SETTING_PROBE, bytes(_PROBE_BYTES)))
        self._writer.execute(*setting(schema.SETTING_PROBE, None))

    def _flush_segments(self) -> None:
        if self._used_bytes() + self._segments.waiting_bytes > self._may_use_bytes():
            raise failures.full(self._path)
        self._segments.flush()
        self._limit_size()

    def _used_bytes(self) -> int:
        """What the limit counts, but for the log."""
        return connections.used_bytes(self._writer) + self._segments.size_bytes + self._reserve.size_bytes

    def _is_over(self) -> bool:
        """Whether there is no room for submits, by the limit."""
        return self._used_bytes() + _PROBE_BYTES > self._size_max_bytes - self._transaction_bytes

    def _may_use_bytes(self) -> int:
        """The limit, where there may be submits in the next transaction."""
        return self._size_max_bytes if self._full is None else UNLIMITED_BYTES

    def _limit_size(self, size_max_bytes: int = 0) -> None:
        reserve_bytes = self._reserve.size_bytes
        # Should the disk be full all at once, the reserve must hold what the log has and the database has not.
        size_max_bytes = size_max_bytes or self._may_use_bytes()
        size_max_bytes -= self._segments.size_bytes + reserve_bytes + self._transaction_bytes
        connections.limit_size(self._writer, size_max_bytes, reserve_bytes // 2, self._size_max_bytes // LOG_SHARE)

    def _sweep(self, *, busy: bool) -> None:
        started = time.monotonic()
        if started < self._sweep_at_s:
            return
        full = self._full is not None and not self._over
        if full:
            self._give_up_reserve()
        try:
            more = self._sweeper.step(full=full)
        except (sqlite3.Error, OSError) as error:
            if not isinstance(failures.explain(error, self._path), JournalFullError):
                raise
            more = False  # no room even to forget
        if full:
            self._take_some_reserve()
        ended = time.monotonic()
        if more:
            share = SWEEP_SHARE_BUSY if busy else SWEEP_SHARE_IDLE
            self._sweep_at_s = ended + (ended - started) * (1 / share - 1)
        else:
            self._limit_size()
            self._sweep_at_s = ended + TICK_S

    def _fail(self, error: Exception) -> None:
        """The end: nothing is written any more, and the log stays for the next master to read."""
        self._fatal = failures.explain(error, self._path)
        connections.close_keeping_log(self._path, self._writer)
        entries = [*self._freeing, *self._pending, *self._rest()]
        self._on_commit([entry for entry in entries if entry is not _CLOSE], 0, self._fatal)


def frees(entry: Entry) -> bool:
    """Whether an entry empties the journal, or is as good as nothing: deletions, cancellations, settings."""
    return not entry.submits and all(
        record.state == task_pb2.OUTCOME_STATE_CANCELLED and len(record.body) <= SMALL_BODY_BYTES
        for record in entry.settles
    )
