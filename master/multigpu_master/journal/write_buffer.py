"""What is on its way to the disk, and who is to be told when it is there.

Entries that nobody waits for linger a little, for others to share their transaction. Tasks that nobody will be told of
before they end wait longer, in memory: most settle meanwhile, and are written once, as their outcome. But whatever is
told to be durable is so, with all that was taken before it. The journal has a thread of its own; it calls back when a
transaction is on the disk, and only then are durable tasks acknowledged and settled ones forgotten.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from multigpu_master.core import events as ev
from multigpu_master.core.model import Task
from multigpu_master.journal.protocol import Entry, Journal, JournalError, JournalFullError, LargeBody
from multigpu_master.journal.request_filter import KnownRequests
from multigpu_master.payloads import messages as wire_large
from multigpu_master.wire.tasks import settle_record, submit_record

log = structlog.get_logger()

# What may wait for the journal thread before the front doors stop reading.
JOURNAL_BACKLOG_BYTES = 64 << 20
# Entries larger than this are written at once: the disk should not idle while there is much to write.
LINGER_BYTES_MAX = 256 << 10
# Outcomes of more than this go to the journal in several entries.
ENTRY_BYTES_MAX = 256 << 10
# How long an entry that nobody waits for may wait for others. What settles meanwhile is written once, not twice, and
# the journal's thread is not woken, to wait for the interpreter, while a task is on its way.
LINGER_S = 0.02
# How long at most, and in how many bytes, tasks wait to be written that nobody is told of; at least half as long.
PATIENCE_S = 0.5
PATIENT_BYTES_MAX = 64 << 20

# How long a call waits for what it asked for to be on the disk, which may be full.
DURABLE_S = 10.0

Done = Callable[[JournalError | None], None]


@dataclass(slots=True)
class _Patient:
    """Tasks that wait to be written, by task_id, and who is to be told if they can't be."""

    tasks: dict[int, Task] = field(default_factory=dict)
    failed: list[Done] = field(default_factory=list)


def tell(future: asyncio.Future[JournalError | None]) -> Done:
    """For a call that awaits this, and may be gone by then: its client broke it off. Others wait behind it."""

    def done(error: JournalError | None) -> None:
        if not future.done():
            future.set_result(error)

    return done


@dataclass(slots=True)
class _Pending:
    """An entry on its way to the disk, and who is to be told."""

    entry: Entry
    size: int
    referred_bytes: int = 0  # of these: they lie where they are, and nothing is gained by writing them early
    submitted: Sequence[Task] = ()
    settled: Sequence[Task] = ()
    done: Done | None = None
    tells: bool = True  # `done` tells a client that it is durable


