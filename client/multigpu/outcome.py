"""How a task ended, as the client hands it out: a thin wrapper that reads the protobuf message only when asked.

Outcomes arrive many to a frame, and a message keeps its whole frame in memory for as long as it lives: keep values, not
outcomes, of many tasks.
"""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from multigpu import errors
from multigpu._transport.encoding import decode
from multigpu.v1 import task_pb2

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp


class _OpenEnum(enum.IntEnum):
    """A value that only a newer master knows becomes UNSPECIFIED, 0."""

    @classmethod
    def _missing_(cls, _value: object) -> Self:
        return cls(0)


class OutcomeState(_OpenEnum):
    """How a task can end."""

    UNSPECIFIED = 0
    SUCCEEDED = 1
    FAILED = 2
    CANCELLED = 3
    EXPIRED = 4
    DEAD_LETTERED = 5
    # It SUCCEEDED, and its result is not there any more; `error_type` says why.
    RESULT_MISSING = 6


class TaskState(_OpenEnum):
    """Where a task can be."""

    UNSPECIFIED = 0
    QUEUED = 1
    LEASED = 2
    SETTLED = 3


class EnergyMethod(_OpenEnum):
    """How energy can be measured."""

    UNSPECIFIED = 0
    COUNTER = 1
    SAMPLED_POWER = 2


class Energy(NamedTuple):
    """What a task took of its device's energy, in joules; the truth lies within `uncertainty` (a share of it: 0.2 is
    plus or minus 20 %).
    """

    joules: float
    method: EnergyMethod
    uncertainty: float


_SUCCEEDED = task_pb2.OUTCOME_STATE_SUCCEEDED
_RESULT_MISSING = task_pb2.OUTCOME_STATE_RESULT_MISSING
_ERRORS = {
    OutcomeState.FAILED: errors.TaskFailed,
    OutcomeState.CANCELLED: errors.TaskCancelled,
    OutcomeState.EXPIRED: errors.TaskExpired,
    OutcomeState.DEAD_LETTERED: errors.TaskDeadLettered,
}


