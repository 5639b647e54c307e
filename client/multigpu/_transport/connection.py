"""One channel to one master, and the errors of calls on it.

Unary calls are safe to repeat (submits carry request_ids), but for a few of AdminService. So while the master doesn't
answer they are repeated, with backoff and full jitter, until `connect_timeout_s` or the timeout of the call is over: a
restart of the master is invisible. The Run and Watch streams reconnect by themselves.
"""

import asyncio
import contextlib
import math
import random
import time
from typing import Any

import grpc
import grpc.aio

from multigpu import errors
from multigpu._transport import forks
from multigpu._transport.credentials import Credentials
from multigpu.config.config import ConfigError
from multigpu.v1 import task_service_pb2, task_service_pb2_grpc

MESSAGE_BYTES_MAX = 64 << 20
_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),  # masters are in the local network, and proxies for the web are not for them
    # A vanished master is noticed within 15 s; the master permits these pings.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # How soon a broken connection is tried again.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
# How long one attempt to connect may take; longer where `connect_timeout_s` is, which may be infinite.
_ATTEMPT_S, _ATTEMPT_MAX_S = 5.0, 60.0
# While there is no connection, certificates are looked at this often.
_RENEWAL_S = 5.0
# Statuses that say nothing about the call: the connection or the master went away, or is about to.
RETRYABLE_CODES = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
    }
)
# The call was not served. A gRPC server with too many waiting calls ends some as CANCELLED unread. (A caller who
# cancels gets asyncio.CancelledError instead.)
_REPEATED = frozenset({grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE})
# Not to be repeated: a second call would make another token, or not find what the first has taken away.
_ONCE = frozenset({"CreateToken", "RevokeToken", "RequeueDeadLetters"})
_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 2.0
# Unary calls are answered at once, or after one fsync.
UNARY_TIMEOUT_S = 60.0


def backoff_s(failures: int) -> float:
    """How long to wait after this many consecutive failures: full jitter under a doubling limit."""
    return random.uniform(0, min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2 ** min(failures - 1, 10)))  # noqa: S311  no secret


def jittered_s(delay_s: float) -> float:
    """A delay that the master asked for, plus up to half of it, so that many clients don't return at once."""
    return delay_s * random.uniform(1, 1.5)  # noqa: S311  no secret


def cut_off() -> bool:
    """Of a CancelledError: whether gRPC raised it, as the channel was closed, and nobody cancels this task."""
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


