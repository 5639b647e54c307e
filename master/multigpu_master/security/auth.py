"""Authentication and authorization of every call, by certificate and token, before its request is read.

Checks run once for each call or stream, not for each task. Without tokens and client certificates nothing is checked.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import structlog

from multigpu_master.errors import CallError, DeniedError, ExhaustedError, UnauthenticatedError
from multigpu_master.security.tokens import ADMIN, READ, SUBMIT, WORKER, Token, Tokens, token_id_of

log = structlog.get_logger()

# The token of the running call. None: the master runs without tokens, and every caller may do everything.
_CALLER: ContextVar[Token | None] = ContextVar("caller", default=None)
# The asyncio task of the running call. Code of a call may also run in another task, which has a copy of this context.
_CALL: ContextVar["asyncio.Task[Any] | None"] = ContextVar("call", default=None)

_SUBMITTERS = frozenset({SUBMIT, ADMIN})
_READERS = frozenset({READ, SUBMIT, ADMIN})
_WORKERS = frozenset({WORKER})
_ADMINS = frozenset({ADMIN})
_ANY = frozenset({READ, SUBMIT, ADMIN, WORKER})
# Roles that may call each method. Only administrators may call a method that is not listed: a method by which
# operators change something, or a new method.
_ROLES = {
    "TaskService/Submit": _SUBMITTERS,
    "TaskService/Run": _SUBMITTERS,
    "TaskService/Cancel": _SUBMITTERS,
    "TaskService/Watch": _READERS,
    "TaskService/Get": _READERS,
    "TaskService/List": _READERS,
    "TaskService/Count": _READERS,
    "WorkerService/Session": _WORKERS,
    "AdminService/ListWorkers": _READERS,
    "AdminService/WatchWorkers": _READERS,
    "AdminService/GetStrategy": _READERS,
    "AdminService/ListQueues": _READERS,
    "AdminService/ListModels": _READERS,
    "AdminService/ListDeadLetters": _READERS,
    "AdminService/GetStats": _READERS,
    "AdminService/GetHistory": _READERS,
    "AdminService/Explain": _READERS,
    "AdminService/GetUsage": _READERS,
    "AdminService/ListTokens": _ADMINS,
    "ServerReflection/ServerReflectionInfo": _ANY,
}
HEADER, SCHEME = "authorization", "bearer "
URN = "urn:multigpu:"
NO_TOKEN = "the master requires a token: set token_file (MGPU_TOKEN_FILE) or MGPU_TOKEN"  # noqa: S105
BAD_TOKEN = "the token is not valid here: it is unknown, was revoked or has expired; ask for a new one"  # noqa: S105
TOKEN_ENDED = "the token was revoked or has expired; ask for a new one"  # noqa: S105
# Auth logs at most one rejected call in this interval.
LOG_INTERVAL_S = 1.0

Serve = Callable[[Any, Any], Awaitable[Any]]  # (request, context)


def current_caller() -> Token | None:
    """Returns the token of the running call, or None if the master runs without tokens."""
    return _CALLER.get()


def caller_queues() -> frozenset[str] | None:
    """Returns the queues that the running call may use, or None if it may use all."""
    caller = _CALLER.get()
    return None if caller is None else caller.queues


def allowed_roles(method: str) -> frozenset[str]:
    """Returns the roles that may call `method`, which is "Service/Method"."""
    return _ROLES.get(method, _ADMINS)


def is_administrative(method: str) -> bool:
    """Returns whether `method`, which is "Service/Method", is audited because an operator changes something by it."""
    return method not in _ROLES


class Auth:
    """`tokens`: None if callers need no token. `certificates`: whether callers must have a client certificate.
    `calls_max`: limit of open calls for each token that has no limit of its own.
    """

    def __init__(self, tokens: Tokens | None, *, certificates: bool, calls_max: int) -> None:
        self.tokens = tokens
        self._certificates = certificates
        self._calls_max = calls_max
        self._ended: set[asyncio.Task[Any]] = set()  # calls that `_end` cancelled and that still run
        self._logged_s = 0.0  # when a rejected call was last logged, by time.monotonic()
        self._unlogged = 0  # calls rejected since then

    def with_checks(self, serve: Serve, method: str) -> Serve:
        """Returns a wrapper of `serve` that checks each caller, and ends the call when the caller's token expires or is
        revoked. `method`: "Service/Method".
        """
        roles = allowed_roles(method)

        async def checked(request: Any, context: Any) -> Any:
            if self._certificates:
                self._check_certificate(context, method, roles)
            if self.tokens is None:
                return await serve(request, context)
            token = self._check_token(context, method, roles, self.tokens)
            _CALLER.set(token)
            call = asyncio.current_task()
            assert call is not None, "handlers run in a task"
            _CALL.set(call)
            token.open_calls.add(call)
            timer = None
            if token.expire_s is not None:
                left_s = max(0.0, token.expire_s - self.tokens.now())
                timer = asyncio.get_running_loop().call_later(left_s, self._end, call)
            try:
                return await serve(request, context)
            except asyncio.CancelledError:
                if call not in self._ended:
                    raise
                call.uncancel()
                raise UnauthenticatedError(TOKEN_ENDED) from None
            finally:
                token.open_calls.discard(call)
                self._ended.discard(call)
                if timer is not None:
                    timer.cancel()

        return checked

    def revoke(self, token_id: str) -> Token | None:
        """Removes and returns a token, and ends its open calls except the running call. None: no such token."""
        assert self.tokens is not None, "only callers with a token can revoke one"
        token = self.tokens.remove(token_id)
        if token is not None:
            this_call = _CALL.get()  # a caller that revokes its own token still gets an answer
            for call in [c for c in token.open_calls if c is not this_call]:
                self._end(call)
        return token

    def _end(self, call: "asyncio.Task[Any]") -> None:
        if not call.done():
            self._ended.add(call)
            call.cancel()

    def _check_certificate(self, context: Any, method: str, roles: frozenset[str]) -> None:
        uris = [uri.decode("utf-8", "replace") for uri in context.auth_context().get("peer_uri", ())]
        kinds = [uri.removeprefix(URN) for uri in uris if uri.startswith(URN)]
        required = "worker" if roles == _WORKERS else "client"
        if required not in kinds and roles != _ANY:
            text = (
                f"{method} requires a certificate of the kind {required}; the caller's certificate is of the kind "
                f"{', '.join(kinds) or 'none'}: issue one with `mgpuctl certs issue DIR {required}`"
            )
            raise self._log_rejection(DeniedError(text), context, method, None)

    def _check_token(self, context: Any, method: str, roles: frozenset[str], tokens: Tokens) -> Token:
        headers: Sequence[Any] = [v for k, v in context.invocation_metadata() or () if k == HEADER]
        if not headers:
            raise self._log_rejection(UnauthenticatedError(NO_TOKEN), context, method, None)
        text = headers[0]
        token = None
        if len(headers) == 1 and isinstance(text, str) and text[: len(SCHEME)].lower() == SCHEME:
            text = text[len(SCHEME) :]
            token = tokens.find(text)
        if token is None:
            raise self._log_rejection(UnauthenticatedError(BAD_TOKEN), context, method, token_id_of(text))
        if not token.roles & roles:
            required, given = " or ".join(sorted(roles)), ", ".join(sorted(token.roles))
            error = DeniedError(f"{method} requires a token with the role {required}; this token has {given}")
            raise self._log_rejection(error, context, method, token.token_id)
        limit = token.calls_max or self._calls_max
        if len(token.open_calls) >= limit:
            details = f"{limit} calls are open with this token already; share streams, or try again when one has ended"
            raise self._log_rejection(ExhaustedError(details), context, method, token.token_id)
        return token

    def _log_rejection(self, error: CallError, context: Any, method: str, token_id: str | None) -> CallError:
        """Logs the rejected call, unless one was logged in the last LOG_INTERVAL_S. Returns the error."""
        now = time.monotonic()
        if now - self._logged_s >= LOG_INTERVAL_S:
            log.warning(
                "a call was rejected",
                method=method,
                code=error.code.name,
                peer=context.peer(),
                rejected_before=self._unlogged,
                token_id=token_id,
            )
            self._logged_s, self._unlogged = now, 0
        else:
            self._unlogged += 1
        return error
