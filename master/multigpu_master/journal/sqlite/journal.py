"""The embedded journal: one SQLite file, one thread that writes it, and readers that never wait for the writer.

`append` puts entries into a queue. The journal's thread writes what was queued during the last commit as one
transaction, within limits (room.py). Of a task submitted and settled in one transaction, only the outcome is written.
After each call into SQLite the thread waits for Python's global lock, so a transaction is as few calls as possible
(statements.py).

If the disk is almost full, or the journal has its maximal size, submits are rejected and all other entries are written
(room.py). If another program has filled the disk, the waiting entries are written one by one with the space of the
reserve, and entries for which there is no space wait. After any other failure of the disk the journal reports it once
and stops. The next master reads what was written.
"""

import contextlib
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from multigpu_master.errors import PARSE_ERRORS, JournalError, JournalFullError
from multigpu_master.ids import Incarnation
from multigpu_master.journal.protocol import CommitCallback, Entry, Recovered
from multigpu_master.journal.sqlite import connections, directory, failures, room, schema
from multigpu_master.journal.sqlite.reads import JournalReads
from multigpu_master.journal.sqlite.room import SEGMENTS_IN_RESERVE, Reserve, Room, content_bytes, is_small_or_frees
from multigpu_master.journal.sqlite.segments import Segments
from multigpu_master.journal.sqlite.statements import transaction
from multigpu_master.journal.sqlite.sweep import Sweeper

RETRY_S = 0.5  # between two attempts to write to a full disk
TICK_S = 1.0  # between two sweeps
SWEEP_SHARE_BUSY, SWEEP_SHARE_IDLE = 0.2, 0.5  # of the journal thread's time, for sweeping
SWEEP_AFTER_S = 5.0  # from `open` to the first sweep: by then most masters have recovered their tasks
_CLOSE = Entry()  # in the queue: the journal is being closed


