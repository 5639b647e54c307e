"""Errors of requests: an HTTP status, and a message that names the remedy. Routes write them in their own format."""

import math

import structlog
from multigpu import errors
from multigpu.outcome import TaskCancelled, TaskError, TaskExpired, TaskFailed

log = structlog.get_logger()

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, NOT_ALLOWED = 400, 401, 403, 404, 405
TIMED_OUT, CONFLICT, TOO_LARGE, UNSUPPORTED, TOO_MANY = 408, 409, 413, 415, 429
INTERNAL, NOT_IMPLEMENTED, UNAVAILABLE, LATE = 500, 501, 503, 504

# An engine's error_type for an input that fails on every worker.
BAD_INPUT = "BadInput"
UNKNOWN_MODEL = "UnknownModel"
# The end of the master's message about an unplaceable task. http_error removes it: most protocols have no such option.
_QUEUE_IT = ", or set wait_for_worker to queue the task until then"
# The google.rpc.Code of a rejection because the token does not allow the task's queue.
_PERMISSION_DENIED = 7


class HttpError(Exception):
    """Ends a request with an error response. `param`: the field of the request at fault; `retry_s`: seconds after which
    to try again; `allow`: the methods that the path has.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "",
        param: str = "",
        retry_s: float | None = None,
        allow: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_s = retry_s
        self.allow = allow

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the response that tell when to retry, which methods there are, or that a token is needed."""
        found = []
        if self.retry_s is not None:
            found.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_s))))
            found.append((b"retry-after-ms", b"%d" % math.ceil(1000 * self.retry_s)))
        if self.allow:
            found.append((b"allow", ", ".join(self.allow).encode()))
        if self.status == UNAUTHORIZED:
            found.append((b"www-authenticate", b"Bearer"))
        return found


def not_allowed(path: str, method: str, *allowed: str) -> HttpError:
    """Returns the error for a method that the path does not have."""
    return HttpError(NOT_ALLOWED, f"{path} takes {' or '.join(allowed)}, not {method}", allow=allowed)


class DisconnectedError(Exception):
    """The client disconnected: no response can be sent."""


def http_error(error: Exception) -> HttpError:
    """Returns the HttpError for an error of a call to the master, or of a task. Re-raises any other error."""
    text = str(error)
    match error:
        case HttpError():
            return error
        case errors.AccessError() if error.local:
            log.error("requests can't be sent to the master", reason=text)
            message = "the gateway can't connect to the master: its settings or certificates are wrong, see its log"
            return HttpError(UNAVAILABLE, message, code="master_unavailable", retry_s=1.0)
        case errors.AccessError():
            return HttpError(FORBIDDEN if error.denied else UNAUTHORIZED, text, code="invalid_api_key")
        case errors.UnplaceableError():
            return HttpError(NOT_FOUND, text.replace(_QUEUE_IT, ""), code="model_not_found", param="model")
        case errors.AlreadyExistsError():
            message = f"the Idempotency-Key belongs to another request: use another key ({text})"
            return HttpError(CONFLICT, message, code="idempotency_key_in_use")
        case errors.ResourceExhaustedError():
            return HttpError(TOO_MANY, error.message, code="queue_full", retry_s=error.retry_delay_s or 1.0)
        case errors.RejectedError() if error.retry_delay_s is not None:  # the master can't take the task now
            return HttpError(UNAVAILABLE, error.message, code="master_unavailable", retry_s=error.retry_delay_s)
        case errors.RejectedError():
            denied = error.code == _PERMISSION_DENIED
            return HttpError(FORBIDDEN if denied else BAD_REQUEST, error.message)
        case errors.CallTimeoutError():
            return HttpError(LATE, text, code="timeout")
        case errors.NotFoundError():
            return HttpError(NOT_FOUND, text)
        case errors.InvalidRequestError():
            return HttpError(BAD_REQUEST, text)
        case errors.TransportError() | errors.ClientClosedError():
            return HttpError(UNAVAILABLE, text, code="master_unavailable", retry_s=1.0)
        case TaskError():
            return _of_task(error)
    raise error


def _of_task(error: TaskError) -> HttpError:
    outcome = error.outcome
    text = outcome.error_message or str(error)
    if isinstance(error, TaskFailed) and outcome.error_type == BAD_INPUT:
        return HttpError(BAD_REQUEST, text)
    if isinstance(error, TaskFailed) and outcome.error_type == UNKNOWN_MODEL:
        return HttpError(NOT_FOUND, text, code="model_not_found", param="model")
    if isinstance(error, TaskExpired):
        return HttpError(LATE, str(error), code="expired")
    if isinstance(error, TaskCancelled):
        return HttpError(CONFLICT, str(error), code="cancelled")
    return HttpError(INTERNAL, str(error), code="task_failed")
