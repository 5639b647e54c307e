"""The master's errors. If a gRPC method raises an exception, `rpc.services` ends the call with the status of the
CallError that `call_error` returns for the exception.
"""

from urllib.parse import quote

import grpc
import structlog
from multigpu._transport.payloads import is_transient

log = structlog.get_logger()

# Limit of a status's text, in characters, and of its encoded form, in bytes. Clients reject longer headers.
DETAILS_BYTES_MAX = 3000
_UNCHANGED = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")  # characters that the encoding keeps


# Exceptions that parsing a damaged setting may raise.
PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


class JournalError(Exception):
    """The journal can't be opened or used; the message says what to do."""


class JournalClosedError(JournalError):
    """The journal has been closed."""


class JournalDamagedError(JournalError):
    """The journal's data is damaged. Trying again does not help."""


class PayloadLostError(JournalError):
    """The payload of a task is gone. Trying again does not help."""


class JournalFullError(JournalError):
    """The disk or the journal is full, or no file descriptor is left. Trying again later may help."""


class InvalidMessageError(Exception):
    """A task, or a message of a worker, is invalid; the text says why and what is allowed."""


class CallError(Exception):
    """Ends the call with `code`. The text says what is wrong and what to do."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, details: str, code: grpc.StatusCode | None = None) -> None:
        """Cuts a long text in its middle, because the remedy is at its end."""
        shown, half = details, DETAILS_BYTES_MAX // 2
        while len(shown) > DETAILS_BYTES_MAX or len(quote(shown, _UNCHANGED, errors="replace")) > DETAILS_BYTES_MAX:
            half = half * 2 // 3
            shown = f"{details[:half]} … {details[-half:]}"
        super().__init__(shown)
        self.code = code or self.code


class InvalidArgumentError(CallError):
    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFoundError(CallError):
    code = grpc.StatusCode.NOT_FOUND


class PreconditionError(CallError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class ExhaustedError(CallError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeniedError(CallError):
    code = grpc.StatusCode.PERMISSION_DENIED


class UnauthenticatedError(CallError):
    code = grpc.StatusCode.UNAUTHENTICATED


def damaged_setting_error(key: str, error: Exception) -> JournalError:
    """Returns the JournalError for a setting in the journal that can't be parsed. `error`: one of PARSE_ERRORS."""
    return JournalError(
        f"The journal's setting {key!r} is damaged ({error!r}). Restore the data directory from a backup, or run "
        "`mgpu-master --data-dir DIR salvage`, which removes that setting and nothing else."
    )


def call_error(error: Exception, method: str) -> CallError:
    """Returns the CallError for any exception of a method. Logs the exceptions other than CallError and
    InvalidMessageError.
    """
    if isinstance(error, CallError):
        return error
    if isinstance(error, InvalidMessageError):
        return InvalidArgumentError(str(error))
    if isinstance(error, JournalDamagedError):
        log.error("a call failed: the journal is damaged", method=method, error=str(error))
        return CallError(str(error), grpc.StatusCode.DATA_LOSS)
    if isinstance(error, JournalError) or is_transient(error):
        log.error("a call failed: the journal, a file or memory cannot be used now", method=method, error=repr(error))
        return CallError(f"the master cannot serve this call now ({error!r}); try again", grpc.StatusCode.UNAVAILABLE)
    log.error("a call failed because of a fault in the master", method=method, exc_info=error)
    return CallError(f"the master failed to serve {method}: {error!r}; its log has the details")
