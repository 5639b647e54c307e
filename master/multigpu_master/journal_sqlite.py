"""The embedded journal: one SQLite file, one thread that writes it, and readers that never wait.

`append` puts an entry into a queue. The journal's thread takes all that queued up while the disk was busy, writes it
as one transaction and tells the driver. It shares the interpreter with the driver's event loop, and whenever a call
into SQLite returns it has to win the interpreter back. So a transaction is as few calls as possible: rows go in by
the hundred, with one statement each for tasks and for outcomes, prepared for a few sizes and filled up with rows of
NULL that the statement skips.

When the disk is full, submits are refused at once; what running work has to say (outcomes, settings) is kept and
tried again until there is room. Any other failure of the disk leaves it unknown what was written: the journal says so
once and stops, and the process has to start anew from what is on the disk.
"""

# ruff: noqa: S608  # statements are put together from this package's constants; values are always bound

import bisect
import itertools
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import cache
from pathlib import Path
from typing import Any

from multigpu_master import journal_schema
from multigpu_master.journal import (
    CommitCallback,
    Entry,
    JournalError,
    JournalFullError,
    LargeBody,
    Recovered,
    SettleRecord,
    SubmitRecord,
)
from multigpu_master.journal_reads import JournalReads
from multigpu_master.journal_segments import LARGE_BYTES, Segments
from multigpu_master.journal_sweep import Sweeper

TRANSACTION_RECORDS = 8192  # a transaction takes no more entries once it has as many records,
TRANSACTION_BYTES = 16 << 20  # or as many bytes of payloads and bodies
RETRY_S = 0.5  # between two tries on a full disk
TICK_S = 1.0  # between two looks at what may be forgotten
SWEEP_SHARE_BUSY, SWEEP_SHARE_IDLE = 0.2, 0.5  # of the journal thread's time, for forgetting
SWEEP_AFTER_S = 5.0  # once it is open: the tasks are being recovered
_PROBE_BYTES = 64 << 10
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # rows a statement may have
_STATEMENT_BYTES = 1 << 20  # SQLite keeps what was last bound to a prepared statement: let it not be too much
_TASK_FIELDS, _OUTCOME_FIELDS = 7, 12
_CLOSE = Entry()  # in the queue: the end is near

_Statement = tuple[str, Sequence[Any]]


