"""How calls and tasks end: the outcome of a task, and everything that the client raises, in one tree.

    MultigpuError
    ├── TransportError              the master could not be reached, or did not speak our protocol
    │   ├── CallTimeoutError        the call's `timeout` has passed; also a TimeoutError
    │   ├── UnavailableError        no master answers at the address
    │   └── AccessError             the token or the certificate is missing, wrong, or not for this call
    ├── RejectedError               the master rejected the task and keeps nothing of it
    │   ├── InvalidTaskError        the task is invalid: submitting it again cannot help
    │   ├── AlreadyExistsError      another task has its request_id
    │   ├── ResourceExhaustedError  a limit is hit; retry_delay_s says when to try again
    │   └── UnplaceableError        no known worker could ever run it
    ├── TaskError                   the task was accepted and has no result; carries its outcome
    │   ├── TaskFailed              it raised; also of the class that its handler raised, and its cause is a RemoteError
    │   ├── TaskCancelled, TaskExpired
    │   ├── ResultExpiredError      it SUCCEEDED, and its result was deleted after the result_ttl
    │   └── ResultLostError         it SUCCEEDED, and its result can no longer be read
    ├── NotFoundError               the master does not know the task, or no longer does
    ├── InvalidRequestError         an AdminClient's call makes no sense, or not in this state; also a ValueError
    ├── ConfigError                 a setting is unknown or wrong; also a ValueError
    ├── CursorExpiredError          the outcomes after the cursor are no longer available
    └── ClientClosedError           the client was closed, or belongs to another process or event loop

An error's message names the remedy where there is one. Wrong types in the caller's own code raise TypeError.

One frame carries many outcomes, and each outcome keeps the memory of its whole frame allocated. A program with many
tasks should keep the values of outcomes, not the outcomes.
"""

from __future__ import annotations

import enum
import functools
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from multigpu._transport.encoding import decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.timestamp_pb2 import Timestamp

    from multigpu.v1 import task_pb2, task_service_pb2

# The values of google.rpc.Code that Rejection uses.
CANCELLED = 1
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
NOT_FOUND = 5
ALREADY_EXISTS = 6
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
UNAVAILABLE = 14


class MultigpuError(Exception):
    """The root: catch this to catch everything that multigpu raises on purpose.

    `submitted`: if the error ended a `submit_many`, what the call would have returned for the first tasks: the handle
    of each accepted task, and the error of each rejected one.
    """

    submitted: Sequence[Any] = ()


class TransportError(MultigpuError):
    """The call did not reach the master, or the answer was late or malformed."""


class CallTimeoutError(TransportError, TimeoutError):
    """The `timeout` of the call has passed, or the master took too long to answer."""


class UnavailableError(TransportError):
    """No master answers at the address."""


class AccessError(TransportError):
    """The master asks for a token or a certificate, and ours is missing, wrong, or not for this call."""


class RejectedError(MultigpuError):
    """The master rejected the task and keeps nothing of it.

    `code` is a google.rpc.Code. `retry_delay_s` is the time after which to try again; None: do not try again.
    """

    def __init__(self, code: int, message: str, retry_delay_s: float | None = None) -> None:
        super().__init__(code, message, retry_delay_s)
        self.code = code
        self.message = message
        self.retry_delay_s = retry_delay_s

    def __str__(self) -> str:
        if self.retry_delay_s is None:
            return self.message
        return f"{self.message} (try again in {self.retry_delay_s:g} s)"

    @staticmethod
    def of(rejection: task_service_pb2.Rejection) -> RejectedError:
        """The error for a rejection; its class depends on the code."""
        retry_delay_s = seconds_of(rejection.retry_delay) if rejection.HasField("retry_delay") else None
        return _BY_CODE.get(rejection.code, RejectedError)(rejection.code, rejection.message, retry_delay_s)


class InvalidTaskError(RejectedError):
    """The task is invalid: an unknown kind, a bad option, too large, or a deadline in the past."""


class AlreadyExistsError(RejectedError):
    """The request_id belongs to a task with another kind, model, content type, parameters or payload."""


class ResourceExhaustedError(RejectedError):
    """A limit of the master is hit: its queue, its memory or its disk is full."""


class UnplaceableError(RejectedError):
    """No worker that the master knows could ever run the task. `wait_for_worker=True` queues it anyway."""


_BY_CODE: dict[int, type[RejectedError]] = {
    INVALID_ARGUMENT: InvalidTaskError,
    DEADLINE_EXCEEDED: InvalidTaskError,
    ALREADY_EXISTS: AlreadyExistsError,
    RESOURCE_EXHAUSTED: ResourceExhaustedError,
    FAILED_PRECONDITION: UnplaceableError,
}


