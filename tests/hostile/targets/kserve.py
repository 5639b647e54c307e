"""The gateway's gRPC services, over a real connection, with a real master and no worker behind: messages with extreme
values, and damaged ones.
"""

import asyncio
from typing import Any

import grpc
from multigpu.config.config import GatewayConfig
from multigpu_gateway.app import Gateway
from multigpu_gateway.grpc_server import GrpcServer
from multigpu_gateway.kserve import open_inference_pb2 as pb
from multigpu_gateway.kserve.service import SERVICE
from multigpu_gateway.tei import tei_pb2 as tei_pb

from tests.hostile.targets.base import Crash, Target
from tests.hostile.targets.inputs import Maker
from tests.hostile.targets.master import LocalMaster

# By the name of the service and the method: a request and its answer. A task waits for a worker that never comes.
_INFERENCE = (
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics",
    "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "ModelInfer",
)  # fmt: skip
CALLS: dict[str, tuple[Any, Any]] = {
    f"{SERVICE}/{name}": (getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response")) for name in _INFERENCE
} | {
    "tei.v1.Info/Info": (tei_pb.InfoRequest, tei_pb.InfoResponse),
    "tei.v1.Embed/Embed": (tei_pb.EmbedRequest, tei_pb.EmbedResponse),
    "tei.v1.Embed/EmbedAll": (tei_pb.EmbedAllRequest, tei_pb.EmbedAllResponse),
    "tei.v1.Embed/EmbedSparse": (tei_pb.EmbedSparseRequest, tei_pb.EmbedResponse),
    "tei.v1.Predict/Predict": (tei_pb.PredictRequest, tei_pb.PredictResponse),
    "tei.v1.Predict/PredictPair": (tei_pb.PredictPairRequest, tei_pb.PredictResponse),
    "tei.v1.Rerank/Rerank": (tei_pb.RerankRequest, tei_pb.RerankResponse),
    "tei.v1.Rerank/RerankStream": (tei_pb.RerankStreamRequest, tei_pb.RerankResponse),
    "tei.v1.Tokenize/Tokenize": (tei_pb.EncodeRequest, tei_pb.EncodeResponse),
    "tei.v1.Tokenize/Decode": (tei_pb.DecodeRequest, tei_pb.DecodeResponse),
}
METHODS = sorted(CALLS)
INFER = METHODS.index(f"{SERVICE}/ModelInfer")
DEADLINE_S = 0.05
BLAMES_THE_GATEWAY = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class LocalInference:
    """Runs on the master's loop."""

    def __init__(self, master: LocalMaster) -> None:
        self._loop = master.loop
        config = GatewayConfig(master=master.master.address, grpc="127.0.0.1:0", body_bytes_max=1 << 20)
        self._gateway = Gateway(config)
        self._loop.run_until_complete(self._start(config))

    async def _start(self, config: GatewayConfig) -> None:
        self._server = GrpcServer(config, self._gateway)
        self._channel = grpc.aio.insecure_channel(await self._server.start())
        self._serving = asyncio.create_task(self._server.serve())

    def close(self) -> None:
        self._loop.run_until_complete(self._close())

    async def _close(self) -> None:
        await self._channel.close()
        self._server.stop()
        await self._serving
        await self._gateway.close()

    def feed(self, data: bytes) -> None:
        name = METHODS[data[0] % len(METHODS) if data else INFER]
        self._loop.run_until_complete(self._call(name, data[1:]))

    async def _call(self, name: str, data: bytes) -> None:
        call: Any = self._channel.unary_unary(f"/{name}")
        try:
            answer = await call(data, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in BLAMES_THE_GATEWAY or "Traceback" in (error.details() or ""):
                raise Crash(f"{name}: {error.code().name}: {error.details()}") from None
        else:
            CALLS[name][1].FromString(answer)


def _make(maker: Maker) -> bytes:
    number = maker.rng.choice((INFER, maker.rng.randrange(len(METHODS))))
    return bytes([number]) + maker.wire(CALLS[METHODS[number]][0].DESCRIPTOR)


def targets(local: LocalInference) -> list[Target]:
    return [Target(name="a call of the gateway over gRPC", make=_make, feed=local.feed)]