class SqliteJournal(JournalReads):
    """A journal in a directory of its own. At `size_max_bytes` it rejects submits. The journal's thread calls
    `on_commit` (see CommitCallback), which must neither raise nor wait. Any thread may read.
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
        # Not a SimpleQueue: its get() never returns if the thread is suspended during the timeout (Python 3.11, 3.12).
        self._queue: queue.Queue[Sequence[Entry]] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._fatal: JournalError | None = None
        # Only the journal's thread changes the following fields, once it runs.
        self._pending: deque[Entry] = deque()  # received from the queue, not yet written
        self._closing = False
        self._busy_since_s = 0.0  # on the monotonic clock; 0: the thread waits for entries
        self._last_cursor = 0
        self._full: JournalFullError | None = None  # why submits are rejected; None: they are accepted
        self._stuck = False  # entries in `_pending` found no space: they are tried again at `_retry_at_s`
        self._retry_at_s = self._sweep_at_s = 0.0  # on the monotonic clock
        self._rejected: set[int] = set()  # task_ids of submits that were rejected since `_full` was set

    @property
    def writable(self) -> bool:
        """False while there is no room: submits would be rejected. From any thread."""
        return self._full is None

    def free_bytes(self) -> int:
        """The free bytes on the disk, plus the bytes of the reserve."""
        return self._reserve.size_bytes + room.free_bytes(self._data_dir)

    def works(self, within_s: float) -> bool:
        """Whether the journal's thread runs, and its current write or sweep began at most `within_s` ago."""
        busy_since_s = self._busy_since_s
        late = busy_since_s > 0 and time.monotonic() - busy_since_s > within_s
        return self._thread is not None and self._thread.is_alive() and not late

    def open(
        self, on_commit: CommitCallback, begin_clock: Callable[[float], None] = lambda _newest_s: None
    ) -> Recovered:
        """Locks, checks and opens the journal, starts its thread, and returns what a new master needs. Before anything
        expires, calls `begin_clock` on the caller's thread with the newest time in the journal, or 0.0.
        """
        assert self._thread is None, "a journal is opened once"
        try:
            epoch, incarnations, lease_key = self._open()
        except JournalFullError:
            if not self._reserve.release():
                raise
            epoch, incarnations, lease_key = self._open()
        try:
            settings = self.settings()
            begin_clock(self.newest_time_s())
            clock_difference_s = self._downtimes.add_downtime(self._last_cursor + 1)
            # This block also empties the log, so the flag that the journal is open is in the database file, and the
            # next start notices if the log is missing.
            with self._room.reserve_released():
                # The downtime is saved before new outcomes are written. Otherwise, if this master dies, the next one
                # would take the new outcomes for older ones, and add the downtime to their lifetime.
                self._full = self._full_error_from(self._sweeper.save_time) or self._room.prepare_for_submits()
        except (sqlite3.Error, OSError, JournalError, *PARSE_ERRORS) as error:
            self._opened.close()
            raise failures.explain_open(error, self._path) from error
        self._on_commit = on_commit
        self._sweep_at_s = time.monotonic() + SWEEP_AFTER_S
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()
        return Recovered(
            self.recover_tasks(), settings, epoch, incarnations, self._last_cursor, lease_key, clock_difference_s
        )

    def _open(self) -> tuple[int, list[Incarnation], bytes]:
        """Locks, checks and opens the files, and begins an incarnation. `_opened` closes all of them again, and keeps
        the log.
        """
        opened = self._opened = contextlib.ExitStack()
        self._lock_file = directory.prepare(self._data_dir)
        opened.callback(self._lock_file.release)
        try:
            connections.rewrite_log(self._path)
            writer = self._writer = connections.connect_writer(self._path)
            opened.callback(connections.close_keeping_log, self._path, writer)
            opened.callback(self.payloads.close)
            self.payloads.open()
            self._segments = Segments(self._data_dir, self.payloads, self._reserve.wanted_bytes // SEGMENTS_IN_RESERVE)
            opened.callback(self._segments.close)
            opened.callback(self._close_idle_readers)
            self._room = Room(self._path, self._writer, self._segments, self._reserve, self._size_max_bytes)
            self._last_cursor = self.newest_cursor()
            begun = schema.begin_incarnation(self._writer, self._now(), self._last_cursor)
            if saved := schema.read_private(self._writer, schema.SETTING_TIME):
                self._downtimes.load(saved)
            self._sweeper = Sweeper(self._writer, self._segments, self._downtimes, self._dedupe_window_s)
            self._files = directory.FileIdentities(self._path)
        except (sqlite3.Error, OSError, JournalError, *PARSE_ERRORS) as error:
            opened.close()
            raise failures.explain_open(error, self._path) from error
        return begun

    def append(self, *entries: Entry) -> None:
        for entry in entries:
            assert not (entry.submits and entry.settles), "submits may be rejected, settles may not: keep them apart"
        if self._fatal is not None:
            raise self._fatal
        if self._thread is None:
            raise JournalError(f"The journal {self._path} is closed.")
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
        last = self._last_cursor  # read first: the first outcomes may be committed after the query
        ((cursor,),) = self._rows("SELECT min(cursor) FROM outcome", ())
        return last + 1 if cursor is None else int(cursor)

    @property
    def removed_cursor(self) -> int:
        """The newest cursor whose outcome is deleted: a reader at an earlier cursor may have missed outcomes."""
        return self._sweeper.removed_cursor

    def _run(self) -> None:
        try:
            while not self._closing:
                self._receive()
                self._busy_since_s = time.monotonic()
                wrote = self._write()
                self._sweep(busy=wrote)
                self._busy_since_s = 0.0
            self._stuck = False  # try a last time to write waiting entries
            while self._pending and not self._stuck:
                self._write()
            if self._pending:
                assert self._full is not None
                self._on_commit(list(self._pending), 0, self._full)
            self.close_readers()
            connections.close_writer(self._path, self._writer)
            self._segments.close()
        except Exception as error:  # noqa: BLE001  # the callback is how the driver learns that this thread failed
            self._fail(error)

    def _receive(self) -> None:
        """Moves entries from the queue to `_pending`. If none can be written, waits for entries, the next sweep or the
        next retry.
        """
        timeout_s = 0.0
        if not self._pending or self._stuck:
            at_s = self._sweep_at_s if self._full is None else min(self._sweep_at_s, self._retry_at_s)
            timeout_s = max(at_s - time.monotonic(), 0.0)
        try:
            received = [*self._queue.get(timeout=timeout_s), *self._drain_queue()]
        except queue.Empty:
            return
        if any(entry is _CLOSE for entry in received):
            self._closing = True  # entries that are in the queue behind _CLOSE are written as well
            received = [entry for entry in received if entry is not _CLOSE]
        self._pending.extend(received if self._full is None else self._reject_submits(received))

    def _drain_queue(self) -> list[Entry]:
        """Removes and returns the entries that are in the queue now."""
        return [entry for _ in range(self._queue.qsize()) for entry in self._queue.get_nowait()]

    def _write(self) -> bool:
        """Writes the next waiting entries, if there may be room. Returns whether any were written."""
        retry_due = self._full is not None and time.monotonic() >= self._retry_at_s
        if retry_due:
            self._stuck = False
        written = bool(self._pending) and not self._stuck and self._write_batch()
        if retry_due:
            self._retry_at_s = time.monotonic() + RETRY_S
            if not self._pending:
                self._try_end_full()
        return written

    def _write_batch(self) -> bool:
        batch, bytes_total = self._room.pop_batch(self._pending)
        try:
            if any(entry.submits for entry in batch):
                self._room.require_room_for_submits(bytes_total)
            self._write_now(batch, bytes_total)
        except Exception as error:
            self._pending.extendleft(reversed(batch))
            problem = failures.explain(error, self._path)
            if not isinstance(problem, JournalFullError):
                raise
            self._roll_back()
            if self._full is not None:
                return self._write_one_by_one()
            self._begin_full(problem)
            return False
        return True

    def _begin_full(self, problem: JournalFullError) -> None:
        """Rejects submits from now on."""
        self._full = problem
        self._retry_at_s = time.monotonic() + RETRY_S
        self._on_commit([], 0, problem)  # no entries: see CommitCallback
        self._pending = deque(self._reject_submits(self._pending))

    def _write_now(self, batch: Sequence[Entry], bytes_total: int) -> None:
        """Commits the entries as one transaction, and reports the commit."""
        first_cursor = self._last_cursor + 1
        self._commit(batch, bytes_total)
        self._on_commit(batch, first_cursor, None)

    def _write_one_by_one(self) -> bool:
        """Writes waiting entries with the space of the reserve, and returns whether any were written. Two kinds of
        entries stay in sequence: settings, and outcomes other than small cancellations. If there is no space for
        such an entry, it and all later entries of its kind wait; the other entries are tried. Writing an outcome makes
        room for the next one, because it deletes the task.
        """
        written, waits = False, set[str]()
        with self._room.reserve_released():
            for _ in range(len(self._pending)):
                entry = self._pending[0]
                sequence = (
                    "outcomes" if not is_small_or_frees(entry) else "settings" if entry.settings or entry.epoch else ""
                )
                if sequence not in waits and not self._full_error_from(partial(self._write_one, entry)):
                    written = True
                    self._pending.popleft()
                    self._segments.delete_unused(self._writer)
                else:
                    waits |= {sequence} - {""}
                    self._pending.rotate(-1)
        self._stuck = bool(self._pending)
        self._retry_at_s = time.monotonic() + RETRY_S
        return written

    def _write_one(self, entry: Entry) -> None:
        bytes_total = content_bytes(entry)
        if not is_small_or_frees(entry):
            self._room.require_room_for_outcome(bytes_total)
        self._write_now([entry], bytes_total)

    def _full_error_from(self, step: Callable[[], object]) -> JournalFullError | None:
        """Calls `step`, which writes or checks for room. If there is no room, rolls back and returns the error."""
        try:
            step()
        except Exception as error:
            problem = failures.explain(error, self._path)
            if not isinstance(problem, JournalFullError):
                raise
            self._roll_back()
            return problem
        return None

    def _roll_back(self) -> None:
        """Rolls back a transaction for which there was no room."""
        self._segments.abandon()
        if self._writer.in_transaction:
            self._writer.execute("ROLLBACK")

    def _try_end_full(self) -> None:
        """Accepts submits again if there is room."""
        self._full = self._room.prepare_for_submits()
        if self._full is None:
            self._rejected.clear()
            self._on_commit([], self._last_cursor + 1, None)

    def _commit(self, batch: Sequence[Entry], bytes_total: int) -> None:
        """Writes the entries as one transaction, and syncs it."""
        self._room.require_room_for_transaction(bytes_total)
        statements, outcomes = transaction(batch, self._last_cursor + 1, bytes_total, self._segments)
        if self._segments.needs_flush:
            self._segments.flush()
        alone = len(statements) == 1  # SQLite makes it a transaction: fewer calls
        if not alone:
            self._writer.execute("BEGIN IMMEDIATE")
        for sql, parameters in statements:
            self._writer.execute(sql, parameters)
        if not alone:
            self._writer.execute("COMMIT")
        self._files.check()
        self._last_cursor += outcomes
        self._sweeper.note_commit(self._last_cursor, [i for entry in batch for i in entry.deleted_dead_letters])

    def _reject_submits(self, entries: Sequence[Entry] | deque[Entry]) -> list[Entry]:
        """Rejects the entries with submits. Returns the other entries, without the settles of rejected tasks."""
        assert self._full is not None
        rejected, others = list[Entry](), list[Entry]()
        for entry in entries:
            if entry.submits:
                rejected.append(entry)
                self._rejected.update([record.task_id for record in entry.submits])
                continue
            if any(record.task_id in self._rejected for record in entry.settles):
                entry.settles = [record for record in entry.settles if record.task_id not in self._rejected]  # in place
            others.append(entry)
        if rejected:
            self._on_commit(rejected, 0, self._full)
        return others

    def _sweep(self, *, busy: bool) -> None:
        started = time.monotonic()
        if started < self._sweep_at_s:
            return
        self._files.check()
        short = self._full is not None and self._room.is_short()
        with self._room.reserve_released() if short else contextlib.nullcontext():
            try:
                more = self._sweeper.step(disk_full=short)
            except (sqlite3.Error, OSError) as error:
                if not isinstance(failures.explain(error, self._path), JournalFullError):
                    raise
                more = False  # there is no room for the sweep's deletions
        ended = time.monotonic()
        if more:
            share = SWEEP_SHARE_BUSY if busy else SWEEP_SHARE_IDLE
            self._sweep_at_s = ended + (ended - started) * (1 / share - 1)
        else:
            self._sweep_at_s = ended + TICK_S
            self._room.measure()
            check = partial(self._room.require_room_for_submits, 0)
            if self._full is None and (problem := self._full_error_from(check)):
                self._begin_full(problem)

    def _fail(self, error: Exception) -> None:
        """Stops the journal: writes nothing more, and leaves the log for the next master to read."""
        self._fatal = failures.explain(error, self._path)
        connections.close_keeping_log(self._path, self._writer)
        entries = [*self._pending, *self._drain_queue()]
        self._on_commit([entry for entry in entries if entry is not _CLOSE], 0, self._fatal)