class NotFoundError(MultigpuError):
    """The master knows no such task: never submitted, or forgotten since it ended."""


class InvalidRequestError(MultigpuError, ValueError):
    """A call of an AdminClient makes no sense, or the state of the fleet does not allow it."""


class ConfigError(MultigpuError, ValueError):
    """A setting is unknown, of the wrong type or out of range. The message says where it is and what to do."""


class CursorExpiredError(MultigpuError):
    """The outcomes after the cursor have been removed, or the master's journal is another one or an older copy. Watch
    from the start or from now, and `get` the tasks that were missed.
    """


class ClientClosedError(MultigpuError):
    """The client was closed before the call ended, or is used in a process or event loop that it does not belong to."""


class OpenEnum(enum.IntEnum):
    """A value that only a newer master knows becomes UNSPECIFIED, 0."""

    @classmethod
    def _missing_(cls, _value: object) -> Self:
        return cls(0)


class OutcomeState(OpenEnum):
    """How a task can end."""

    UNSPECIFIED = 0
    SUCCEEDED = 1
    FAILED = 2
    CANCELLED = 3
    EXPIRED = 4
    DEAD_LETTERED = 5
    # The task SUCCEEDED, and its result is no longer available; `error_type` says why.
    RESULT_MISSING = 6


class EnergyMethod(OpenEnum):
    """How energy can be measured."""

    UNSPECIFIED = 0
    COUNTER = 1
    SAMPLED_POWER = 2


# Plain integers: compared for every outcome.
_SUCCEEDED = int(OutcomeState.SUCCEEDED)
_RESULT_MISSING = int(OutcomeState.RESULT_MISSING)


class Energy(NamedTuple):
    """A task's share of its device's energy, in joules. `uncertainty` 0.2 means plus or minus 20 %."""

    joules: float
    method: EnergyMethod
    uncertainty: float


class Outcome:
    """How a task ended; immutable. The properties read the protobuf `message` on each access."""

    __slots__ = ("_listed", "_result", "frame_bytes", "message")

    def __init__(
        self, message: task_pb2.Outcome, frame_bytes: int = 0, result: bytes | None = None, *, listed: bool = False
    ) -> None:
        """`result`: the result, if `message` only refers to it. `listed`: it comes from a list, which omits results."""
        self.message = message
        self._result = result
        self._listed = listed
        # Its share of the frame that it came in: roughly the memory that keeping it takes.
        self.frame_bytes = frame_bytes

    def __repr__(self) -> str:
        return f"<Outcome of task {self.task_id}: {self.state.name}>"

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
        """The bytes that the engine returned. Empty unless SUCCEEDED.

        Raises ResultExpiredError or ResultLostError if it is no longer available.
        """
        result = self.message.result if self._result is None else self._result
        if not result:
            self._check_there()
        return result

    @property
    def content_type(self) -> str:
        """Encoding of the result: empty for bytes, "application/json" for a JSON value."""
        return self.message.content_type

    def value(self) -> Any:
        """The decoded result of a task that SUCCEEDED; otherwise raises its TaskError."""
        if self.message.state != _SUCCEEDED:
            raise self.to_error()
        content_type = self.message.content_type
        return decode(self.result, content_type) if content_type else self.result

    def to_error(self) -> TaskError:
        """The error that says how the task ended. Only for one that did not succeed."""
        assert not self.succeeded, "a task that succeeded has no error"
        if self.message.state == _RESULT_MISSING:
            expired = self.error_type == "ResultExpired"
            return ResultExpiredError(self) if expired else ResultLostError(self)
        if self.state in (OutcomeState.FAILED, OutcomeState.DEAD_LETTERED):
            return _task_failed(self)
        return _BY_STATE.get(self.state, TaskError)(self)

    def _check_there(self) -> None:
        """Raises if the message lacks results that the task may have had."""
        if self.message.state == _RESULT_MISSING:
            raise self.to_error()
        if self._listed and self.succeeded:
            raise MultigpuError(f"a list has no results; client.get({self.task_id}) has this one")

    @property
    def error_type(self) -> str:
        """The class of the error ("ValueError", "my_module.MyError", "RunTimeout", …); empty when SUCCEEDED."""
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
        """None: not measured (a CPU, a device without a sensor, too short a time, or a task that did not succeed)."""
        if not self.message.HasField("energy"):
            return None
        energy = self.message.energy
        return Energy(energy.joules, EnergyMethod(energy.method), energy.uncertainty)

    @property
    def partials(self) -> list[bytes]:
        """Everything the task yielded before it returned, in order. Raises the same errors as `result`."""
        if not self.message.partials:
            self._check_there()
        return list(self.message.partials)

    @property
    def submit_time(self) -> datetime | None:
        return instant(self.message.stages.submit_time)

    @property
    def dispatch_time(self) -> datetime | None:
        """Of the last attempt; None if there was none."""
        return instant(self.message.stages.dispatch_time)

    @property
    def start_time(self) -> datetime | None:
        """When the engine began the task's batch, by the worker's clock."""
        return instant(self.message.stages.start_time)

    @property
    def finish_time(self) -> datetime | None:
        """When the engine finished that batch; for a task that never ran, when it was settled."""
        return instant(self.message.stages.finish_time)


