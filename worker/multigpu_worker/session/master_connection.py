"""The worker's stream to the master: connects, and reconnects for ever with growing, jittered delays.

master_stream.py makes and handles the frames. The writer asks for the next frame whenever the last one is written, so
reports that piled up meanwhile share one frame, and nothing waits when the stream is idle.

mypyc does not compile this module, which awaits while it handles an exception: see hatch_build.py.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Iterable
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog
from multigpu._transport.connection import unavailable
from multigpu._transport.credentials import Credentials
from multigpu.config.config import ConfigError
from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.session.wire import BadFrameError

log = structlog.get_logger()

METHOD = "/multigpu.v1.WorkerService/Session"
MESSAGE_BYTES_MAX = 64 << 20
# The delay before a reconnect is random, between 0 and a bound that doubles from RECONNECT_MIN_S to RECONNECT_MAX_S.
RECONNECT_MIN_S = 0.05
RECONNECT_MAX_S = 2.0
# For this long after the start, failures to connect to a master that was never reached are not logged as warnings.
QUIET_S = 2.0
# If there is no session, the same reason is logged REPEATS_MAX times, then once in REPEAT_S.
REPEATS_MAX, REPEAT_S = 3, 60.0
WELCOME_TIMEOUT_S = 10.0
# How long to wait for the master to end the stream after the worker has ended its side.
CLOSE_TIMEOUT_S = 2.0

OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # masters are in the same network
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # With a shared pool, gRPC's own backoff would go on in the next channel and add to the delays here.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
]


class ProtocolMismatchError(Exception):
    """The master speaks another version of the protocol; the message says which side to upgrade."""


class TakenOverError(Exception):
    """Another worker with the same id has the session; the message says what to do."""


# Initial metadata of a call.
Metadata = Iterable[tuple[str, str | bytes]]


class StreamHandler(Protocol):
    """Called on the event loop."""

    def hello(self) -> pb.SessionRequest: ...
    def connected(self, welcome: pb.SessionResponse, metadata: Metadata) -> None: ...
    def received(self, response: pb.SessionResponse) -> None: ...
    def next_frame(self) -> bytes | None: ...
    def disconnected(self, reason: str) -> None: ...


class MasterConnection:
    def __init__(self, address: str, handler: StreamHandler, credentials: Credentials | None = None) -> None:
        self.address = address
        self._credentials = credentials or Credentials()
        self._handler = handler
        self._wake = asyncio.Event()
        self._closing = False
        self._random = random.Random()  # noqa: S311  jitter, not secrets
        # Why there is no session, how often that was logged, and when last.
        self._reason, self._logged, self._logged_s = "", 0, 0.0

    def wake(self) -> None:
        """There is something to send."""
        self._wake.set()

    def close(self) -> None:
        """Send the frames that are due, end the stream, and let `run` return."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Keep a session until `close`. Raises ProtocolMismatchError, TakenOverError."""
        bound_s = RECONNECT_MIN_S
        met, quiet_until = False, time.monotonic() + QUIET_S
        while not self._closing:
            welcomed = False
            reason = "the master ended the stream"
            try:
                metadata = self._credentials.metadata(self.address)
                async with self._credentials.channel(self.address, OPTIONS, grpc.aio) as channel:
                    session = channel.stream_stream(METHOD, response_deserializer=pb.SessionResponse.FromString)
                    call = session(metadata=metadata)
                    welcome = await self._open(call)
                    welcomed = met = True
                    self._handler.connected(welcome, await call.initial_metadata())
                    await self._exchange(call)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise ProtocolMismatchError(error.details()) from error
                if error.code() is grpc.StatusCode.ABORTED and welcomed:
                    raise TakenOverError(
                        f"the master at {self.address} ended our session: {error.details()}. Another worker runs with "
                        "the same worker_id; stop one of them, or give each its own --worker-id"
                    ) from error
                details = error.details() or ""
                if error.code() is grpc.StatusCode.UNAVAILABLE and not welcomed:
                    details = unavailable(self.address, details, self._credentials)
                reason = f"{error.code().name}: {details}"
            except ConfigError as error:
                reason = str(error)  # not fatal: credentials are read for each stream, and a file may yet be replaced
            except BadFrameError as error:
                reason = f"the master sent a frame that makes no sense ({error}); upgrade it?"
            except (TimeoutError, asyncio.InvalidStateError, grpc.aio.InternalError) as error:
                reason = str(error) or "the master didn't answer"
            if welcomed:
                bound_s = RECONNECT_MIN_S
                self._handler.disconnected(reason)
            if not self._closing:
                delay_s = self._random.uniform(0, bound_s)
                # A fleet that is being started may have no master for a moment.
                self._log(reason, delay_s, quiet=not met and time.monotonic() < quiet_until)
                await self._sleep(delay_s)
                bound_s = min(RECONNECT_MAX_S, 2 * bound_s)

    def _log(self, reason: str, delay_s: float, *, quiet: bool) -> None:
        """Log why there is no session, but not the same reason every second."""
        if reason != self._reason:
            self._reason, self._logged = reason, 0
        now_s = time.monotonic()
        if not quiet and self._logged >= REPEATS_MAX and now_s - self._logged_s < REPEAT_S:
            return
        self._logged, self._logged_s = self._logged + (not quiet), now_s
        write = log.debug if quiet else log.warning
        write("no session", master=self.address, reason=reason, retry_s=round(delay_s, 3))

    async def _open(self, call: Any) -> pb.SessionResponse:
        """Send the hello and wait for the welcome."""
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            await call.write(self._handler.hello().SerializeToString())
            response = await call.read()
        if response is grpc.aio.EOF:
            await _raise_status(call)
            raise asyncio.InvalidStateError("the master ended the stream without a welcome")
        if response is None or not response.HasField("welcome"):
            raise asyncio.InvalidStateError("the master's first frame is no welcome; is it a multigpu master?")
        frame: pb.SessionResponse = response
        return frame

    async def _exchange(self, call: Any) -> None:
        """Write and read until the writer or the reader ends."""
        self._wake.set()
        writer = asyncio.create_task(self._write(call))
        reader = asyncio.create_task(self._read(call))
        try:
            await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and not reader.done():
                # The worker closed, or the stream broke: the reader raises the stream's status.
                await asyncio.wait({reader}, timeout=CLOSE_TIMEOUT_S)
            for task in (reader, writer):
                if task.done():
                    task.result()
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
            call.cancel()

    async def _write(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (request := self._handler.next_frame()) is not None:
                await call.write(request)
            if self._closing:
                await call.done_writing()
                return

    async def _read(self, call: Any) -> None:
        received = self._handler.received
        while (response := await call.read()) is not grpc.aio.EOF:
            if response is None:  # gRPC could not parse it
                raise BadFrameError("it is no SessionResponse")
            received(response)
        await _raise_status(call)

    async def _sleep(self, delay_s: float) -> None:
        """Sleep, but not longer than until `close`."""
        self._wake.clear()
        if not self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    while not self._closing:
                        await self._wake.wait()
                        self._wake.clear()


async def _raise_status(call: Any) -> None:
    """Raise AioRpcError with the status of an ended call, unless that is OK."""
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )
