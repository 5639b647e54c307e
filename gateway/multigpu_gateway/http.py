"""One HTTP request, as the routes see it: headers, token, body and response.

ASGI: https://asgi.readthedocs.io/en/latest/specs/www.html. Server-sent events:
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import parse_qsl

import msgspec

from multigpu_gateway.errors import (
    BAD_REQUEST,
    TIMED_OUT,
    TOO_LARGE,
    UNAUTHORIZED,
    UNSUPPORTED,
    DisconnectedError,
    HttpError,
)

T = TypeVar("T")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON = b"application/json"
EVENT_STREAM = "text/event-stream"
# The time limit for receiving a whole request body, or each part if a route reads the body in parts.
BODY_TIMEOUT_S = 60.0
# After this many seconds without an event, a stream sends a comment: proxies and clients close idle connections.
HEARTBEAT_S = 10.0
_COMMENT = b": waiting\n\n"
_EVENTS: Headers = [
    (b"content-type", f"{EVENT_STREAM}; charset=utf-8".encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def token_of(value: str) -> str:
    """Returns the token in the value of an Authorization header, "" if the value is empty. Raises HttpError if the
    value is not `Bearer TOKEN`.
    """
    if not value:
        return ""
    scheme, _, token = value.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or not token.isascii() or not token.isprintable():
        raise HttpError(UNAUTHORIZED, "the header is to be `Authorization: Bearer TOKEN`", code="invalid_api_key")
    return token


class Request:
    """A request whose headers have arrived. `body_bytes_max`: a larger body is an error. `timeout_s`: the timeout of
    its tasks.
    """

    def __init__(
        self, scope: Mapping[str, Any], receive: Receive, send: Send, *, body_bytes_max: int, timeout_s: float
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._query: bytes = scope["query_string"]
        self._headers: Headers = scope["headers"]
        # Whether the connection is encrypted.
        self.secure: bool = scope.get("scheme") == "https"
        self._receive = receive
        self._send = send
        self.body_bytes_max = body_bytes_max
        self.timeout_s = timeout_s
        self.responded = False
        # When an event stream was last written to, by the loop's clock; 0: no event stream has begun.
        self._written_at = 0.0

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the query string. A repeated one has its last value."""
        return dict(parse_qsl(self._query.decode("latin-1"), keep_blank_values=True))

    def header(self, name: bytes) -> str:
        """Returns the value of a header, "" if there is none. `name`: in lower case."""
        for key, value in self._headers:
            if key == name:
                return value.decode("latin-1")
        return ""

    @property
    def token(self) -> str:
        """The token of the request; "" if it has none. Raises HttpError if the header is malformed."""
        return token_of(self.header(b"authorization"))

    def cookie(self, name: str) -> str:
        """Returns the value of a cookie, "" if there is none."""
        # SimpleCookie drops all cookies if one is malformed; other programs on this host may have set such a cookie.
        pairs = (pair.strip().partition("=") for pair in self.header(b"cookie").split(";"))
        return next((value for key, _, value in pairs if key == name), "")

    async def body(self) -> bytes:
        """Returns the whole body. Raises HttpError if it is too large, too slow or compressed."""
        if self.header(b"content-encoding") not in ("", "identity"):
            raise HttpError(UNSUPPORTED, "the body is compressed: send it as it is")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return b"".join([part async for part in self.parts(self.body_bytes_max)])
        except TimeoutError:
            raise HttpError(TIMED_OUT, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None

    async def parts(self, bytes_max: int) -> AsyncIterator[bytes]:
        """Yields the body as it arrives. Raises HttpError if it has more than `bytes_max` bytes, or if no part arrives
        for BODY_TIMEOUT_S; DisconnectedError if the client disconnects.
        """
        length = self.header(b"content-length")
        if length.isdecimal() and int(length) > bytes_max:
            raise _too_large(bytes_max)
        size = 0
        more = True
        while more:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    message = await self._receive()
            except TimeoutError:
                raise HttpError(TIMED_OUT, f"the rest of the body did not come within {BODY_TIMEOUT_S:g} s") from None
            if message["type"] == "http.disconnect":
                raise DisconnectedError
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > bytes_max:
                raise _too_large(bytes_max)
            yield part

    async def json(self, decoder: "msgspec.json.Decoder[T]") -> T:
        """Returns the decoded body. Raises HttpError if it can't be read or decoded."""
        return decode(decoder, await self.body())

    # Responses.

    async def respond(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers | None = None
    ) -> None:
        """Sends a whole response."""
        self.responded = True
        own = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or ())]
        await self._send({"type": "http.response.start", "status": status, "headers": own})
        await self._send({"type": "http.response.body", "body": body})

    async def respond_parts(self, parts: AsyncIterator[bytes], content_type: bytes) -> None:
        """Sends a response of unknown length. If `parts` raises an error before the first part, the response can still
        have the error's status. After a later error, the server closes the connection before the end of the response.
        """
        async for part in parts:
            if not self.responded:
                self.responded = True
                headers = [(b"content-type", content_type)]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self.write(part)
        if not self.responded:
            await self.respond(200, b"", content_type)
        else:
            await self.write(b"", more=False)

    async def begin_events(self, headers: Headers | None = None) -> None:
        """Begins a response of server-sent events, unless the response has begun."""
        if not self.responded:
            self.responded = True
            own = [*_EVENTS, *(headers or ())]
            await self._send({"type": "http.response.start", "status": 200, "headers": own})
            self._written_at = asyncio.get_running_loop().time()

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Sends the next part of a response, which is empty for HEAD. Waits while the client reads too slowly. No-op
        after a disconnect.
        """
        self._written_at = self._written_at and asyncio.get_running_loop().time()
        await self._send_part(data, more=more)

    async def _send_part(self, data: bytes, *, more: bool) -> None:
        part = b"" if self.method == "HEAD" else data
        await self._send({"type": "http.response.body", "body": part, "more_body": more})

    def while_connected(self, *, events: bool = False) -> "WhileConnected":
        """Returns a context manager that cancels its block, and raises DisconnectedError, when the client disconnects.
        Use it only after the body was read.

        In the block, an event stream sends a comment after HEARTBEAT_S without an event. `events`: the response will be
        an event stream; it begins with a comment if there is no event within HEARTBEAT_S.
        """
        return WhileConnected(self, events=events)

    async def wait_for_disconnect(self, *, events: bool) -> None:
        """Sends the comments of an event stream. Returns when the client disconnects. `events`: see while_connected."""
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    if (await self._receive())["type"] == "http.disconnect":
                        return
            except TimeoutError:
                idle_s = asyncio.get_running_loop().time() - self._written_at
                late = events and not self.responded
                if late:
                    await self.begin_events()
                if late or (self._written_at and idle_s >= HEARTBEAT_S):
                    await self._send_part(_COMMENT, more=True)


def _too_large(bytes_max: int) -> HttpError:
    return HttpError(TOO_LARGE, f"the body is too large: the limit is {bytes_max:,} bytes")


class WhileConnected:
    """See Request.while_connected."""

    def __init__(self, request: Request, *, events: bool) -> None:
        self._request = request
        self._events = events
        self._disconnected = False
        self._left = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        waiting = self._request.wait_for_disconnect(events=self._events)
        self._waiting = asyncio.get_running_loop().create_task(waiting, name="wait for a disconnect")
        self._waiting.add_done_callback(self._ended)
        return self

    def _ended(self, waiting: "asyncio.Task[None]") -> None:
        if not (waiting.cancelled() or self._left):  # it may be scheduled already when the block ends
            self._disconnected = True
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._left = True
        self._waiting.cancel()
        if self._disconnected:
            self._task.uncancel()
            if kind is asyncio.CancelledError:
                raise DisconnectedError from None


def decode(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T:
    """Returns the decoded request body. Raises HttpError if it is not JSON, or not of the decoder's type."""
    if not data:
        raise HttpError(BAD_REQUEST, "the body is empty: it is to be JSON")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise validation_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(BAD_REQUEST, f"the body is not valid JSON: {error}") from None


def validation_error(error: msgspec.ValidationError) -> HttpError:
    """Converts msgspec's error to an HttpError that names the field at fault."""
    message, _, at = str(error).partition(" - at `$")
    param = at.rstrip("`").lstrip(".")
    if not param and (missing := re.search("missing required field `(.+)`", message)):
        return HttpError(BAD_REQUEST, message, param=missing[1])
    return HttpError(BAD_REQUEST, f"{param}: {message}" if param else message, param=param)
