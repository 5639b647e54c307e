"""The nouns of the scheduler. State is derived, not stored: a task with an outcome is settled, with a lease is leased,
else it is queued; a worker with a session is connected, else it is lost. So the states can't drift from the facts.

A million tasks may wait at once, so what every queued task carries is kept small: what few tasks need is in `Extra`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from multigpu_master.core.workers.residency import Model, ModelState, Residency

if TYPE_CHECKING:
    from multigpu_master.core.placement.lanes import Part

# Ids of tasks and leases come in ranges of this many, each of which begins at a multiple of it.
EPOCH_IDS = 1 << 24
# Bytes, or what stands for them: the core needs no more of it than its length.
Payload = bytes | Any


class OutcomeState(IntEnum):
    """How a task ended. The numbers are those of multigpu.v1.OutcomeState."""

    SUCCEEDED = 1
    FAILED = 2
    CANCELLED = 3
    EXPIRED = 4
    DEAD_LETTERED = 5


class Shape(NamedTuple):
    """What decides which workers may take a task. Tasks of one shape are interchangeable for placement."""

    kind: str
    model: str
    labels: tuple[tuple[str, str], ...]
    memory_bytes: int
    # The partition of the task's partition_key, -1 if it has none.
    partition: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Spec:
    """A validated multigpu.v1.TaskSpec. Tasks submitted alike share one."""

    kind: str
    model: str = ""
    queue: str = "default"
    priority: int = 3
    labels: tuple[tuple[str, str], ...] = ()
    memory_bytes: int = 0
    deadline_s: float | None = None  # since the epoch
    queue_timeout_s: float | None = None
    run_timeout_s: float | None = None
    attempts_max: int = 3
    backoff_initial_s: float = 0.1
    backoff_max_s: float = 30.0
    durable: bool = True
    result_ttl_s: float = 86_400.0
    wait_for_worker: bool = False
    identity: int = 0  # 31 bits of what makes its tasks others: kind, model, content type, parameters
    wire: bytes = b""  # the serialized TaskSpec: what the journal keeps and workers get


@dataclass(frozen=True, slots=True)
class TaskError:
    """Why an attempt, or a task, failed."""

    type: str
    message: str
    retryable: bool = True
    traceback: str = ""


class HealthState(IntEnum):
    """Whether a device is fit for work. The numbers are those of multigpu.v1.HealthState."""

    HEALTHY = 1
    DEGRADED = 2
    SICK = 3
    RECOVERING = 4


@dataclass(frozen=True, slots=True)
class HealthReason:
    code: str
    message: str = ""
    since_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a worker says of its device: a multigpu.v1.DeviceHealth. Times in seconds since the epoch, 0.0: none."""

    state: HealthState = HealthState.HEALTHY
    since_s: float = 0.0
    reasons: tuple[HealthReason, ...] = ()
    unusable: bool = False
    checks_passed: int = 0
    next_check_s: float = 0.0

    @property
    def fit(self) -> bool:
        return self.state <= HealthState.DEGRADED


HEALTHY = Health()


@dataclass(slots=True)
class Extra:
    """What only some tasks have."""

    traceparent: str = ""
    checkpoint: bytes = b""
    partials: list[bytes] = field(default_factory=list)
    partial_content_types: list[str] = field(default_factory=list)
    partials_bytes: int = 0  # with PARTIAL_OVERHEAD_BYTES for each
    last_error: TaskError | None = None
    not_before_s: float = 0.0
    losses: int = 0  # times a worker was lost with this task waiting in its window
    failed_attempt: int = 0  # the newest attempt that a worker reported as failed
    avoids: str = ""  # device_key of where its last attempt failed, or worker_id of where its last lease was recalled
    broke: tuple[str, ...] = ()  # device_keys of devices, healthy as far as is known, whose engine it broke
    forgiven: tuple[str, ...] = ()  # device_keys of devices that were to blame for an attempt: each gives one back


class Energy(NamedTuple):
    """What a task took of its device's energy; the fields are those of multigpu.v1.Energy."""

    joules: float
    method: int
    uncertainty: float


# The error type of a task that its own client took back.
WITHDRAWN = "Withdrawn"