class SqliteJournal(JournalReads):
    """A `Journal` in a directory of its own. `size_max_bytes` bounds it; a second master is told the `address`.

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
        super().__init__(path)
        self._now = now
        self._dedupe_window_s = dedupe_window_s
        self._size_max_bytes = size_max_bytes
        self._address = address
        self._queue: queue.SimpleQueue[Sequence[Entry]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._fatal: JournalError | None = None
        # The rest is the journal thread's own, once it runs.
        self._pending: deque[Entry] = deque()  # taken from the queue, not yet written
        self._closing = False
        self._busy_since_s = 0.0  # on the monotonic clock; 0: it waits for something to do
        self._last_cursor = 0
        self._full: JournalFullError | None = None
        self._retry_at_s = 0.0  # on the monotonic clock, as is the next
        self._sweep_at_s = 0.0
        self._refused: set[int] = set()  # tasks whose submit found no room, while there is none

    @property
    def writable(self) -> bool:
        """False while there is no room: submits would be refused. From any thread."""
        return self._full is None

    def works(self, within_s: float) -> bool:
        """Whether its thread lives, and no piece of its work has taken longer than this. From any thread."""
        busy_since_s = self._busy_since_s
        late = busy_since_s > 0 and time.monotonic() - busy_since_s > within_s
        return self._thread is not None and self._thread.is_alive() and not late

    def open(self, on_commit: CommitCallback) -> Recovered:
        assert self._thread is None, "a journal is opened once"
        self._lock_file = journal_schema.prepare(self._data_dir, self._address)
        try:
            journal_schema.secure_log(self._path)
            self._writer = journal_schema.connect_writer(self._path)
            self.payloads.open()
            self._segments = Segments(self._data_dir, self.payloads)
            self._limit_size()
            epoch = journal_schema.begin_epoch(self._writer)
            settings = self.settings()
            self._last_cursor = last_cursor = self.newest_cursor()
            self._sweeper = Sweeper(self._writer, self._segments, self._now, self._dedupe_window_s)
        except (sqlite3.Error, OSError, JournalError) as error:
            self._lock_file.release()
            raise journal_schema.explain(error, self._path) from error
        self._on_commit = on_commit
        self._sweep_at_s = time.monotonic() + SWEEP_AFTER_S
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()
        return Recovered(self.recover_tasks(), settings, epoch, last_cursor)

    def append(self, *entries: Entry) -> None:
        for entry in entries:
            assert not (entry.submits and entry.settles), "submits may be refused, settles may not: keep them apart"
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
            self._retry_at_s = 0.0  # a last try
            while self._write():
                pass
            if self._pending:
                assert self._full is not None
                self._on_commit(tuple(self._pending), 0, self._full)
            self.close_readers()
            self._writer.close()  # which moves the log into the database
            self._segments.close()
        except Exception as error:  # noqa: BLE001  # whatever it is, nobody waits for this thread but through the callback
            self._fail(error)

    def _take(self) -> None:
        """Moves what is queued to what is pending. Waits for something to do if there is nothing."""
        now = time.monotonic()
        if self._full is not None:
            timeout_s = self._retry_at_s - now
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
        """One transaction of what is pending, if anything is and there is hope of room. True if it was written."""
        if self._full is not None and time.monotonic() < self._retry_at_s:
            return False
        batch, bytes_total = self._batch()
        first_cursor = self._last_cursor + 1
        try:
            if batch:
                self._commit(batch, bytes_total)
            elif self._full is not None:
                self._probe()
        except Exception as error:
            self._pending.extendleft(reversed(batch))
            problem = journal_schema.explain(error, self._path)
            if not isinstance(problem, JournalFullError):
                raise
            self._note_full(problem)
            return False
        room_again = self._full is not None
        if room_again:
            self._full = None
            self._refused.clear()
        if batch or room_again:
            self._on_commit(batch, first_cursor, None)
        return bool(batch)

    def _batch(self) -> tuple[list[Entry], int]:
        """The entries of the next transaction, with their bytes of payloads and bodies."""
        batch: list[Entry] = []
        records = bytes_total = 0
        while self._pending and records < TRANSACTION_RECORDS and bytes_total < TRANSACTION_BYTES:
            entry = self._pending.popleft()
            records += len(entry.submits) + len(entry.settles)
            bytes_total += sum([len(record.payload) for record in entry.submits])
            bytes_total += sum([len(record.body) for record in entry.settles])
            batch.append(entry)
        return batch, bytes_total

    def _commit(self, batch: Sequence[Entry], bytes_total: int) -> None:
        """Writes the entries as one transaction, down to the disk."""
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

    def _statements(self, batch: Sequence[Entry], bytes_total: int) -> tuple[list[_Statement], int]:
        """What SQLite is to do for these entries, and how many outcomes are among them."""
        submits: Iterable[SubmitRecord] = itertools.chain.from_iterable([entry.submits for entry in batch])
        settles = list(itertools.chain.from_iterable([entry.settles for entry in batch]))
        if settles:  # what begins and ends in this transaction is written as its outcome only
            settled = {record.task_id for record in settles}
            submits = [record for record in submits if record.task_id not in settled]
        large = self._segments if bytes_total >= LARGE_BYTES else None
        statements = list(_inserts("task", _TASK_FIELDS, _task_values(submits, large), bytes_total))
        outcomes = _outcome_values(settles, self._last_cursor + 1, large)
        statements += _inserts("outcome", _OUTCOME_FIELDS, outcomes, bytes_total)
        letters = [record.dead for record in settles if record.dead is not None]
        if letters:
            large = self._segments if max(len(letter.payload) for letter in letters) >= LARGE_BYTES else None
            letter_bytes = sum([len(letter.payload) for letter in letters])
            statements += _inserts("dead_letter", _TASK_FIELDS, _task_values(letters, large), letter_bytes)
        for entry in batch:
            statements += [_setting(key, value) for key, value in entry.settings.items()]
            statements += [("DELETE FROM dead_letter WHERE task_id = ?", (i,)) for i in entry.deleted_dead_letters]
        return statements, len(settles)

    def _note_full(self, problem: JournalFullError) -> None:
        """After a transaction that failed for want of room, which may come back."""
        self._segments.abandon()
        if self._writer.in_transaction:
            self._writer.execute("ROLLBACK")
        self._retry_at_s = time.monotonic() + RETRY_S
        if self._full is None:
            self._full = problem
            pending, self._pending = self._pending, deque()
            self._sort_out(pending)

    def _sort_out(self, entries: Iterable[Entry]) -> None:
        """On a full disk: refuses submits, and keeps the rest but for the settles of refused tasks."""
        assert self._full is not None
        refused: list[Entry] = []
        for entry in entries:
            if entry.submits:
                refused.append(entry)
                self._refused.update([record.task_id for record in entry.submits])
            elif any(record.task_id in self._refused for record in entry.settles):
                entry.settles = [record for record in entry.settles if record.task_id not in self._refused]
                self._pending.append(entry)  # the same object: the driver knows its entries by identity
            else:
                self._pending.append(entry)
        if refused:
            self._on_commit(refused, 0, self._full)

    def _probe(self) -> None:
        """Finds out whether there is room again, by taking some and giving it back."""
        self._writer.execute(*_setting(journal_schema.SETTING_PROBE, bytes(_PROBE_BYTES)))
        self._writer.execute(*_setting(journal_schema.SETTING_PROBE, None))

    def _flush_segments(self) -> None:
        taken = journal_schema.used_bytes(self._writer) + self._segments.size_bytes + self._segments.waiting_bytes
        if taken > self._size_max_bytes:
            raise journal_schema.full(self._path)
        self._segments.flush()
        self._limit_size()

    def _limit_size(self) -> None:
        journal_schema.limit_size(self._writer, self._size_max_bytes - self._segments.size_bytes)

    def _sweep(self, *, busy: bool) -> None:
        started = time.monotonic()
        if started < self._sweep_at_s:
            return
        try:
            more = self._sweeper.step()
        except (sqlite3.Error, OSError) as error:
            if not isinstance(journal_schema.explain(error, self._path), JournalFullError):
                raise
            more = False  # no room even to forget
        ended = time.monotonic()
        if more:
            share = SWEEP_SHARE_BUSY if busy else SWEEP_SHARE_IDLE
            self._sweep_at_s = ended + (ended - started) * (1 / share - 1)
        else:
            self._limit_size()
            self._sweep_at_s = ended + TICK_S

    def _fail(self, error: Exception) -> None:
        """The end: nothing is written any more. The connection stays open, so that closing it does no more harm."""
        self._fatal = journal_schema.explain(error, self._path)
        entries = [*self._pending, *self._rest()]
        self._on_commit([entry for entry in entries if entry is not _CLOSE], 0, self._fatal)


@cache
def _insert_sql(table: str, fields: int, rows: int) -> str:
    row = f"({','.join('?' * fields)})"
    # A statement that fails ends the whole transaction, so SQLite need not keep the way back to before it.
    return f"INSERT OR ROLLBACK INTO {table} SELECT * FROM (VALUES {','.join([row] * rows)}) WHERE column1 IS NOT NULL"


def _inserts(table: str, fields: int, values: list[Any], bytes_total: int) -> Iterator[_Statement]:
    """Statements that insert these rows, given as one flat list."""
    rows = len(values) // fields
    rows_max = _ROWS[-1]
    if bytes_total > _STATEMENT_BYTES:
        rows_max = min(max(rows * _STATEMENT_BYTES // bytes_total, 1), rows_max)
    for at in range(0, rows, rows_max):
        chunk = values[at * fields : (at + rows_max) * fields]
        size = _ROWS[bisect.bisect_left(_ROWS, len(chunk) // fields)]
        chunk += [None] * (size * fields - len(chunk))
        yield _insert_sql(table, fields, size), chunk


def _task_values(records: Iterable[SubmitRecord], large: Segments | None) -> list[Any]:
    """The columns of `task` or `dead_letter`, flat. With `large`, large payloads go there."""
    values: list[Any] = []
    for r in records:
        payload: bytes | Sized | str = r.payload
        if large is not None and len(payload) >= LARGE_BYTES:
            payload = large.put_payload(r.payload)
        values += (r.task_id, r.request_id, r.partition_key, r.units, r.submit_time_s, r.spec, payload)
    return values


def _outcome_values(records: Sequence[SettleRecord], first_cursor: int, large: Segments | None) -> list[Any]:
    values: list[Any] = []
    for cursor, r in enumerate(records, first_cursor):
        body: bytes | LargeBody | str = r.body
        if large is not None and len(body) >= LARGE_BYTES:
            body = large.put_body(r.body)
        values += (
            cursor, r.task_id, r.request_id, r.state, r.queue, r.kind, r.model, r.worker_id,
            r.submit_time_s, r.settle_time_s, r.expire_time_s, body,
        )  # fmt: skip
    return values


def _setting(key: str, value: bytes | None) -> _Statement:
    if value is None:
        return "DELETE FROM setting WHERE key = ?", (key,)
    return "INSERT OR REPLACE INTO setting VALUES (?, ?)", (key, value)
