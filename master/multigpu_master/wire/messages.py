"""Between the wire and the core: protobuf messages in and out of the core's plain values.

Every message is validated here, so that the core gets only valid values; the text of InvalidTaskError tells the sender
what is wrong and what is allowed. Specs of tasks are read in `specs`.
"""

import math
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu._transport.payloads import Reference
from multigpu.v1 import device_pb2, task_pb2, task_service_pb2, worker_service_pb2

from multigpu_master.core import events as ev
from multigpu_master.core import identity
from multigpu_master.core.model import Energy, Lease, Outcome, OutcomeState, Spec, Task, TaskError
from multigpu_master.core.workers.info import (
    Capability,
    EmbeddingCache,
    Health,
    HealthReason,
    HealthState,
    Telemetry,
    WorkerInfo,
)
from multigpu_master.ids import LeaseProofs
from multigpu_master.journal.protocol import LargeBody, SettleRecord, SubmitRecord
from multigpu_master.payloads import messages as wire_large
from multigpu_master.payloads.messages import Peer
from multigpu_master.payloads.shared_files import BadReferenceError
from multigpu_master.wire import devices as wire_devices
from multigpu_master.wire import models as wire_models
from multigpu_master.wire.protobuf import tag, varint

if TYPE_CHECKING:
    from multigpu_master.wire.specs import SpecReader

ATTEMPTS_MAX = 100
NAME_BYTES_MAX, MODEL_BYTES_MAX, KEY_BYTES_MAX = 128, 256, 256
MESSAGE_CHARS_MAX, TRACEBACK_CHARS_MAX = 8 << 10, 16 << 10
# What a worker may say of itself in all, what it may leave for the next attempt of a task, and how much of a task's
# partial outputs its next worker is handed.
HELLO_BYTES_MAX, CHECKPOINT_BYTES_MAX, PARTIALS_BYTES_MAX = 128 << 10, 1 << 20, 1 << 20
MODELS_MAX = 1000
REASONS_MAX, REASON_CODE_CHARS_MAX, REASON_CHARS_MAX = 16, 64, 1 << 10
# Times beyond these are taken for these: so every one can be said again as a Timestamp, and shown as a date.
SECONDS_MIN, SECONDS_MAX = -62e9, 100e9


class InvalidTaskError(Exception):
    """A task, or a worker's word, that makes no sense; the message says why and what would."""


# --- time ------------------------------------------------------------------------------------------------------------


def seconds_of(message: Timestamp | Duration) -> float:
    """Seconds, since the epoch for a Timestamp; between SECONDS_MIN and SECONDS_MAX."""
    return min(max(message.seconds + message.nanos / 1e9, SECONDS_MIN), SECONDS_MAX)


def set_time(message: Timestamp, seconds: float) -> None:
    """Fills a Timestamp from seconds since the epoch."""
    whole = math.floor(seconds)
    message.seconds = whole
    message.nanos = int((seconds - whole) * 1e9)


def timestamp(seconds: float) -> Timestamp:
    """A Timestamp from seconds since the epoch."""
    message = Timestamp()
    set_time(message, seconds)
    return message


def duration(seconds: float) -> Duration:
    """A Duration from seconds."""
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


# --- tasks in --------------------------------------------------------------------------------------------------------


def request_ids_of(batch: task_pb2.TaskBatch) -> list[str]:
    """What the tasks of a batch are called, in order."""
    return [*[i.request_id for i in batch.inputs], *batch.request_ids]


def tasks_of(
    spec: Spec, batch: task_pb2.TaskBatch, payload_bytes_max: int, peer: Peer | None = None
) -> list[Task | ev.Rejection]:
    """The Task for each input, or why it can't be one. `peer` sent them, and may refer to payloads."""
    tasks: list[Task | ev.Rejection] = []
    payload: bytes | Reference
    for i in batch.inputs:
        payload, request_id, key = i.payload, i.request_id, i.partition_key
        if not payload and i.HasField("payload_place"):
            try:
                payload = wire_large.payload_of(i, peer)
            except BadReferenceError as error:
                tasks.append(_invalid(str(error)))
                continue
        rejected = _rejected(payload, request_id, key, payload_bytes_max)
        if rejected is not None:
            tasks.append(rejected)
            continue
        task = Task(spec, request_id, payload, key, i.units or 1)
        if i.traceparent:
            task.more().traceparent = i.traceparent[:64]
        tasks.append(task)
    payloads = list(batch.payloads)
    if len(payloads) != len(batch.request_ids):
        message = f"a batch has {len(batch.request_ids)} request_ids and {len(payloads)} payloads; each needs the other"
        return [*tasks, *[_invalid(message) for _ in batch.request_ids]]
    for request_id, payload in zip(batch.request_ids, payloads, strict=True):
        rejected = _rejected(payload, request_id, "", payload_bytes_max)
        tasks.append(Task(spec, request_id, payload) if rejected is None else rejected)
    return tasks


