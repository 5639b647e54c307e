"""The gRPC server: its channel arguments, and what it does before a handler runs.

Whoever can connect may send anything, and gRPC holds what was sent until the call ends. So nothing is decompressed, a
stream that nobody reads holds at most STREAM_BYTES_MAX, and handlers read their request themselves, after the token
was checked (see `registration`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server as aio_server

from multigpu_master.rpc.status import reject

MESSAGE_BYTES_MAX = 64 << 20
STREAM_BYTES_MAX = 128 << 10
# Of one connection. A client that opens more waits until one of its streams has ended. No fewer than a token's calls
# (token_calls_max): a Get may wait for an hour, and a Cancel must not wait for it.
STREAMS_MAX = 512
# Calls of one method that we have not taken yet, on all connections. gRPC ends some of the calls beyond the first
# number and all beyond the second as CANCELLED: each may hold megabytes of metadata, see docs/security.md.
WAITING_SOFT_MAX, WAITING_MAX = 128, 256
METADATA_BYTES_MAX = 16 << 10
# Both ends ping an idle connection every 10 s and give up after 5; the server must then allow pings that often.
OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    # A connection that says nothing ends then.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # gRPC keeps to the second with peers that have acknowledged our settings. Until then it takes 16 MiB a call, and
    # STREAMS_MAX calls in all; whoever does not acknowledge is closed.
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.http2.settings_timeout", 10_000),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.server.max_pending_requests", WAITING_SOFT_MAX),
    ("grpc.server.max_pending_requests_hard_limit", WAITING_MAX),
    # Bit 0 stands for "identity": compressed calls end as UNIMPLEMENTED before a message of theirs is read.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # The window of a stream that is not being read. Without the probe it would grow to 128 MiB.
    ("grpc.http2.lookahead_bytes", STREAM_BYTES_MAX),
    ("grpc.http2.bdp_probe", 0),
]


# A request of a caller without a token. While one is read, gRPC takes in a message of up to 64 MiB, and for that it
# needs CPU time: about a millisecond for 1 MiB.
SMALL_BYTES_MAX = 4096
SMALL_CPU_S, SMALL_TIMEOUT_S, SMALL_POLL_S = 0.02, 1.0, 0.002
LOG_CHARS_MAX = 1000


class OncePerSecond(logging.Filter):
    """Lets through a line a second, cut short: peers without a token can have gRPC's Python code write two a call."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("ExecuteBatchError"):  # the peer was gone before its answer: no fault
            return False
        now_s = time.monotonic()
        if now_s - self._last_s < 1.0:
            return False
        self._last_s = now_s
        record.msg, record.args = record.getMessage()[:LOG_CHARS_MAX], ()
        return True


logging.getLogger("grpc._cython.cygrpc").addFilter(OncePerSecond())


async def read_small(context: Any) -> Any:
    """The one request of a caller who needs no token, or EOF. Rejects one that is large, or does not come with its
    call. All calls together hold at most what gRPC can take in within SMALL_CPU_S.
    """
    reading = asyncio.ensure_future(context.read())
    cpu_s, end_s = time.process_time() + SMALL_CPU_S, time.monotonic() + SMALL_TIMEOUT_S
    try:
        await asyncio.wait([reading], timeout=SMALL_POLL_S)
        while not reading.done():
            if time.process_time() > cpu_s or time.monotonic() > end_s:
                text = "the request is large, or did not come with the call: send both at once, or try again"
                await reject(context, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            await asyncio.wait([reading], timeout=SMALL_POLL_S)
    finally:
        reading.cancel()
    data = reading.result()
    if data is not grpc.aio.EOF and len(data) > SMALL_BYTES_MAX:
        text = f"the request has {len(data)} bytes, and {SMALL_BYTES_MAX} are allowed: name a service of this master"
        await reject(context, grpc.StatusCode.INVALID_ARGUMENT, text)
    return data


class Server(aio_server.Server):  # type: ignore[misc]  # grpc has no types
    """A grpc.aio server without ports. Methods are added with add_registered_method_handlers. `connections_max`: more
    are closed as they come.
    """

    def __init__(self, connections_max: int) -> None:  # not the base's, which makes the core
        self._loop = asyncio.get_running_loop()
        options = [*OPTIONS, ("grpc.max_allowed_incoming_connections", connections_max)]
        self._server = _Core(self._loop, None, (), (), options, None)


class _Core(cygrpc.AioServer):  # type: ignore[misc]  # grpc has no types
    """Takes calls and finds their handlers itself, for three reasons.

    gRPC's own decodes the path of an unregistered method as UTF-8, and shuts down when that fails: one frame of anybody
    would end every stream. It makes Python objects of all metadata of every call, before anybody asks for them, and
    leaves them in a cycle. And it keeps what a rejected call held: see `_forgetting`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *more: Any) -> None:
        super().__init__(loop, *more)
        self._running_loop = loop
        self._handlers: dict[str, Any] = {}
        self._calls: set[asyncio.Task[None]] = set()  # the loop holds no references

    def add_registered_method_handlers(self, method_handlers: dict[str, Any]) -> None:
        """Those of methods whose requests are streams, by path."""
        for path, handler in method_handlers.items():
            assert handler.request_streaming, path
            kind = "stream_stream" if handler.response_streaming else "stream_unary"
            self._handlers[path] = handler._replace(**{kind: _forgetting(getattr(handler, kind))})
        super().add_registered_method_handlers(method_handlers)

    def _make_request_call_future(self, method: bytes | None) -> Any:
        """A task that answers all calls of a registered method; for None, those of all other methods."""
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
            del state, answer, call  # not until the next call comes


def _forgetting(serve: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """`serve`, so that nothing of a call is left once it was rejected. gRPC keeps the AbortError with the call; its
    traceback keeps frames, and they the request and the call: a cycle of up to 64 MiB for the cyclic collector, which
    counts objects and not bytes.
    """

    async def forgetting(request: Any, context: Any) -> Any:
        try:
            return await serve(request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError) as error:
            error.__traceback__ = error.__context__ = error.__cause__ = None
            del request, context  # this frame is in the traceback that begins now
            raise

    return forgetting


async def _reject_unknown(_requests: object, context: Any) -> None:
    await reject(context, grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


_NO_METHOD = grpc.stream_stream_rpc_method_handler(_forgetting(_reject_unknown))
