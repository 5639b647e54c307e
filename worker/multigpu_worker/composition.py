"""Creates a worker's parts from its configuration and connects them."""

import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import multigpu
import structlog
from multigpu._transport.credentials import Credentials
from multigpu.config.config import WorkerConfig

from multigpu_worker.agent import Agent
from multigpu_worker.device.cpu import host_memory_bytes
from multigpu_worker.device.interface import Device, visible_environment
from multigpu_worker.device.sampler import Sampler
from multigpu_worker.dispatcher import Dispatcher
from multigpu_worker.engines.base import EmbeddingCacheSettings, EngineSettings
from multigpu_worker.health_monitor import HealthMonitor
from multigpu_worker.master_stream import MasterStream
from multigpu_worker.models.catalog import installed
from multigpu_worker.models.loader import ModelLoader
from multigpu_worker.mps.control import MpsStatus
from multigpu_worker.mps.engines import Mps
from multigpu_worker.processes.child import ProcessSettings
from multigpu_worker.processes.pool import EnginePool
from multigpu_worker.processes.reload import HandlersReload
from multigpu_worker.repository.folders import find_models
from multigpu_worker.repository.model import Scan
from multigpu_worker.session.batcher import Batcher, BatchLimits
from multigpu_worker.session.master_connection import MasterConnection
from multigpu_worker.session.payload_sharing import Sharing
from multigpu_worker.session.session import Session, SessionLimits
from multigpu_worker.session.store_address import StoreAddress
from multigpu_worker.session.wire import Identity
from multigpu_worker.stats_file import StatsFile, record

# Default of engine_memory_bytes on a CPU worker, as a share of the host's memory.
MEMORY_SHARE = 0.8
# Default share of the GPU's (on CPU workers: the host's) memory for the models of all workers that use the device.
MODELS_SHARE, MODELS_SHARE_CPU = 0.9, 0.5
# Upper limit of result_bytes_max: an outcome must fit into one message of 64 MiB, with its other fields.
RESULT_BYTES_MAX = 63 << 20

log = structlog.get_logger()


def compose(
    config: WorkerConfig,
    identity: Identity,
    device: Device,
    settings: EngineSettings,
    find_catalog: Callable[[], Scan],
    *,
    mps: Mps | None = None,
    mps_off: MpsStatus | None = None,
) -> Agent:
    """Create a worker. Called on the event loop. `mps_off`: why it runs without MPS."""
    sharing = Sharing()
    sampler = Sampler(device)
    pool = EnginePool(_process_settings(config, device, settings, sharing, mps))
    batcher = Batcher(
        BatchLimits(tasks_max=config.batch_tasks_max, tokens_max=config.batch_tokens_max, delay_s=config.batch_delay_s),
        config.slots,
    )
    dispatcher = Dispatcher(identity.worker_id, Session(SessionLimits()), batcher, pool, sampler)
    loader = _loader(config, device, settings, find_catalog(), dispatcher, pool, sampler)
    health_monitor = HealthMonitor(
        dispatcher, device, sampler, pool, settings.artifacts, self_test_interval_s=config.canary_interval_s
    )
    pool.callbacks.dispatcher = dispatcher
    pool.model_loader = loader
    pool.callbacks.self_test = health_monitor.self_test
    pool.callbacks.health_monitor = health_monitor
    handlers = HandlersReload(pool.default, config.drain_timeout_s, dispatcher.handlers_reloaded)
    stream = MasterStream(
        master=config.master,
        identity=identity,
        dispatcher=dispatcher,
        pool=pool,
        loader=loader,
        health_monitor=health_monitor,
        sampler=sampler,
        sharing=sharing,
        handlers=handlers,
        mps_off=mps_off,
    )
    connection = MasterConnection(config.master, stream, Credentials.of(config))
    dispatcher.connect(loader, health_monitor, connection.wake)
    return Agent(
        config=config,
        dispatcher=dispatcher,
        pool=pool,
        loader=loader,
        health_monitor=health_monitor,
        sampler=sampler,
        handlers=handlers,
        stream=stream,
        connection=connection,
        find_catalog=find_catalog,
    )


