"""The gRPC server of a daemon: its channel arguments, and how it takes calls.

Peers without a token can send anything, and gRPC keeps it until the call ends. So nothing is decompressed, a stream
that is not read holds at most STREAM_BYTES_MAX, and handlers read their requests themselves.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server as aio_server

MESSAGE_BYTES_MAX = 64 << 20
STREAM_BYTES_MAX = 128 << 10
# Of one connection; a client that opens more waits until a stream ends. At least token_calls_max: a Get may wait for an
# hour, and a Cancel must not wait for it.
STREAMS_MAX = 512
# Calls of one method that wait to be taken, on all connections. gRPC ends others as CANCELLED. One connection alone
# cannot cause that: its further streams wait or are refused (UNAVAILABLE). A call may hold megabytes of metadata, see
# docs/security.md.
WAITING_MAX = STREAMS_MAX
METADATA_BYTES_MAX = 16 << 10
# Both ends ping an idle connection every 10 s and give up after 5; the server must then allow pings that often.
OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    # A silent connection is closed.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # gRPC enforces the second once the peer has acknowledged our settings. Before, it accepts 16 MiB a call in at most
    # STREAMS_MAX calls; peers that do not acknowledge are disconnected.
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.http2.settings_timeout", 10_000),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.server.max_pending_requests", WAITING_MAX),
    ("grpc.server.max_pending_requests_hard_limit", WAITING_MAX),
    # Bit 0 is "identity": compressed calls end as UNIMPLEMENTED before a message is read.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # The window of a stream that is not read. The probe would let it grow to 128 MiB.
    ("grpc.http2.lookahead_bytes", STREAM_BYTES_MAX),
    ("grpc.http2.bdp_probe", 0),
]

LOG_CHARS_MAX = 1000


class OncePerSecond(logging.Filter):
    """Passes one line a second, shortened: peers without a token can make gRPC log two lines for each call."""

    _last_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("ExecuteBatchError"):  # the peer was gone before its answer
            return False
        now_s = time.monotonic()
        if now_s - self._last_s < 1.0:
            return False
        self._last_s = now_s
        record.msg, record.args = record.getMessage()[:LOG_CHARS_MAX], ()
        return True


logging.getLogger("grpc._cython.cygrpc").addFilter(OncePerSecond())


class Server(aio_server.Server):  # type: ignore[misc]  # grpc has no types
    """A grpc.aio server. Methods are added with add_registered_method_handlers. Connections beyond `connections_max`
    are closed. `message_bytes_max`: the largest request.
    """

    def __init__(self, connections_max: int, message_bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        # The base class would make its own core.
        self._loop = asyncio.get_running_loop()
        options = [
            *OPTIONS,
            ("grpc.max_receive_message_length", message_bytes_max),
            ("grpc.max_allowed_incoming_connections", connections_max),
        ]
        self._server = _Core(self._loop, None, (), (), options, None)


class _Core(cygrpc.AioServer):  # type: ignore[misc]  # grpc has no types
    """Takes calls and finds their handlers itself, because gRPC's own server core

    - decodes the path of an unregistered method as UTF-8 and shuts down if that fails: one frame would end every
      stream;
    - converts all metadata of every call to Python objects, and leaves them in a reference cycle;
    - keeps what a rejected call held, see `_forgetting`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *more: Any) -> None:
        super().__init__(loop, *more)
        self._running_loop = loop
        self._handlers: dict[str, Any] = {}
        self._calls: set[asyncio.Task[None]] = set()  # the event loop keeps no references

    def add_registered_method_handlers(self, method_handlers: dict[str, Any]) -> None:
        """`method_handlers`: by path. Their requests are streams."""
        for path, handler in method_handlers.items():
            assert handler.request_streaming, path
            kind = "stream_stream" if handler.response_streaming else "stream_unary"
            self._handlers[path] = handler._replace(**{kind: _forgetting(getattr(handler, kind))})
        super().add_registered_method_handlers(method_handlers)

    def _make_request_call_future(self, method: bytes | None) -> Any:
        """A task that serves all calls of a registered method; None: of all other methods."""
        return self._running_loop.create_task(self._answer(method))

    async def _answer(self, method: bytes | None) -> None:
        name = "unknown" if method is None else method.decode()
        handler = _NO_METHOD if method is None else self._handlers[name]
        handle = cygrpc._handle_stream_stream_rpc if handler.response_streaming else cygrpc._handle_stream_unary_rpc  # noqa: SLF001
        loop = self._running_loop
        while True:  # both raise when the server stops
            state = await (self._request_call() if method is None else self._request_registered_call(method))
            answer = handle(handler, state, loop)
            call = loop.create_task(cygrpc._schedule_rpc_coro(answer, state, loop, name))  # noqa: SLF001
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            del state, answer, call  # do not keep them until the next call


def _forgetting(serve: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """`serve` without references left behind by a rejected call.

    gRPC keeps the AbortError with the call. Its traceback keeps frames, and these the request and the call: a cycle of
    up to 64 MiB, which the garbage collector does not count as much.
    """

    async def forgetting(request: Any, context: Any) -> Any:
        try:
            return await serve(request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError) as error:
            error.__traceback__ = error.__context__ = error.__cause__ = None
            del request, context  # this frame is in the new traceback
            raise

    return forgetting


async def _reject_unknown(_requests: object, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


_NO_METHOD = grpc.stream_stream_rpc_method_handler(_forgetting(_reject_unknown))
