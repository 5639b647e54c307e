"""Between the wire and the core: protobuf messages in and out of the core's plain values.

Everything that comes in is validated here, so that the core meets only what makes sense; InvalidTaskError says what is
wrong in words for the person who wrote it. Specs are interned: equal ones are one object, however many frames carry
them.
"""

import math
from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary, WeakValueDictionary

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu.v1 import device_pb2, task_pb2, worker_service_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.model import (
    Capability,
    Outcome,
    OutcomeState,
    ReportState,
    Spec,
    Task,
    TaskError,
    Telemetry,
    WorkerInfo,
)
from multigpu_master.journal import SettleRecord, SubmitRecord

PRIORITY_DEFAULT, ATTEMPTS_DEFAULT, ATTEMPTS_MAX = 3, 3, 100
DURABLE_TTL_S, EPHEMERAL_TTL_S = 86_400.0, 300.0
PARAMETERS_MAX, PARAMETERS_BYTES_MAX = 64, 64 << 10
NAME_BYTES_MAX, MODEL_BYTES_MAX, KEY_BYTES_MAX = 128, 256, 256
MESSAGE_CHARS_MAX, TRACEBACK_CHARS_MAX = 8 << 10, 16 << 10


class InvalidTaskError(Exception):
    """A task, or a worker's word, that makes no sense; the message says why and what would."""


# --- time ------------------------------------------------------------------------------------------------------------


def seconds_of(message: Timestamp | Duration) -> float:
    """Seconds, since the epoch for a Timestamp."""
    return message.seconds + message.nanos / 1e9


def set_time(message: Timestamp, seconds: float) -> None:
    """Fills a Timestamp from seconds since the epoch."""
    whole = int(seconds)
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


class SpecReader:
    """Validates TaskSpec messages and interns them."""

    def __init__(self) -> None:
        self._specs: WeakValueDictionary[bytes, Spec] = WeakValueDictionary()
        self._messages: WeakKeyDictionary[Spec, task_pb2.TaskSpec] = WeakKeyDictionary()

    def read(self, message: task_pb2.TaskSpec) -> Spec:
        """The Spec for a message. InvalidTaskError: it makes no sense."""
        wire = message.SerializeToString(deterministic=True)
        spec = self._specs.get(wire)
        if spec is None:
            spec = self._specs[wire] = _spec(message, wire)
        return spec

    def restore(self, wire: bytes) -> Spec:
        """The Spec for bytes from the journal."""
        spec = self._specs.get(wire)
        return spec if spec is not None else self.read(task_pb2.TaskSpec.FromString(wire))

    def message(self, spec: Spec) -> task_pb2.TaskSpec:
        """The message for a Spec, to be copied from and not changed."""
        message = self._messages.get(spec)
        if message is None:
            message = self._messages[spec] = task_pb2.TaskSpec.FromString(spec.wire)
        return message


def _spec(m: task_pb2.TaskSpec, wire: bytes) -> Spec:
    _name("kind", m.kind, NAME_BYTES_MAX)
    if not m.kind:
        raise InvalidTaskError('kind is missing; name what is to run, for example "embed"')
    _name("model", m.model, MODEL_BYTES_MAX)
    _name("queue", m.queue, NAME_BYTES_MAX)
    if not 0 <= m.priority <= 5:
        raise InvalidTaskError(
            f"priority {m.priority} is out of range; use 1 (served first) to 5, or 0 for {PRIORITY_DEFAULT}"
        )
    if not 0 <= m.attempts_max <= ATTEMPTS_MAX:
        raise InvalidTaskError(f"attempts_max {m.attempts_max} is out of range; use 1 to {ATTEMPTS_MAX}")
    _mapping("parameters", m.parameters)
    _mapping("required_labels", m.required_labels)
    if m.durability not in task_pb2.Durability.values():
        raise InvalidTaskError(f"durability {m.durability} is unknown; use DURABLE or EPHEMERAL")
    durable = m.durability != task_pb2.DURABILITY_EPHEMERAL
    initial_s = _timeout(m, "backoff_initial", 0.1)
    max_s = _timeout(m, "backoff_max", 30.0)
    assert initial_s is not None, "it has a default"
    assert max_s is not None, "it has a default"
    ttl_s = _timeout(m, "result_ttl", DURABLE_TTL_S if durable else EPHEMERAL_TTL_S)
    assert ttl_s is not None, "it has a default"
    return Spec(
        kind=m.kind,
        model=m.model,
        queue=m.queue or "default",
        priority=m.priority or PRIORITY_DEFAULT,
        labels=tuple(sorted(m.required_labels.items())),
        memory_bytes=m.required_device_memory_bytes,
        deadline_s=seconds_of(m.deadline) if m.HasField("deadline") else None,
        queue_timeout_s=_timeout(m, "queue_timeout", None),
        run_timeout_s=_timeout(m, "run_timeout", None),
        attempts_max=m.attempts_max or ATTEMPTS_DEFAULT,
        backoff_initial_s=initial_s,
        backoff_max_s=max(initial_s, max_s),
        durable=durable,
        result_ttl_s=ttl_s,
        wait_for_worker=m.wait_for_worker,
        wire=wire,
    )


