"""The journal's records, which writers append and readers return.

The core keeps every unsettled task in memory; the journal keeps all that must outlive the process: unsettled tasks, the
outcomes of settled ones, dead letters with their payloads, usage, and settings (such as workers, tokens and rules).
Leases are not journaled: after a restart the workers report them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from multigpu._transport.payloads import Reference

from multigpu_master.core.usage import UsageSums
from multigpu_master.errors import JournalError
from multigpu_master.ids import Incarnation


@dataclass(slots=True)
class SubmitRecord:
    """A durable task, as it was submitted. The journal parses neither `spec` nor `payload`."""

    task_id: int
    request_id: str  # "" if the client gave none
    spec: bytes  # a serialized multigpu.v1.TaskSpec; equal for all tasks of a batch (often the same object)
    payload: bytes | Reference
    partition_key: str
    units: int
    submit_time_s: float  # seconds since 1970
    first_lease_id: int = 0  # of a requeued dead letter: its leases with lower ids precede the requeue


def head_without_result_tag(head: bytes, result_bytes: int) -> bytes:
    """Removes the result's tag, one byte, and length, a varint, from the end of a LargeBody's head."""
    return head[: -1 - (result_bytes.bit_length() + 6) // 7]


@dataclass(frozen=True, slots=True, eq=False)
class LargeBody:
    """A serialized multigpu.v1.Outcome whose last field is a large result. The two parts are kept apart, so that
    the result is not copied.
    """

    head: bytes  # all before the result
    tail: bytes | Reference  # the result

    def __len__(self) -> int:
        return len(self.head) + len(self.tail)

    def without_result(self) -> bytes:
        return head_without_result_tag(self.head, len(self.tail))

    def whole(self) -> bytes:
        """Returns both parts, joined. Raises OSError if the file to which `tail` refers can't be read."""
        return self.head + (self.tail if isinstance(self.tail, bytes) else self.tail.read())


@dataclass(slots=True)
class SettleRecord:
    """How a durable task ended. Times are in seconds since 1970."""

    task_id: int
    request_id: str
    state: int  # a multigpu.v1.OutcomeState
    queue: str
    kind: str
    model: str
    worker_id: str
    submit_time_s: float
    settle_time_s: float
    # When the body expires, unless the task is a dead letter. Times without a running master delay it (downtimes.py).
    expire_time_s: float
    body: bytes | LargeBody  # a serialized multigpu.v1.Outcome
    dead: SubmitRecord | None  # the task as it was submitted, if it became a dead letter
    fingerprint: int | None = None  # see core/identity.py; None: not known
    submit_may_be_stored: bool = True  # False: the journal certainly has no SubmitRecord of the task


USAGE_INTERVAL_S = 600


class UsageKey(NamedTuple):
    """The properties of tasks by which usage is summed."""

    queue: str
    submitter: str
    kind: str
    model: str


class UsageRecord(NamedTuple):
    """What tasks have used in an interval of USAGE_INTERVAL_S. The journal adds it to the interval's stored usage."""

    begin_s: int  # seconds since 1970, a multiple of USAGE_INTERVAL_S
    key: UsageKey
    used: UsageSums


@dataclass(slots=True)
class Entry:
    """Records that are written together or not at all. An entry with `submits` has no `settles`. A transaction writes
    one or more entries.
    """

    submits: Sequence[SubmitRecord] = ()
    settles: Sequence[SettleRecord] = ()
    settings: Mapping[str, bytes | None] = field(default_factory=dict)  # key -> value; None deletes
    deleted_dead_letters: Sequence[int] = ()  # task_ids, deleted first: `settles` may add one of them again
    epoch: int = 0  # the new epoch of ids (see ids.py) if the running master begins one with this entry, else 0
    usage: Sequence[UsageRecord] = ()


@dataclass(slots=True)
class SettledTask:
    """A task that ended, without the body of its outcome."""

    cursor: int  # the outcome's number in the order of commits
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
    """An outcome read from the journal. `body` is None if the body was lost or has expired."""

    body: bytes | None
    lost: str = ""  # why a body that has not expired is missing


@dataclass(frozen=True, slots=True)
class OutcomeFilter:
    """Which settled tasks to list or count. The default values match all. Times are in seconds since 1970."""

    states: Collection[int] = ()
    queue: str = ""
    queues: Collection[str] | None = None  # None: all; an empty collection matches nothing
    kind: str = ""
    model: str = ""
    worker_id: str = ""
    submitted_after_s: float = 0.0  # inclusive
    submitted_before_s: float = math.inf  # exclusive
    cursor_max: int = 0  # inclusive; 0: no limit


@dataclass(slots=True)
class Recovered:
    """The state from which a new master starts."""

    tasks: Iterator[SubmitRecord]  # unsettled, in task_id order; read all of them before the first append
    settings: dict[str, bytes]
    epoch: int  # the epoch of ids of this start of the master, above all earlier epochs; see ids.py
    incarnations: Sequence[Incarnation]  # the starts of masters on this journal, oldest first; the last is this start
    last_cursor: int  # of the newest outcome; 0 if there was none
    lease_key: bytes  # the secret from which ids.LeaseProofs computes the proofs of leases
    clock_difference_s: float  # the clock minus the last time saved in the journal; 0: no time was saved


class Checks(NamedTuple):
    """Checks of values that the journal does not parse itself. Each returns why the value can't be used, or ""."""

    setting: Callable[[str, bytes], str]  # of a key and its value
    spec: Callable[[bytes], str]  # of a SubmitRecord
    body: Callable[[bytes], str]  # of a StoredOutcome


CommitCallback = Callable[[Sequence[Entry], int, JournalError | None], object]
"""The journal calls this on its own thread, with (entries, first_cursor, error). A call has one of these meanings:

- Entries, no error: they are committed, in this order. The cursors of their settles are first_cursor, first_cursor + 1
  and so on.
- Entries, JournalFullError: they are rejected; they were not written and will not be. first_cursor is 0.
- No entries, JournalFullError: the journal is full, and rejects entries with submits from now on. Other entries wait
  until there is room for them, or until the journal is closed. From entries that wait, the journal removes the settles
  of tasks whose submits it has rejected.
- No entries, no error: the journal accepts submits again.

Any other error means that the journal has failed. It writes nothing more. Whether the entries of that call, if any, are
on the disk is not known.
"""
