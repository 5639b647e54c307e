"""Everything that the client raises, in one tree. What depends on the outcome of a task is in outcome.py.

    MultigpuError
    ├── TransportError              the master could not be reached, or did not speak our protocol
    │   ├── CallTimeoutError        the call's `timeout` has passed; also a TimeoutError
    │   ├── UnavailableError        no master answers at the address
    │   └── AccessError             the token or the certificate is missing, wrong, or not for this call
    ├── RejectedError               the master does not take the task; itself with the code 14: it can't do so now
    │   ├── InvalidTaskError        the task is invalid: submitting it again cannot help
    │   ├── AlreadyExistsError      another task has its request_id
    │   ├── ResourceExhaustedError  a limit is hit; retry_delay_s says when to try again
    │   └── UnplaceableError        no known worker could ever run it
    ├── TaskError                   the task was accepted and has no result; carries its outcome
    │   ├── TaskFailed              it raised; also of the class that its handler raised, and its cause is a RemoteError
    │   ├── TaskCancelled, TaskExpired
    │   ├── ResultExpiredError      it SUCCEEDED, and its result was deleted after the result_ttl
    │   ├── ResultLostError         it SUCCEEDED, and its result can no longer be read
    │   └── ResultFormatError       it SUCCEEDED, and this client can't decode its result
    ├── NotFoundError               the master does not know the task, worker, model or token, or no longer does
    ├── InvalidRequestError         an AdminClient's call makes no sense, or not in this state; also a ValueError
    ├── ConfigError                 a setting is unknown or wrong; also a ValueError
    ├── PlanError                   a model does not fit on the devices that `multigpu.plan` is asked about
    ├── CursorExpiredError          the outcomes after the cursor are no longer available
    └── ClientClosedError           the client was closed, or belongs to another process or event loop

An error's message names the remedy where there is one. Wrong types in the caller's own code raise TypeError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multigpu._times import seconds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multigpu.v1 import task_service_pb2

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
    """The master asks for a token or a certificate, and ours is missing, wrong, or not for this call.

    `denied`: the token is valid, and not for this call. `local`: this client's own files or settings are wrong, and the
    master was not asked.
    """

    def __init__(self, message: str, *, denied: bool = False) -> None:
        super().__init__(message)
        self.denied = denied

    @property
    def local(self) -> bool:
        return isinstance(self.__cause__, ConfigError)


class RejectedError(MultigpuError):
    """The master does not take the task, and keeps nothing of it.

    With the code UNAVAILABLE it can't do so now: it starts or stops, or it has the task and can't read its outcome.
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
    """The master knows no such task (never submitted, or forgotten since it ended), worker, model or token."""


class InvalidRequestError(MultigpuError, ValueError):
    """A call of an AdminClient makes no sense, or the state of the fleet does not allow it."""


class ConfigError(MultigpuError, ValueError):
    """A setting is unknown, of the wrong type or out of range. The message says where it is and what to do."""


class PlanError(MultigpuError):
    """The model does not fit on the devices, or can't be divided so. The message says what would do."""


class CursorExpiredError(MultigpuError):
    """The outcomes after the cursor have been removed, or the master's journal is another one or an older copy. Watch
    from the start or from now, and `get` the tasks that were missed.
    """


class ClientClosedError(MultigpuError):
    """The client was closed before the call ended, or is used in a process or event loop that it does not belong to."""
