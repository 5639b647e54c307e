"""Outcomes and errors of tasks, and the frames that carry outcomes to clients."""

from collections.abc import Iterable
from typing import Any

from multigpu._transport.protobuf import Frame, tag, varint
from multigpu.v1 import task_pb2, task_service_pb2

from multigpu_master.core.model import Attempt, Outcome, Task, TaskError
from multigpu_master.journal.protocol import LargeBody
from multigpu_master.wire import payloads as payload_messages
from multigpu_master.wire.times import set_time
from multigpu_master.wire.validation import MESSAGE_CHARS_MAX

TYPE_CHARS_MAX, TRACEBACK_CHARS_MAX = 128, 16 << 10
# The tag and length (the head) of fields with fewer bytes than this are precomputed.
HEADS_MAX = 2048
_RESULT_TAG = tag(task_pb2.Outcome.RESULT_FIELD_NUMBER)
_RESULT_HEADS = [_RESULT_TAG + varint(size) for size in range(HEADS_MAX)]
_OUTCOMES_TAG = tag(task_service_pb2.RunResponse.OUTCOMES_FIELD_NUMBER)
_OUTCOMES_HEADS = [_OUTCOMES_TAG + varint(size) for size in range(HEADS_MAX)]


class OutcomeWriter:
    """Serializes each outcome once, for the journal and the streams.

    Most fields are equal for the tasks of one batch. The serialized form of these fields is reused for the next task: a
    protobuf message may be serialized in parts, which are then concatenated.
    """

    def __init__(self) -> None:
        self._shared: tuple[object, ...] = ()
        self._shared_bytes = b""

    def write(self, task: Task) -> bytes | LargeBody:
        """Returns the serialized Outcome of a settled task."""
        o = task.outcome
        assert o is not None, "it is settled"
        shared = (
            o.state, task.submit_s, o.dispatch_s, o.start_s, o.finish_s,
            task.attempts, o.worker_id, o.device_id, o.content_type, bool(o.result),
        )  # fmt: skip
        if shared != self._shared:
            self._shared, self._shared_bytes = shared, _shared_part(task, o).SerializeToString()
        own_part = task_pb2.Outcome()
        own_part.task_id = task.task_id
        if task.request_id:
            own_part.request_id = task.request_id
        if o.error is not None:
            fill_error(own_part.error, o.error)
        if task.extra is not None and task.extra.partials:
            own_part.partials.extend(task.extra.partials)
            if any(task.extra.partial_content_types):
                own_part.partial_content_types.extend(task.extra.partial_content_types)
        if task.extra is not None and task.extra.ended_attempts:
            fill_attempts(own_part.earlier_attempts, task.extra.ended_attempts)
        if task.extra is not None and task.extra.log:
            own_part.log = task.extra.log
        if o.energy is not None:
            own_part.energy.joules, method, own_part.energy.uncertainty = o.energy
            own_part.energy.method = method  # type: ignore[assignment]  # enums are ints on the wire
        if not o.result:
            return own_part.SerializeToString() + self._shared_bytes
        size = len(o.result)
        if payload_messages.may_have_large(size):
            return payload_messages.outcome_body(
                own_part.SerializeToString(), self._shared_bytes, payload_messages.checked_value(o.result)
            )
        assert isinstance(o.result, bytes), "references are large"
        head = _RESULT_HEADS[size] if size < len(_RESULT_HEADS) else _RESULT_TAG + varint(size)
        return b"".join((own_part.SerializeToString(), head, o.result, self._shared_bytes))


def _shared_part(task: Task, o: Outcome) -> task_pb2.Outcome:
    message = task_pb2.Outcome(attempts=task.attempts, worker_id=o.worker_id, device_id=o.device_id)
    message.state = int(o.state)  # type: ignore[assignment]  # enums are ints on the wire
    if o.result:
        message.content_type = o.content_type
    fill_stages(message.stages, task.submit_s, o.dispatch_s, o.start_s)
    set_time(message.stages.finish_time, o.finish_s)
    return message


def fill_stages(message: task_pb2.Stages, submit_s: float, dispatch_s: float, start_s: float) -> None:
    """`dispatch_s` and `start_s` are 0.0 if the task has not reached that stage."""
    set_time(message.submit_time, submit_s)
    if dispatch_s:
        set_time(message.dispatch_time, dispatch_s)
    if start_s:
        set_time(message.start_time, start_s)


def fill_attempts(messages: Any, attempts: Iterable[Attempt]) -> None:
    for attempt in attempts:
        message = messages.add(worker_id=attempt.worker_id, reason=attempt.reason)
        set_time(message.dispatch_time, attempt.dispatch_s)
        if attempt.start_s:
            set_time(message.start_time, attempt.start_s)
        set_time(message.end_time, attempt.end_s)


class RunFrame(Frame[task_service_pb2.RunResponse]):
    """A RunResponse under construction. Its outcomes are already serialized."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(task_service_pb2.RunResponse())

    def add_outcome(self, body: bytes) -> None:
        size = len(body)
        self.parts += (_OUTCOMES_HEADS[size] if size < HEADS_MAX else _OUTCOMES_TAG + varint(size), body)

    def add_large_outcome(self, body: LargeBody) -> None:
        """Raises OSError if the result can no longer be read."""
        tail = body.tail if isinstance(body.tail, bytes) else body.tail.read()
        self.parts += (_OUTCOMES_TAG + varint(len(body)), body.head, tail)


def fill_error(message: task_pb2.TaskError, error: TaskError) -> None:
    message.type = error.type
    message.message = error.message
    message.retryable = error.retryable
    message.traceback = error.traceback


def error_of(message: task_pb2.TaskError) -> TaskError:
    """Converts a worker's error. Cuts its texts to their limits; of the traceback, the end is kept."""
    return TaskError(
        message.type[:TYPE_CHARS_MAX] or "Unknown",
        message.message[:MESSAGE_CHARS_MAX],
        message.retryable,
        message.traceback[-TRACEBACK_CHARS_MAX:],
    )