def instant(timestamp: Timestamp) -> datetime | None:
    """A timestamp in UTC; None if it is not set."""
    if not (timestamp.seconds or timestamp.nanos):
        return None
    return timestamp.ToDatetime(tzinfo=UTC)


def seconds_of(span: Duration | Timestamp) -> float:
    """A duration, or a timestamp since 1970, in seconds."""
    return span.seconds + span.nanos / 1e9


class TaskError(MultigpuError):
    """The task ended, and there is no result; `outcome` has the details."""

    def __init__(self, outcome: Outcome) -> None:
        Exception.__init__(self, outcome)  # a TaskFailed is of another class too, which may want other arguments
        self.outcome = outcome

    def __reduce__(self) -> tuple[Any, ...]:
        return _error_of, (self.outcome,)

    @property
    def attempts(self) -> int:
        """How many attempts the task had."""
        return self.outcome.attempts

    def __str__(self) -> str:
        outcome = self.outcome
        text = f"task {outcome.task_id} ended {outcome.state.name}"
        if outcome.error_type:
            text += f" with {outcome.error_type}: {outcome.error_message}"
        one = outcome.attempts == 1
        where = f"{'' if one else ', the last'} on {outcome.worker_id}" if outcome.worker_id else ""
        return f"{text} ({outcome.attempts} attempt{'' if one else 's'}{where})"


class RemoteError(Exception):
    """What was raised in the worker, as the cause of a TaskFailed. Its text has the worker's traceback."""

    def __init__(self, type_: str, message: str, traceback: str) -> None:
        super().__init__(type_, message, traceback)
        self.type, self.message, self.traceback = type_, message, traceback

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" + (f"\n\n{self.traceback.rstrip()}" if self.traceback else "")


class TaskFailed(TaskError):  # noqa: N818  an outcome's name, not a category of errors
    """The last attempt of the task failed. `__cause__` is a RemoteError with the type, message and traceback.

    If a handler raised a built-in exception, or one of a module that this program has imported, the error is of that
    class too: `except ValueError` catches it.
    """

    @property
    def dead_lettered(self) -> bool:
        """Whether the task ended only because no attempt is left, or it is suspected of breaking workers. Its input is
        kept: `mgpuctl dead-letters requeue` runs it again.
        """
        return self.outcome.state == OutcomeState.DEAD_LETTERED


class TaskCancelled(TaskError):  # noqa: N818  as TaskFailed
    """A client or an operator cancelled the task."""


class TaskExpired(TaskError):  # noqa: N818  as TaskFailed
    """The task's deadline or queue timeout passed."""


class ResultExpiredError(TaskError):
    """The task SUCCEEDED, and its result was deleted after its `result_ttl_s`."""


class ResultLostError(TaskError):
    """The task SUCCEEDED, and its result can no longer be read: its file is deleted or damaged."""


_BY_STATE: dict[OutcomeState, type[TaskError]] = {
    OutcomeState.CANCELLED: TaskCancelled,
    OutcomeState.EXPIRED: TaskExpired,
}


def _error_of(outcome: Outcome) -> TaskError:
    return outcome.to_error()


def _task_failed(outcome: Outcome) -> TaskFailed:
    try:
        cls = _failed_class(_exception_class(outcome.error_type))
        error = cls.__new__(cls)
    except TypeError:  # the class can't be derived from, or can't be made without its arguments
        error = TaskFailed.__new__(TaskFailed)
    TaskFailed.__init__(error, outcome)
    error.__cause__ = RemoteError(outcome.error_type, outcome.error_message, outcome.traceback)
    return error


def _exception_class(name: str) -> type:
    """The class that a handler raised; TaskFailed if this program has not imported it, and for engines' errors."""
    module, _, name = name.rpartition(".")
    found = getattr(sys.modules.get(module or "builtins"), name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else TaskFailed


@functools.cache
def _failed_class(raised: type) -> type[TaskFailed]:
    """TaskFailed and the class at once."""
    if issubclass(TaskFailed, raised):
        return TaskFailed
    return type("TaskFailed", (TaskFailed, raised), {"__module__": TaskFailed.__module__})
