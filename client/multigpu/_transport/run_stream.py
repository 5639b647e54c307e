"""The one Run stream of a client: sends tasks, settles calls, and reconnects when it breaks.

The writer sends what has accumulated while its last write was in flight. With few calls in flight it delays nothing to
make a batch; with more it pauses between two frames, so that the next calls of those callers share one. The reader
passes each frame to the RunState. When the stream ends, for whatever reason, the supervisor opens another, and the
RunState sends every unsettled task again: no task waits on a stream that is gone.

A client that was never connected gives up after `connect_timeout_s`. After the first successful connection it retries
forever.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from multigpu import errors
from multigpu._transport.call import Call
from multigpu._transport.connection import RETRYABLE_CODES, Connection, backoff_s, cut_off, jittered_s
from multigpu._transport.payloads import Directory
from multigpu._transport.run_state import RunState
from multigpu._transport.window import Window
from multigpu.v1 import task_service_pb2

log = logging.getLogger("multigpu")

# With this many calls in flight, frames are at least this far apart. Each frame costs four processes about as much as
# ten small tasks in it. 64 threads with a call each are twice as fast as without the pause, and wait half as long.
_PAUSE_CALLS, _PAUSE_S = 8, 0.002
# Consecutive streams that a reachable master ends before a first frame. Beyond this we assume that our own frames are
# at fault, and sending them again would not help.
_EMPTY_STREAMS_MAX = 8
# How long closing waits for the master to confirm withdrawals.
_CANCEL_TIMEOUT_S = 2.0
# Maximum delay before results taken from shared files are acknowledged.
_ACK_DELAY_S = 0.1
# Without a shared directory, the initial metadata may come with the first response only.
_OFFER_TIMEOUT_S = 0.1
# At most one warning in this time that the master rejects tasks for now.
_WARNING_S = 60.0


class RunStream:
    def __init__(self, connection: Connection, window: Window, *, wait_when_full: bool = True) -> None:
        self._connection = connection
        self._window = window
        self._state = RunState(window, wait_when_full=wait_when_full)
        self._supervisor: asyncio.Task[None] | None = None
        # Set when the idle supervisor, or writer, may have something to do.
        self._woken = asyncio.Event()
        # Resolved when the master has confirmed every withdrawal.
        self._confirmed: asyncio.Future[None] | None = None
        self._closed = False
        # Monotonic instant of the first attempt to connect.
        self._first_try: float | None = None
        # Whether the master was ever connected.
        self._reached = False
        # Runs until a report of results taken is sent on its own.
        self._ack_timer: asyncio.TimerHandle | None = None
        self._ack_now = False
        # Why the master rejected calls that wait to be sent again; and the instant of the last warning about it.
        self._rejected: dict[Call, str] = {}
        self._warned_at = float("-inf")
        # Why the last stream broke, while there is no other.
        self._broken = ""
        # Consecutive streams that ended without a frame; the subset whose status was not UNAVAILABLE.
        self._failures = 0
        self._empty_streams = 0

    def check(self) -> None:
        """As Connection.check."""
        self._connection.check()

    async def start(self, calls: Sequence[Call]) -> None:
        """Starts calls, in order, as soon as the window admits them all."""
        nbytes = sum(call.nbytes for call in calls)
        if not self._window.try_admit(len(calls), nbytes):
            await self._window.admit(len(calls), nbytes)
        self.start_admitted(calls)

    def try_start(self, call: Call) -> bool:
        """Starts a call if the window admits it now."""
        if not self._window.try_admit(1, call.nbytes):
            return False
        self.start_admitted((call,))
        return True

    def start_admitted(self, calls: Sequence[Call]) -> None:
        if self._closed:
            self._window.free(len(calls), sum(call.nbytes for call in calls))
            raise errors.ClientClosedError("this client is closed; make a new one")
        self._state.start(calls)
        self._wake()

    def withdraw(self, call: Call) -> None:
        """The caller has left: the master must cancel the task."""
        self._state.withdraw(call)
        self._wake()

    def withdraw_where(self, condition: Callable[[Call], bool]) -> None:
        """Withdraws every unsettled call that fulfils the condition."""
        for call in self._state.unsettled():
            if condition(call):
                self._state.withdraw(call)
        self._wake()

    def abandon_where(self, condition: Callable[[Call], bool]) -> None:
        """Before closing: withdraws the calls that fulfil the condition, and fails them with ClientClosedError."""
        for call in self._state.unsettled():
            if condition(call):
                self._state.withdraw(call)
                call.settle(closed_error())
        self._wake()

    async def wait_for_cancellations(self, timeout_s: float = _CANCEL_TIMEOUT_S) -> None:
        """Waits until the master has confirmed every withdrawal, for at most `timeout_s`."""
        if self._state.cancelling and self._supervisor is not None and self._reached:
            self._confirmed = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._confirmed], timeout=timeout_s)

    async def close(self) -> None:
        """Ends the stream. Unsettled calls fail with ClientClosedError; their tasks go on in the master."""
        if self._closed:
            return
        await self.wait_for_cancellations()
        self._closed = True
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.wait([supervisor])
        self._state.fail_all(closed_error)

    def _wake(self) -> None:
        self._woken.set()
        if self._supervisor is None and not self._closed:
            self._supervisor = asyncio.get_running_loop().create_task(self._supervise(), name="multigpu run stream")
            self._supervisor.add_done_callback(self._supervisor_ended)

    async def _sleep_until_woken(self) -> None:
        await self._woken.wait()
        self._woken.clear()

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        """It ends by close(), with its event loop, or by a bug: then all calls fail, so that none waits for ever."""
        if self._supervisor is task:
            self._supervisor = None
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            log.error("the run stream ended by an internal error", exc_info=error)
            self._state.fail_all(lambda: errors.TransportError(f"internal error: {error!r}"))

    async def _supervise(self) -> None:
        while True:
            while self._state.idle:
                await self._sleep_until_woken()
            if self._first_try is None:
                self._first_try = time.monotonic()
            try:
                code, details = await self._serve_a_stream()
                await self._recover(code, details)
            except errors.AccessError as error:  # our own token or certificate can't be read
                self._first_try = None
                self._state.fail_all(partial(_access_error, str(error), error.__cause__))

    async def _serve_a_stream(self) -> tuple[grpc.StatusCode, str]:
        """Opens a stream, serves it until it ends, and returns its status and details.

        An error in one of its tasks ends the others, and then the supervisor.
        """
        stream = self._connection.open_run()
        channel = self._connection.channel
        self._state.stream_opened()
        try:
            async with asyncio.TaskGroup() as group:
                offer = group.create_task(self._await_handshake(stream, channel), name="multigpu run stream offer")
                writer = group.create_task(self._write(stream, offer), name="multigpu run stream writer")
                try:
                    while (frame := await stream.read()) is not grpc.aio.EOF:
                        self._received(*frame)
                except grpc.aio.AioRpcError:
                    pass  # stream.code() has the status
                except asyncio.CancelledError:
                    if not cut_off():
                        raise
                writer.cancel()
                offer.cancel()
                stream.cancel()
        finally:
            stream.cancel()
        return await stream.code(), await stream.details() or ""

    async def _await_handshake(self, stream: Any, channel: grpc.aio.Channel | None) -> None:
        """Notes that the master is connected, and what it shares according to the initial metadata."""
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):  # the reader gets the status
            if channel is not None:
                await channel.channel_ready()
            self._reached = True
            self._broken = ""
            self._state.offered(Directory.of(await stream.initial_metadata()))
            self._wake()

    async def _write(self, stream: Any, offer: asyncio.Task[None]) -> None:
        while True:
            if self._state.waits_for_offer:
                await asyncio.wait([offer], timeout=_OFFER_TIMEOUT_S)
            frame = self._state.next_frame(report=self._ack_now)
            self._ack_now = False
            if frame is None:
                await self._sleep_until_woken()
                continue
            pauses = self._state.in_flight >= _PAUSE_CALLS and not self._state.waits_to_send  # else the frame is full
            try:
                await stream.write(frame)
                if pauses:
                    await asyncio.sleep(_PAUSE_S)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the stream is over; the reader gets its status

    def _received(self, response: task_service_pb2.RunResponse, nbytes: int) -> None:
        if self._failures:
            log.info("the stream to the master at %s is back", self._connection.master)
        self._reached = True
        self._failures = self._empty_streams = 0
        retries_by_delay = self._state.receive(response, nbytes)
        if self._state.waits_to_send:
            self._wake()
        sharing = self._state.sharing
        if sharing.report_due:
            self._wake()
        elif sharing.report_pending and self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(_ACK_DELAY_S, self._ack)
        if self._confirmed is not None and not self._state.cancelling:
            if not self._confirmed.done():
                self._confirmed.set_result(None)
            self._confirmed = None
        for delay_s, calls in retries_by_delay.items():
            messages = {rejection.request_id: rejection.message for rejection in response.rejected}
            self._rejected |= {call: messages[call.request_id] for call in calls}
            if time.monotonic() >= self._warned_at + _WARNING_S:
                self._warned_at = time.monotonic()
                why = self._rejected[calls[0]]
                log.warning("the master rejects tasks for now; they are sent again until it accepts them: %s", why)
            asyncio.get_running_loop().call_later(jittered_s(delay_s), self._retry, calls)

    def _ack(self) -> None:
        self._ack_timer = None
        self._ack_now = True
        self._wake()

    def rejection(self, condition: Callable[[Call], bool]) -> str:
        """Why there is no connection, or why the master rejected a call that fulfils the condition and waits to be sent
        again; "": neither.
        """
        return self._broken or next((why for call, why in list(self._rejected.items()) if condition(call)), "")

    def _retry(self, calls: list[Call]) -> None:
        for call in calls:
            self._rejected.pop(call, None)
        self._state.retry(calls)
        self._wake()

    async def _recover(self, code: grpc.StatusCode, details: str) -> None:
        """Waits until another stream can be opened. Fails all calls if that makes no sense."""
        self._failures += 1
        # A restarting master yields UNAVAILABLE, or once INTERNAL if a write was interrupted.
        self._empty_streams = 0 if code is grpc.StatusCode.UNAVAILABLE else self._empty_streams + 1
        if code not in RETRYABLE_CODES or self._empty_streams >= _EMPTY_STREAMS_MAX:
            self._give_up(code, details)
            return
        if self._failures == 1:
            what = "the stream to it broke" if self._reached else "it can't be reached"
            log.warning("master %s: %s (%s: %s); trying again", self._connection.master, what, code.name, details)
        self._broken = str(self._connection.explain(code, details))
        await asyncio.sleep(backoff_s(self._failures))
        if self._reached:
            await self._connection.ready(None)
            return
        assert self._first_try is not None
        left_s = self._first_try + self._connection.connect_timeout_s - time.monotonic()
        if left_s > 0 and await self._connection.ready(left_s):
            self._reached = True
        else:
            self._give_up(grpc.StatusCode.UNAVAILABLE, details)

    def _give_up(self, code: grpc.StatusCode, details: str) -> None:
        self._failures = self._empty_streams = 0
        self._first_try = None
        explain = self._connection.explain
        self._state.fail_all(lambda: explain(code, details))


def closed_error() -> errors.ClientClosedError:
    return errors.ClientClosedError("the client was closed before the task ended; durable tasks go on without it")


def _access_error(text: str, cause: BaseException | None) -> errors.AccessError:
    error = errors.AccessError(text)
    error.__cause__ = cause
    return error