def _process_settings(
    config: WorkerConfig, device: Device, engine: EngineSettings, sharing: Sharing, mps: Mps | None
) -> ProcessSettings:
    return ProcessSettings(
        engine=engine,
        memory_bytes=_engine_memory_bytes(config, device),
        result_bytes_max=min(config.result_bytes_max, RESULT_BYTES_MAX),
        device_environment=visible_environment([device]),
        mps=mps,
        sharing=sharing,
        progress_timeout_s=config.progress_timeout_s,
        cancel_grace_s=config.cancel_grace_s,
    )


def _loader(
    config: WorkerConfig,
    device: Device,
    settings: EngineSettings,
    catalog: Scan,
    dispatcher: Dispatcher,
    pool: EnginePool,
    sampler: Sampler,
) -> ModelLoader:
    return ModelLoader(
        dispatcher,
        pool,
        sampler,
        catalog,
        settings,
        limit_bytes=model_memory_bytes(config, device),
        progress_timeout_s=config.progress_timeout_s,
        # With only the bundled model configured, keep no spare process.
        eager=bool(config.models or config.model_repository or config.default_model),
    )


def catalog_of(config: WorkerConfig, device: Device) -> Scan:
    """The models found now, with an error for each that can't run here. Raises ValueError, ModelFolderError."""
    on_gpu = device.engine_name.startswith("cuda")
    gpus = 0 if device.info.device_id == "cpu" else len(device.info.each)
    return installed(find_models(config), config.engine, vllm=bool(config.vllm_python), on_gpu=on_gpu, gpus=gpus)


def engine_settings(config: WorkerConfig, device: Device, catalog: Scan) -> EngineSettings:
    return EngineSettings(
        device=device.engine_name,
        slots=config.slots,
        threads=config.threads,
        handlers=config.handlers,
        vllm_python=config.vllm_python and str(Path(config.vllm_python).expanduser().absolute()),
        train_dir=config.train_dir and str(Path(config.train_dir).expanduser().absolute()),
        repository=config.model_repository and str(Path(config.model_repository).expanduser().absolute()),
        allow_pickle=config.allow_pickle,
        models=dict(catalog.models),
        engine=config.engine,
        precision=config.precision,
        artifacts=str(artifacts_folder(config)),
        artifacts_bytes_max=config.artifacts_bytes_max,
        embedding_cache=_embedding_cache(config),
    )


def artifacts_folder(config: WorkerConfig) -> Path:
    """The folder for exports, plans and measurements that are expensive to make."""
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


def identity_of(config: WorkerConfig, device: Device) -> Identity:
    host = socket.gethostname()
    return Identity(
        worker_id=config.worker_id or f"{host}-{device.info.device_id}",
        host=host,
        version=multigpu.__version__,
        pid=os.getpid(),
        process=secrets.token_hex(8),
        device=device.info,
        labels=config.labels,
        slots=config.slots,
        window_tasks=config.window_tasks,
        window_bytes=config.window_bytes,
        store=_store_address(config.master),
    )


def _store_address(master: str) -> StoreAddress | None:
    try:
        return StoreAddress(master)
    except OSError as error:
        log.warning("this worker takes no ranks of tasks that several workers run", error=str(error))
        return None


def _engine_memory_bytes(config: WorkerConfig, device: Device) -> int:
    """The memory limit of each engine process; 0: no limit."""
    if config.engine_memory_bytes or device.info.device_id != "cpu":
        return config.engine_memory_bytes
    return int(host_memory_bytes() * MEMORY_SHARE)


def model_memory_bytes(config: WorkerConfig, device: Device) -> int:
    """The limit of all loaded models together, in a group on the device with the least memory. 0: none is known."""
    if config.model_memory_bytes:
        return config.model_memory_bytes
    if device.info.device_id == "cpu":
        return int(host_memory_bytes() * MODELS_SHARE_CPU) // config.device_workers
    return int(device.info.smallest_bytes * MODELS_SHARE) // config.device_workers


def stats_file_of(config: WorkerConfig, agent: Agent) -> StatsFile | None:
    if not config.stats_file:
        return None
    return StatsFile(
        Path(config.stats_file).expanduser(),
        config.stats_interval_s,
        lambda: record(agent.stream.identity, agent.sampler.latest, len(agent.dispatcher.session.leases)),
    )
