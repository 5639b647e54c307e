"""Errors of the REST routes: {"error": {"message", "code", "field"}}."""

import re
from typing import Any

from multigpu import errors

from multigpu_gateway.errors import BAD_REQUEST, CONFLICT, HttpError, http_error
from multigpu_gateway.rest.requests import TaskRequest

GONE = 410
# msgspec's messages about a missing field and about an unknown field.
_FIELD = re.compile(r"^Object .* field `([^`]+)`$")
_CODES = {
    400: "invalid_request", 401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed",
    408: "body_timeout", 409: "conflict", 413: "body_too_large", 500: "internal_error",
}  # fmt: skip


def error_body(error: HttpError) -> dict[str, Any]:
    """Returns the JSON value of an error. `field` is the field or parameter at fault, if there is one."""
    found = {"message": error.message, "code": error.code or _CODES.get(error.status, "error")}
    named = _FIELD.match(error.message)
    field = error.param or (named[1] if named else "")
    return {"error": found | ({"field": field} if field else {})}


def rest_error(error: Exception) -> HttpError:
    """As http_error, with the statuses and codes of REST."""
    match error:
        case errors.UnplaceableError():
            return HttpError(CONFLICT, str(error), code="unplaceable")
        case errors.AlreadyExistsError():
            return HttpError(CONFLICT, str(error), code="request_id_in_use", param="request_id")
        case errors.InvalidTaskError():  # the master's messages begin with the field
            first = error.message.partition(" ")[0]
            return HttpError(BAD_REQUEST, error.message, param=first if first in TaskRequest.__struct_fields__ else "")
        case errors.CursorExpiredError():
            return HttpError(GONE, str(error), code="cursor_expired", param="cursor")
    return http_error(error)