@dataclass(slots=True, eq=False)
class Outcome:
    """How a task ended. Times in seconds since the epoch; 0.0 means it never got there."""

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
        """Whether the task's request_id is free."""
        return self.state is OutcomeState.CANCELLED and self.error is not None and self.error.type == WITHDRAWN


@dataclass(slots=True, eq=False)
class Task:
    """A unit of work. `task_id` is 0 until the core has taken it, and again if it could not be made durable: then it
    was never taken, whatever was promised.
    """

    spec: Spec
    request_id: str
    payload: Payload
    partition_key: str = ""
    units: int = 1
    submit_s: float = 0.0
    task_id: int = 0
    attempts: int = 0
    lease: "Lease | None" = None
    outcome: Outcome | None = None
    part: "Part | None" = None  # of its lane, where it has an entry, hollow unless the task waits
    streams: tuple[int, ...] = ()  # the Run streams that follow it
    extra: Extra | None = None
    payload_crc: int = -1  # -1: not computed; see identity.py

    @property
    def told(self) -> Outcome | None:
        """Its outcome, as far as nothing can undo it. A durable task's is on the disk by then, and read from there."""
        return None if self.spec.durable else self.outcome

    @property
    def waiting(self) -> bool:
        """Whether it may be dispatched: it is ours, and neither settled, nor leased, nor waiting out a pause."""
        if self.outcome is not None or self.lease is not None or not self.task_id:
            return False
        return self.extra is None or not self.extra.not_before_s

    def more(self) -> Extra:
        """The task's Extra, made when first needed."""
        if self.extra is None:
            self.extra = Extra()
        return self.extra


@dataclass(slots=True, eq=False)
class Lease:
    """The grant of one attempt of a task to one session of a worker; the only fencing token."""

    lease_id: int
    task: Task
    worker: "Worker"
    attempt: int
    dispatch_s: float
    frame: int  # the session's frame that carried it; 0 if it was adopted
    cost_s: float  # how long it was expected to take, when it was granted
    running: bool = False
    run_s: float = 0.0  # when the master first heard that it runs
    fraction: float = 0.0
    steps: int = 0
    note: str = ""
    recalled: int = 0  # the session in which its worker was asked to return it, if it is not begun
    model: str = ""  # the id of the worker's model that it is on; "": none that is planned for

    def stages(self, start_s: float, finish_s: float) -> tuple[float, float]:
        """When it was dispatched, and when it began (0.0: unknown) by a worker's clock, which may be wrong. A master
        that adopted the lease does not know when it was dispatched: before it began.
        """
        dispatch_s = self.dispatch_s
        if start_s and not self.frame:
            dispatch_s = min(dispatch_s, max(self.task.submit_s, start_s))
        return dispatch_s, min(max(start_s, dispatch_s), finish_s) if start_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A kind that a worker runs, and the models it can run it on (none: any, or the kind needs no model)."""

    kind: str
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker says of itself when its session begins."""

    worker_id: str
    host: str = ""
    version: str = ""
    pid: int = 0
    device_id: str = "cpu"
    device_wire: bytes = b""  # the serialized Device, with all that the core doesn't read
    memory_total_bytes: int = 0
    capabilities: tuple[Capability, ...] = ()
    models: tuple[Model, ...] = ()
    model_memory_bytes: int = 0  # that loaded models may take together; 0: no limit is known
    labels: Mapping[str, str] = field(default_factory=dict)
    slots: int = 1
    window_tasks: int = 1024
    window_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """How a device is doing. None: it doesn't say."""

    sample_s: float = 0.0
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    wire: bytes = b""  # the serialized DeviceTelemetry, with all that the core doesn't read


