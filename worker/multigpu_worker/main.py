"""mgpu-worker: puts the worker's parts together, and turns signals and errors into a drain and exit codes."""

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

# gRPC's own log writes to stderr what its peers send, line ends included. Read when grpc is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import click
import structlog
import uvloop
from multigpu._transport.credentials import Credentials
from multigpu.config.config import ConfigError, TelemetryConfig, WorkerConfig, click_options, load
from multigpu.daemon.systemd import Notifier, raise_descriptor_limit
from multigpu.daemon.telemetry import configure_logging, configure_tracing, shut_down_tracing
from multigpu.repository.model import Scan

from multigpu_worker.agent import Agent
from multigpu_worker.device.cpu import host_memory_bytes
from multigpu_worker.device.interface import Device, DeviceError
from multigpu_worker.device.open import open_device
from multigpu_worker.device.stats_file import BYTES_MAX, StatsFile, append, record
from multigpu_worker.engines.base import EmbeddingCacheSettings, EngineSettings
from multigpu_worker.models.catalog import installed
from multigpu_worker.models.folders import ModelFolderError, find_models
from multigpu_worker.mps.control import MpsError
from multigpu_worker.mps.setup import open_mps
from multigpu_worker.processes.host import EngineStartError
from multigpu_worker.session.link import ProtocolMismatchError, TakenOverError
from multigpu_worker.session.wire import Identity
from multigpu_worker.supervision import supervised

log = structlog.get_logger()

# Exit codes. 0: stopped as asked.
EXIT_CONFIG = 2
EXIT_ENGINE = 3
EXIT_PROTOCOL = 4
EXIT_TAKEN_OVER = 5
# The share of the host's memory that a CPU worker's engine may take where the config doesn't say, and what its loaded
# models may take together, of a GPU's memory or the host's: of all workers that share it.
MEMORY_SHARE = 0.8
MODELS_SHARE, MODELS_SHARE_CPU = 0.9, 0.5
READY_POLL_S = 0.05
# A driver that takes longer to tell what the device is hangs.
DRIVER_SLOW_S = 10.0


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click_options(WorkerConfig)
def main(config_file: str | None, **flags: Any) -> None:
    """Run one worker: own one device, take tasks from the master, run them in an engine process of its own.

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
        device = _open_device(config.device)
        catalog = _first_catalog(config)
        settings = _engine_settings(config, device, catalog)
        configure_tracing(telemetry, {"service.name": "mgpu-worker"})
    except (DeviceError, ModelFolderError) as error:  # what may change while the settings stay
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
    """ConfigError: a file or folder of the settings can't be used."""
    Credentials.of(config).check(config.master)
    try:
        if name := config.artifacts_dir:
            artifacts_folder(config).mkdir(mode=0o700, parents=True, exist_ok=True)
        if name := config.stats_file:
            append(Path(name).expanduser(), b"", BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"{name} can't be used ({error}): name another artifacts_dir or stats_file") from error


def _open_device(name: str) -> Device:
    """DeviceError: it can't be used. A driver that hangs is told of: nothing else is, before the worker has begun."""
    words = f"the driver has not answered for {DRIVER_SLOW_S:g} s: see the kernel's log, restart the host"
    timer = threading.Timer(DRIVER_SLOW_S, log.warning, [words], {"device": name})
    timer.daemon = True
    timer.start()
    try:
        return open_device(name)
    finally:
        timer.cancel()


def _load_log_level(config_file: str | None, flags: dict[str, Any]) -> None:
    """ConfigError: the settings are wrong by now."""
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
    identity = _identity(config, device)
    structlog.contextvars.bind_contextvars(worker_id=identity.worker_id)
    if device.info.simulated:
        log.warning("the driver is a simulation: the engine computes on the processor", device=device.info.product)
    mps, mps_off = await open_mps(config, device, identity.worker_id)
    agent = Agent(
        config,
        identity,
        device,
        settings,
        memory_bytes=_memory_bytes(config, device),
        find_catalog=lambda: _catalog(config),
        model_memory_bytes=_model_memory_bytes(config, device),
        mps=mps,
        mps_off=mps_off,
    )
    stats = _stats_file(config, agent)
    draining: asyncio.Task[None] | None = None

    def stop() -> None:
        nonlocal draining
        systemd.stopping(f"draining: {len(agent.session.leases)} tasks in hand")
        if draining is None:
            draining = supervised(asyncio.create_task(agent.drain(config.drain_timeout_s)))
        else:
            agent.stop("the worker was told to stop at once")

    # A thousand leases come and go many times a second, and none is part of a cycle: by default the collector would
    # walk over all of them again and again.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop)
    loop.add_signal_handler(signal.SIGHUP, systemd.reload, load_log_level)
    telling = supervised(asyncio.create_task(_tell(systemd, agent)))
    if stats is not None:
        stats.start()
    try:
        await agent.run()
    finally:
        telling.cancel()
        if stats is not None:
            stats.stop()
        if mps is not None:
            await mps.close()
    if draining is not None:
        await draining
    log.info("stopped")