def _rejected(payload: bytes | Sized, request_id: str, key: str, payload_bytes_max: int) -> ev.Rejection | None:
    """Why an input can't be a task."""
    if len(payload) > payload_bytes_max:
        return _invalid(
            f"the payload has {len(payload)} bytes; at most {payload_bytes_max} are allowed (payload_bytes_max)"
        )
    if len(request_id.encode()) > NAME_BYTES_MAX or len(key.encode()) > KEY_BYTES_MAX or "\0" in request_id:
        return _invalid(
            f"request_id or partition_key is not allowed: a request_id has at most {NAME_BYTES_MAX} bytes and no NUL, "
            f"a partition_key at most {KEY_BYTES_MAX} bytes"
        )
    return None


def _invalid(message: str) -> ev.Rejection:
    return ev.Rejection(3, message)


# --- the journal's records -------------------------------------------------------------------------------------------


def submit_record(task: Task) -> SubmitRecord:
    """What the journal keeps of a task."""
    return SubmitRecord(
        task.task_id, task.request_id, task.spec.wire, task.payload, task.partition_key, task.units, task.submit_s
    )


def restored_task(record: SubmitRecord, spec: Spec) -> Task:
    """The task that a record tells of."""
    return Task(
        spec,
        record.request_id,
        record.payload,
        record.partition_key,
        record.units,
        record.submit_time_s,
        record.task_id,
    )


def settle_record(task: Task, body: bytes | LargeBody, *, submitted: bool = True) -> SettleRecord:
    """What the journal keeps of a task's end. `body` is its serialized Outcome; `submitted`: see SettleRecord."""
    outcome, spec = task.outcome, task.spec
    assert outcome is not None, "it is settled"
    return SettleRecord(
        task.task_id, task.request_id, int(outcome.state), spec.queue, spec.kind, spec.model, outcome.worker_id,
        task.submit_s, outcome.finish_s, outcome.finish_s + spec.result_ttl_s, body,
        submit_record(task) if outcome.state is OutcomeState.DEAD_LETTERED else None, identity.fingerprint(task),
        submitted,
    )  # fmt: skip


# --- tasks out -------------------------------------------------------------------------------------------------------


class OutcomeWriter:
    """Serializes outcomes: once for the journal and for the streams that wait for them. Tasks that went together share
    all but a few fields, so those are serialized apart, and the rest is kept for the next. That makes an outcome its
    message: protobuf puts the parts of a message together by concatenating them.
    """

    def __init__(self) -> None:
        self._shared: tuple[object, ...] = ()
        self._tail = b""

    def write(self, task: Task) -> bytes | LargeBody:
        """The serialized Outcome of a settled task."""
        o = task.outcome
        assert o is not None, "it is settled"
        shared = (
            o.state, task.submit_s, o.dispatch_s, o.start_s, o.finish_s,
            task.attempts, o.worker_id, o.device_id, o.content_type,
        )  # fmt: skip
        if shared != self._shared:
            self._shared, self._tail = shared, _shared_part(task, o).SerializeToString()
        own = task_pb2.Outcome()
        own.task_id = task.task_id
        if task.request_id:
            own.request_id = task.request_id
        if o.error is not None:
            fill_error(own.error, o.error)
        if task.extra is not None and task.extra.partials:
            own.partials.extend(task.extra.partials)
            if any(task.extra.partial_content_types):
                own.partial_content_types.extend(task.extra.partial_content_types)
        if o.energy is not None:
            own.energy.joules, method, own.energy.uncertainty = o.energy
            own.energy.method = method  # type: ignore[assignment]  # enums are ints on the wire
        if not o.result:
            return own.SerializeToString() + self._tail
        size = len(o.result)
        if wire_large.is_large(size):
            return wire_large.outcome_body(own.SerializeToString(), self._tail, wire_large.bytes_of(o.result))
        assert isinstance(o.result, bytes), "what is referred to is large"
        head = _RESULT_HEADS[size] if size < len(_RESULT_HEADS) else _RESULT_TAG + varint(size)
        return b"".join((own.SerializeToString(), head, o.result, self._tail))


