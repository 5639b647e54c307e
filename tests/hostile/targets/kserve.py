"""The gateway's gRPC service, over a real connection, with a real master and no worker behind: messages with extreme
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

from tests.hostile.targets.base import Crash, Target
from tests.hostile.targets.inputs import Maker
from tests.hostile.targets.master import LocalMaster

# Requests by method; a task waits for a worker that never comes.
REQUESTS = {
    "ServerLive": pb.ServerLiveRequest, "ServerReady": pb.ServerReadyRequest, "ModelReady": pb.ModelReadyRequest,
    "ServerMetadata": pb.ServerMetadataRequest, "ModelMetadata": pb.ModelMetadataRequest,
    "ModelConfig": pb.ModelConfigRequest, "ModelStatistics": pb.ModelStatisticsRequest,
    "RepositoryIndex": pb.RepositoryIndexRequest, "RepositoryModelLoad": pb.RepositoryModelLoadRequest,
    "RepositoryModelUnload": pb.RepositoryModelUnloadRequest, "ModelInfer": pb.ModelInferRequest,
}  # fmt: skip
METHODS = sorted(REQUESTS)
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
        name = METHODS[data[0] % len(METHODS)] if data else "ModelInfer"
        self._loop.run_until_complete(self._call(name, data[1:]))

    async def _call(self, name: str, data: bytes) -> None:
        call: Any = self._channel.unary_unary(f"/{SERVICE}/{name}")
        try:
            answer = await call(data, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in BLAMES_THE_GATEWAY or "Traceback" in (error.details() or ""):
                raise Crash(f"{name}: {error.code().name}: {error.details()}") from None
        else:
            getattr(pb, f"{name}Response").FromString(answer)


def _make(maker: Maker) -> bytes:
    number = maker.rng.choice((METHODS.index("ModelInfer"), maker.rng.randrange(len(METHODS))))
    return bytes([number]) + maker.wire(REQUESTS[METHODS[number]].DESCRIPTOR)


def targets(local: LocalInference) -> list[Target]:
    return [Target(name="a call of KServe's protocol", make=_make, feed=local.feed)]
