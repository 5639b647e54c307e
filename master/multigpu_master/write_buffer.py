"""Buffers entries for the journal's thread, and calls back when they are durable.

An entry that no unary call waits for stays here for LINGER_S, so that more entries share its transaction. Tasks whose
client wants no acceptance, only the outcome, are deferred for up to DEFER_S, in memory: most of them settle meanwhile,
and only their outcome is written. An entry with a `done` callback is written after all tasks and entries that were
added before it, except that on a full disk small cancellations overtake outcomes.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from multigpu_master.core import events as ev
from multigpu_master.core.model import Task
from multigpu_master.errors import JournalError, JournalFullError
from multigpu_master.journal.protocol import Entry, LargeBody
from multigpu_master.journal.request_filter import RequestFilter
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.wire import payloads as payload_messages
from multigpu_master.wire.tasks import settle_record, submit_record

log = structlog.get_logger()

# Streams are not read while more bytes than this wait for the journal's thread.
JOURNAL_BACKLOG_BYTES = 64 << 20
# When more bytes than this have gathered, they are written at once: the disk should not idle while there is much to do.
LINGER_BYTES_MAX = 256 << 10
# A larger batch of outcomes becomes several entries: on a full disk, some of them may fit.
ENTRY_BYTES_MAX = 256 << 10
# How long an entry waits for others, to reduce the number of transactions: each of them makes the event loop wait for
# Python's global lock (GIL).
LINGER_S = 0.02
# A deferred task is written between DEFER_S / 2 and DEFER_S after `defer`; earlier if `flush` is called, or if an entry
# with a `done` callback is passed to the journal.
DEFER_S = 0.5
DEFERRED_BYTES_MAX = 64 << 20
# A call waits for at most this long until its changes are on the disk, which may be full.
DURABLE_S = 10.0

# Disk space that a transaction needs, and what each cancellation in it adds: a page of tasks and a page of an index.
TRANSACTION_ROOM_BYTES, CANCELLATION_ROOM_BYTES = 64 << 10, 16 << 10

Done = Callable[[JournalError | None], None]


def set_result_of(future: asyncio.Future[JournalError | None]) -> Done:
    """A callback that sets the future's result, unless the call that awaits it was cancelled."""

    def done(error: JournalError | None) -> None:
        if not future.done():
            future.set_result(error)

    return done


def after_both(done: Done) -> Done:
    """A callback for two entries, which calls `done` when both are durable or rejected."""
    first: list[JournalError | None] = []

    def one(error: JournalError | None) -> None:
        if first:
            done(first[0] or error)
        first.append(error)

    return one


@dataclass(slots=True)
class _Pending:
    """An entry that is not committed yet, and its callback."""

    entry: Entry
    size: int  # bytes of its payloads and results, without those in shared files, which the journal does not write
    submitted: Sequence[Task] = ()
    replaced: Sequence[tuple[int, int]] = ()  # submitted task_ids, and the dead letters that they replace
    settled: Sequence[Task] = ()
    done: Done | None = None  # reports that the entry is durable, or why it is rejected