def _shared_part(task: Task, o: Outcome) -> task_pb2.Outcome:
    message = task_pb2.Outcome(attempts=task.attempts, worker_id=o.worker_id, device_id=o.device_id)
    message.state = int(o.state)  # type: ignore[assignment]  # enums are ints on the wire
    if o.result:
        message.content_type = o.content_type
    stages = message.stages
    set_time(stages.submit_time, task.submit_s)
    if o.dispatch_s:
        set_time(stages.dispatch_time, o.dispatch_s)
    if o.start_s:
        set_time(stages.start_time, o.start_s)
    set_time(stages.finish_time, o.finish_s)
    return message


HEADS_MAX = 2048
_RESULT_TAG = tag(task_pb2.Outcome.RESULT_FIELD_NUMBER)
_RESULT_HEADS = [_RESULT_TAG + varint(size) for size in range(HEADS_MAX)]
_OUTCOMES_TAG = tag(task_service_pb2.RunResponse.OUTCOMES_FIELD_NUMBER)
_OUTCOMES_HEADS = [_OUTCOMES_TAG + varint(size) for size in range(HEADS_MAX)]


class RunFrame:
    """A RunResponse in the making. Outcomes are serialized already: they go in as they are."""

    __slots__ = ("message", "outcomes")

    def __init__(self) -> None:
        self.message = task_service_pb2.RunResponse()
        self.outcomes: list[bytes] = []

    def add_outcome(self, body: bytes) -> None:
        size = len(body)
        self.outcomes += (_OUTCOMES_HEADS[size] if size < HEADS_MAX else _OUTCOMES_TAG + varint(size), body)

    def add_large_outcome(self, body: LargeBody) -> None:
        """OSError: the result is gone from where it lay."""
        tail = body.tail if isinstance(body.tail, bytes) else body.tail.read()
        self.outcomes += (_OUTCOMES_TAG + varint(len(body)), body.head, tail)

    def serialize(self) -> bytes:
        return b"".join((self.message.SerializeToString(), *self.outcomes))


def fill_error(message: task_pb2.TaskError, error: TaskError) -> None:
    """Fills a TaskError message."""
    message.type = error.type
    message.message = error.message
    message.retryable = error.retryable
    message.traceback = error.traceback


def error_of(message: task_pb2.TaskError) -> TaskError:
    """The core's TaskError for a worker's message."""
    return TaskError(
        message.type[:128] or "Unknown",
        message.message[:MESSAGE_CHARS_MAX],
        message.retryable,
        message.traceback[-TRACEBACK_CHARS_MAX:],
    )


def task_message(task: Task, now: float) -> task_pb2.Task:
    """A task as clients see it, without its outcome."""
    spec = task_pb2.TaskSpec.FromString(task.spec.wire)
    spec.queue, spec.priority, spec.attempts_max = task.spec.queue, task.spec.priority, task.spec.attempts_max
    message = task_pb2.Task(
        task_id=task.task_id,
        request_id=task.request_id,
        spec=spec,
        partition_key=task.partition_key,
        payload_bytes=len(task.payload),
        submit_time=timestamp(task.submit_s),
        attempts=task.attempts,
        state=task_state(task),
    )
    if task.lease is not None:
        lease = task.lease
        message.worker_id = lease.worker.worker_id
        message.lease_id = lease.lease_id
        if lease.fraction or lease.steps or lease.note:
            message.progress.fraction = lease.fraction
            message.progress.steps = lease.steps
            message.progress.note = lease.note
    elif task.outcome is not None:
        message.worker_id = task.outcome.worker_id
    extra = task.extra
    if extra is not None and extra.not_before_s > now:
        set_time(message.not_before, extra.not_before_s)
    if extra is not None and extra.last_error is not None:
        fill_error(message.last_error, extra.last_error)
    return message


