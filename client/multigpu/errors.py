"""Everything the client raises, in one small tree.

    MultigpuError
    ├── TransportError              the master could not be reached, or did not speak our protocol
    │   ├── UnavailableError        nobody answers at the address
    │   └── AccessError             the token or the certificate is missing, wrong, or not for this call
    ├── RejectedError               the master refused the task; nothing of it is kept
    │   ├── InvalidTaskError        the task can never be taken as it is
    │   ├── ResourceExhaustedError  a limit is hit; retry_delay_s says when to try again
    │   └── UnplaceableError        no known worker could ever take it
    ├── TaskError                   the task was taken and ended otherwise than SUCCEEDED; carries its outcome
    │   ├── TaskFailed, TaskCancelled, TaskExpired, TaskDeadLettered
    ├── NotFoundError               no such task, or its result's time to live is over
    ├── CursorExpiredError          the outcomes after the cursor have been removed
    └── ClientClosedError           the client was closed, or crossed a fork

An error's message names the remedy where there is one. Wrong types in the caller's own code raise TypeError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multigpu.outcome import Outcome

# google.rpc.Code, as far as Rejection uses it.
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
UNAVAILABLE = 14


class MultigpuError(Exception):
    """The root: catch this to catch everything that multigpu raises on purpose."""


class TransportError(MultigpuError):
    """The call did not reach the master, or its answer did not come back in time or in shape."""


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


class ResourceExhaustedError(RejectedError):
    """A limit of the master is hit: its queue, its memory or its disk is full."""


class UnplaceableError(RejectedError):
    """No worker that the master knows could ever take the task; `wait_for_worker=True` queues it all the same."""


_BY_CODE: dict[int, type[RejectedError]] = {
    INVALID_ARGUMENT: InvalidTaskError,
    DEADLINE_EXCEEDED: InvalidTaskError,
    RESOURCE_EXHAUSTED: ResourceExhaustedError,
    FAILED_PRECONDITION: UnplaceableError,
}


class TaskError(MultigpuError):
    """The task ended otherwise than SUCCEEDED; `outcome` tells the whole story."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome

    def __str__(self) -> str:
        outcome = self.outcome
        text = f"task {outcome.task_id} ended {outcome.state.name}"
        if outcome.error_type:
            text += f" with {outcome.error_type}: {outcome.error_message}"
        where = f" on {outcome.worker_id}" if outcome.worker_id else ""
        return f"{text} ({outcome.attempts} attempt{'' if outcome.attempts == 1 else 's'}{where})"


class TaskFailed(TaskError):  # noqa: N818  an outcome's name, not a category of errors
    """The engine refused the task for good."""


class TaskCancelled(TaskError):  # noqa: N818  as TaskFailed
    """Somebody withdrew the task."""


class TaskExpired(TaskError):  # noqa: N818  as TaskFailed
    """Its deadline or queue timeout passed first."""


class TaskDeadLettered(TaskError):  # noqa: N818  as TaskFailed
    """Every attempt failed. `mgpuctl dead-letters requeue` tries again."""


class NotFoundError(MultigpuError):
    """The master knows no such task, or the time to live of its result is over."""


class CursorExpiredError(MultigpuError):
    """The outcomes after the cursor have been removed. Watch from the start or from now, and `get` what was missed."""


class ClientClosedError(MultigpuError):
    """The client was closed before the call ended, or is used in a process or event loop that it does not belong to."""
