"""The scheduler's data types: Task, Outcome, Lease, Worker, Queue.

State is derived, not stored: a task with an outcome is settled, one with a lease is leased, any other is queued; a
worker with a session is connected, any other is lost. A million tasks may be queued at once, so a task is small: fields
that few tasks need are in `Extra`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import Any, NamedTuple

from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import (
    HEALTHY,
    Capability,
    EngineReport,
    Health,
    ModelState,
    Telemetry,
    WorkerInfo,
)
from multigpu_master.core.workers.pace import Pace
from multigpu_master.core.workers.residency import Residency

# The number of ids in an epoch (ids.py): epoch n has the ids from n * EPOCH_IDS to (n + 1) * EPOCH_IDS - 1.
EPOCH_IDS = 1 << 24
PARTITIONS = 4096
# Bytes, or a reference to bytes: the core only needs the length and the CRC.
Payload = bytes | Any


class OutcomeState(IntEnum):
    """How a task ended. The numbers are those of multigpu.v1.OutcomeState."""

    SUCCEEDED = 1
    FAILED = 2
    CANCELLED = 3
    EXPIRED = 4
    DEAD_LETTERED = 5


class Shape(NamedTuple):
    """The properties of a task by which workers are chosen. Tasks of one shape are interchangeable for placement."""

    kind: str
    model: str
    labels: tuple[tuple[str, str], ...]
    memory_bytes: int
    # The partition of the task's partition_key, -1 if it has none.
    partition: int = -1
    world_size: int = 1
    world_size_min: int = 1
    spread_ranks: bool = False


def partition_of(key: str) -> int:
    """The partition of a partition_key; -1 for no key."""
    if not key:
        return -1
    return int.from_bytes(blake2b(key.encode(), digest_size=4).digest()) % PARTITIONS


def shape_of(spec: Spec, partition: int = -1) -> Shape:
    ranks = spec.world_size, spec.world_size_min or spec.world_size, spec.spread_ranks
    return Shape(spec.kind, spec.model, spec.labels, spec.memory_bytes, partition, *ranks)


@dataclass(frozen=True, slots=True)
class TaskError:
    """Why an attempt, or a task, failed."""

    type: str
    message: str
    retryable: bool = True
    traceback: str = ""


ATTEMPTS_KEPT = LEASE_IDS_KEPT = 16
LOG_CHARS_MAX = 16_384  # limit of the log of a task


class Attempt(NamedTuple):
    """An attempt that ran without ending its task. A `start_s` of 0.0 is unknown."""

    worker_id: str
    dispatch_s: float
    start_s: float
    end_s: float
    reason: str
    lease_id: int


@dataclass(slots=True)
class Extra:
    """The fields of a task that most tasks do not need. Devices are named by their device_key."""

    traceparent: str = ""
    checkpoint: bytes = b""
    partials: list[bytes] = field(default_factory=list)
    partial_content_types: list[str] = field(default_factory=list)
    outputs_and_log_bytes: int = 0  # of the log and of partial outputs, each with PARTIAL_OVERHEAD_BYTES
    kept_bytes: int = 0  # outputs_and_log_bytes, checkpoint and last_error
    last_error: TaskError | None = None
    not_before_s: float = 0.0  # when its pause ends; 0.0: it does not pause
    # Whether the task's queue_timeout no longer applies, although Task.attempts may be 0: an uncharged attempt has run,
    # or a worker's hello listed a lease of a gang as running.
    queue_timeout_over: bool = False
    losses: int = 0  # uncharged losses of its leases: see attempts.py
    lost_lease_id: int = 0  # of the newest of these losses
    sick_returns: int = 0  # times that a device fell sick while it ran the task
    reservations_expired: int = 0  # of a gang: reservations that ended before it could begin
    failed_attempt: int = 0  # the newest attempt that a worker reported as failed
    returned_lease_ids: tuple[int, ...] = ()  # the last LEASE_IDS_KEPT leases that a worker has returned
    first_lease_id: int = 0  # of a requeued dead letter: leases with lower ids were granted before
    # The device_key of the device on which it failed last or its worker did not begin it in time, or the worker_id of
    # the worker that returned its recalled lease.
    avoid_device_or_worker: str = ""
    broke_on_devices: tuple[str, ...] = ()  # devices, reported as healthy, whose engines it broke
    blamed_devices: tuple[str, ...] = ()  # blamed for failed attempts: attempts_max rises by one for each
    log: str = ""  # the last lines that its ended attempts have written
    log_lease_id: int = 0  # the lease that wrote the last part of the log
    log_part_chars: int = 0  # size of that part
    ended_attempts: tuple[Attempt, ...] = ()  # the last ATTEMPTS_KEPT attempts that have ended


class Energy(NamedTuple):
    """The energy that a task took from its device; the fields are those of multigpu.v1.Energy."""

    joules: float
    method: int
    uncertainty: float


def sum_energy(parts: Sequence[Energy]) -> Energy:
    """The sum of several devices' energy; its method is the least exact of their methods."""
    joules = sum([part.joules for part in parts])
    uncertain = sum([part.joules * part.uncertainty for part in parts])
    return Energy(joules, max(part.method for part in parts), uncertain / joules if joules else 0.0)


