"""One HTTP request, as the routes see it: its body, its caller, its answer.

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
# How long a body may take to arrive.
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
    """The token in the value of an Authorization header; empty: none. HttpError: the value can't be read."""
    if not value:
        return ""
    scheme, _, token = value.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or not token.isascii() or not token.isprintable():
        raise HttpError(UNAUTHORIZED, "the header is to be `Authorization: Bearer TOKEN`", code="invalid_api_key")
    return token


class Request:
    """A request whose headers have arrived. `body_bytes_max`: a larger body is an error. `timeout_s`: how long its
    tasks may take.
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
        # What was written last, by the loop's clock; 0: no stream has begun.
        self._written_at = 0.0

    @property
    def query(self) -> dict[str, str]:
        """The fields of the query string; of a repeated one, the last."""
        return dict(parse_qsl(self._query.decode("latin-1"), keep_blank_values=True))

    def header(self, name: bytes) -> str:
        """The value of a header, by its name in lower case; empty: there is none."""
        for key, value in self._headers:
            if key == name:
                return value.decode("latin-1")
        return ""

    @property
    def token(self) -> str:
        """The caller's token; empty: none. HttpError: the header can't be read."""
        return token_of(self.header(b"authorization"))

    def cookie(self, name: str) -> str:
        """The value of a cookie; empty: there is none."""
        # Not by SimpleCookie, which reads none if it does not like one: other programs of the host may have set that.
        pairs = (pair.strip().partition("=") for pair in self.header(b"cookie").split(";"))
        return next((value for key, _, value in pairs if key == name), "")

    async def body(self) -> bytes:
        """The whole body. HttpError: too large, too slow or compressed."""
        if self.header(b"content-encoding") not in ("", "identity"):
            raise HttpError(UNSUPPORTED, "the body is compressed: send it as it is")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return b"".join([part async for part in self.parts(self.body_bytes_max)])
        except TimeoutError:
            raise HttpError(TIMED_OUT, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None

    async def parts(self, bytes_max: int) -> AsyncIterator[bytes]:
        """The body as it arrives. HttpError: it has more than `bytes_max`, or a part does not come."""
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
        """The body as a value. HttpError: it is no JSON, or has another shape."""
        return decode(decoder, await self.body())

    # Answers.

    async def respond(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers | None = None
    ) -> None:
        """The whole answer."""
        self.responded = True
        own = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or ())]
        await self._send({"type": "http.response.start", "status": status, "headers": own})
        await self._send({"type": "http.response.body", "body": body})

    async def respond_parts(self, parts: AsyncIterator[bytes], content_type: bytes) -> None:
        """A response of unknown length. An error before the first part is raised, so that the response has its status;
        a later one closes the connection before the end of the response.
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
        """Begins an answer of server-sent events. Nothing happens if it has begun."""
        if not self.responded:
            self.responded = True
            own = [*_EVENTS, *(headers or ())]
            await self._send({"type": "http.response.start", "status": 200, "headers": own})
            self._written_at = asyncio.get_running_loop().time()

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """The next part of a stream. Waits while the reader is slow; nothing is sent to one that has gone."""
        self._written_at = self._written_at and asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def while_connected(self, *, events: bool = False) -> "WhileConnected":
        """A block that a hang-up of the caller ends with DisconnectedError. Only after the body was read.

        In it, a stream of events that has nothing else to send for HEARTBEAT_S sends a comment. `events`: the answer
        will be such a stream, and begins after HEARTBEAT_S at the latest.
        """
        return WhileConnected(self, events=events)

    async def watch(self, *, events: bool) -> None:
        """Returns when the caller has hung up. `events`: see while_connected."""
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
                    await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})


def _too_large(bytes_max: int) -> HttpError:
    return HttpError(TOO_LARGE, f"the body is too large: the limit is {bytes_max:,} bytes")


class WhileConnected:
    """See Request.while_connected."""

    def __init__(self, request: Request, *, events: bool) -> None:
        self._request = request
        self._events = events
        self._gone = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        watch = self._request.watch(events=self._events)
        self._watch = asyncio.get_running_loop().create_task(watch, name="watch for a hang-up")
        self._watch.add_done_callback(self._ended)
        return self

    def _ended(self, watch: "asyncio.Task[None]") -> None:
        if not watch.cancelled():
            self._gone = True
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.remove_done_callback(self._ended)
        self._watch.cancel()
        if self._gone:
            self._task.uncancel()
            if kind is asyncio.CancelledError:
                raise DisconnectedError from None


def decode(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T:
    """A JSON value. HttpError: it is no JSON, or has another shape."""
    if not data:
        raise HttpError(BAD_REQUEST, "the body is empty: it is to be JSON")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise invalid(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(BAD_REQUEST, f"the body is not valid JSON: {error}") from None


def invalid(error: msgspec.ValidationError) -> HttpError:
    """The error of a value of another shape; it names the field."""
    message, _, at = str(error).partition(" - at `$")
    param = at.rstrip("`").lstrip(".")
    if not param and (missing := re.search("missing required field `(.+)`", message)):
        return HttpError(BAD_REQUEST, message, param=missing[1])
    return HttpError(BAD_REQUEST, f"{param}: {message}" if param else message, param=param)
