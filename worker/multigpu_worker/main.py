"""mgpu-worker: the command line, signals, and exit codes."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# gRPC's own log would write to stderr what peers send, line ends included. Set before grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# gRPC's own threads for sockets, its default since 1.80, slow small messages down: see docs/dependencies.md.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

from multigpu import _extras

if error := _extras.missing("mgpu-worker", "worker"):
    sys.exit(error)

import click
import structlog
import uvloop
from multigpu import __version__
from multigpu._build import build_of
from multigpu._transport.credentials import Credentials
from multigpu.config.config import ConfigError, TelemetryConfig, WorkerConfig, click_options, load
from multigpu.daemon.systemd import Notifier, raise_descriptor_limit
from multigpu.daemon.telemetry import configure_logging, configure_tracing, shut_down_tracing

from multigpu_worker.agent import Agent
from multigpu_worker.composition import (
    artifacts_folder,
    catalog_of,
    compose,
    engine_settings,
    identity_of,
    stats_file_of,
)
from multigpu_worker.device.interface import Device, DeviceError
from multigpu_worker.device.open import open_device
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.mps.control import MpsError
from multigpu_worker.mps.setup import open_mps
from multigpu_worker.processes.default_process import EngineStartError
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import Scan
from multigpu_worker.session.master_connection import ProtocolMismatchError, TakenOverError
from multigpu_worker.stats_file import BYTES_MAX, append
from multigpu_worker.supervision import supervised
from multigpu_worker.waiting import until

log = structlog.get_logger()

# Exit codes. 0: stopped as asked.
EXIT_CONFIG = 2
EXIT_ENGINE = 3
EXIT_PROTOCOL = 4
EXIT_TAKEN_OVER = 5

# Settings that are paths, in which ~ may stand for a home.
PATHS = (
    "tls_ca", "tls_cert", "tls_key", "token_file", "train_dir", "model_repository", "vllm_python", "artifacts_dir",
    "embedding_cache_file", "stats_file",
)  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click_options(WorkerConfig)
@click.version_option(f"{__version__} ({build_of('multigpu_worker.dispatcher')})", prog_name="mgpu-worker")
def main(config_file: str | None, **flags: Any) -> None:
    """Run one worker: own one device, take tasks from the master, run them in an engine process.

    SIGTERM or Ctrl-C finishes what is held and stops; a second one stops at once. Exit codes: 2 a wrong setting, 3 the
    engine can't start, or the device or a model can't be used, 4 the master speaks another version of the protocol, 5
    another worker has the same worker_id.
    """
    try:
        loaded = load(WorkerConfig, file=config_file, flags=flags)
        config = loaded.config
        telemetry = load(TelemetryConfig, file=config_file).config
        configure_logging(config.log_level, config.log_format)
        for remark in loaded.remarks:
            log.warning(remark)
        _check_files(config)
        device = open_device(config.device)
        settings = engine_settings(config, device, _first_catalog(config, device))
        configure_tracing(telemetry, {"service.name": "mgpu-worker"})
    except (DeviceError, ModelFolderError) as error:  # may be temporary, unlike a wrong setting
        _exit(EXIT_ENGINE, error)
    except (ConfigError, ValueError) as error:
        _exit(EXIT_CONFIG, error)
    try:
        uvloop.run(_run(config, device, settings, lambda: _load_log_level(config_file, flags)))
    except (EngineStartError, MpsError) as error:
        _exit(EXIT_ENGINE, error)
    except ProtocolMismatchError as error:
        _exit(EXIT_PROTOCOL, error)
    except TakenOverError as error:
        _exit(EXIT_TAKEN_OVER, error)
    finally:
        shut_down_tracing()


def _check_files(config: WorkerConfig) -> None:
    """Raises ConfigError if a file or folder that the settings name can't be used."""
    paths = [(name, getattr(config, name)) for name in PATHS]
    for name, path in paths + [("models", entry.partition("=")[2].strip()) for entry in config.models]:
        try:
            Path(path).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"{name} has {path}: {error} Write the whole path instead of ~") from error
    Credentials.of(config).check(config.master)
    try:
        if name := config.artifacts_dir:
            artifacts_folder(config).mkdir(mode=0o700, parents=True, exist_ok=True)
        if name := config.stats_file:
            append(Path(name).expanduser(), b"", BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"{name} can't be used ({error}): name another artifacts_dir or stats_file") from error
    python = Path(config.vllm_python).expanduser()
    if config.vllm_python and not (os.access(python, os.X_OK) and python.is_file()):
        raise ConfigError(f"vllm_python {config.vllm_python} is no program: name the Python of vLLM's environment")
    if config.train_dir and not Path(config.train_dir).expanduser().is_dir():
        raise ConfigError(f"train_dir {config.train_dir} is no folder: make it, and put the training scripts there")


