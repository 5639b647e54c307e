"""The journal's protocol: what a durable store of the master has to do.

The core keeps every unsettled task in memory; the journal keeps what must outlive the process: submitted tasks, the
outcomes of settled ones, dead letters with their payloads, workers, and settings. Leases are not journaled: after a
restart the workers report them.

Writes are group-committed. The driver appends `Entry` objects, in order, and one journal thread writes all that queued
up during the last commit as one transaction. A task submitted and settled within one transaction is written as its
outcome alone. Then `on_commit` is called, on the journal thread, with the entries of that transaction and their first
cursor; the driver acknowledges only after that.

Reads (`find_requests`, `get_outcome`, ...) may be made from any thread, at any time, and never wait for the writer.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Protocol

from multigpu._transport.payloads import Reference

from multigpu_master.ids import Incarnation
from multigpu_master.journal.errors import JournalDamagedError, JournalError, JournalFullError
from multigpu_master.payloads.shared_files import Payloads

__all__ = [
    "CommitCallback",
    "Entry",
    "Journal",
    "JournalDamagedError",
    "JournalError",
    "JournalFullError",
    "LargeBody",
    "OutcomeFilter",
    "Recovered",
    "SettleRecord",
    "SettledTask",
    "StoredOutcome",
    "SubmitRecord",
]


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
    """A body with a large result at its end, which is not copied to join it to the rest."""

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
    expire_time_s: float  # from then on the body is not returned, unless the task is a dead letter
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
    deleted_dead_letters: Sequence[int] = ()
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
    """An outcome as read back. `body` is None if it was lost, and once its time to live is over."""

    body: bytes | None
    lost: str = ""  # why there is no body before its time to live is over


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
    """What a new master starts from."""

    tasks: Iterator[SubmitRecord]  # unsettled, in task_id order; to be exhausted before the first append
    settings: dict[str, bytes]
    epoch: int  # of this opening, above those of all others; see ids.py
    incarnations: Sequence[Incarnation]  # the last one is this opening
    last_cursor: int  # of the newest outcome; 0 if there was none
    lease_key: bytes  # of ids.LeaseProofs


CommitCallback = Callable[[Sequence[Entry], int, JournalError | None], None]
"""(entries, first_cursor, error): the entries of one transaction, in order. Their settles, in order, have the cursors
first_cursor, first_cursor + 1, ... With an error none of them was or will be written. After a JournalFullError, settles
of rejected tasks are removed from their entries, and entries that empty the journal are still written. No entries and
an error: there is no room any more. No entries and no error: there is room again."""


class Journal(Protocol):
    """A durable store. Methods other than reads are called from the driver's thread."""

    payloads: Payloads  # opened, synced and closed with the journal

    @property
    def writable(self) -> bool:
        """False while there is no room: submits are rejected. From any thread."""

    def room_bytes(self) -> int:
        """The room for deletions, cancellations and settings while submits are rejected."""

    def open(self, on_commit: CommitCallback) -> Recovered:
        """Takes the lock and reads what is there. JournalError: another master holds it, or it is damaged, or of a
        newer schema; nothing was changed.
        """

    def append(self, *entries: Entry) -> None:
        """Queues entries for the next transaction and returns at once."""

    def close(self, timeout_s: float) -> None:
        """Commits what is queued, then releases the lock."""

    def find_requests(self, request_ids: Sequence[str]) -> dict[str, SettledTask]:
        """The settled tasks with these request_ids."""

    def read_settled(self, tasks: Sequence[SettledTask], bytes_max: int) -> list[StoredOutcome]:
        """The outcomes of the first of these tasks: at least one, and no more after `bytes_max` of bodies."""

    def request_ids(self) -> Iterator[list[str]]:
        """The request_ids of all settled tasks, a page at a time."""

    def get_outcome(self, task_id: int) -> StoredOutcome | None: ...

    def read_outcomes(self, after_cursor: int, limit: int, bytes_max: int) -> list[StoredOutcome]:
        """The outcomes after a cursor, oldest first: at most `limit`, and no more after `bytes_max` of bodies."""

    def oldest_cursor(self) -> int:
        """The cursor of the oldest outcome; last_cursor + 1 if there is none."""

    def newest_cursor(self) -> int:
        """The cursor of the newest outcome; 0 if there never was one."""

    def list_outcomes(self, wanted: OutcomeFilter, before_task_id: int, limit: int) -> list[StoredOutcome]:
        """Settled tasks below this task_id (0: all), newest task_id first."""

    def count_outcomes(self, wanted: OutcomeFilter) -> dict[int, int]:
        """The number of matching settled tasks, by state."""

    def get_dead_letters(self, task_ids: Sequence[int]) -> list[SubmitRecord]:
        """The existing ones of these dead letters, with their payloads."""

    def dead_letter_queues(self) -> list[str]:
        """The queues that have dead letters."""

    def list_dead_letters(
        self, *, queue: str, before_task_id: int, limit: int, queues: Collection[str] | None = None
    ) -> list[StoredOutcome]:
        """Dead letters, newest task_id first. queues: None for all."""

    def size_bytes(self) -> int:
        """The size of the journal's files."""
