"""The gRPC service of Triton and of KServe."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from google.protobuf.message import Message
from multigpu import errors
from multigpu.config.config import GatewayConfig

from multigpu_gateway import VERSION
from multigpu_gateway.app import Gateway
from multigpu_gateway.clients import Connected
from multigpu_gateway.grpc_calls import Answer, GrpcCalls
from multigpu_gateway.kserve import models, repository
from multigpu_gateway.kserve import open_inference_pb2 as pb
from multigpu_gateway.kserve.inference import infer
from multigpu_gateway.kserve.statistics import Statistics

SERVICE = "inference.GRPCInferenceService"
# Triton's names of what this service has beyond the protocol.
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "parameters", "schedule_policy",
              "statistics")  # fmt: skip


class InferenceService:
    """The methods of the service. Methods that are not here are UNIMPLEMENTED."""

    def __init__(self, config: GatewayConfig, gateway: Gateway) -> None:
        self._calls = GrpcCalls(SERVICE, config, gateway)
        self._clients = gateway.clients
        self._statistics = Statistics()

    def handlers(self) -> dict[str, Any]:
        """By name, for add_registered_method_handlers."""
        counted = self._statistics

        def of(answer: Callable[[Any, Connected], Awaitable[Message]]) -> Answer:
            return lambda request, connected, _call: answer(request, connected)

        answers: dict[str, tuple[type[Message], Answer]] = {
            "ServerLive": (pb.ServerLiveRequest, of(_live)),
            "ServerReady": (pb.ServerReadyRequest, of(self._ready)),
            "ServerMetadata": (pb.ServerMetadataRequest, of(_metadata)),
            "ModelReady": (pb.ModelReadyRequest, of(models.ready)),
            "ModelMetadata": (pb.ModelMetadataRequest, of(models.metadata)),
            "ModelConfig": (pb.ModelConfigRequest, of(models.config)),
            "ModelStatistics": (pb.ModelStatisticsRequest, of(partial(models.statistics, counted=counted))),
            "ModelInfer": (pb.ModelInferRequest, partial(infer, statistics=counted)),
            "RepositoryIndex": (pb.RepositoryIndexRequest, of(repository.index)),
            "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, repository.load),
            "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, of(repository.unload)),
        }
        unary = self._calls.unary
        return {name: unary(name, request_type, answer) for name, (request_type, answer) in answers.items()}

    async def _ready(self, _request: pb.ServerReadyRequest, _connected: Connected) -> pb.ServerReadyResponse:
        try:
            await self._clients.check_master()
        except errors.MultigpuError:
            return pb.ServerReadyResponse(ready=False)
        return pb.ServerReadyResponse(ready=True)


async def _live(_request: pb.ServerLiveRequest, _connected: Connected) -> pb.ServerLiveResponse:
    return pb.ServerLiveResponse(live=True)


async def _metadata(_request: pb.ServerMetadataRequest, _connected: Connected) -> pb.ServerMetadataResponse:
    return pb.ServerMetadataResponse(name="multigpu", version=VERSION, extensions=EXTENSIONS)