@dataclass(slots=True, eq=False)
class Worker:
    """The registry's record of a worker. Strategies read it and change nothing."""

    info: WorkerInfo
    kinds: dict[str, list[Capability]] = field(default_factory=dict)  # its capabilities, by kind
    session: int = 0  # 0: lost
    frame: int = 0  # frames with leases sent in this session
    cordoned: bool = False
    cordon_reason: str = ""
    draining: bool = False  # an operator drains it
    drain_deadline_s: float | None = None
    stopping: bool = False  # it wants no more work
    telemetry: Telemetry = field(default_factory=Telemetry)
    health: Health = HEALTHY  # its own word, as of the last heartbeat
    quarantined: bool = False  # it gets no leases because of its health
    checks_asked: int = 0  # see multigpu.v1.DesiredState.check
    residency: Residency = field(default_factory=Residency)
    embedding_cache: bytes | None = None  # the serialized EmbeddingCache; None: the worker has none
    mps: bytes = b""  # the serialized MpsStatus; empty: it said nothing
    handlers: bytes = b""  # the serialized Handlers, likewise
    # (kind, model) of leases granted to it, where it offers no models by id: their models are resident or about to be,
    # whatever its last heartbeat said
    loading: dict[tuple[str, str], None] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    leased_bytes: int = 0
    leased_memory_bytes: int = 0  # device memory promised to its leases
    backlog_s: float = 0.0  # expected time of its leases
    occupied: int = 0  # slots in which cancelled calls run on, as of the last heartbeat
    allowed: int = 1  # leases it may hold now; grows to window_tasks with its measured pace
    pace_s: float = 0.0  # measured seconds a task, all kinds; 0.0: not measured
    unit_s: dict[tuple[str, str], float] = field(default_factory=dict)  # (kind, model) -> seconds a unit of work
    paced_s: float = 0.0  # when its pace was last measured, moved on by the time it was idle since
    finished: int = 0  # attempts that ended since then
    reported_s: float = 0.0  # when it last reported
    together: int = 1  # tasks in its last report
    dispatched: int = 0  # leases granted since the master started
    last_dispatch: int = 0  # the fleet's count of dispatches when it last got one
    succeeded: int = 0
    failed: int = 0
    connect_s: float = 0.0
    heard_s: float = 0.0
    version: int = 0  # counts changes that matter to a ranking

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def slots(self) -> int:
        """The slots in which leases can begin or run."""
        return max(0, self.info.slots - self.occupied)

    @property
    def resident_models(self) -> tuple[str, ...]:
        """What is loaded, as of the last heartbeat."""
        return tuple(sorted(r.model for r in self.residency.said.values() if r.state is ModelState.READY))

    @property
    def accepting(self) -> bool:
        """Whether it is connected and may be given work at all."""
        return bool(self.session) and not (self.cordoned or self.draining or self.stopping or self.quarantined)

    @property
    def device_key(self) -> str:
        """What tells its device from all others: workers may share a GPU; a CPU worker is a device of its own."""
        return self.info.device_id if self.info.device_id != "cpu" else f"cpu of {self.info.worker_id}"

    @property
    def suspected(self) -> bool:
        """Whether the master has asked for a check that was not passed yet."""
        return self.checks_asked > self.health.checks_passed

    @property
    def full(self) -> bool:
        """Whether its window is used up, by count or by bytes."""
        return len(self.leases) >= self.allowed or self.leased_bytes >= self.info.window_bytes

    def memory_fraction(self) -> float | None:
        """The share of the device's memory in use, 0 to 1; None if the device doesn't say."""
        total, used = self.telemetry.memory_total_bytes, self.telemetry.memory_used_bytes
        return used / total if total and used is not None else None

    def memory_free_bytes(self) -> int | None:
        """Free device memory; None if the device doesn't say."""
        total, used = self.telemetry.memory_total_bytes, self.telemetry.memory_used_bytes
        return max(0, total - used) if total and used is not None else None


@dataclass(slots=True)
class Queue:
    """A named queue: its rules, and what is in it."""

    name: str
    paused: bool = False
    strategy: str = ""  # "": the fleet's
    tasks_max: int = 0  # 0: the master's limit
    bytes_max: int = 0
    queued: int = 0
    queued_bytes: int = 0
    leased: int = 0
    leased_bytes: int = 0

    @property
    def idle(self) -> bool:
        """Whether it has neither tasks nor rules of its own."""
        rules = self.paused or self.strategy or self.tasks_max or self.bytes_max
        return not (rules or self.queued or self.leased)