class Outcome:
    """The immutable end of a task. `message` is the protobuf behind it."""

    __slots__ = ("_listed", "_result", "frame_bytes", "message")

    def __init__(
        self, message: task_pb2.Outcome, frame_bytes: int = 0, result: bytes | None = None, *, listed: bool = False
    ) -> None:
        """`result`: the result, if the message has only the place of it. `listed`: it is of a list, without results."""
        self.message = message
        self._result = result
        self._listed = listed
        # Its share of the frame that it came in: what it costs to hold, near enough.
        self.frame_bytes = frame_bytes

    def __repr__(self) -> str:
        return f"<Outcome of task {self.task_id}: {self.state.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.message.SerializeToString(), self._result, self._listed)

    @property
    def task_id(self) -> int:
        return self.message.task_id

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def state(self) -> OutcomeState:
        return OutcomeState(self.message.state)

    @property
    def succeeded(self) -> bool:
        return self.message.state == _SUCCEEDED

    @property
    def result(self) -> bytes:
        """What the engine returned, as it came. Empty unless SUCCEEDED.

        Raises ResultExpiredError or ResultLostError if it is not there any more.
        """
        result = self.message.result if self._result is None else self._result
        if not result:
            self._check_there()
        return result

    @property
    def content_type(self) -> str:
        """How the result is to be read: empty for raw bytes, "application/json" for a JSON value."""
        return self.message.content_type

    def value(self) -> Any:
        """The decoded result of a task that SUCCEEDED; otherwise raises its TaskError."""
        message = self.message
        if message.state != _SUCCEEDED:
            raise self.to_error()
        content_type = message.content_type
        return decode(self.result, content_type) if content_type else self.result

    def to_error(self) -> errors.TaskError:
        """The error that says how the task ended. Only for one that did not succeed."""
        assert not self.succeeded, "a task that succeeded has no error"
        if self.message.state == _RESULT_MISSING:
            expired = self.error_type == "ResultExpired"
            return errors.ResultExpiredError(self) if expired else errors.ResultLostError(self)
        return _ERRORS.get(self.state, errors.TaskError)(self)

    def _check_there(self) -> None:
        """What the message does not have may have been: then it is an error to ask for it."""
        if self.message.state == _RESULT_MISSING:
            raise self.to_error()
        if self._listed and self.succeeded:
            raise errors.MultigpuError(f"a list has no results; client.get({self.task_id}) has this one")

    @property
    def error_type(self) -> str:
        """The class of the error ("ValueError", "RunTimeout", …); empty when SUCCEEDED."""
        return self.message.error.type

    @property
    def error_message(self) -> str:
        return self.message.error.message

    @property
    def traceback(self) -> str:
        """The engine's traceback, if it has one."""
        return self.message.error.traceback

    @property
    def attempts(self) -> int:
        """How many attempts were granted. 0: never dispatched."""
        return self.message.attempts

    @property
    def worker_id(self) -> str:
        """The worker of the last attempt; empty if there was none."""
        return self.message.worker_id

    @property
    def device_id(self) -> str:
        """The device of the last attempt: an NVML UUID, or "cpu"."""
        return self.message.device_id

    @property
    def energy(self) -> Energy | None:
        """What it took of its device's energy. None: it wasn't measured (a CPU, a device without a sensor, too short a
        time, or a task that did not succeed).
        """
        if not self.message.HasField("energy"):
            return None
        energy = self.message.energy
        return Energy(energy.joules, EnergyMethod(energy.method), energy.uncertainty)

    @property
    def partials(self) -> list[bytes]:
        """Everything the task yielded before it returned, in order. Raises as `result`."""
        if not self.message.partials:
            self._check_there()
        return list(self.message.partials)

    @property
    def submit_time(self) -> datetime | None:
        return _instant(self.message.stages.submit_time)

    @property
    def dispatch_time(self) -> datetime | None:
        """Of the last attempt; None if there was none."""
        return _instant(self.message.stages.dispatch_time)

    @property
    def start_time(self) -> datetime | None:
        """When the engine began the batch that the task was in, by the worker's clock."""
        return _instant(self.message.stages.start_time)

    @property
    def finish_time(self) -> datetime | None:
        """When the engine finished that batch; for a task that never ran, when it was settled."""
        return _instant(self.message.stages.finish_time)


class Task:
    """A task as the master saw it when asked. `message` is the protobuf behind it, with everything."""

    __slots__ = ("_listed", "message")

    def __init__(self, message: task_pb2.Task, *, listed: bool = False) -> None:
        """`listed`: it is of a list, without results."""
        self.message = message
        self._listed = listed

    def __repr__(self) -> str:
        return f"<Task {self.task_id}: {self.kind}, {self.state.name}>"

    @property
    def task_id(self) -> int:
        return self.message.task_id

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def kind(self) -> str:
        return self.message.spec.kind

    @property
    def state(self) -> TaskState:
        return TaskState(self.message.state)

    @property
    def attempts(self) -> int:
        """Attempts granted so far."""
        return self.message.attempts

    @property
    def worker_id(self) -> str:
        """Where it is leased; empty unless LEASED."""
        return self.message.worker_id

    @property
    def progress(self) -> float:
        """0 to 1; 0 if the engine doesn't say."""
        return self.message.progress.fraction

    @property
    def submit_time(self) -> datetime | None:
        return _instant(self.message.submit_time)

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None unless SETTLED."""
        return Outcome(self.message.outcome, listed=self._listed) if self.message.HasField("outcome") else None


def _instant(timestamp: Timestamp) -> datetime | None:
    if not (timestamp.seconds or timestamp.nanos):
        return None
    return timestamp.ToDatetime(tzinfo=UTC)


def _unpickle(data: bytes, result: bytes | None, listed: bool) -> Outcome:
    return Outcome(task_pb2.Outcome.FromString(data), 0, result, listed=listed)