def _first_catalog(config: WorkerConfig, device: Device) -> Scan:
    """The models at the start. Raises ModelFolderError if a model that the configuration names is broken."""
    catalog = catalog_of(config, device)
    named = {entry.partition("=")[0].strip() for entry in config.models}
    for model, error in catalog.errors.items():
        if model.partition(":")[0] in named:
            raise ModelFolderError(error)
        log.warning("a model can't be served", model=model, error=error)
    return catalog


def _load_log_level(config_file: str | None, flags: dict[str, Any]) -> None:
    """Read the settings again and apply the log level. Raises ConfigError if a setting is no longer valid."""
    config = load(WorkerConfig, file=config_file, flags=flags).config
    configure_logging(config.log_level, config.log_format)


async def _run(
    config: WorkerConfig,
    device: Device,
    settings: EngineSettings,
    load_log_level: Callable[[], None],
) -> None:
    systemd = Notifier()
    log.debug("file descriptors", limit=raise_descriptor_limit())
    identity = identity_of(config, device)
    structlog.contextvars.bind_contextvars(worker_id=identity.worker_id)
    if device.info.simulated:
        log.warning("the driver is a simulation: the engine computes on the processor", device=device.info.product)
    mps, mps_off = await open_mps(config, device)
    agent = compose(config, identity, device, settings, lambda: catalog_of(config, device), mps=mps, mps_off=mps_off)
    leases = agent.dispatcher.session.leases
    draining: asyncio.Task[None] | None = None

    def stop() -> None:
        nonlocal draining
        systemd.stopping(f"draining: {len(leases)} tasks in hand")
        if draining is None:
            draining = supervised(asyncio.create_task(agent.drain(config.drain_timeout_s)))
        else:
            agent.stop("the worker was told to stop at once")

    # Thousands of leases are created and freed without reference cycles: with the default thresholds the garbage
    # collector would traverse all of them many times a second.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop)
    loop.add_signal_handler(signal.SIGHUP, systemd.reload, load_log_level)
    notifying = supervised(asyncio.create_task(_notify(systemd, agent, config.master)))
    stats = stats_file_of(config, agent)
    if stats is not None:
        stats.start()
    try:
        await agent.run()
    finally:
        notifying.cancel()
        if stats is not None:
            stats.stop()
    if draining is not None:
        await draining
    log.info("stopped")


async def _notify(systemd: Notifier, agent: Agent, master: str) -> None:
    """Send READY after the agent's first tick; then feed the watchdog while ticks continue."""
    seen = 0

    def progress() -> bool:
        nonlocal seen
        before, seen = seen, agent.ticks
        return seen > before

    def status() -> str:
        session = agent.dispatcher.session
        link = "connected to" if session.connected else "looking for"
        engine = "" if agent.pool.ready else "; the engine is not ready"
        device_id = agent.stream.identity.device.device_id
        return f"{device_id}: {link} {master}, {len(session.leases)} tasks in hand{engine}"

    await until(lambda: agent.ticks)
    systemd.ready(status())
    await systemd.keep(progress, status)


def _exit(code: int, error: Exception) -> NoReturn:
    click.echo(f"mgpu-worker: {error}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