# The error type of a task whose client cancelled it with `withdraw`, so that its request_id can be used again.
WITHDRAWN = "Withdrawn"


@dataclass(slots=True, eq=False)
class Outcome:
    """How a task ended. Times in seconds since 1970; 0.0: the task did not reach that stage."""

    state: OutcomeState
    finish_s: float
    result: Payload = b""
    content_type: str = ""
    error: TaskError | None = None
    dispatch_s: float = 0.0
    start_s: float = 0.0
    worker_id: str = ""
    device_id: str = ""
    energy: Energy | None = None

    @property
    def withdrawn(self) -> bool:
        """Whether the client cancelled the task with `withdraw`, so that its request_id can be used again."""
        return self.state is OutcomeState.CANCELLED and self.error is not None and self.error.type == WITHDRAWN


@dataclass(slots=True, eq=False)
class Task:
    """A unit of work. `task_id` is 0 before the core accepts a new task, and after the journal has failed to write a
    task that is not settled.
    """

    spec: Spec
    request_id: str
    payload: Payload
    partition_key: str = ""
    units: int = 1  # amount of work: expected run times and usage are kept for a unit
    submit_s: float = 0.0
    task_id: int = 0
    attempts: int = 0  # number of attempts so far, with the current one, without uncharged ones
    lease: "Lease | None" = None
    outcome: Outcome | None = None
    streams: tuple[int, ...] = ()  # the Run streams that get its outcome
    extra: Extra | None = None
    payload_crc: int = -1  # -1: not computed; see identity.py
    run_timeout_armed: bool = False  # whether it has an expiry for its run_timeout
    client_id: str = ""  # of the Run stream that submitted it; "": another call, or an earlier master, accepted it

    @property
    def outcome_if_ephemeral(self) -> Outcome | None:
        """The outcome of an ephemeral task; always None for durable tasks, whose final outcome is in the journal."""
        return None if self.spec.durable else self.outcome

    @property
    def waiting(self) -> bool:
        """Whether it may be dispatched: accepted, and neither settled, nor leased, nor pausing before an attempt."""
        if self.outcome is not None or self.lease is not None or not self.task_id:
            return False
        return self.extra is None or not self.extra.not_before_s

    @property
    def log(self) -> str:
        """The last lines that its attempts have written."""
        before = self.extra.log if self.extra is not None else ""
        return (before + self.lease.log)[-LOG_CHARS_MAX:] if self.lease is not None else before

    def ensure_extra(self) -> Extra:
        """The task's Extra; creates it if the task has none."""
        if self.extra is None:
            self.extra = Extra()
        return self.extra


# A slot, in units of Lease.share.
SLOT = 1 << 20


