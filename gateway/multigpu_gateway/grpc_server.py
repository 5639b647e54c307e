"""The gateway's gRPC server."""

import asyncio
from pathlib import Path

import grpc
from multigpu.config.config import ConfigError, GatewayConfig
from multigpu.daemon.grpc_server import Server

from multigpu_gateway.app import Gateway
from multigpu_gateway.kserve.service import SERVICE, InferenceService
from multigpu_gateway.tei import service as tei


class GrpcServer:
    """Serves KServe's and TEI's gRPC services at config.grpc."""

    def __init__(self, config: GatewayConfig, gateway: Gateway) -> None:
        self._config = config
        self._stopping = asyncio.Event()
        self._server = Server(config.connections_max, config.body_bytes_max)
        inference = InferenceService(config, gateway.clients, gateway.metrics, gateway.inference)
        self._server.add_registered_method_handlers(SERVICE, inference.handlers())
        for service, handlers in tei.services(config, gateway.clients, gateway.metrics).items():
            self._server.add_registered_method_handlers(service, handlers)

    async def start(self) -> str:
        """Starts to serve, and returns the address with the port in use. Raises ConfigError if the address or the
        certificate can't be used.
        """
        address = self._config.grpc
        try:
            port = self._open_port(address)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"can't serve gRPC at {address}: {error}") from error
        await self._server.start()
        return f"{address.rpartition(':')[0]}:{port}"

    def _open_port(self, address: str) -> int:
        if not self._config.http_tls_cert:
            return int(self._server.add_insecure_port(address))
        key, certificate = (Path(each).read_bytes() for each in (self._config.http_tls_key, self._config.http_tls_cert))
        credentials = grpc.ssl_server_credentials([(key, certificate)])
        return int(self._server.add_secure_port(address, credentials))

    async def serve(self) -> None:
        """Serves until `stop` is called. Raises RuntimeError if gRPC's server ends by itself."""
        stopped = asyncio.ensure_future(self._stopping.wait())
        ended = asyncio.ensure_future(self._server.wait_for_termination())
        await asyncio.wait([stopped, ended], return_when=asyncio.FIRST_COMPLETED)
        if not self._stopping.is_set():
            stopped.cancel()
            raise RuntimeError("gRPC's server has ended")
        await self._server.stop(self._config.stop_timeout_s)
        await ended

    def stop(self) -> None:
        """Makes `serve` return, after at most stop_timeout_s for the calls under way."""
        self._stopping.set()
