"""A model of the journal: what was appended becomes durable in order and after a delay; a crash loses the rest.

While `full`, transactions fail: entries with submits are refused, those with outcomes wait for room, as the protocol
says.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from multigpu_master.core.model import Outcome, Spec, Task

from tests.sim.world import World


@dataclass(slots=True)
class Row:
    """A submitted task, as it is on the disk."""

    task_id: int
    request_id: str
    spec: Spec
    payload: bytes
    partition_key: str
    submit_s: float


@dataclass(slots=True)
class Settle:
    """An outcome, as it is on the disk."""

    task_id: int
    request_id: str
    outcome: Outcome
    attempts: int


@dataclass(slots=True)
class Entry:
    submits: list[Row] = field(default_factory=list)
    settles: list[Settle] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    done: Callable[[bool], None] = lambda _ok: None


class SimJournal:
    """The disk, and the thread that writes it. `generation` counts the openings."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.tasks: dict[int, Row] = {}
        self.outcomes: dict[int, Settle] = {}
        self.by_request: dict[str, Settle] = {}
        self.generation = 0
        self.full = False
        self._queue: list[Entry] = []
        self._writing = False

    def open(self) -> None:
        self.generation += 1
        self._queue = []
        self._writing = False

    def append(self, entry: Entry) -> None:
        self._queue.append(entry)
        self._write()

    @property
    def idle(self) -> bool:
        return not self._queue and not self._writing

    def _write(self) -> None:
        if self._writing or not self._queue:
            return
        self._writing = True
        batch, self._queue = self._queue, []
        generation = self.generation
        self._world.after(self._world.between(0.0005, 0.03), lambda: self._end(batch, generation))

    def _end(self, batch: list[Entry], generation: int) -> None:
        if generation != self.generation:
            return
        done: list[tuple[Entry, bool]] = []
        if self.full:
            kept = [e for e in batch if e.settles]
            done = [(e, False) for e in batch if not e.settles]
            self._queue = kept + self._queue
        else:
            for entry in batch:
                self._apply(entry)
                done.append((entry, True))
        # The transaction is on the disk; the master hears of it a little later.
        self._world.after(self._world.between(0.0001, 0.002), lambda: self._tell(done, generation))

    def _tell(self, done: list[tuple[Entry, bool]], generation: int) -> None:
        if generation != self.generation:
            return
        self._writing = False
        for entry, ok in done:
            entry.done(ok)
        if self.full:
            self._world.after(0.3, self._write)
        else:
            self._write()

    def _apply(self, entry: Entry) -> None:
        for row in entry.submits:
            self.tasks[row.task_id] = row
        for settle in entry.settles:
            self.tasks.pop(settle.task_id, None)
            self.outcomes[settle.task_id] = settle
            if settle.request_id:
                self.by_request[settle.request_id] = settle
