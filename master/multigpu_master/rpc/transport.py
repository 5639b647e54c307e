"""The gRPC server: its channel arguments, and what it does before a handler runs.

Whoever can connect may send anything, and gRPC holds what was sent until the call ends. So nothing is decompressed, a
stream that nobody reads holds at most STREAM_BYTES_MAX, and handlers read their request themselves, after the token
was checked (see `registration`).
"""

import asyncio
import logging
import time
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server as aio_server

from multigpu_master.rpc.status import refuse

MESSAGE_BYTES_MAX = 64 << 20
STREAM_BYTES_MAX = 128 << 10
# Of one connection. A client that opens more waits until one of its streams has ended.
STREAMS_MAX = 1024
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
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
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
    """The one request of a caller who needs no token, or EOF. Refuses one that is large, or does not come with its
    call. All calls together hold at most what gRPC can take in within SMALL_CPU_S.
    """
    reading = asyncio.ensure_future(context.read())
    cpu_s, end_s = time.process_time() + SMALL_CPU_S, time.monotonic() + SMALL_TIMEOUT_S
    try:
        await asyncio.wait([reading], timeout=SMALL_POLL_S)
        while not reading.done():
            if time.process_time() > cpu_s or time.monotonic() > end_s:
                text = "the request is large, or did not come with the call: send both at once, or try again"
                await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            await asyncio.wait([reading], timeout=SMALL_POLL_S)
    finally:
        reading.cancel()
    data = reading.result()
    if data is not grpc.aio.EOF and len(data) > SMALL_BYTES_MAX:
        text = f"the request has {len(data)} bytes, and {SMALL_BYTES_MAX} are allowed: name a service of this master"
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, text)
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
    """gRPC's own decodes the path of an unregistered method as UTF-8, and shuts down when that fails: one frame of
    anybody would end every stream. This one never looks at such a path: the method is unknown anyhow.
    """

    def _make_request_call_future(self, method: bytes | None) -> Any:
        """The next call of a registered method; for None, a task that answers all calls of other methods."""
        if method is not None:
            return super()._make_request_call_future(method)
        return asyncio.get_running_loop().create_task(self._refuse_unknown_methods())

    async def _refuse_unknown_methods(self) -> None:
        loop = asyncio.get_running_loop()
        calls: set[asyncio.Task[None]] = set()
        while True:
            state = await self._request_call()  # raises when the server stops
            answer = cygrpc._handle_rpc("unknown", _NoMethods(), (), state, loop, False)  # noqa: SLF001
            call = loop.create_task(cygrpc._schedule_rpc_coro(answer, state, loop, "unknown"))  # noqa: SLF001
            calls.add(call)
            call.add_done_callback(calls.discard)


class _NoMethods:
    def resolve_handler(self, _details: object) -> None:
        """No handler: gRPC answers UNIMPLEMENTED."""
