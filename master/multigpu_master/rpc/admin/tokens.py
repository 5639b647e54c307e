"""AdminService's methods for tokens."""

from typing import Any

from multigpu.v1 import admin_service_pb2 as pb

from multigpu_master.driver import Driver
from multigpu_master.errors import ExhaustedError, InvalidArgumentError, JournalError, NotFoundError, PreconditionError
from multigpu_master.journal.protocol import Entry
from multigpu_master.rpc.requests import page_of
from multigpu_master.security.auth import Auth
from multigpu_master.security.setup import ADMIN_TOKEN_NAME
from multigpu_master.security.tokens import ADMIN, READ, SUBMIT, WORKER, Token, Tokens
from multigpu_master.wire.times import seconds_of, set_time

_ROLE_NAMES = {pb.ROLE_SUBMIT: SUBMIT, pb.ROLE_READ: READ, pb.ROLE_WORKER: WORKER, pb.ROLE_ADMIN: ADMIN}
_ROLE_NUMBERS = {name: number for number, name in _ROLE_NAMES.items()}
NO_TOKENS = "this master runs without tokens, and every caller may do everything: start it with --require-tokens"


class TokenCalls:
    """See protos/multigpu/v1/admin_service.proto."""

    _driver: Driver
    _auth: Auth | None

    async def CreateToken(self, request: Any, _context: Any) -> pb.CreateTokenResponse:
        _, tokens = self._auth_and_tokens()
        if request.name == ADMIN_TOKEN_NAME:
            raise InvalidArgumentError(f"{request.name!r} is the name of the token that the master makes: use another")
        if expired := tokens.remove_expired():
            self._driver.write_buffer.append(Entry(settings=expired))
        tokens.check_count()
        try:
            token, secret = tokens.make(
                request.name,
                [_ROLE_NAMES.get(r, str(r)) for r in request.roles],
                request.queues,
                request.worker_ids,
                ttl_s=seconds_of(request.ttl) if request.HasField("ttl") else None,
                tasks_per_s=request.task_rate,
                calls_max=request.calls_max,
            )
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from None
        try:
            await self._driver.write_buffer.save(token.setting())
        except JournalError as error:
            # After a timeout of `save`, the journal may still write the setting. The next entry deletes the setting.
            self._driver.write_buffer.append(Entry(settings=dict.fromkeys(token.setting())))
            raise ExhaustedError(f"no token was made: {error}") from None
        tokens.add(token)
        return pb.CreateTokenResponse(token=_message(token), secret=secret)

    async def ListTokens(self, request: Any, _context: Any) -> pb.ListTokensResponse:
        _, tokens = self._auth_and_tokens()
        valid, page_token = page_of(tokens.valid(), request)
        return pb.ListTokensResponse(tokens=[_message(t) for t in valid], next_page_token=page_token)

    async def RevokeToken(self, request: Any, _context: Any) -> pb.RevokeTokenResponse:
        auth, tokens = self._auth_and_tokens()
        if [t.token_id for t in tokens.valid() if ADMIN in t.roles] == [request.token_id]:
            raise PreconditionError(
                f"{request.token_id} is the only valid token with the role admin, so it was not revoked: without it, "
                "no caller could create tokens. Create another first (`mgpuctl tokens create NAME --role admin`), and "
                "revoke this token with the new one"
            )
        token = auth.revoke(request.token_id)
        if token is None:
            raise NotFoundError(f"there is no token {request.token_id!r}; `mgpuctl tokens list` shows all tokens")
        try:
            await self._driver.write_buffer.save(dict.fromkeys(token.setting()))
        except JournalError as error:
            raise ExhaustedError(
                "the token is revoked now, but after a restart of the master it may be valid again: revoke it again "
                f"then. {error}"
            ) from None
        return pb.RevokeTokenResponse(token=_message(token))

    def _auth_and_tokens(self) -> tuple[Auth, Tokens]:
        """Returns the Auth and its tokens. Raises PreconditionError if the master runs without tokens."""
        auth = self._auth
        if auth is None or auth.tokens is None:
            raise PreconditionError(NO_TOKENS)
        return auth, auth.tokens


def _message(token: Token) -> pb.Token:
    message = pb.Token(
        **{name: getattr(token, name) for name in ("token_id", "name", "worker_ids", "calls_max")},
        roles=[_ROLE_NUMBERS[r] for r in sorted(token.roles)],
        queues=sorted(token.queues or ()),
        task_rate=token.tasks_per_s,
        calls=len(token.open_calls),
    )
    set_time(message.create_time, token.create_s)
    if token.expire_s is not None:
        set_time(message.expire_time, token.expire_s)
    return message
