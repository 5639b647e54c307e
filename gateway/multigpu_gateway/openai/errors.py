"""Errors in OpenAI's format: https://platform.openai.com/docs/guides/error-codes."""

from typing import Any

from multigpu_gateway.errors import HttpError
from multigpu_gateway.events import event

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(error: HttpError) -> dict[str, Any]:
    type_ = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {
        "error": {"message": error.message, "type": type_, "param": error.param or None, "code": error.code or None}
    }


def error_event(error: HttpError) -> bytes:
    """Returns the event for an error after the beginning of a stream."""
    return event(error_body(error))
