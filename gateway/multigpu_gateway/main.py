"""mgpu-gateway: the command line, signals, and exit codes."""

import asyncio
import logging
import os
import signal
import sys
from typing import Any

# gRPC's own log would write text from peers to stderr, with line ends. This must be set before grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# gRPC's own threads for sockets, its default since 1.80, slow small messages down: see docs/dependencies.md.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

from multigpu import _extras

if error := _extras.missing("mgpu-gateway", "gateway"):
    sys.exit(error)

from multigpu.daemon import grpcio_check

if error := grpcio_check.error("mgpu-gateway", "gateway"):
    sys.exit(error)

import click
import structlog
import uvloop
from multigpu import AsyncClient, errors
from multigpu._transport.credentials import is_loopback
from multigpu.config.config import ConfigError, GatewayConfig, TelemetryConfig, click_options, load
from multigpu.daemon.systemd import Notifier, raise_descriptor_limit
from multigpu.daemon.telemetry import configure_logging, configure_tracing, shut_down_tracing

from multigpu_gateway import VERSION
from multigpu_gateway.app import Gateway
from multigpu_gateway.grpc_server import GrpcServer
from multigpu_gateway.server import HttpServer
from multigpu_gateway.webhooks import webhooks_of

log = structlog.get_logger()

EXIT_CONFIG = 2


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click_options(GatewayConfig)
def main(config_file: str | None, **flags: Any) -> None:
    """Serve HTTP and gRPC for a fleet: OpenAI's API and Triton's, with the master's queue behind them.

    Stateless: any number of gateways serve one master, and one that ends loses no task. SIGTERM or Ctrl-C finishes the
    requests under way and stops. Exit code 2: a wrong setting.
    """
    try:
        config = load(GatewayConfig, file=config_file, flags=flags).config
        telemetry = load(TelemetryConfig, file=config_file).config
        configure_logging(config.log_level, config.log_format)
        check_listener(config)
        # The library logs every malformed upload. The client gets the error in the response.
        logging.getLogger("python_multipart").setLevel(logging.ERROR)
        configure_tracing(telemetry, {"service.name": "mgpu-gateway", "service.version": VERSION})
        raise_descriptor_limit()
        uvloop.run(_serve(config))
    except ConfigError as error:
        click.echo(f"mgpu-gateway: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    finally:
        shut_down_tracing()


def check_listener(config: GatewayConfig) -> None:
    """Raises ConfigError if only one of the TLS files is set, or if other hosts can reach a listener and the gateway
    uses shared memory, or has neither TLS nor `insecure`.
    """
    if bool(config.http_tls_cert) != bool(config.http_tls_key):
        raise ConfigError("http_tls_cert and http_tls_key go together: give both, or neither")
    reached = _open_address(config)
    if reached and config.kserve_shared_memory:
        raise ConfigError(f"kserve_shared_memory is for this host alone, and {reached} can be reached from others")
    if reached and not config.insecure and not config.http_tls_cert:
        raise ConfigError(
            f"{reached} can be reached from other hosts: tokens and texts would cross the network in the clear. "
            "Give --http-tls-cert and --http-tls-key (`mgpuctl certs` makes them); or listen on 127.0.0.1, behind a "
            "proxy; or, on a network where every host is trusted, add --insecure"
        )


def _open_address(config: GatewayConfig) -> str:
    """Returns the address of a listener that other hosts can reach, "" if there is none."""
    return next((each for each in (config.http, config.grpc) if each and not is_loopback(each)), "")


async def check_tokens(config: GatewayConfig) -> None:
    """Waits for the master and raises ConfigError if it requires no tokens. Returns at once if only this host can reach
    the gateway, or with `insecure`.
    """
    reached = _open_address(config)
    if not reached or config.insecure:
        return
    certificate = {name: getattr(config, name) for name in ("tls_ca", "tls_cert", "tls_key")}
    while True:
        try:
            async with AsyncClient(config.master, token="", **certificate) as client:
                await client.count()
        except errors.MultigpuError as error:
            if isinstance(error, errors.AccessError) and not error.local:
                return
            log.warning("waiting for the master", reason=str(error))
            await asyncio.sleep(1)
        else:
            raise ConfigError(
                f"the master at {config.master} asks nobody for a token: any host that reaches {reached} could run "
                "tasks. Start it with --require-tokens, or listen on 127.0.0.1, or add --insecure"
            )


async def _serve(config: GatewayConfig) -> None:
    notifier = Notifier()
    webhooks = webhooks_of(config)
    await check_tokens(config)
    gateway = Gateway(config)
    # gRPC starts first: a client that reaches the HTTP port can rely on both.
    grpc_server = GrpcServer(config, gateway) if config.grpc else None
    grpc_address = "" if grpc_server is None else await grpc_server.start()
    server = HttpServer(config, gateway)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    address = f"{config.http.rpartition(':')[0]}:{server.port}"
    log.info("serving", http=address, grpc=grpc_address, master=config.master, version=VERSION)
    notifier.ready(f"serving HTTP at {address}" + (f", gRPC at {grpc_address}" if grpc_address else ""))
    background = [loop.create_task(notifier.keep(lambda: True, lambda: ""))]
    if webhooks is not None:
        background.append(loop.create_task(webhooks.run()))
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve())
        if grpc_server is not None:
            group.create_task(grpc_server.serve())
        await stopping.wait()
        server.stop()
        if grpc_server is not None:
            grpc_server.stop()
    notifier.stopping()
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    await gateway.close()
    log.info("stopped")


if __name__ == "__main__":
    main()