def _name(field: str, value: str, bytes_max: int) -> None:
    size = len(value.encode())
    if size > bytes_max:
        raise InvalidTaskError(f"{field} has {size} bytes; at most {bytes_max} are allowed")
    if "\0" in value:
        raise InvalidTaskError(f"{field} contains a NUL character; remove it")


def _mapping(field: str, items: Mapping[str, str]) -> None:
    if len(items) > PARAMETERS_MAX:
        raise InvalidTaskError(f"{field} has {len(items)} entries; at most {PARAMETERS_MAX} are allowed")
    size = sum(len(k.encode()) + len(v.encode()) for k, v in items.items())
    if size > PARAMETERS_BYTES_MAX:
        raise InvalidTaskError(
            f"{field} has {size} bytes; at most {PARAMETERS_BYTES_MAX} are allowed: put data in the payload"
        )


def _timeout(m: task_pb2.TaskSpec, field: str, default: float | None) -> float | None:
    if not m.HasField(field):
        return default
    value = seconds_of(getattr(m, field))
    if not value > 0 or not math.isfinite(value):
        raise InvalidTaskError(f"{field} is {value:g} s; it must be above zero, or absent")
    return value


def tasks_of(spec: Spec, inputs: Iterable[task_pb2.TaskInput], payload_bytes_max: int) -> list[Task | ev.Rejection]:
    """The Task for each input, or why it can't be one."""
    tasks: list[Task | ev.Rejection] = []
    for i in inputs:
        payload, request_id, key = i.payload, i.request_id, i.partition_key
        if len(payload) > payload_bytes_max:
            tasks.append(
                _invalid(
                    f"the payload has {len(payload)} bytes; at most {payload_bytes_max} are allowed (payload_bytes_max)"
                )
            )
            continue
        if len(request_id) > NAME_BYTES_MAX or len(key) > KEY_BYTES_MAX or "\0" in request_id:
            tasks.append(
                _invalid(
                    f"request_id (at most {NAME_BYTES_MAX} bytes, without NUL) or partition_key "
                    f"(at most {KEY_BYTES_MAX} bytes) is too long"
                )
            )
            continue
        task = Task(spec, request_id, payload, key, i.units or 1)
        if i.traceparent:
            task.more().traceparent = i.traceparent[:64]
        tasks.append(task)
    return tasks


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


def settle_record(task: Task, body: bytes) -> SettleRecord:
    """What the journal keeps of a task's end. `body` is its serialized Outcome."""
    outcome, spec = task.outcome, task.spec
    assert outcome is not None, "it is settled"
    return SettleRecord(
        task.task_id, task.request_id, int(outcome.state), spec.queue, spec.kind, spec.model, outcome.worker_id,
        task.submit_s, outcome.finish_s, outcome.finish_s + spec.result_ttl_s, body,
        submit_record(task) if outcome.state is OutcomeState.DEAD_LETTERED else None,
    )  # fmt: skip


# --- tasks out -------------------------------------------------------------------------------------------------------