async def _tell(systemd: Notifier, agent: Agent) -> None:
    """READY once the engine is looked after; then the watchdog is fed as long as it is."""
    seen = 0

    def progress() -> bool:
        nonlocal seen
        before, seen = seen, agent.ticks
        return seen > before

    def status() -> str:
        link = "connected to" if agent.session.connected else "looking for"
        engine = "" if agent.pool.ready else "; the engine is not ready"
        leases = len(agent.session.leases)
        return f"{agent.identity.device.device_id}: {link} {agent.config.master}, {leases} tasks in hand{engine}"

    while not agent.ticks:  # noqa: ASYNC110  it counts from the first look at the engine on
        await asyncio.sleep(READY_POLL_S)
    systemd.ready(status())
    await systemd.keep(progress, status)


def _catalog(config: WorkerConfig) -> Scan:
    """The models that there are now. Raises ValueError or ModelFolderError."""
    return installed(find_models(config), config.engine)


def _first_catalog(config: WorkerConfig) -> Scan:
    """The same, when the worker starts: a broken model that the configuration names is rejected. ModelFolderError."""
    catalog = _catalog(config)
    named = {entry.partition("=")[0].strip() for entry in config.models}
    for model, error in catalog.errors.items():
        if model.partition(":")[0] in named:
            raise ModelFolderError(error)
        log.warning("a model can't be served", model=model, error=error)
    return catalog


def _engine_settings(config: WorkerConfig, device: Device, catalog: Scan) -> EngineSettings:
    return EngineSettings(
        device=device.engine_name,
        slots=config.slots,
        threads=config.threads,
        handlers=config.handlers,
        models=dict(catalog.models),
        engine=config.engine,
        precision=config.precision,
        artifacts=str(artifacts_folder(config)),
        artifacts_bytes_max=config.artifacts_bytes_max,
        embedding_cache=_embedding_cache(config),
    )


def artifacts_folder(config: WorkerConfig) -> Path:
    """Where what is expensive to make is kept."""
    if config.artifacts_dir:
        return Path(config.artifacts_dir).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "multigpu"


def _embedding_cache(config: WorkerConfig) -> EmbeddingCacheSettings:
    file = config.embedding_cache_file and str(Path(config.embedding_cache_file).expanduser().absolute())
    if file and config.embedding_cache_entries:
        from multigpu_worker.engines.embed.cache_file import check_cache_file  # noqa: PLC0415  most workers have none

        check_cache_file(Path(file))
    return EmbeddingCacheSettings(
        entries=config.embedding_cache_entries,
        bytes_max=config.embedding_cache_bytes_max,
        ttl_s=config.embedding_cache_ttl_s,
        file=file,
    )


def _identity(config: WorkerConfig, device: Device) -> Identity:
    host = socket.gethostname()
    suffix = device.info.device_id if device.info.device_id != "cpu" else "cpu"
    return Identity(
        worker_id=config.worker_id or f"{host}-{suffix}",
        host=host,
        version=metadata.version("multigpu"),
        pid=os.getpid(),
        device=device.info,
        labels=config.labels,
        slots=config.slots,
        window_tasks=config.window_tasks,
        window_bytes=config.window_bytes,
    )


def _memory_bytes(config: WorkerConfig, device: Device) -> int:
    """The engine's limit; 0: none."""
    if config.engine_memory_bytes or device.info.device_id != "cpu":
        return config.engine_memory_bytes
    return int(host_memory_bytes() * MEMORY_SHARE)


def _model_memory_bytes(config: WorkerConfig, device: Device) -> int:
    """What loaded models may take together; 0: no limit is known."""
    if config.model_memory_bytes:
        return config.model_memory_bytes
    if device.info.device_id == "cpu":
        return int(host_memory_bytes() * MODELS_SHARE_CPU) // config.device_workers
    return int(device.info.memory_total_bytes * MODELS_SHARE) // config.device_workers


def _stats_file(config: WorkerConfig, agent: Agent) -> StatsFile | None:
    if not config.stats_file:
        return None
    return StatsFile(
        Path(config.stats_file).expanduser(),
        config.stats_interval_s,
        lambda: record(agent.identity, agent.sampler.latest, len(agent.session.leases)),
    )


def _exit(code: int, error: Exception) -> NoReturn:
    click.echo(f"mgpu-worker: {error}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
