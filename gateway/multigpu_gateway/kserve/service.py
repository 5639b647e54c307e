"""The gRPC service of Triton and of KServe: calls, their callers, their errors.

To gRPC every method takes a stream of requests (see multigpu/daemon/grpc_server.py): its one request is read here.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from multigpu import errors
from multigpu.config.config import GatewayConfig

from multigpu_gateway.app import Gateway
from multigpu_gateway.clients import Connected
from multigpu_gateway.errors import INTERNAL, HttpError, http_error
from multigpu_gateway.http import token_of
from multigpu_gateway.kserve import inference, models, repository
from multigpu_gateway.kserve import open_inference_pb2 as pb
from multigpu_gateway.kserve.shared_memory import cuda_status, cuda_unregister
from multigpu_gateway.kserve.tensors import response_of

M = TypeVar("M", bound=Message)

log = structlog.get_logger()

SERVICE = "inference.GRPCInferenceService"
# A client's deadline may be endless.
TIMEOUT_MAX_S = 86_400.0
MESSAGE_CHARS_MAX = 2_000
# Of one ModelStreamInfer.
STREAM_REQUESTS_MAX = 64
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ALREADY_EXISTS,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class GrpcCall:
    """What a call says beside its request: a Call of tasks.py."""

    def __init__(self, context: Any, timeout_s: float) -> None:
        """`timeout_s`: for a call without a deadline."""
        self._metadata = dict(context.invocation_metadata() or ())
        left_s = context.time_remaining()
        self.timeout_s = timeout_s if left_s is None else min(left_s, TIMEOUT_MAX_S)

    def header(self, name: bytes) -> str:
        value = self._metadata.get(name.decode(), "")
        return value if isinstance(value, str) else ""

    @property
    def token(self) -> str:
        """The caller's token; empty: none. HttpError: it can't be read."""
        return token_of(self.header(b"authorization"))


Answer = Callable[[Any, Connected, GrpcCall], Awaitable[Message]]


class InferenceService:
    """The methods of the service. Methods that are not here are UNIMPLEMENTED."""

    def __init__(self, config: GatewayConfig, gateway: Gateway) -> None:
        self._config = config
        self._clients, self._metrics = gateway.clients, gateway.metrics
        self._inference = gateway.inference

    def handlers(self) -> dict[str, Any]:
        """By name, for add_registered_method_handlers."""
        counted = self._inference.statistics

        def of(answer: Callable[[Any, Connected], Awaitable[Message]]) -> Answer:
            return lambda request, connected, _call: answer(request, connected)

        answers: dict[str, tuple[type[Message], Answer]] = {
            "ServerLive": (pb.ServerLiveRequest, of(_live)),
            "ServerReady": (pb.ServerReadyRequest, of(self._ready)),
            "ServerMetadata": (pb.ServerMetadataRequest, of(self._metadata)),
            "ModelReady": (pb.ModelReadyRequest, of(models.ready)),
            "ModelMetadata": (pb.ModelMetadataRequest, of(models.metadata)),
            "ModelConfig": (pb.ModelConfigRequest, of(models.config)),
            "ModelStatistics": (pb.ModelStatisticsRequest, of(partial(models.statistics, counted=counted))),
            "ModelInfer": (pb.ModelInferRequest, self._infer),
            "RepositoryIndex": (pb.RepositoryIndexRequest, of(repository.index)),
            "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, repository.load),
            "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, of(repository.unload)),
        }
        if (regions := self._inference.regions) is not None:
            answers |= {
                "SystemSharedMemoryStatus": (pb.SystemSharedMemoryStatusRequest, of(regions.status)),
                "SystemSharedMemoryRegister": (pb.SystemSharedMemoryRegisterRequest, of(regions.register)),
                "SystemSharedMemoryUnregister": (pb.SystemSharedMemoryUnregisterRequest, of(regions.unregister)),
                "CudaSharedMemoryStatus": (pb.CudaSharedMemoryStatusRequest, of(cuda_status)),
                "CudaSharedMemoryUnregister": (pb.CudaSharedMemoryUnregisterRequest, of(cuda_unregister)),
            }
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(
                partial(self._serve, name, partial(self._answer, request_type, answer)),
                response_serializer=_serialized,
            )
            for name, (request_type, answer) in answers.items()
        }
        stream = partial(self._serve, "ModelStreamInfer", self._answer_stream)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(stream, response_serializer=_serialized)
        return handlers

    async def _serve(
        self, name: str, answer: Callable[[Any, Connected], Awaitable[Message | None]], _requests: object, context: Any
    ) -> Message | None:
        began_s = time.perf_counter()
        self._metrics.begun()
        code = grpc.StatusCode.CANCELLED
        try:
            try:
                async with self._clients.of(self._call(context).token) as connected:
                    response = await answer(context, connected)
            except grpc.aio.InternalError as error:  # gRPC could not send: the peer is gone
                raise asyncio.CancelledError from error
            except Exception as error:  # noqa: BLE001  the caller gets a status, and the log the reason
                code, text = status_of(error, name)
                # The frames of the traceback keep the request.
                error.__traceback__ = error.__context__ = error.__cause__ = None
            else:
                code = grpc.StatusCode.OK
                return response
            await context.abort(code, text)
        finally:
            self._metrics.ended(f"/{SERVICE}/{name}", code.name, time.perf_counter() - began_s)
        return None

    def _call(self, context: Any) -> GrpcCall:
        return GrpcCall(context, self._config.request_timeout_s)

    async def _answer(self, request_type: type[Message], answer: Answer, context: Any, connected: Connected) -> Message:
        data = await context.read()
        return await answer(_parsed(request_type, data), connected, self._call(context))

    async def _answer_stream(self, context: Any, connected: Connected) -> None:
        """ModelStreamInfer: the requests run together, and an error ends its request alone. At most STREAM_REQUESTS_MAX
        run: the next ones are not read before.
        """
        free = asyncio.Semaphore(STREAM_REQUESTS_MAX)
        writing = asyncio.Lock()

        async def write(response: pb.ModelStreamInferResponse) -> None:
            async with writing:  # waits while the reader is slow
                await context.write(response)

        async def serve(data: bytes) -> None:
            request = pb.ModelInferRequest()
            try:
                request = _parsed(pb.ModelInferRequest, data)
                answers = self._inference.stream(request, connected, self._call(context))
                async with aclosing(answers):
                    async for answer in answers:
                        await write(_streamed(request, answer))
            except grpc.aio.InternalError as error:  # the peer is gone
                raise asyncio.CancelledError from error
            except Exception as error:  # noqa: BLE001  the caller gets a message, and the log the reason
                _, text = status_of(error, "ModelStreamInfer")
                identity = pb.ModelInferResponse(id=request.id)
                await write(pb.ModelStreamInferResponse(error_message=text, infer_response=identity))
            finally:
                free.release()

        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await free.acquire()
                    if (data := await context.read()) is grpc.aio.EOF:
                        break
                    group.create_task(serve(data))
                    del data
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _infer(self, request: pb.ModelInferRequest, connected: Connected, call: GrpcCall) -> Message:
        outputs = await self._inference.run(request, request.raw_input_contents, connected, call)
        return response_of(request, outputs)

    async def _metadata(self, _request: pb.ServerMetadataRequest, _connected: Connected) -> pb.ServerMetadataResponse:
        return models.server_metadata(shared_memory=self._inference.regions is not None)

    async def _ready(self, _request: pb.ServerReadyRequest, _connected: Connected) -> pb.ServerReadyResponse:
        try:
            await self._clients.check_master()
        except errors.MultigpuError:
            return pb.ServerReadyResponse(ready=False)
        return pb.ServerReadyResponse(ready=True)


async def _live(_request: pb.ServerLiveRequest, _connected: Connected) -> pb.ServerLiveResponse:
    return pb.ServerLiveResponse(live=True)


def _streamed(request: pb.ModelInferRequest, answer: inference.Answer) -> pb.ModelStreamInferResponse:
    response = response_of(request, answer.outputs)
    response.parameters["triton_final_response"].bool_param = answer.final
    return pb.ModelStreamInferResponse(infer_response=response)


def _parsed(request_type: type[M], data: Any) -> M:
    """HttpError: it is no such message."""
    try:
        return request_type.FromString(b"" if data is grpc.aio.EOF else data)
    except DecodeError as error:
        raise HttpError(400, f"the request is no {request_type.DESCRIPTOR.name}: {error}") from None


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def status_of(error: Exception, name: str) -> tuple[grpc.StatusCode, str]:
    """The status and message of a call that failed. Logs an error that neither the caller nor the fleet caused."""
    try:
        failure = http_error(error)
    except Exception:
        log.exception("a call failed", method=name)
        failure = HttpError(INTERNAL, "the gateway failed: its log says why")
    code = grpc.StatusCode.CANCELLED if failure.code == "cancelled" else CODES[failure.status]
    return code, failure.message[:MESSAGE_CHARS_MAX]