class Connection:
    def __init__(self, master: str, connect_timeout_s: float, credentials: Credentials | None = None) -> None:
        self.master = master
        self.credentials = credentials or Credentials()
        self.connect_timeout_s = connect_timeout_s
        self.closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._stamp = b""  # of the files that the channel was made from
        self._closing: set[asyncio.Task[None]] = set()

    def check(self) -> None:
        """ClientClosedError: it is closed, or belongs to another process or event loop than the running one."""
        if self.closed:
            raise errors.ClientClosedError("this client is closed; make a new one")
        forks.check()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if loop is not self._loop:
            raise errors.ClientClosedError("this AsyncClient belongs to another event loop; make one for each loop")

    @property
    def stub(self) -> Any:
        """The TaskService stub. Its first use opens the channel, which belongs to the running event loop."""
        self.check()
        if self._channel is None:
            forks.uses()
            self._stamp = self.credentials.stamp()
            try:
                attempt_ms = int(min(max(_ATTEMPT_S, self.connect_timeout_s), _ATTEMPT_MAX_S) * 1000)
                options = (*_OPTIONS, ("grpc.min_reconnect_backoff_ms", attempt_ms))
                self._channel = self.credentials.channel(self.master, options, grpc.aio)
            except ConfigError as error:
                raise errors.AccessError(str(error)) from error
            self._stub = task_service_pb2_grpc.TaskServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        return self._stub

    @property
    def channel(self) -> grpc.aio.Channel | None:
        """The channel of the last stream that was opened, until the next refresh(). None: there is none."""
        return self._channel

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """The metadata of every call: the token, if there is one. AccessError: it can't be read."""
        try:
            return self.credentials.metadata(self.master)
        except ConfigError as error:
            raise errors.AccessError(str(error)) from error

    def refresh(self) -> None:
        """After a failure: gives the next call a new channel if certificates were renewed meanwhile."""
        old = self._channel
        if old is not None and self._stamp and self.credentials.stamp() not in (b"", self._stamp):
            self._channel = None
            # Unary calls may end on the old one. Streams are cut off then, and open again on the new one.
            closing = asyncio.get_running_loop().create_task(old.close(UNARY_TIMEOUT_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def open_run(self) -> Any:
        """A new Run stream. It takes serialized RunRequests, and is read as pairs of RunResponse and the size of its
        frame.
        """
        self.refresh()
        assert self.stub is not None
        assert self._channel is not None
        multicallable = self._channel.stream_stream(
            "/multigpu.v1.TaskService/Run",
            response_deserializer=_sized_response,
        )
        return multicallable(metadata=self.metadata())

    async def ready(self, timeout_s: float | None) -> bool:
        """Waits until there is a connection, with the certificates that the files have then. False: not in time.

        Raises as `stub`.
        """
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.refresh()
            assert self.stub is not None
            channel = self._channel
            assert channel is not None
            with contextlib.suppress(TimeoutError, grpc.aio.UsageError):  # UsageError: a call has renewed the channel
                await asyncio.wait_for(channel.channel_ready(), min(_RENEWAL_S, end - time.monotonic()))
                return True
            if time.monotonic() >= end:
                return False

    @property
    def admin(self) -> Any:
        """The AdminService stub."""
        assert self.stub is not None
        from multigpu.v1.admin_service_pb2_grpc import AdminServiceStub  # noqa: PLC0415  few programs need it

        return AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    async def unary(
        self, method: str, request: Any, timeout_s: float = UNARY_TIMEOUT_S, *, service: str = "stub"
    ) -> Any:
        """Calls a method of a service by name. `timeout_s`: of all its attempts together. Raises MultigpuErrors."""
        end = time.monotonic() + timeout_s
        give_up = min(end, time.monotonic() + self.connect_timeout_s)
        failures = 0
        not_repeatable = method in _ONCE and await self.ready(min(timeout_s, self.connect_timeout_s))
        while True:
            try:
                call = getattr(getattr(self, service), method)
                return await call(request, timeout=max(0.0, end - time.monotonic()), metadata=self.metadata())
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details()
            except asyncio.CancelledError:
                if not cut_off():
                    raise
                if self.closed:
                    raise errors.ClientClosedError("the client was closed before the call ended") from None
                # refresh() replaced the channel.
                code, details = grpc.StatusCode.UNAVAILABLE, "the connection was closed"
            failures += 1
            delay_s = backoff_s(failures)
            if not_repeatable and code in _REPEATED:
                failure = self.explain(grpc.StatusCode.UNAVAILABLE, details)
                raise errors.UnavailableError(f"{failure}; the master may have done it: look before you repeat it")
            if code not in _REPEATED or time.monotonic() + delay_s > give_up:
                if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise self.late(timeout_s)
                failure = self.explain(code, details, task=service == "stub")
                if give_up == end and isinstance(failure, errors.UnavailableError):
                    late = f"no answer within {round(timeout_s, 2):g} s (timeout): {failure}"
                    raise errors.CallTimeoutError(late)
                raise failure
            self.refresh()
            await asyncio.sleep(delay_s)

    def late(self, timeout_s: float) -> errors.CallTimeoutError:
        """The error of a call that the master has not answered in time."""
        what = f"the master at {self.master} did not answer within {round(timeout_s, 2):g} s (timeout)"
        return errors.CallTimeoutError(f"{what}; is it stopped or overloaded?")

    def explain(self, code: grpc.StatusCode, details: str | None, *, task: bool = True) -> errors.MultigpuError:
        """The error to raise for a status. `task`: of a call about tasks."""
        text = details or code.name
        if not task and code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
            return errors.InvalidRequestError(text)
        match code:
            case grpc.StatusCode.UNAVAILABLE:
                return errors.UnavailableError(unavailable(self.master, text, self.credentials))
            case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
                denied = code is grpc.StatusCode.PERMISSION_DENIED
                return errors.AccessError(f"the master at {self.master} rejected the call: {text}", denied=denied)
            case grpc.StatusCode.NOT_FOUND:
                return errors.NotFoundError(text)
            case grpc.StatusCode.OUT_OF_RANGE:
                return errors.CursorExpiredError(text)
            case grpc.StatusCode.INVALID_ARGUMENT:
                return errors.InvalidTaskError(errors.INVALID_ARGUMENT, text)
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return errors.ResourceExhaustedError(errors.RESOURCE_EXHAUSTED, text)
            case grpc.StatusCode.UNIMPLEMENTED:
                return errors.TransportError(f"what listens at {self.master} is no multigpu master: {text}")
        return errors.TransportError(f"the call to {self.master} failed with {code.name}: {text}")

    async def close(self) -> None:
        self.closed = True
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


def unavailable(address: str, details: str, credentials: Credentials) -> str:
    """A message for the status UNAVAILABLE: why there is no connection, and what to do."""
    ca, host = credentials.tls_ca, address.rpartition(":")[0].strip("[]")
    if "resolving" in details or "resolution" in details:
        return f"the host name in the address {address} is not known: correct it, or its DNS entry ({details})"
    if ca and "WRONG_VERSION_NUMBER" in details:
        return f"what listens at {address} speaks no TLS: leave tls_ca out ({details})"
    if "Hostname Verification" in details:
        remedy = f"use an address that it names, or make one with `mgpuctl certs issue DIR master --host {host}`"
        return f"the certificate of the master at {address} is for other names: {remedy} ({details})"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"the certificate of the master at {address} has expired, or is not of the authority in {ca} ({details})"
    if "security handshaker" in details:
        return "tls_ca, tls_cert and tls_key can't be used: one is damaged, or the key is of another certificate"
    if "Socket closed" in details:
        needed = "tls_cert and tls_key, of its own authority" if ca else "TLS: set tls_ca"
        return f"what listens at {address} closes the connection: perhaps it asks for {needed} ({details})"
    if "failed to connect" in details:
        reason = "connection refused" if "refused" in details.lower() else details
        return f"no master at {address}: {reason}; start one with `mgpuctl up`"
    return f"the master at {address} is not available: {details}"


def _sized_response(frame: bytes) -> tuple[task_service_pb2.RunResponse, int]:
    # A message can tell its size only by serialising itself again.
    return task_service_pb2.RunResponse.FromString(frame), len(frame)
