"""What is on its way to the disk, and who is to be told when it is there.

Entries that nobody waits for linger a little, for others to share their transaction. The journal has a thread of its
own; it calls back when a transaction is on the disk, and only then are durable tasks acknowledged and settled ones
forgotten.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from multigpu.v1 import task_pb2

from multigpu_master import wire
from multigpu_master.core import events as ev
from multigpu_master.core.model import Task
from multigpu_master.journal import Entry, Journal, JournalError, JournalFullError
from multigpu_master.known_requests import KnownRequests

log = structlog.get_logger()

# What may wait for the journal thread before the front doors stop reading.
JOURNAL_BACKLOG_BYTES = 64 << 20
# Entries larger than this are written at once: the disk should not idle while there is much to write.
LINGER_BYTES_MAX = 256 << 10
# How long an entry that nobody waits for may wait for others. What settles meanwhile is written once, not twice, and
# the journal's thread is not woken, to wait for the interpreter, while a task is on its way.
LINGER_S = 0.02


Done = Callable[[JournalError | None], None]


@dataclass(slots=True)
class _Pending:
    """An entry on its way to the disk, and who is to be told."""

    entry: Entry
    size: int
    submitted: Sequence[Task] = ()
    settled: Sequence[Task] = ()
    done: Done | None = None


class Journaling:
    """See the module. `handle` feeds an event to the core; `committed` is told that outcomes became durable; `on_fatal`
    is called once, with the reason, when the master can't go on.
    """

    def __init__(
        self,
        journal: Journal,
        outcome_message: Callable[[Task, task_pb2.Outcome], None],
        handle: Callable[[ev.Event], object],
        committed: Callable[[], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        self.writable = True
        self._journal = journal
        self._outcome_message = outcome_message
        self._handle = handle
        self._on_outcomes = committed
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, _Pending] = {}
        self._pending_bytes = 0
        self._known_requests = KnownRequests()
        self._learning: asyncio.Future[None] | None = None
        self._lingering: list[Entry] = []
        self._lingering_bytes = 0
        self._linger: asyncio.TimerHandle | None = None
        self._backlog_fell = asyncio.Event()

    # --- in ----------------------------------------------------------------------------------------------------------

    def submits(self, fresh: Sequence[Task], done: Done, deleted_dead_letters: Sequence[int], urgent: bool) -> None:
        """Tasks the core has taken, in the place of dead letters. `done` is told when they are durable, or can't be."""
        entry = Entry(submits=[wire.submit_record(t) for t in fresh], deleted_dead_letters=deleted_dead_letters)
        size = sum([len(t.payload) for t in fresh])
        self._append(_Pending(entry, size, submitted=fresh, done=done), urgent=urgent)

    def settles(self, settled: Sequence[tuple[Task, task_pb2.Outcome | None]]) -> None:
        """Tasks that ended, each with the message that somebody who follows it got, if anybody does."""
        records, size = [], 0
        for task, sent in settled:
            message = sent
            if message is None:
                message = task_pb2.Outcome()
                self._outcome_message(task, message)
            body = message.SerializeToString()
            size += len(body)
            records.append(wire.settle_record(task, body))
        self._known_requests.add([t.request_id for t, _ in settled if t.request_id])
        if self._known_requests.full and (self._learning is None or self._learning.done()):
            self.learn_requests()
        self._append(_Pending(Entry(settles=records), size, settled=[t for t, _ in settled]), urgent=False)

    async def save(self, settings: dict[str, bytes | None], deleted_dead_letters: Sequence[int] = ()) -> None:
        """Writes settings, and returns when they are on the disk. JournalError: they could not be written."""
        future: asyncio.Future[JournalError | None] = self._loop.create_future()
        self.remember(settings, future.set_result, deleted_dead_letters)
        if (error := await future) is not None:
            raise error

    def remember(
        self, settings: dict[str, bytes | None], done: Done | None = None,
        deleted_dead_letters: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Writes settings soon."""
        self._append(
            _Pending(Entry(settings=settings, deleted_dead_letters=deleted_dead_letters), 0, done=done), urgent=True
        )

    # --- known requests ----------------------------------------------------------------------------------------------

    def perhaps_known(self, request_ids: Sequence[str]) -> list[str]:
        """Those of these requests that the journal may know."""
        return self._known_requests.sift(request_ids)

    def learn_requests(self) -> None:
        """Reads, in the background, which request_ids the journal knows, so that new ones need no look-up."""
        settled = [t.request_id for p in self._pending.values() for t in p.settled]
        self._learning = asyncio.ensure_future(self._known_requests.load(self._journal, settled))

    # --- out ---------------------------------------------------------------------------------------------------------

    def _append(self, pending: _Pending, *, urgent: bool) -> None:
        self._pending[id(pending.entry)] = pending
        self._pending_bytes += pending.size
        self._lingering.append(pending.entry)
        self._lingering_bytes += pending.size
        if urgent or self._lingering_bytes > LINGER_BYTES_MAX:
            self._flush()
        elif self._linger is None:
            self._linger = self._loop.call_later(LINGER_S, self._flush)

    def _flush(self) -> None:
        """Hands the entries that lingered to the journal."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self._lingering:
            entries, self._lingering = self._lingering, []
            self._lingering_bytes = 0
            self._journal.append(*entries)

    async def all_durable(self) -> None:
        """Waits until nothing is on its way to the disk."""
        await asyncio.sleep(0)  # what runs soon comes first
        while self._pending:
            self._flush()
            self._backlog_fell.clear()
            await self._backlog_fell.wait()

    async def room(self) -> None:
        """Waits until the journal has caught up enough to take more."""
        while self._pending_bytes > JOURNAL_BACKLOG_BYTES:
            self._backlog_fell.clear()
            await self._backlog_fell.wait()

    def on_commit(self, entries: Sequence[Entry], first_cursor: int, error: JournalError | None) -> None:
        """Called by the journal, on its thread."""
        self._loop.call_soon_threadsafe(self._committed, entries, error)

    def _committed(self, entries: Sequence[Entry], error: JournalError | None) -> None:
        if error is not None and not isinstance(error, JournalFullError):
            self._on_fatal(f"the journal failed and can't be trusted until it is read again: {error}")
            return
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
            self._handle(ev.SettlesCommitted(settled))
            self._on_outcomes()
        self._backlog_fell.set()

    def _set_writable(self, error: JournalError | None) -> None:
        writable = error is None
        if writable != self.writable:
            self.writable = writable
            if writable:
                log.info("journal can be written again: durable tasks are taken")
            else:
                log.error("journal can't be written: durable tasks are refused, running work goes on", error=str(error))
