"""Method handlers for the gateway's gRPC services: tokens, timeouts, errors and metrics of calls.

Every method is registered as one that takes a stream of requests (see multigpu/daemon/grpc_server.py), so that this
module or the method itself reads them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from multigpu.config.config import GatewayConfig

from multigpu_gateway.clients import ClientPair, Clients
from multigpu_gateway.errors import INTERNAL, HttpError, http_error
from multigpu_gateway.http import token_of
from multigpu_gateway.metrics import Metrics

M = TypeVar("M", bound=Message)

log = structlog.get_logger()

# A client may set any deadline. Its timeout is cut to this.
TIMEOUT_MAX_S = 86_400.0
MESSAGE_CHARS_MAX = 2_000
# Requests of one stream that run at once.
STREAM_REQUESTS_MAX = 64
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    424: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class GrpcCall:
    """The metadata and the timeout of a call. Implements tasks.Call."""

    def __init__(self, context: Any, timeout_s: float) -> None:
        """`timeout_s`: the timeout if the call has no deadline."""
        self._metadata = dict(context.invocation_metadata() or ())
        left_s = context.time_remaining()
        self.timeout_s = timeout_s if left_s is None else min(left_s, TIMEOUT_MAX_S)

    def header(self, name: bytes) -> str:
        value = self._metadata.get(name.decode(), "")
        return value if isinstance(value, str) else ""

    @property
    def token(self) -> str:
        """The token of the call; "" if it has none. Raises HttpError if the authorization is not `Bearer TOKEN`."""
        return token_of(self.header(b"authorization"))


Handler = Callable[[Any, ClientPair, GrpcCall], Awaitable[Message]]
# Reads its requests from the context. Returns the response, or None if it has written its responses to the context.
StreamHandler = Callable[[Any, ClientPair], Awaitable[Message | None]]


class GrpcCalls:
    """Makes the handlers of one service, for add_registered_method_handlers."""

    def __init__(self, service: str, config: GatewayConfig, clients: Clients, metrics: Metrics) -> None:
        """`service`: its full name, with the package."""
        self._service, self._config = service, config
        self._clients, self._metrics = clients, metrics

    def unary(self, name: str, request_type: type[Message], handler: Handler) -> Any:
        """A method with one request and one response."""
        return self.stream_unary(name, partial(self._respond, request_type, handler))

    def stream_unary(self, name: str, handler: StreamHandler) -> Any:
        """A method with many requests and one response."""
        serve = partial(self._serve, name, handler)
        return grpc.stream_unary_rpc_method_handler(serve, response_serializer=_serialized)

    def stream_stream(self, name: str, handler: StreamHandler) -> Any:
        """A method with many requests and many responses, which `handler` writes to its context."""
        serve = partial(self._serve, name, handler)
        return grpc.stream_stream_rpc_method_handler(serve, response_serializer=_serialized)

    def stream(self, name: str, request_type: type[Message], handler: Handler) -> Any:
        """A method that responds to each of many requests, in their order. An error ends the stream."""
        return self.stream_stream(name, partial(self._respond_each, request_type, handler))

    def call_of(self, context: Any) -> GrpcCall:
        """Returns the metadata of a call, and its timeout counted from now."""
        return GrpcCall(context, self._config.request_timeout_s)

    async def _respond(self, request_type: type[Message], handler: Handler, context: Any, pair: ClientPair) -> Message:
        data = await context.read()
        return await handler(parsed(request_type, data), pair, self.call_of(context))

    async def _respond_each(
        self, request_type: type[Message], handler: Handler, context: Any, pair: ClientPair
    ) -> None:
        """Runs the requests concurrently, and writes the responses in their order. While STREAM_REQUESTS_MAX requests
        have no response written, the next is not read.
        """
        free = asyncio.Semaphore(STREAM_REQUESTS_MAX)
        running: asyncio.Queue[asyncio.Task[Message | Exception] | None] = asyncio.Queue()

        async def run(data: bytes) -> Message | Exception:
            """Returns an error instead of raising it, so that it is reported in the order of the requests."""
            try:
                return await handler(parsed(request_type, data), pair, self.call_of(context))
            except Exception as error:  # noqa: BLE001  `write` raises it
                return error

        async def write() -> None:
            while (task := await running.get()) is not None:
                response = await task
                if isinstance(response, Exception):
                    raise response
                await context.write(response)  # waits while the client reads too slowly
                del task, response
                free.release()

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(write())
                await read_requests(context, free, lambda data: running.put_nowait(group.create_task(run(data))))
                running.put_nowait(None)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _serve(self, name: str, handler: StreamHandler, _requests: object, context: Any) -> Message | None:
        began_s = time.perf_counter()
        self._metrics.begun()
        code = grpc.StatusCode.CANCELLED
        try:
            try:
                async with self._clients.acquire(self.call_of(context).token) as pair:
                    response = await handler(context, pair)
            except grpc.aio.InternalError as error:  # gRPC could not send: the client has disconnected
                raise asyncio.CancelledError from error
            except Exception as error:  # noqa: BLE001  status_of logs unexpected errors
                code, text = status_of(error, name)
                # The traceback's frames refer to the request, and would keep it in memory.
                error.__traceback__ = error.__context__ = error.__cause__ = None
            else:
                code = grpc.StatusCode.OK
                return response
            await context.abort(code, text)
        finally:
            self._metrics.ended(f"/{self._service}/{name}", code.name, time.perf_counter() - began_s)
        return None


async def read_requests(context: Any, free: asyncio.Semaphore, start: Callable[[bytes], object]) -> None:
    """Calls `start` with each request of a stream. Acquires `free` before it reads a request: the end of the request
    releases it.
    """
    while True:
        await free.acquire()
        if (data := await context.read()) is grpc.aio.EOF:
            return
        start(data)
        del data  # a request may be large, and the next one may come late


def parsed(request_type: type[M], data: Any) -> M:
    """Returns the message in `data`, an empty one if `data` is EOF. Raises HttpError if `data` can't be parsed."""
    try:
        return request_type.FromString(b"" if data is grpc.aio.EOF else data)
    except DecodeError as error:
        raise HttpError(400, f"the request is no {request_type.DESCRIPTOR.name}: {error}") from None


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def status_of(error: Exception, name: str) -> tuple[grpc.StatusCode, str]:
    """Returns the status and message for an error of a call. Logs an error that is a defect of the gateway."""
    try:
        failure = http_error(error)
    except Exception:
        log.exception("a call failed", method=name)
        failure = HttpError(INTERNAL, "the gateway failed: its log says why")
    code = grpc.StatusCode.CANCELLED if failure.code == "cancelled" else CODES[failure.status]
    return code, failure.message[:MESSAGE_CHARS_MAX]