@dataclass(slots=True, eq=False)
class Lease:
    """The grant of one attempt of a task to a worker; the only fencing token.

    If the worker begins a session while the old one is open, the leases that its hello lists stay; the others are
    released, as are all when a session is lost. A later hello may adopt a released lease: as a new Lease with the same
    id.
    """

    lease_id: int
    task: Task
    worker: "Worker"
    attempt: int
    dispatch_s: float
    dispatch_number: int  # Dispatch.number of the dispatch that granted it; 0: the worker held it before this session
    cost_s: float  # expected run time
    running: bool = False
    # When a hello or heartbeat first listed it as running, by the master's clock. For rank 0 of a gang that succeeded
    # before any did: its reported start. 0.0: unknown.
    running_since_s: float = 0.0
    fraction: float = 0.0
    steps: int = 0
    note: str = ""
    log: str = ""  # its last lines, as last reported
    recalled_in: int = 0  # the session in which it was recalled; 0: it was not
    model: str = ""  # id of the worker's model that it needs; "": none, or the worker lists its models by name only
    share: int = SLOT  # the part of a slot that it takes: less than SLOT where a slot runs several tasks together
    gang: "Gang | None" = None  # with the leases of the task's other ranks
    rank: int = 0

    def stages(self, start_s: float, finish_s: float) -> tuple[float, float, float]:
        """Returns the attempt's (dispatch_s, start_s, finish_s), moved where needed so that none is before the one
        before it: the arguments may be times of the worker's clock, which may be wrong. A start of 0.0 is unknown.

        A lease that the worker held before this session (number 0) may have no dispatch time but that of its adoption.
        If the attempt began before the adoption, it counts as dispatched when it began.
        """
        dispatch_s = self.dispatch_s
        if start_s and not self.dispatch_number:
            dispatch_s = min(dispatch_s, max(self.task.submit_s, start_s))
        finish_s = max(finish_s, dispatch_s)
        return dispatch_s, min(max(start_s, dispatch_s), finish_s) if start_s else 0.0, finish_s


@dataclass(slots=True, eq=False)
class Gang:
    """The leases of one attempt of a task that several workers run, by rank. Task.lease is the lease of rank 0, also
    after rank 0 has succeeded, until the last rank succeeds. The attempt succeeds when all ranks have. If a rank ends
    otherwise, the other leases are revoked.
    """

    leases: list[Lease]
    succeeded: int = 0  # ranks that have succeeded
    outcome: Outcome | None = None  # of rank 0; it becomes the task's when all ranks have succeeded
    energy: list[Energy] = field(default_factory=list)  # of ranks that have succeeded and were measured
    device_s: float = 0.0  # device time of the ranks that have succeeded, without that of the rank that succeeds last


@dataclass(frozen=True, slots=True)
class Cordon:
    """An operator's order that a worker gets no new leases. A draining worker's leases are revoked at the deadline."""

    reason: str
    draining: bool = False
    drain_deadline_s: float | None = None


