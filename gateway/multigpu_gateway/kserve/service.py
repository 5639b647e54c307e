"""The gRPC service of Triton and of KServe."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message
from multigpu import errors
from multigpu.config.config import GatewayConfig

from multigpu_gateway.clients import ClientPair, Clients
from multigpu_gateway.grpc_calls import (
    STREAM_REQUESTS_MAX,
    GrpcCall,
    GrpcCalls,
    Handler,
    parsed,
    read_requests,
    status_of,
)
from multigpu_gateway.kserve import inference, models, repository
from multigpu_gateway.kserve import open_inference_pb2 as pb
from multigpu_gateway.kserve.shared_memory import cuda_status, cuda_unregister
from multigpu_gateway.kserve.tensors import response_of
from multigpu_gateway.metrics import Metrics

SERVICE = "inference.GRPCInferenceService"


class InferenceService:
    """The methods of the service. Methods that are not here are UNIMPLEMENTED."""

    def __init__(
        self, config: GatewayConfig, clients: Clients, metrics: Metrics, inference: inference.Inference
    ) -> None:
        self._calls = GrpcCalls(SERVICE, config, clients, metrics)
        self._clients = clients
        self._inference = inference

    def handlers(self) -> dict[str, Any]:
        """Returns the handlers by method name, for add_registered_method_handlers."""
        counted = self._inference.statistics

        def of(respond: Callable[[Any, ClientPair], Awaitable[Message]]) -> Handler:
            return lambda request, pair, _call: respond(request, pair)

        methods: dict[str, tuple[type[Message], Handler]] = {
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
            methods |= {
                "SystemSharedMemoryStatus": (pb.SystemSharedMemoryStatusRequest, of(regions.status)),
                "SystemSharedMemoryRegister": (pb.SystemSharedMemoryRegisterRequest, of(regions.register)),
                "SystemSharedMemoryUnregister": (pb.SystemSharedMemoryUnregisterRequest, of(regions.unregister)),
                "CudaSharedMemoryStatus": (pb.CudaSharedMemoryStatusRequest, of(cuda_status)),
                "CudaSharedMemoryUnregister": (pb.CudaSharedMemoryUnregisterRequest, of(cuda_unregister)),
            }
        unary = self._calls.unary
        handlers = {name: unary(name, request_type, handler) for name, (request_type, handler) in methods.items()}
        handlers["ModelStreamInfer"] = self._calls.stream_stream("ModelStreamInfer", self._serve_stream)
        return handlers

    async def _serve_stream(self, context: Any, pair: ClientPair) -> None:
        """ModelStreamInfer: runs the requests of a stream concurrently. An error of a request is sent as a message, and
        does not end the stream. While STREAM_REQUESTS_MAX requests run, the next is not read.
        """
        free = asyncio.Semaphore(STREAM_REQUESTS_MAX)
        writing = asyncio.Lock()

        async def write(response: pb.ModelStreamInferResponse) -> None:
            async with writing:  # `write` waits while the client reads too slowly
                await context.write(response)

        async def serve(data: bytes) -> None:
            request = pb.ModelInferRequest()
            try:
                request = parsed(pb.ModelInferRequest, data)
                answers = self._inference.stream(request, pair, self._calls.call_of(context))
                async with aclosing(answers):
                    async for answer in answers:
                        await write(_streamed(request, answer))
            except grpc.aio.InternalError as error:  # the client has disconnected
                raise asyncio.CancelledError from error
            except Exception as error:  # noqa: BLE001  status_of logs unexpected errors
                _, text = status_of(error, "ModelStreamInfer")
                identity = pb.ModelInferResponse(id=request.id)
                await write(pb.ModelStreamInferResponse(error_message=text, infer_response=identity))
            finally:
                free.release()

        try:
            async with asyncio.TaskGroup() as group:
                await read_requests(context, free, lambda data: group.create_task(serve(data)))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _infer(self, request: pb.ModelInferRequest, pair: ClientPair, call: GrpcCall) -> Message:
        outputs = await self._inference.run(request, request.raw_input_contents, pair, call)
        return response_of(request, outputs)

    async def _metadata(self, _request: pb.ServerMetadataRequest, _pair: ClientPair) -> pb.ServerMetadataResponse:
        return models.server_metadata(shared_memory=self._inference.regions is not None)

    async def _ready(self, _request: pb.ServerReadyRequest, _pair: ClientPair) -> pb.ServerReadyResponse:
        try:
            await self._clients.check_master()
        except errors.MultigpuError:
            return pb.ServerReadyResponse(ready=False)
        return pb.ServerReadyResponse(ready=True)


async def _live(_request: pb.ServerLiveRequest, _pair: ClientPair) -> pb.ServerLiveResponse:
    return pb.ServerLiveResponse(live=True)


def _streamed(request: pb.ModelInferRequest, answer: inference.Answer) -> pb.ModelStreamInferResponse:
    response = response_of(request, answer.outputs)
    response.parameters["triton_final_response"].bool_param = answer.final
    return pb.ModelStreamInferResponse(infer_response=response)