class Journaling:
    """See the module. `handle` feeds an event to the core; `committed` is told that outcomes became durable; `on_fatal`
    is called once, with the reason, when the master can't go on.
    """

    def __init__(
        self,
        journal: Journal,
        handle: Callable[[ev.Event], object],
        committed: Callable[[], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        self.writable = journal.writable
        self._journal = journal
        self._handle = handle
        self._on_outcomes = committed
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, _Pending] = {}
        self._pending_bytes = 0
        self._known_requests = KnownRequests()
        self._learning: asyncio.Future[None] | None = None
        self._young, self._old = _Patient(), _Patient()
        self._patient_bytes = 0
        self._patience: asyncio.TimerHandle | None = None
        self._lingering: list[_Pending] = []
        self._lingering_bytes = 0
        self._linger: asyncio.TimerHandle | None = None
        self._backlog_fell = asyncio.Event()

    # --- in ----------------------------------------------------------------------------------------------------------

    def submits(self, fresh: Sequence[Task], done: Done, deleted_dead_letters: Sequence[int], urgent: bool) -> None:
        """Tasks the core has taken, in the place of dead letters. `done` is told when they are durable, or can't be."""
        size = sum([len(t.payload) for t in fresh])
        entry = Entry(deleted_dead_letters=deleted_dead_letters)
        referred = size - _own_bytes(fresh) if size > LINGER_BYTES_MAX else 0
        self._append(_Pending(entry, size, referred, submitted=fresh, done=done), urgent=urgent)

    def submits_patiently(self, fresh: Sequence[Task], failed: Done) -> None:
        """Tasks the core has taken, of which nobody is told before they end. `failed` is called if they can't be made
        durable, and may be called without an error.
        """
        self._young.tasks.update([(task.task_id, task) for task in fresh])
        self._young.failed.append(failed)
        self._patient_bytes += _own_bytes(fresh)
        if self._patient_bytes > PATIENT_BYTES_MAX:
            self.hurry()
        elif self._patience is None:
            self._patience = self._loop.call_later(PATIENCE_S / 2, self._grow_old)

    def hurry(self) -> None:
        """Has the tasks written that wait patiently."""
        self._lose_patience(self._old, self._young)
        self._flush()

    def _grow_old(self) -> None:
        """Has those written that were old already."""
        self._lose_patience(self._old)
        self._flush()
        self._old, self._young = self._young, self._old
        self._patience = self._loop.call_later(PATIENCE_S / 2, self._grow_old) if self._old.failed else None

    def _lose_patience(self, *groups: "_Patient") -> None:
        """Hands over the tasks that wait, before all that lingers: it may rest on them. Who is to be told comes behind
        all that: a submit that has joined the task of another call is answered once this is written or rejected.
        """
        tasks = [task for group in groups for task in group.tasks.values()]
        failed = [each for group in groups for each in group.failed]
        for group in groups:
            group.tasks, group.failed = {}, []
        if not failed:
            return

        def done(error: JournalError | None) -> None:
            for each in failed:
                each(error)

        size = sum([len(task.payload) for task in tasks])
        self._patient_bytes -= _own_bytes(tasks)
        first, last = _Pending(Entry(), size, submitted=tasks), _Pending(Entry(), 0, done=done, tells=False)
        self._pending |= {id(pending.entry): pending for pending in (first, last)}
        self._pending_bytes += size
        self._lingering = [first, *self._lingering, last]

    def settles(self, settled: Sequence[tuple[Task, bytes | LargeBody]], done: Done | None = None) -> None:
        """Tasks that ended, each with its serialized Outcome. `done` is told when they are durable."""
        size = sum([len(body) for _, body in settled])
        if size > ENTRY_BYTES_MAX and len(settled) > 1:  # where there is little room, some of them may fit
            half = len(settled) // 2
            self.settles(settled[:half])
            self.settles(settled[half:], done)
            return
        tasks = [task for task, _ in settled]
        unwritten = self._forget_patience(tasks)
        records = [settle_record(task, body, submitted=task.task_id not in unwritten) for task, body in settled]
        if self._known_requests.full and (self._learning is None or self._learning.done()):
            self.learn_requests()  # before these are added: they are not in the journal yet
        self._known_requests.add([task.request_id for task in tasks if task.request_id])
        referred = size - wire_large.own_bytes([b for _, b in settled]) if size > LINGER_BYTES_MAX else 0
        pending = _Pending(Entry(settles=records), size, referred, settled=tasks, done=done)
        self._append(pending, urgent=done is not None)

    async def save(self, settings: dict[str, bytes | None], deleted_dead_letters: Sequence[int] = ()) -> None:
        """Writes settings, and returns when they are on the disk. JournalError: they are not there by DURABLE_S."""
        future: asyncio.Future[JournalError | None] = self._loop.create_future()
        self.remember(settings, tell(future), deleted_dead_letters)
        await asyncio.wait([future], timeout=DURABLE_S)
        error = future.result() if future.done() else JournalFullError("the disk takes nothing now; free space on it")
        if error is not None:
            raise error

    def remember(
        self, settings: dict[str, bytes | None], done: Done | None = None,
        deleted_dead_letters: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Writes settings soon."""
        self._append(
            _Pending(Entry(settings=settings, deleted_dead_letters=deleted_dead_letters), 0, done=done), urgent=True
        )

    def begin_epoch(self, epoch: int, done: Done) -> None:
        """Writes the epoch of the ids that are given out next."""
        self._append(_Pending(Entry(epoch=epoch), 0, done=done), urgent=True)

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
        self._lingering.append(pending)
        self._lingering_bytes += pending.size - pending.referred_bytes
        if self._lingering_bytes > LINGER_BYTES_MAX:
            self._flush()
        elif urgent:
            self._loop.call_soon(self._flush)  # with what the same call hands over besides
        elif self._linger is None:
            self._linger = self._loop.call_later(LINGER_S, self._flush)

    def _flush(self) -> None:
        """Hands the entries that lingered to the journal."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self._lingering:
            if any(pending.done is not None and pending.tells for pending in self._lingering):
                # Who is told something may have heard of tasks that wait patiently: they come first.
                self._lose_patience(self._old, self._young)
            lingering, self._lingering = self._lingering, []
            self._lingering_bytes = 0
            settled = {task.task_id for pending in lingering for task in pending.settled}
            for pending in lingering:
                if pending.submitted:  # what has settled meanwhile is written as its outcome only
                    unsettled = [task for task in pending.submitted if task.task_id not in settled]
                    pending.entry.submits = [submit_record(task) for task in unsettled]
            with contextlib.suppress(JournalError):  # it has failed, and `on_fatal` is told of that
                self._journal.append(*[pending.entry for pending in lingering])

    def _forget_patience(self, settled: Iterable[Task]) -> set[int]:
        """What has settled need not be written as submitted any more. Returns the task_ids that waited for that."""
        young, old, unwritten = self._young.tasks, self._old.tasks, set[int]()
        if young or old:
            for task in settled:
                if old.pop(task.task_id, None) or young.pop(task.task_id, None):
                    unwritten.add(task.task_id)
                    if type(task.payload) is bytes:
                        self._patient_bytes -= len(task.payload)
        return unwritten

    async def all_durable(self) -> None:
        """Waits until nothing is on its way to the disk."""
        await asyncio.sleep(0)  # what runs soon comes first
        self.hurry()
        while self._pending:
            self._flush()
            self._backlog_fell.clear()
            await self._backlog_fell.wait()

    async def room(self) -> None:
        """Waits until the journal has caught up enough to take more."""
        while self._pending_bytes > JOURNAL_BACKLOG_BYTES and self.writable:  # else durable tasks are rejected
            self._backlog_fell.clear()
            await self._backlog_fell.wait()

    def on_commit(self, entries: Sequence[Entry], first_cursor: int, error: JournalError | None) -> None:
        """Called by the journal, on its thread."""
        self._loop.call_soon_threadsafe(self._committed, entries, error)

    def _committed(self, entries: Sequence[Entry], error: JournalError | None) -> None:
        if error is not None and not isinstance(error, JournalFullError):
            self._on_fatal(f"the journal failed and can't be trusted until it is read again: {error}")
            return
        if error is not None or not entries:  # what empties a full journal is committed all the while
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
                log.error(
                    "journal can't be written: durable tasks are rejected, running work goes on", error=str(error)
                )


def _own_bytes(tasks: Iterable[Task]) -> int:
    """The payloads that lie in our memory, and not in files."""
    return sum([len(task.payload) for task in tasks if type(task.payload) is bytes])
