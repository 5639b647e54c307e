"""`Outcome`: how a task ended; `TaskError`: one without a result.

One frame carries many outcomes, and each outcome keeps the memory of its whole frame allocated. A program with many
tasks should keep the values of outcomes, not the outcomes.
"""

from __future__ import annotations

import concurrent.futures
import enum
import functools
import sys
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from multigpu._encoding import decode
from multigpu._times import instant
from multigpu.errors import MultigpuError

if TYPE_CHECKING:
    from datetime import datetime

    from multigpu.v1 import task_pb2

# A task_id (int) or a request_id.
TaskName = int | str | uuid.UUID


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


# Errors by which Python ends iterations and calls, whoever raises them.
_CONTROL = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)
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
        error = f", {self.error_type}: {self.error_message}" if self.error_type else ""
        return f"<Outcome of task {self.task_id}: {self.state.name}{error}>"

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
        """Encoding of the result: empty for bytes, else "application/json", "application/vnd.msgpack" …"""
        return self.message.content_type

    def value(self) -> Any:
        """The decoded result of a task that SUCCEEDED; otherwise raises its TaskError. ResultFormatError: it can't be
        decoded here.
        """
        if self.message.state != _SUCCEEDED:
            raise self.to_error()
        content_type = self.message.content_type
        if not content_type:
            return self.result
        try:
            return decode(self.result, content_type)
        except ValueError as error:
            raise ResultFormatError(self, str(error)) from None

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
    def log(self) -> str:
        """The last lines that the handler wrote with `context().log`, over all attempts; at most 16,384 characters.
        Empty in a list.
        """
        return self.message.log

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


class TaskError(MultigpuError):
    """The task ended, and there is no result; `outcome` has the details."""

    def __init__(self, outcome: Outcome) -> None:
        Exception.__init__(self, outcome)  # a TaskFailed is of another class too, which may want other arguments
        self.outcome = outcome

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

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
    class too: `except ValueError` catches it. Not of StopIteration, StopAsyncIteration and CancelledError: raised here,
    they would end a loop or the call.
    """

    @property
    def remote(self) -> RemoteError:
        """What was raised in the worker: its type, message and traceback. It is the `__cause__`, too."""
        cause = self.__cause__
        assert isinstance(cause, RemoteError), "made with the error"
        return cause

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


class ResultFormatError(TaskError):
    """The task SUCCEEDED, and this client can't decode its result: a pickle without `allow_pickle`, for example."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(outcome)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.outcome, self.reason)

    def __str__(self) -> str:
        return f"the result of task {self.outcome.task_id} can't be read: {self.reason}"


_BY_STATE: dict[OutcomeState, type[TaskError]] = {
    OutcomeState.CANCELLED: TaskCancelled,
    OutcomeState.EXPIRED: TaskExpired,
}


def _error_of(outcome: Outcome) -> TaskError:
    return outcome.to_error()


def _task_failed(outcome: Outcome) -> TaskFailed:
    try:
        cls = _failed_class(_exception_class(outcome.error_type))
        # MemoryError has a __new__ of its own, which classes derived from two don't inherit.
        error = BaseException.__new__(cls) if issubclass(cls, MemoryError) else cls.__new__(cls)
        TaskFailed.__init__(error, outcome)
    except Exception:  # noqa: BLE001  the class can't be derived from, wants arguments, or refuses attributes
        error = TaskFailed(outcome)
    error.__cause__ = RemoteError(outcome.error_type, outcome.error_message, outcome.traceback)
    return error


def _exception_class(name: str) -> type:
    """The class that a handler raised; TaskFailed if this program has not imported it, and for engines' errors. Also
    for our own: a CallTimeoutError of the handler's client says nothing about ours; and for those of _CONTROL.
    """
    parts = ("MemoryError" if name == "OutOfMemory" else name).split(".")
    found: Any = None
    for at in range(len(parts) - 1, -1, -1):  # the module's name, then the class's, which may be nested
        found = sys.modules.get(".".join(parts[:at]) or "builtins")
        if found is not None:
            for part in parts[at:]:
                found = getattr(found, part, None)
            break
    if isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, (MultigpuError, *_CONTROL)):
        return found
    return TaskFailed


@functools.cache
def _failed_class(raised: type) -> type[TaskFailed]:
    """TaskFailed and the class at once."""
    if issubclass(TaskFailed, raised):
        return TaskFailed
    return type("TaskFailed", (TaskFailed, raised), {"__module__": TaskFailed.__module__, "__getattr__": _not_sent})


def _not_sent(_error: TaskFailed, name: str) -> Any:
    """In place of a __getattr__ of the class, which may rely on an __init__ that did not run."""
    raise AttributeError(f"a worker sends the type, message and traceback of an exception, not its {name!r}")
