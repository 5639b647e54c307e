"""A simulated journal, in place of SQLite and the journal's thread. Appended entries become durable in order and after
a delay, several in a transaction, and a crash loses the rest. The master's real `WriteBuffer` uses it, on a simulated
event loop.

It repeats the rules of journal/sqlite/journal.py (what a full disk rejects and keeps, what is written once, when there
is space again); test_journal_model.py passes the same entries to both and compares them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from multigpu_master import ids
from multigpu_master.core.identity import REQUEST_ID_FREE
from multigpu_master.errors import JournalFullError
from multigpu_master.journal import request_filter as known_requests
from multigpu_master.journal.protocol import CommitCallback, Entry, SettleRecord, SubmitRecord
from multigpu_master.journal.sqlite.room import is_small_or_frees

from tests.sim.world import Link, World

if TYPE_CHECKING:
    from collections.abc import Iterator

RETRY_S = 0.5  # between two attempts on a full disk
FULL = JournalFullError("the simulated disk is full")


class Rows:
    """The contents of the disk."""

    def __init__(self) -> None:
        self.tasks: dict[int, SubmitRecord] = {}
        self.outcomes: list[SettleRecord] = []  # in order of their cursors
        self.by_request: dict[str, SettleRecord] = {}
        self.dead: dict[int, SubmitRecord] = {}
        self.settings: dict[str, bytes] = {}
        self.deleted: Counter[int] = Counter()  # how often a task was a dead letter and is none any more
        self.epoch = 0
        self.incarnations: list[ids.Incarnation] = []

    def apply(self, entry: Entry) -> None:
        """Write an entry of a transaction that succeeded."""
        for task_id in entry.deleted_dead_letters:
            letter = self.dead.pop(task_id, None)
            known = self.by_request.get(letter.request_id) if letter is not None else None
            if known is not None and known.task_id == task_id:
                self.by_request[known.request_id] = replace(known, fingerprint=REQUEST_ID_FREE)
            self.deleted[task_id] += letter is not None
        for row in entry.submits:
            self.tasks[row.task_id] = row
        for settle in entry.settles:
            if settle.submit_may_be_stored:
                self.tasks.pop(settle.task_id, None)
            self.outcomes.append(settle)
            if settle.request_id:
                self.by_request[settle.request_id] = settle
            if settle.dead is not None:
                self.dead[settle.task_id] = settle.dead
        for key, value in entry.settings.items():
            if value is None:
                self.settings.pop(key, None)
            else:
                self.settings[key] = value
        self.epoch = entry.epoch or self.epoch

    def backup(self) -> Rows:
        """A copy of the current contents."""
        rows = Rows()
        rows.restore(self)
        return rows

    def restore(self, rows: Rows) -> None:
        """Replace the contents by a copy of `rows`."""
        for name in ("tasks", "outcomes", "by_request", "dead", "deleted", "settings", "epoch", "incarnations"):
            setattr(self, name, copy(getattr(rows, name)))

    def begin_incarnation(self, name: str) -> None:
        """As schema.begin_incarnation, with a clock that stands still. That is the worst case: a master on an older
        copy begins the same epochs that the lost data had.
        """
        self.epoch = ids.next_epoch(self.epoch, 0.0)
        self.incarnations.append(ids.Incarnation(name, ids.first_id(self.epoch), len(self.outcomes) + 1))


class SimJournal(Rows):
    """The disk, and the thread that writes it. `disk_full` and `slow` inject faults; the rest is the thread's state."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.disk_full = False
        self.slow = 1.0
        self.rejected_ever = False
        self._generation = 0  # incremented by `open` and `close`
        self._queue: list[Entry] = []
        self._pending: deque[Entry] = deque()
        self._freeing: deque[Entry] = deque()  # while the disk is full: entries written before the others
        self._rejected: dict[int, None] = {}
        self._writing = False
        self._full = False  # as the thread knows it
        self._answers: Link

    def open(self, on_commit: CommitCallback) -> None:
        """A new process opens the journal. Entries that the last one had not written are lost."""
        self.close()
        self._answers = Link(self._world, 0.001, lambda answer: on_commit(*answer))

    def close(self) -> None:
        """The process ends, possibly during a write."""
        if self._generation:
            self._answers.end(lost=True)
        self._generation += 1
        self._queue = []
        self._pending.clear()
        self._freeing.clear()
        self._rejected = {}
        self._writing = self._full = False

    def append(self, *entries: Entry) -> None:
        for entry in entries:
            assert not (entry.submits and entry.settles), "submits may be rejected, settles may not: keep them apart"
        self._queue.extend(entries)
        self._take()

    def find_requests(self, request_ids: Sequence[str]) -> dict[str, SettleRecord]:
        return {r: self.by_request[r] for r in request_ids if r in self.by_request}

    @property
    def writable(self) -> bool:
        return not self._full

    @property
    def idle(self) -> bool:
        return not (self._queue or self._pending or self._freeing or self._writing or self._full)

    def _take(self) -> None:
        """If the thread is idle, it takes the queued entries and begins to write. On a full disk it writes only entries
        that are small or free space.
        """
        if self._writing:
            return
        taken, self._queue = self._queue, []
        if self._full:
            self._sort_out(taken)
            if self._freeing:
                self._begin(self._freeing)
            return
        self._pending.extend(taken)
        if self._pending:
            self._begin(self._pending)

    def _begin(self, waiting: deque[Entry]) -> None:
        self._writing = True
        batch = list(waiting)
        if len(batch) > 1 and self._world.chance(0.1):
            batch = batch[: self._world.random.randrange(1, len(batch))]
        for _ in batch:
            waiting.popleft()
        generation = self._generation
        self._world.after(self._world.between(0.0005, 0.03) * self.slow, lambda: self._end(batch, waiting, generation))

    def _end(self, batch: list[Entry], waiting: deque[Entry], generation: int) -> None:
        """End of a write. On a full disk, entries that are small or free space succeed: the reserve is unlimited."""
        if generation != self._generation:
            return
        self._writing = False
        ahead = waiting is self._freeing
        if self.disk_full and not (ahead or (batch and all(map(is_small_or_frees, batch)))):
            waiting.extendleft(reversed(batch))
            if not self._full:
                self._full = True
                self._answers.send(([], 0, FULL))
                pending = list(waiting)
                waiting.clear()
                self._sort_out(pending)
            self._world.after(RETRY_S, lambda: self._retry(generation))
        else:
            free_again = self._full and not ahead
            if free_again:
                self._full = False
                self._rejected = {}
            for entry in batch:
                self.apply(entry)
            if batch:
                self._answers.send((batch, 0, None))
            if free_again:
                self._answers.send(([], 0, None))
        self._take()

    def _retry(self, generation: int) -> None:
        if generation != self._generation:
            return
        if self._writing:
            self._world.after(0.001, lambda: self._retry(generation))
        else:
            self._begin(self._pending)

    def _sort_out(self, entries: Iterable[Entry]) -> None:
        """On a full disk: rejects submits, drops settles of rejected tasks, and keeps all other entries."""
        rejected: list[Entry] = []
        for entry in entries:
            if entry.submits:
                rejected.append(entry)
                self._rejected.update(dict.fromkeys([r.task_id for r in entry.submits]))
                continue
            if any(r.task_id in self._rejected for r in entry.settles):
                entry.settles = [r for r in entry.settles if r.task_id not in self._rejected]
            (self._freeing if is_small_or_frees(entry) else self._pending).append(entry)
        if rejected:
            self.rejected_ever = True
            self._world.coverage["journal: submits rejected"] += len(rejected)
            self._answers.send((rejected, 0, FULL))