def task_state(task: Task) -> task_pb2.TaskState:
    """The state as clients see it. A durable task whose outcome is not on the disk yet may be run again."""
    if task.told is not None:
        return task_pb2.TASK_STATE_SETTLED
    leased = task.lease is not None or (task.outcome is not None and task.outcome.worker_id)
    return task_pb2.TASK_STATE_LEASED if leased else task_pb2.TASK_STATE_QUEUED


def fill_leases(
    batch: worker_service_pb2.LeaseBatch,
    specs: "SpecReader",
    proofs: LeaseProofs,
    leases: Sequence[Lease],
    read: dict[int, bytes] | None = None,
) -> None:
    """Fills a LeaseBatch from leases of one spec and worker. `read`: some payloads are large, and these were read."""
    tasks = [lease.task for lease in leases]
    batch.spec.CopyFrom(specs.message(tasks[0].spec))
    batch.lease_ids.extend([lease.lease_id for lease in leases])
    batch.task_ids.extend([task.task_id for task in tasks])
    batch.attempts.extend([lease.attempt for lease in leases])
    batch.proofs.extend(proofs.of(leases[0].worker.worker_id, batch.lease_ids, batch.task_ids, batch.attempts))
    if read is None:
        batch.payloads.extend([task.payload for task in tasks])
    batch.units.extend([task.units for task in tasks])
    for index, extra in enumerate([task.extra for task in tasks]):
        if extra is not None:
            batch.extras.add(
                index=index, checkpoint=extra.checkpoint,
                partials_received=len(extra.partials), traceparent=extra.traceparent,
                partials=extra.partials if extra.partials_bytes <= PARTIALS_BYTES_MAX else (),
            )  # fmt: skip
    if read is not None:
        wire_large.fill_payloads(batch, leases, read)


# --- workers ---------------------------------------------------------------------------------------------------------


def worker_info(m: worker_service_pb2.Hello) -> WorkerInfo:
    """What a hello says. InvalidTaskError: it makes no sense."""
    if not m.worker_id or len(m.worker_id.encode()) > NAME_BYTES_MAX:
        raise InvalidTaskError(f"worker_id must have 1 to {NAME_BYTES_MAX} bytes; has {len(m.worker_id.encode())}")
    wire_models.plain_hello(m)
    if not m.capabilities:
        raise InvalidTaskError("capabilities are missing: a worker that can run nothing is of no use")
    size = m.ByteSize() - sum(lease.ByteSize() for lease in m.leases)
    if size > HELLO_BYTES_MAX:
        raise InvalidTaskError(
            f"the worker says {size} bytes of itself; at most {HELLO_BYTES_MAX} are allowed: "
            "serve fewer kinds and models, or give it fewer labels"
        )
    return WorkerInfo(
        worker_id=m.worker_id,
        host=m.host,
        version=m.version,
        pid=m.pid,
        device_id=m.device.device_id or "cpu",
        device_name=m.device.name or "cpu",
        device_product=m.device.product,
        device_wire=wire_devices.device_wire(m.device),
        memory_total_bytes=m.device.memory_total_bytes,
        capabilities=tuple(Capability(kind=c.kind, models=tuple(c.models)) for c in m.capabilities),
        models=wire_models.models_of(m.models),
        model_memory_bytes=m.model_memory_bytes,
        labels=dict(m.labels),
        slots=max(1, m.slots),
        window_tasks=max(1, m.window_tasks),
        window_bytes=max(1, m.window_bytes),
    )


def held_leases(m: worker_service_pb2.Hello, proofs: LeaseProofs) -> list[ev.HeldLease]:
    """The leases of an earlier session that a worker says it holds, and whether it was granted them."""
    columns = [x.lease_id for x in m.leases], [x.task_id for x in m.leases], [x.attempt for x in m.leases]
    return [held_lease(x, proven=x.proof == p) for x, p in zip(m.leases, proofs.of(m.worker_id, *columns), strict=True)]


def held_lease(m: worker_service_pb2.HeldLease, *, proven: bool = False) -> ev.HeldLease:
    """A lease that a worker says it holds."""
    p = m.progress
    attempt = min(max(m.attempt, 1), ATTEMPTS_MAX)
    fraction = p.fraction if 0.0 <= p.fraction <= 1.0 else 0.0
    checkpoint = m.checkpoint if len(m.checkpoint) <= CHECKPOINT_BYTES_MAX else b""
    return ev.HeldLease(m.lease_id, m.task_id, attempt, m.running, fraction, p.steps, p.note[:1024], checkpoint, proven)