class WriteBuffer:
    """`handle` feeds an event to the core, `on_outcomes_committed` is called when outcomes are durable, and `on_fatal`
    once, with the reason, when the master can't go on.
    """

    def __init__(
        self,
        journal: SqliteJournal,
        handle: Callable[[ev.Event], object],
        on_outcomes_committed: Callable[[], None],
        on_fatal: Callable[[str], None],
        last_cursor: int = 0,
    ) -> None:
        self.writable = journal.writable
        self.last_cursor = last_cursor  # of the newest outcome whose task the core has forgotten
        self._journal = journal
        self._handle = handle
        self._on_outcomes_committed = on_outcomes_committed
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, _Pending] = {}
        self._pending_bytes = 0
        self._request_filter = RequestFilter()
        self._filter_load: asyncio.Future[None] | None = None
        # Deferred tasks by task_id: those deferred since the timer was last set, and those from before.
        self._deferred: dict[int, Task] = {}
        self._deferred_before: dict[int, Task] = {}
        self._deferred_bytes = 0
        self._deferral_timer: asyncio.TimerHandle | None = None
        self._lingering: list[_Pending] = []
        self._lingering_bytes = 0
        self._linger_timer: asyncio.TimerHandle | None = None
        self._backlog_fell = asyncio.Event()

    def append_submits(
        self, fresh: Sequence[Task], done: Done | None, replaced: Sequence[tuple[int, int]], urgent: bool
    ) -> None:
        """Writes tasks that the core has accepted. `replaced`: pairs of a task_id and the dead letter that is deleted
        in the same transaction. `done` is called when the tasks are durable or rejected.
        """
        pending = _Pending(Entry(), _inline_payload_bytes(fresh), submitted=fresh, replaced=replaced, done=done)
        self._append(pending, urgent=urgent)

    def defer(self, fresh: Sequence[Task]) -> None:
        """Writes tasks that the core has accepted, and whose acceptance is not sent, unless they settle soon."""
        self._deferred.update([(task.task_id, task) for task in fresh])
        self._deferred_bytes += _inline_payload_bytes(fresh)
        if self._deferred_bytes > DEFERRED_BYTES_MAX:
            self.flush()
        elif self._deferral_timer is None:
            self._deferral_timer = self._loop.call_later(DEFER_S / 2, self._write_older)

    def flush(self) -> None:
        """Passes all entries to the journal, with the deferred tasks."""
        self._end_deferrals()
        self._hand_over()

    def _write_older(self) -> None:
        """Passes the tasks to the journal that were deferred before the timer was last set, and sets it again."""
        newer, self._deferred = self._deferred, {}
        self._end_deferrals()
        self._deferred_before = newer
        self._hand_over()
        again = self._loop.call_later(DEFER_S / 2, self._write_older) if self._deferred_before else None
        self._deferral_timer = again

    def _end_deferrals(self) -> None:
        """Adds the deferred tasks to the lingering entries: in front, because other entries may depend on them."""
        tasks = [*self._deferred_before.values(), *self._deferred.values()]
        self._deferred_before, self._deferred = {}, {}
        if not tasks:
            return
        pending = _Pending(Entry(), _inline_payload_bytes(tasks), submitted=tasks)
        self._deferred_bytes -= pending.size
        self._pending[id(pending.entry)] = pending
        self._pending_bytes += pending.size
        self._lingering.insert(0, pending)

    def append_settles(
        self, settled: Sequence[tuple[Task, bytes | LargeBody]], now: float, done: Done | None = None
    ) -> None:
        """Writes the outcomes of tasks that settle now: (task, serialized Outcome). `done` is called when they are
        durable.
        """
        bodies = [body for _, body in settled]
        if len(settled) > 1 and sum(map(len, bodies)) > ENTRY_BYTES_MAX:
            half = len(settled) // 2
            either = after_both(done) if done is not None else None  # on a full disk, either half may be written first
            self.append_settles(settled[:half], now, either)
            self.append_settles(settled[half:], now, either)
            return
        tasks = [task for task, _ in settled]
        unwritten = self._forget_deferred(tasks)
        records = [
            settle_record(task, body, now, submit_may_be_stored=task.task_id not in unwritten) for task, body in settled
        ]
        if self._request_filter.full and (self._filter_load is None or self._filter_load.done()):
            # Before `add`: a load reads the journal, which does not have these request_ids yet, and keeps only those
            # that are added after it has begun.
            self.load_request_filter()
        self._request_filter.add([task.request_id for task in tasks if task.request_id])
        pending = _Pending(Entry(settles=records), payload_messages.memory_bytes(bodies), settled=tasks, done=done)
        self._append(pending, urgent=done is not None)

    async def wait_written(self, task: Task) -> None:
        """Returns when a task that the core has accepted is durable or rejected, or after DURABLE_S."""
        if task.spec.durable:
            future: asyncio.Future[JournalError | None] = self._loop.create_future()
            await asyncio.sleep(0)  # lets the scheduled callback append its entry
            self.append(Entry(), set_result_of(future))
            await asyncio.wait([future], timeout=DURABLE_S)

    async def save(self, settings: dict[str, bytes | None], deleted_dead_letters: Sequence[int] = ()) -> None:
        """Writes settings, and returns when they are on the disk. Raises JournalError if they are rejected, or are not
        on the disk after DURABLE_S.
        """
        future: asyncio.Future[JournalError | None] = self._loop.create_future()
        self.append(Entry(settings=settings, deleted_dead_letters=deleted_dead_letters), set_result_of(future))
        await asyncio.wait([future], timeout=DURABLE_S)
        error = future.result() if future.done() else JournalFullError("the disk may be full; free space on it")
        if error is not None:
            raise error

    def append(self, entry: Entry, done: Done | None = None, *, urgent: bool = True) -> None:
        """Writes an entry without submits and settles. `done` is called when the entry is durable or rejected.
        `urgent`: the entry does not stay here for LINGER_S.
        """
        self._append(_Pending(entry, 0, done=done), urgent=urgent)

    def cancellations_max(self) -> int:
        """How many cancellations of tasks without log and outputs fit on the disk now."""
        if self.writable:
            return sys.maxsize
        return max(0, self._journal.free_bytes() - TRANSACTION_ROOM_BYTES) // CANCELLATION_ROOM_BYTES

    def perhaps_known(self, request_ids: Sequence[str]) -> list[str]:
        """The requests among these that the journal may know."""
        return self._request_filter.sift(request_ids)

    def load_request_filter(self) -> None:
        """Loads the journal's request_ids into the filter, in the background: new request_ids then need no look-up."""
        settled = [t.request_id for p in self._pending.values() for t in p.settled]
        self._filter_load = asyncio.ensure_future(self._request_filter.load(self._journal, settled))

    def _append(self, pending: _Pending, *, urgent: bool) -> None:
        self._pending[id(pending.entry)] = pending
        self._pending_bytes += pending.size
        self._lingering.append(pending)
        self._lingering_bytes += pending.size
        if self._lingering_bytes > LINGER_BYTES_MAX:
            self._hand_over()
        elif urgent:
            self._loop.call_soon(self._hand_over)  # in the loop's next round: entries of this round share a transaction
        elif self._linger_timer is None:
            self._linger_timer = self._loop.call_later(LINGER_S, self._hand_over)

    def _hand_over(self) -> None:
        """Passes the lingering entries to the journal."""
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        if not self._lingering:
            return
        if any(pending.done is not None for pending in self._lingering):
            self._end_deferrals()  # when `done` is called, a client may learn of a deferred task: write it first
        lingering, self._lingering = self._lingering, []
        self._lingering_bytes = 0
        settles = {task.task_id: pending.entry for pending in lingering for task in pending.settled}
        for pending in lingering:
            if pending.submitted:  # of a task that settled meanwhile, only the outcome is written
                pending.submitted = [task for task in pending.submitted if task.task_id not in settles]
                pending.entry.submits = [submit_record(task) for task in pending.submitted]
            for task_id, letter in pending.replaced:  # deleted by the transaction that writes the new task
                entry = settles.get(task_id, pending.entry)
                entry.deleted_dead_letters = [*entry.deleted_dead_letters, letter]
        with contextlib.suppress(JournalError):  # it is closed, or has failed and `_on_fatal` is called
            self._journal.append(*[pending.entry for pending in lingering])

    def _forget_deferred(self, settled: Sequence[Task]) -> set[int]:
        """Removes settled tasks from the deferred tasks. Returns the task_ids that it removed: the journal never had
        these tasks.
        """
        unwritten = set[int]()
        for deferred in filter(None, (self._deferred_before, self._deferred)):
            for task in settled:
                if deferred.pop(task.task_id, None) is not None:
                    unwritten.add(task.task_id)
                    self._deferred_bytes -= _inline_payload_bytes((task,))
        return unwritten

    async def flush_and_wait(self) -> None:
        """Waits until every entry is committed or rejected."""
        await asyncio.sleep(0)  # lets scheduled callbacks append their entries
        self.flush()
        while self._pending:
            self._hand_over()
            self._backlog_fell.clear()
            await self._backlog_fell.wait()

    async def wait_for_backlog(self) -> None:
        """Waits until at most JOURNAL_BACKLOG_BYTES wait for the journal. While the journal is full, returns at once:
        durable tasks are rejected then.
        """
        while self._pending_bytes > JOURNAL_BACKLOG_BYTES and self.writable:
            self._backlog_fell.clear()
            await self._backlog_fell.wait()

    def handle_commit(self, entries: Sequence[Entry], first_cursor: int, error: JournalError | None) -> None:
        """Called in the event loop with each report of the journal, in their order. The parameters: CommitCallback."""
        if error is not None and not isinstance(error, JournalFullError):
            self._on_fatal(f"the journal failed, and must be read again by a new master: {error}")
            return
        # Committed entries do not show that there is room: entries without submits are committed while the journal is
        # full, too. See CommitCallback.
        if error is not None or not entries:
            self._set_writable(error)
        settled: list[Task] = []
        for entry in entries:
            pending = self._pending.pop(id(entry))
            self._pending_bytes -= pending.size
            if error is not None and pending.submitted:
                self._handle(ev.SubmitFailed(pending.submitted))
            if pending.done is not None:
                pending.done(error)
            settled.extend(pending.settled)
        if settled:
            if error is None:
                self.last_cursor = first_cursor + sum([len(entry.settles) for entry in entries]) - 1
            self._handle(ev.SettlesDone(settled))
            self._on_outcomes_committed()
        self._backlog_fell.set()

    def _set_writable(self, error: JournalError | None) -> None:
        if error is None and not self.writable:
            log.info("journal can be written again: durable tasks are accepted")
        elif error is not None and self.writable:
            log.error("journal can't be written: durable tasks are rejected, running tasks continue", error=str(error))
        self.writable = error is None


def _inline_payload_bytes(tasks: Iterable[Task]) -> int:
    """The bytes of the payloads in memory, without those in shared files."""
    return sum([len(task.payload) for task in tasks if type(task.payload) is bytes])