class _Handle:
    __slots__ = ("cancelled",)

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class SimLoop:
    """The methods of an event loop that the master's write_buffer uses, on the simulated clock. Once `dead`, it runs no
    callback.
    """

    def __init__(self, world: World, when_awake: Callable[[Callable[[], None]], None]) -> None:
        self._world = world
        self._when_awake = when_awake
        self.dead = False

    def call_later(self, delay_s: float, what: Callable[..., object], *args: Any) -> _Handle:
        handle = _Handle()

        def run() -> None:
            if not (self.dead or handle.cancelled):
                what(*args)

        self._world.after(delay_s, lambda: self._when_awake(run))
        return handle

    def time(self) -> float:
        return self._world.now

    def call_soon(self, what: Callable[..., object], *args: Any) -> _Handle:
        return self.call_later(0.0, what, *args)

    call_soon_threadsafe = call_soon

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it, this is asyncio's running loop, and request_id filters are small. A filter is never loaded here,
        so all lookups read the journal anyway, and clearing megabytes would take longer than the simulation.
        """
        asyncio._set_running_loop(cast("asyncio.AbstractEventLoop", self))
        capacity, known_requests.CAPACITY_MIN = known_requests.CAPACITY_MIN, 1
        try:
            yield
        finally:
            known_requests.CAPACITY_MIN = capacity
            asyncio._set_running_loop(None)