class StagesCache:
    """Stages messages by their four times. Tasks that went together share theirs, and building one costs more than
    copying it.
    """

    def __init__(self) -> None:
        self._stages: dict[tuple[float, float, float, float], task_pb2.Stages] = {}

    def get(self, submit_s: float, outcome: Outcome) -> task_pb2.Stages:
        key = (submit_s, outcome.dispatch_s, outcome.start_s, outcome.finish_s)
        stages = self._stages.get(key)
        if stages is None:
            if len(self._stages) >= 1024:
                self._stages.clear()
            stages = self._stages[key] = task_pb2.Stages()
            set_time(stages.submit_time, submit_s)
            if outcome.dispatch_s:
                set_time(stages.dispatch_time, outcome.dispatch_s)
            if outcome.start_s:
                set_time(stages.start_time, outcome.start_s)
            set_time(stages.finish_time, outcome.finish_s)
        return stages


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
    )
    if task.outcome is not None:
        message.state = task_pb2.TASK_STATE_SETTLED
    elif task.lease is not None:
        lease = task.lease
        message.state = task_pb2.TASK_STATE_LEASED
        message.worker_id = lease.worker.worker_id
        message.lease_id = lease.lease_id
        if lease.fraction or lease.steps or lease.note:
            message.progress.fraction = lease.fraction
            message.progress.steps = lease.steps
            message.progress.note = lease.note
    else:
        message.state = task_pb2.TASK_STATE_QUEUED
    extra = task.extra
    if extra is not None and extra.not_before_s > now:
        set_time(message.not_before, extra.not_before_s)
    if extra is not None and extra.last_error is not None:
        fill_error(message.last_error, extra.last_error)
    return message


# --- workers ---------------------------------------------------------------------------------------------------------


def worker_info(m: worker_service_pb2.Hello) -> WorkerInfo:
    """What a hello says. InvalidTaskError: it makes no sense."""
    if not m.worker_id or len(m.worker_id.encode()) > NAME_BYTES_MAX:
        raise InvalidTaskError(f"worker_id must have 1 to {NAME_BYTES_MAX} bytes; has {len(m.worker_id.encode())}")
    if not m.capabilities:
        raise InvalidTaskError("capabilities are missing: a worker that can run nothing is of no use")
    return WorkerInfo(
        worker_id=m.worker_id,
        host=m.host,
        version=m.version,
        pid=m.pid,
        device_id=m.device.device_id or "cpu",
        device_name=m.device.name or "cpu",
        device_product=m.device.product,
        memory_total_bytes=m.device.memory_total_bytes,
        capabilities=tuple(Capability(kind=c.kind, models=tuple(c.models)) for c in m.capabilities),
        labels=dict(m.labels),
        slots=max(1, m.slots),
        window_tasks=max(1, m.window_tasks),
        window_bytes=max(1, m.window_bytes),
    )


def held_lease(m: worker_service_pb2.HeldLease) -> ev.HeldLease:
    """A lease that a worker says it holds."""
    p = m.progress
    return ev.HeldLease(m.lease_id, m.task_id, m.attempt, m.running, p.fraction, p.steps, p.note[:1024], m.checkpoint)


def telemetry(m: device_pb2.DeviceTelemetry) -> Telemetry:
    """What a device says of how it is doing."""

    def value(field: str) -> float | None:
        return getattr(m, field) if m.HasField(field) else None

    total, used = value("memory_total_bytes"), value("memory_used_bytes")
    return Telemetry(
        sample_s=seconds_of(m.sample_time),
        memory_total_bytes=None if total is None else int(total),
        memory_used_bytes=None if used is None else int(used),
        utilization=value("utilization"),
        temperature_celsius=value("temperature_celsius"),
        power_watts=value("power_watts"),
    )


_STATES = {int(s): s for s in ReportState}


def reports_of(batch: worker_service_pb2.ReportBatch) -> list[ev.Report]:
    """The reports of a batch. One of an unknown state counts as a failure that says so."""
    found = []
    for r in batch.reports:
        state = r.state
        if state == worker_service_pb2.REPORT_STATE_SUCCEEDED:
            found.append(ev.Report(r.lease_id, ReportState.SUCCEEDED, r.result, r.content_type))
        elif state in _STATES:
            found.append(ev.Report(r.lease_id, _STATES[state], error=error_of(r.error)))
        else:
            error = TaskError(
                "BadReport", f"the worker reported state {state}, which this master does not know; upgrade the master"
            )
            found.append(ev.Report(r.lease_id, ReportState.FAILED, error=error))
    return found