def embedding_cache(m: worker_service_pb2.EmbeddingCache) -> EmbeddingCache:
    """What a worker says of its embedding cache."""
    return EmbeddingCache(m.hits, m.joined, m.misses, m.entries, m.size_bytes)


def telemetry(m: device_pb2.DeviceTelemetry) -> Telemetry:
    """What a device says of how it is doing."""
    return wire_devices.telemetry(m, seconds_of(m.sample_time))


def health(m: device_pb2.DeviceHealth) -> Health:
    """What a worker says of its device's health. A state that this master does not know is no reason to trust it."""
    reasons = tuple(
        HealthReason(r.code[:REASON_CODE_CHARS_MAX], r.message[:REASON_CHARS_MAX], seconds_of(r.since_time))
        for r in m.reasons[:REASONS_MAX]
    )
    known = HealthState.HEALTHY <= m.state <= HealthState.RECOVERING
    return Health(
        state=HealthState(m.state) if known else HealthState.SICK,
        since_s=seconds_of(m.since_time),
        reasons=reasons,
        unusable=m.unusable,
        checks_passed=m.checks_passed,
        next_check_s=seconds_of(m.next_check_time) if m.HasField("next_check_time") else 0.0,
    )


_HEALTH = {
    HealthState.HEALTHY: device_pb2.HEALTH_STATE_HEALTHY,
    HealthState.DEGRADED: device_pb2.HEALTH_STATE_DEGRADED,
    HealthState.SICK: device_pb2.HEALTH_STATE_SICK,
    HealthState.RECOVERING: device_pb2.HEALTH_STATE_RECOVERING,
}


def fill_health(message: device_pb2.DeviceHealth, health: Health) -> None:
    """Writes what a worker said of its device's health."""
    message.state = _HEALTH[health.state]
    message.unusable, message.checks_passed = health.unusable, health.checks_passed
    if health.since_s:
        set_time(message.since_time, health.since_s)
    if health.next_check_s:
        set_time(message.next_check_time, health.next_check_s)
    for reason in health.reasons:
        each = message.reasons.add(code=reason.code, message=reason.message)
        set_time(each.since_time, reason.since_s)


def reports_of(
    batch: worker_service_pb2.ReportBatch, session: int, start_s: float, finish_s: float, peer: Peer
) -> ev.Reports:
    """The event for a batch. A report of an unknown state, or of a success without its result, counts as a failure that
    says so.
    """
    count = min(len(batch.succeeded_lease_ids), len(batch.results))
    lease_ids = list(batch.succeeded_lease_ids[:count])
    results: list[bytes | Reference] = list(batch.results[:count])
    failures = [_failure(r) for r in batch.reports]
    no_result = TaskError("BadReport", "the worker reported a success without its result")
    failures += [ev.Failure(lease_id, no_result) for lease_id in batch.succeeded_lease_ids[count:]]
    energy: list[Energy] = []
    if len(batch.energy_joules) == len(lease_ids):
        energy = wire_devices.energies(list(batch.energy_joules), batch.energy_method, batch.energy_uncertainty)
    if batch.result_places:
        lost = wire_large.take_results(batch, results, peer)
        failures += lost.values()
        lease_ids = [x for n, x in enumerate(lease_ids) if n not in lost]
        results = [x for n, x in enumerate(results) if n not in lost]
        energy = [x for n, x in enumerate(energy) if n not in lost]
    return ev.Reports(session, lease_ids, results, batch.content_type, failures, start_s, finish_s, energy)


def _failure(r: worker_service_pb2.Report) -> ev.Failure:
    state = r.state
    if state == worker_service_pb2.REPORT_STATE_FAILED:
        return ev.Failure(r.lease_id, error_of(r.error), broke_engine=r.broke_engine)
    if state == worker_service_pb2.REPORT_STATE_RETURNED:
        return ev.Failure(r.lease_id, error_of(r.error), returned=True)
    message = f"the worker reported state {state}, which this master does not know; upgrade the master"
    return ev.Failure(r.lease_id, TaskError("BadReport", message))
