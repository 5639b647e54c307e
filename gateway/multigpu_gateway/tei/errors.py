"""Errors in TEI's format: {error, error_type}. TEI has a status for each error_type (router/src/http/server.rs)."""

from typing import Any

from multigpu_gateway.errors import BAD_REQUEST, INTERNAL, TOO_MANY, UNAVAILABLE, HttpError

UNPROCESSABLE, BACKEND_FAILED = 422, 424
EMPTY = "empty"
_TYPES = {BACKEND_FAILED: "Backend", TOO_MANY: "Overloaded", UNAVAILABLE: "Unhealthy"}


def empty(param: str) -> HttpError:
    """Returns the error for a request without inputs."""
    return HttpError(BAD_REQUEST, f"`{param}` cannot be empty", code=EMPTY, param=param)


def backend_error(message: str) -> HttpError:
    """Returns the error for something that the model can't do."""
    return HttpError(BACKEND_FAILED, message, code="backend")


def as_tei(error: HttpError) -> HttpError:
    """Returns the error with TEI's status for it. An unknown model, a conflict and a timeout, which TEI does not have,
    keep their status.
    """
    status = error.status
    if status == BAD_REQUEST and error.code != EMPTY:
        status = UNPROCESSABLE
    elif status == INTERNAL and error.code == "task_failed":
        status = BACKEND_FAILED
    return HttpError(status, error.message, code=error.code, param=error.param, retry_s=error.retry_s)


def error_body(error: HttpError) -> dict[str, str]:
    return {"error": error.message, "error_type": _type_of(error)}


def openai_error_body(error: HttpError) -> dict[str, Any]:
    """Returns the error in the format of TEI's OpenAI-compatible routes."""
    return {"message": error.message, "code": error.status, "type": _type_of(error)}


def _type_of(error: HttpError) -> str:
    other = "Validation" if error.status < INTERNAL else "Backend"
    return "Empty" if error.code == EMPTY else _TYPES.get(error.status, other)
