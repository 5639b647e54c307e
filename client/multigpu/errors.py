"""Everything the client raises, in one small tree.

    MultigpuError
    ├── TransportError              the master could not be reached, or did not speak our protocol
    │   ├── CallTimeoutError        the call's `timeout` is over; also a TimeoutError
    │   ├── UnavailableError        nobody answers at the address
    │   └── AccessError             the token or the certificate is missing, wrong, or not for this call
    ├── RejectedError               the master rejected the task; nothing of it is kept
    │   ├── InvalidTaskError        the task can never be taken as it is
    │   ├── AlreadyExistsError      its request_id is that of another task
    │   ├── ResourceExhaustedError  a limit is hit; retry_delay_s says when to try again
    │   └── UnplaceableError        no known worker could ever take it
    ├── TaskError                   the task was taken, and there is no result; carries its outcome
    │   ├── TaskFailed, TaskCancelled, TaskExpired, TaskDeadLettered
    │   ├── ResultExpiredError      it SUCCEEDED, and its result was deleted after the result_ttl
    │   └── ResultLostError         it SUCCEEDED, and its result cannot be read any more
    ├── NotFoundError               the master knows no such task, or not any more
    ├── ConfigError                 a setting is unknown or wrong; also a ValueError
    ├── CursorExpiredError          the outcomes after the cursor are not there
    └── ClientClosedError           the client was closed, or gRPC crossed a fork

An error's message names the remedy where there is one. Wrong types in the caller's own code raise TypeError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multigpu.outcome import Outcome

# google.rpc.Code, as far as Rejection uses it.
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

    `submitted`: what `submit_many` had been told of the first tasks, in order, when the error ended it: they are taken.
    """

    submitted: Sequence[int | RejectedError] = ()


class TransportError(MultigpuError):
    """The call did not reach the master, or its answer did not come back in time or in shape."""


class CallTimeoutError(TransportError, TimeoutError):
    """The `timeout` of the call is over, or the master took too long to answer."""


class UnavailableError(TransportError):
    """Nobody answers at the master's address."""


class AccessError(TransportError):
    """The master asks for a token or a certificate, and ours is missing, wrong, or not for this call."""


class RejectedError(MultigpuError):
    """The master did not take the task; nothing of it is kept.

    `code` is a google.rpc.Code; `retry_delay_s` says when to try again, None that trying again is no use.
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
    def of(code: int, message: str, retry_delay_s: float | None = None) -> RejectedError:
        """The error of the class that belongs to the code."""
        return _BY_CODE.get(code, RejectedError)(code, message, retry_delay_s)


class InvalidTaskError(RejectedError):
    """The task can never be taken as it is: unknown kind, bad option, too large, a deadline in the past."""


class AlreadyExistsError(RejectedError):
    """The request_id is that of a task of another kind, model, content type, parameters or payload."""


class ResourceExhaustedError(RejectedError):
    """A limit of the master is hit: its queue, its memory or its disk is full."""


class UnplaceableError(RejectedError):
    """Workers are connected, and none that the master knows could ever take the task; `wait_for_worker=True` queues it
    all the same.
    """


_BY_CODE: dict[int, type[RejectedError]] = {
    INVALID_ARGUMENT: InvalidTaskError,
    DEADLINE_EXCEEDED: InvalidTaskError,
    ALREADY_EXISTS: AlreadyExistsError,
    RESOURCE_EXHAUSTED: ResourceExhaustedError,
    FAILED_PRECONDITION: UnplaceableError,
}


class TaskError(MultigpuError):
    """The task ended, and there is no result; `outcome` tells the whole story."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome

    def __str__(self) -> str:
        outcome = self.outcome
        text = f"task {outcome.task_id} ended {outcome.state.name}"
        if outcome.error_type:
            text += f" with {outcome.error_type}: {outcome.error_message}"
        one = outcome.attempts == 1
        where = f"{'' if one else ', the last'} on {outcome.worker_id}" if outcome.worker_id else ""
        return f"{text} ({outcome.attempts} attempt{'' if one else 's'}{where})"


class TaskFailed(TaskError):  # noqa: N818  an outcome's name, not a category of errors
    """The engine rejected the task for good."""


class TaskCancelled(TaskError):  # noqa: N818  as TaskFailed
    """Somebody withdrew the task."""


class TaskExpired(TaskError):  # noqa: N818  as TaskFailed
    """Its deadline or queue timeout passed first."""


class TaskDeadLettered(TaskError):  # noqa: N818  as TaskFailed
    """Every attempt failed. `mgpuctl dead-letters requeue` tries again."""


class ResultExpiredError(TaskError):
    """The task SUCCEEDED, and its result was deleted after its `result_ttl_s`."""


class ResultLostError(TaskError):
    """The task SUCCEEDED, and its result cannot be read any more: its file is deleted or damaged."""


class NotFoundError(MultigpuError):
    """The master knows no such task: never submitted, or forgotten since it ended."""


class CursorExpiredError(MultigpuError):
    """The outcomes after the cursor have been removed, or the master's journal is another one or an older copy. Watch
    from the start or from now, and `get` what was missed.
    """


class ClientClosedError(MultigpuError):
    """The client was closed before the call ended, or is used in a process or event loop that it does not belong to."""
