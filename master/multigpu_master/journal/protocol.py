"""The journal's records, which writers append and readers return.

The core keeps every unsettled task in memory; the journal keeps all that must outlive the process: submitted tasks, the
outcomes of settled ones, dead letters with their payloads, workers, and settings. Leases are not journaled: after a
restart the workers report them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field

from multigpu._transport.payloads import Reference

from multigpu_master.errors import JournalError
from multigpu_master.ids import Incarnation


@dataclass(slots=True)
class SubmitRecord:
    """A durable task, as submitted. `spec` and `payload` are never parsed by the journal."""

    task_id: int
    request_id: str  # "" if the client gave none
    spec: bytes  # a serialized multigpu.v1.TaskSpec; equal for all tasks of a batch (often the same object)
    payload: bytes | Sized  # bytes, or a Reference to them
    partition_key: str
    units: int
    submit_time_s: float  # seconds since the epoch


@dataclass(frozen=True, slots=True, eq=False)
class LargeBody:
    """A body that ends with a large result. The two parts stay separate, so that the result is not copied."""

    head: bytes
    tail: bytes | Reference

    def __len__(self) -> int:
        return len(self.head) + len(self.tail)

    def whole(self) -> bytes:
        """The joined bytes. OSError: the file that it refers to is gone."""
        return self.head + (self.tail if isinstance(self.tail, bytes) else self.tail.read())


@dataclass(slots=True)
class SettleRecord:
    """How a durable task ended."""

    task_id: int
    request_id: str
    state: int  # a multigpu.v1.OutcomeState
    queue: str
    kind: str
    model: str
    worker_id: str
    submit_time_s: float
    settle_time_s: float
    expire_time_s: float  # after this time the body is not returned, unless the task is a dead letter
    body: bytes | LargeBody  # a serialized multigpu.v1.Outcome
    dead: SubmitRecord | None  # the task itself, kept if it became a dead letter
    fingerprint: int | None = None  # see core/identity.py; None: not known
    submitted: bool = True  # whether the journal may hold the task as submitted


@dataclass(slots=True)
class Entry:
    """One atomic step of the core. All of it is written, or none of it."""

    submits: Sequence[SubmitRecord] = ()
    settles: Sequence[SettleRecord] = ()
    settings: Mapping[str, bytes | None] = field(default_factory=dict)  # key -> value; None deletes
    deleted_dead_letters: Sequence[int] = ()  # deleted before `settles` are written, which may add dead letters
    epoch: int = 0  # one that a running master begins; 0: none


@dataclass(slots=True)
class SettledTask:
    """A task that ended, without the body of its outcome."""

    cursor: int
    task_id: int
    request_id: str
    state: int
    queue: str
    kind: str
    model: str
    submit_time_s: float
    fingerprint: int | None  # see core/identity.py; None: not known


@dataclass(slots=True)
class StoredOutcome(SettledTask):
    """An outcome read from the journal. `body` is None if it was lost or has expired."""

    body: bytes | None
    lost: str = ""  # why a body that has not expired is missing


@dataclass(frozen=True, slots=True)
class OutcomeFilter:
    """Which settled tasks to list or count. The default values match all."""

    states: Collection[int] = ()
    queue: str = ""
    queues: Collection[str] | None = None  # None: all; an empty collection matches nothing
    kind: str = ""
    model: str = ""
    worker_id: str = ""
    submitted_after_s: float = 0.0  # inclusive
    submitted_before_s: float = 0.0  # exclusive; 0: no limit
    cursor_max: int = 0  # inclusive; 0: no limit


@dataclass(slots=True)
class Recovered:
    """The state from which a new master starts."""

    tasks: Iterator[SubmitRecord]  # unsettled, in task_id order; to be exhausted before the first append
    settings: dict[str, bytes]
    epoch: int  # of this opening, above those of all others; see ids.py
    incarnations: Sequence[Incarnation]  # the last one is this opening
    last_cursor: int  # of the newest outcome; 0 if there was none
    lease_key: bytes  # of ids.LeaseProofs
    downtime_s: float  # how far the clock is ahead of the last time in the journal; 0: the journal had none


CommitCallback = Callable[[Sequence[Entry], int, JournalError | None], None]
"""(entries, first_cursor, error): the entries of one transaction, in order. Their settles, in order, have the cursors
first_cursor, first_cursor + 1, ... With an error, none of the entries was or will be written. After a JournalFullError,
settles of rejected tasks are removed from their entries, and entries that empty the journal are still written. No
entries and an error: the journal is full. No entries and no error: it accepts submits again."""