@dataclass(slots=True, eq=False)
class Worker:
    """The registry's record of a worker. Strategies read it and change nothing."""

    info: WorkerInfo
    kinds: dict[str, list[Capability]] = field(default_factory=dict)  # its capabilities, by kind
    shares: dict[str, int] = field(default_factory=dict)  # Lease.share by kind, where it is not a whole slot
    token_id: str = ""  # of its last session with this master; "": no token, or no such session
    # The session.
    session: int = 0  # 0: lost
    dispatches_sent: int = 0  # number of dispatches in this session
    connect_s: float = 0.0
    heard_s: float = 0.0
    stopping: bool = False  # the worker reports that it is stopping
    health_reported: bool = False  # a heartbeat has come; before, `health` is that of an earlier session
    # As of the last heartbeat.
    telemetry: Telemetry = field(default_factory=Telemetry)
    health: Health = HEALTHY
    engine: EngineReport = field(default_factory=EngineReport)
    occupied_slots: int = 0  # slots in which cancelled calls still run
    # Reasons to grant it no leases.
    cordon: Cordon | None = None
    quarantined: bool = False  # it gets no leases because of its health
    # The number of the last check requested of the device (DesiredState.check). The check is open while
    # health.checks_passed is below it. 0: none is open.
    requested_check: int = 0
    check_at_once: bool = False  # an operator asked for the check
    # What it holds.
    leases: dict[int, Lease] = field(default_factory=dict)
    leases_limit: int | None = None  # while it runs a rank of a gang or is reserved for a gang; None: no limit
    leased_bytes: int = 0  # of payloads
    leased_memory_bytes: int = 0  # device memory reserved for its leases
    leased_shares: int = 0  # sum of its leases' shares of slots
    leased_s: float = 0.0  # expected run time of its leases
    residency: Residency = field(default_factory=Residency)
    # What it has done.
    pace: Pace = field(default_factory=Pace)
    newest_lease_number: int = 0  # number of its newest lease, in the order of all leases that the fleet granted
    succeeded: int = 0
    failed: int = 0
    change_count: int = 0  # increased by each change of the worker

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def usable_slots(self) -> int:
        """The slots in which leases can begin or run."""
        return max(0, self.info.slots - self.occupied_slots)

    @property
    def resident_models(self) -> tuple[str, ...]:
        """The models loaded as of the last heartbeat."""
        return tuple(sorted(r.model for r in self.residency.reported.values() if r.state is ModelState.READY))

    @property
    def accepting(self) -> bool:
        """Whether it is connected and may be granted leases."""
        return bool(self.session) and not (self.cordon or self.stopping or self.quarantined)

    @property
    def draining(self) -> bool:
        return self.cordon is not None and self.cordon.draining

    @property
    def drain_deadline_s(self) -> float | None:
        return self.cordon.drain_deadline_s if self.cordon is not None else None

    @property
    def device_key(self) -> str:
        """Identifies its device. Workers that share a GPU have the same key; each CPU worker has its own."""
        return self.info.device_id if self.info.device_id != "cpu" else f"cpu of {self.info.worker_id}"

    @property
    def check_open(self) -> bool:
        """Whether the master has asked for a check that the device has not passed yet."""
        return self.requested_check > self.health.checks_passed

    @property
    def window_full(self) -> bool:
        """Whether it holds as many leases as it may. The limit is pace.leases_max. Where a slot runs several tasks
        together, the limit is higher if it takes more leases to fill info.slots + 1 slots, but at most window_tasks.
        """
        held = len(self.leases)
        if held < self.pace.leases_max:
            return False
        filled = not self.shares or self.leased_shares >= (self.info.slots + 1) * SLOT
        return filled or held >= self.info.window_tasks

    @property
    def full(self) -> bool:
        """Whether its window is used up, by count or by bytes, or closed for a gang."""
        if self.leases_limit is not None and len(self.leases) >= self.leases_limit:
            return True
        return self.window_full or self.leased_bytes >= self.info.window_bytes

    def memory_fraction(self) -> float | None:
        """The share of the device's memory in use, 0 to 1; None: not reported."""
        total, used = self.telemetry.memory_total_bytes, self.telemetry.memory_used_bytes
        return used / total if total and used is not None else None

    def memory_free_bytes(self) -> int | None:
        """Free memory of the device; of several devices, of the one that has least. None: not reported."""
        if self.telemetry.memory_free_bytes is not None:
            return self.telemetry.memory_free_bytes
        total, used = self.telemetry.memory_total_bytes, self.telemetry.memory_used_bytes
        return max(0, total - used) if total and used is not None else None


@dataclass(slots=True)
class Queue:
    """A named queue: its rules, and the numbers and bytes of its tasks."""

    name: str
    paused: bool = False
    strategy: str = ""  # "": the fleet's
    tasks_max: int = 0  # 0: the master's limit
    bytes_max: int = 0  # 0: the master's limit
    queued: int = 0
    queued_bytes: int = 0
    leased: int = 0
    leased_bytes: int = 0

    @property
    def idle(self) -> bool:
        """Whether it has neither tasks nor rules."""
        return not (self.paused or self.strategy or self.tasks_max or self.bytes_max or self.queued or self.leased)
