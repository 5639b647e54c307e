"""Tasks: from a TaskBatch, to and from the journal's records, and as clients see them."""

from collections.abc import Sequence, Sized

from multigpu._transport.payloads import Reference
from multigpu.v1 import task_pb2, task_service_pb2

from multigpu_master.core import events as ev
from multigpu_master.core import identity
from multigpu_master.core.model import OutcomeState, Task
from multigpu_master.core.spec import Spec
from multigpu_master.journal.payload_files import BadReferenceError
from multigpu_master.journal.protocol import LargeBody, SettleRecord, SubmitRecord
from multigpu_master.wire import payloads as payload_messages
from multigpu_master.wire.outcomes import fill_attempts, fill_error, fill_stages
from multigpu_master.wire.payloads import Peer
from multigpu_master.wire.times import duration, set_time, timestamp
from multigpu_master.wire.validation import KEY_BYTES_MAX, NAME_BYTES_MAX

INVALID_ARGUMENT = 3
TRACEPARENT_CHARS_MAX = 64


def request_ids_of(batch: task_pb2.TaskBatch) -> list[str]:
    """The request_ids of a batch's tasks, in order; "" for a task without one."""
    return [*[i.request_id for i in batch.inputs], *_column_of_request_ids(batch)]


def _column_of_request_ids(batch: task_pb2.TaskBatch) -> Sequence[str]:
    return batch.request_ids or [""] * len(batch.payloads)


def fill_rejection(message: task_service_pb2.Rejection, rejection: ev.Rejection, request_id: str) -> None:
    """Fills a Rejection message."""
    message.request_id = request_id
    message.code = rejection.code
    message.message = rejection.message
    if rejection.retry_delay_s is not None:
        message.retry_delay.CopyFrom(duration(rejection.retry_delay_s))


def tasks_of(
    spec: Spec, batch: task_pb2.TaskBatch, payload_bytes_max: int, peer: Peer | None = None
) -> list[Task | ev.Rejection]:
    """Returns a Task for each valid task of the batch and a Rejection for each invalid one, in the order of
    request_ids_of(). `peer`: the sender, which may refer to shared payloads.
    """
    tasks: list[Task | ev.Rejection] = []
    payload: bytes | Reference
    for i in batch.inputs:
        payload, request_id, key = i.payload, i.request_id, i.partition_key
        if not payload and i.HasField("payload_place"):
            try:
                payload = payload_messages.payload_of(i, peer)
            except BadReferenceError as error:
                tasks.append(_invalid(str(error)))
                continue
        rejection = _check(payload, request_id, key, payload_bytes_max)
        if rejection is not None:
            tasks.append(rejection)
            continue
        task = Task(spec, request_id, payload, key, i.units or 1)
        if i.traceparent:
            task.ensure_extra().traceparent = i.traceparent[:TRACEPARENT_CHARS_MAX]
        tasks.append(task)
    request_ids, payloads = _column_of_request_ids(batch), list(batch.payloads)
    if len(payloads) != len(request_ids):
        message = f"a batch has {len(request_ids)} request_ids and {len(payloads)} payloads; the numbers must be equal"
        return [*tasks, *[_invalid(message) for _ in request_ids]]
    for request_id, payload in zip(request_ids, payloads, strict=True):
        rejection = _check(payload, request_id, "", payload_bytes_max)
        tasks.append(Task(spec, request_id, payload) if rejection is None else rejection)
    return tasks


def _check(payload: bytes | Sized, request_id: str, key: str, payload_bytes_max: int) -> ev.Rejection | None:
    if len(payload) > payload_bytes_max:
        return _invalid(
            f"the payload has {len(payload)} bytes; at most {payload_bytes_max} are allowed (payload_bytes_max)"
        )
    if len(request_id.encode()) > NAME_BYTES_MAX or "\0" in request_id:
        return _invalid(f"the request_id is invalid: it may have at most {NAME_BYTES_MAX} bytes, and no NUL")
    if len(key.encode()) > KEY_BYTES_MAX:
        return _invalid(f"the partition_key is invalid: it may have at most {KEY_BYTES_MAX} bytes")
    return None


def _invalid(message: str) -> ev.Rejection:
    return ev.Rejection(INVALID_ARGUMENT, message)


def submit_record(task: Task) -> SubmitRecord:
    """The journal's record of a task."""
    return SubmitRecord(
        task.task_id, task.request_id, task.spec.wire, task.payload, task.partition_key, task.units, task.submit_s,
        0 if task.extra is None else task.extra.first_lease_id,
    )  # fmt: skip


def restored_task(record: SubmitRecord, spec: Spec) -> Task:
    """The task of a journal record."""
    task = Task(
        spec,
        record.request_id,
        record.payload,
        record.partition_key,
        record.units,
        record.submit_time_s,
        record.task_id,
    )
    if record.first_lease_id:
        task.ensure_extra().first_lease_id = record.first_lease_id
    return task


def settle_record(
    task: Task, body: bytes | LargeBody, now: float, *, submit_may_be_stored: bool = True
) -> SettleRecord:
    """The journal's record of a task that settles now. `body`: the serialized Outcome. The flag: see SettleRecord.

    Retention begins now, not at finish_s: the worker may have finished the task long ago, while no master ran.
    """
    outcome, spec = task.outcome, task.spec
    assert outcome is not None, "it is settled"
    return SettleRecord(
        task.task_id, task.request_id, int(outcome.state), spec.queue, spec.kind, spec.model, outcome.worker_id,
        task.submit_s, now, now + spec.result_ttl_s, body,
        submit_record(task) if outcome.state is OutcomeState.DEAD_LETTERED else None, identity.fingerprint(task),
        submit_may_be_stored,
    )  # fmt: skip


def spec_message(spec: Spec) -> task_pb2.TaskSpec:
    """A spec as clients see it: as submitted, with the defaults of queue, priority and attempts_max."""
    message = task_pb2.TaskSpec.FromString(spec.wire)
    message.queue, message.priority, message.attempts_max = spec.queue, spec.priority, spec.attempts_max
    return message


def task_message(task: Task, now: float) -> task_pb2.Task:
    """A task as clients see it, without its outcome."""
    message = task_pb2.Task(
        task_id=task.task_id,
        request_id=task.request_id,
        spec=spec_message(task.spec),
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
        fill_stages(message.stages, task.submit_s, *lease.stages(lease.running_since_s, now)[:2])
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
    if extra is not None:
        fill_attempts(message.earlier_attempts, extra.ended_attempts)
    return message


def task_state(task: Task) -> task_pb2.TaskState:
    """The state as clients see it. A durable task stays LEASED or QUEUED until its outcome is on disk."""
    if task.outcome_if_ephemeral is not None:
        return task_pb2.TASK_STATE_SETTLED
    leased = task.lease is not None or (task.outcome is not None and task.outcome.worker_id)
    return task_pb2.TASK_STATE_LEASED if leased else task_pb2.TASK_STATE_QUEUED
