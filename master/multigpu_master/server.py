"""The composition root: builds the master's parts, connects them and stops them in order."""

import asyncio
import contextlib
import gc
import random
from collections.abc import Sequence
from datetime import UTC, datetime

import structlog
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from multigpu.config.config import ConfigError, MasterConfig, TelemetryConfig
from multigpu.daemon.grpc_server import Server
from multigpu.v1 import admin_service_pb2, task_service_pb2, worker_service_pb2

from multigpu_master import VERSION, settings
from multigpu_master.clock import Clock
from multigpu_master.core import events as ev
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.core.strategy import Strategy
from multigpu_master.driver import Driver
from multigpu_master.errors import JournalError
from multigpu_master.journal.protocol import Entry, Recovered
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.metrics.master import MasterMetrics
from multigpu_master.rpc import health_service
from multigpu_master.rpc.admin.service import AdminService
from multigpu_master.rpc.intake import Intake
from multigpu_master.rpc.requests import read_small
from multigpu_master.rpc.services import Reflection, add_service
from multigpu_master.rpc.task_service import TaskService
from multigpu_master.rpc.worker_service import WorkerService
from multigpu_master.security import listeners
from multigpu_master.security.audit import Audit
from multigpu_master.security.auth import Auth
from multigpu_master.security.setup import load_auth
from multigpu_master.strategies.registry import StrategyError, canonical_name, load_strategies
from multigpu_master.wire.specs import SpecReader
from multigpu_master.wire.tasks import restored_task
from multigpu_master.worker_log import WorkerLog

log = structlog.get_logger()

# File descriptors that connections may not use: they are for the journal, audit.log and the metrics.
DESCRIPTORS_KEPT = 256
# A starting master logs a larger difference between the clock and the last time saved in the journal.
CLOCK_DIFFERS_S = 60.0
HEALTH_MASTER, HEALTH_WORKER_PREFIX = "master", "worker/"


class StartError(Exception):
    """The master cannot start; the text says why and what to do."""


class SettingError(StartError):
    """The master cannot start until someone changes its settings, or the files that they name."""


class Master:
    """A running master. `clock`: the one that the journal uses. `descriptors`: the process's limit of open files."""

    def __init__(
        self,
        config: MasterConfig,
        journal: SqliteJournal,
        clock: Clock,
        descriptors: int = 1024,
        telemetry: TelemetryConfig | None = None,
    ) -> None:
        self.config = config
        self._telemetry = telemetry or TelemetryConfig()
        self.journal = journal
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.address = ""
        self.fatal: str | None = None  # why the master ends with an error; None: no error
        self.stop_requested = asyncio.Event()
        self.driver: Driver
        self._descriptors = descriptors
        self._server = Server(max(descriptors - DESCRIPTORS_KEPT, descriptors // 2))
        self._audit = Audit(config.data_dir)
        self._health = health_service.Health()
        self._server_watch: asyncio.Task[None] | None = None  # ends the master if the server ends
        self._intake: Intake
        self._metrics: MasterMetrics
        self._worker_log: WorkerLog
        self.auth: Auth | None = None
        self.certificates: listeners.Certificates | None = None

    async def start(self) -> None:
        """Recovers the journal's tasks and settings, then listens. If the master cannot start, closes the
        journal, so that it can be repaired, and raises StartError.
        """
        try:
            await self._start()
        except StartError:
            with contextlib.suppress(JournalError):
                await asyncio.to_thread(self.journal.close, self.config.stop_timeout_s)
            raise

    async def _start(self) -> None:
        config = self.config
        try:
            listeners.check(config)
        except listeners.ListenError as error:
            raise SettingError(str(error)) from error
        strategies, strategy = self._load_strategies()
        try:
            recovered = self.journal.open(self._on_commit, self._clock.begin)
            self._warn_of_clock_difference(recovered.clock_difference_s)
            core = Core(strategies, self._limits(), recovered.incarnations[-1].first_id, random.random, strategy)
            driver = self._make_driver(core, recovered)
            tasks_recovered, workers_expected = self._recover(driver, recovered)
        except JournalError as error:
            raise StartError(str(error)) from error
        self.journal.payloads.start_deleting()
        # Do not traverse a million queued tasks in every full collection.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        try:
            self.auth = await load_auth(config, recovered.settings, driver.now, driver.write_buffer.save)
        except (JournalError, OSError) as error:
            raise StartError(f"the tokens can't be read or written: {error}") from error
        await self._serve(driver)
        log.info(
            "master ready", address=self.address, epoch=recovered.epoch,
            incarnation=driver.incarnations.current, recovered_tasks=tasks_recovered,
            awaited_workers=workers_expected, strategy=core.ledger.strategy,
            data_dir=str(config.data_dir), version=VERSION,
            tls=bool(config.tls_cert), certificates=bool(config.tls_client_ca), tokens=config.require_tokens,
            descriptors=self._descriptors,
        )  # fmt: skip

    def _load_strategies(self) -> tuple[dict[str, Strategy], str]:
        """All strategies, and the name of the configured one."""
        try:
            strategies = load_strategies()
        except StrategyError as error:
            raise SettingError(str(error)) from error
        name = canonical_name(self.config.strategy, strategies)
        if name is None:
            raise SettingError(f"no strategy {self.config.strategy!r}; there are: {', '.join(sorted(strategies))}")
        return strategies, name

    def _limits(self) -> Limits:
        config = self.config
        return Limits(
            tasks_max=config.queue_tasks_max,
            bytes_max=config.queue_bytes_max,
            ephemeral_bytes_max=config.ephemeral_bytes_max,
            session_timeout_s=config.session_timeout_s,
            memory_threshold=config.memory_threshold_percent / 100,
            breaker_share=config.breaker_share,
            breaker_window_s=config.breaker_window_s,
        )

    def _make_driver(self, core: Core, recovered: Recovered) -> Driver:
        config = self.config
        specs = SpecReader(config.result_ttl_max_s, self._clock.skew)
        driver = self.driver = Driver(
            core, self.journal, recovered, specs, self._clock.now, config.stream_bytes_max, self._die,
            self._worker_changed,
        )  # fmt: skip
        self._worker_log = WorkerLog(driver)
        self._intake = Intake(driver, config.payload_bytes_max)
        return driver

    def _recover(self, driver: Driver, recovered: Recovered) -> tuple[int, int]:
        """Restores settings and tasks. Returns the number of tasks, and of workers that are expected to reconnect."""
        driver.write_buffer.load_request_filter()
        now = driver.now()
        expected = settings.restore(
            lambda event: driver.core.handle(event, now), driver.core.ledger.strategies, recovered.settings
        )
        tasks = [restored_task(r, driver.specs.restore(r.spec)) for r in recovered.tasks]
        driver.handle(ev.Recover(tasks, now + self.config.reconnect_grace_s if expected else now))
        return len(tasks), expected

    def _warn_of_clock_difference(self, clock_difference_s: float) -> None:
        if abs(clock_difference_s) > CLOCK_DIFFERS_S:
            log.warning(
                "the clock differs from the last time in the journal: no master ran for that long, or the host's clock "
                "is wrong (set it). The difference does not shorten the time for which results are kept",
                ahead_s=round(clock_difference_s), host_time=datetime.now(UTC).isoformat(timespec="seconds"),
            )  # fmt: skip

    def _on_commit(self, entries: Sequence[Entry], first_cursor: int, error: JournalError | None) -> None:
        """Runs on the journal's thread, which may report that the disk is full, or no longer full, before there is
        a driver. The event loop runs the callback after `start` has made the driver.
        """
        self._loop.call_soon_threadsafe(lambda: self.driver.write_buffer.handle_commit(entries, first_cursor, error))

    async def _serve(self, driver: Driver) -> None:
        """Registers the services, listens, and starts metrics, history and usage."""
        services = self._services(driver)
        for descriptor, servicer in services.items():
            add_service(self._server, descriptor, servicer, self.auth, self._audit)
        names = [d.full_name for d in services]
        health = health_pb2.DESCRIPTOR.services_by_name["Health"]
        add_service(self._server, health, self._health, read=read_small)
        add_service(self._server, Reflection.DESCRIPTOR, Reflection((*names, health_service.NAME)), self.auth)
        port = self._listen(driver)
        driver.history.start()
        driver.usage.start()
        host = self.config.listen.rpartition(":")[0]
        self.address = self.config.listen if self.config.listen.startswith("unix:") else f"{host}:{port}"
        await self._server.start()
        self._server_watch = asyncio.create_task(self._end_with_server())
        for name in ("", HEALTH_MASTER, *names):
            self._health.set(name, health_service.RESPONSE.SERVING)
        for worker_id in driver.core.fleet.workers:  # restored workers are lost until they reconnect
            self._health.set(HEALTH_WORKER_PREFIX + worker_id, health_service.RESPONSE.NOT_SERVING)

    def _services(self, driver: Driver) -> dict[ServiceDescriptor, object]:
        config = self.config
        payload_metadata = self.journal.payloads.initial_metadata() if config.share_payloads else ()
        return {
            task_service_pb2.DESCRIPTOR.services_by_name["TaskService"]: TaskService(
                driver, self._intake, config.submit_tasks_max, config.stream_bytes_max, payload_metadata
            ),
            worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"]: WorkerService(
                driver, VERSION, config.heartbeat_interval_s, config.session_timeout_s, payload_metadata
            ),
            admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]: AdminService(driver, VERSION, self.auth),
        }

    def _listen(self, driver: Driver) -> int:
        """Loads the certificates, and opens the listeners of gRPC and of the metrics. Returns the port of gRPC."""
        config = self.config
        try:
            if config.tls_cert:
                self.certificates = listeners.Certificates(config)
            port = listeners.open_port(self._server, config, self.certificates)
            self._metrics = MasterMetrics(driver, config, self._telemetry)
            self._metrics.start()
        except listeners.ListenError as error:
            raise SettingError(str(error)) from error
        except ConfigError as error:  # for example, the port for metrics is in use
            raise StartError(str(error)) from error
        except RuntimeError as error:
            raise StartError(
                f"can't listen on {config.listen}: {error}; is another master there? choose another --listen"
            ) from error
        return port

    def _worker_changed(self, change: ev.WorkerChanged) -> None:
        worker = change.worker
        driver = self.driver
        if change.gone:
            self._worker_log.forget(worker)
        else:
            self._worker_log.on_changed(worker)
        if change.save:
            setting = settings.worker_setting(worker)
            driver.write_buffer.append(Entry(settings=dict.fromkeys(setting) if change.gone else setting))
        state = health_service.RESPONSE.SERVING if worker.accepting else health_service.RESPONSE.NOT_SERVING
        self._health.set(
            HEALTH_WORKER_PREFIX + worker.worker_id, health_service.RESPONSE.SERVICE_UNKNOWN if change.gone else state
        )
        driver.changes.worker_changed()

    def _die(self, reason: str) -> None:
        """Makes the master end with an error. After a failure of the journal, only a new process can tell what was
        written.
        """
        if self.fatal is None:
            self.fatal = reason
            log.critical("master ends", reason=reason)
            self.stop_requested.set()

    async def _end_with_server(self) -> None:
        """Ends the master if the gRPC server ends although the master is not stopping."""
        try:
            await self._server.wait_for_termination()
        except Exception:
            log.exception("the gRPC server failed")
        if not self._intake.stopping:
            self._die("the gRPC server ended")

    def check_certificates(self) -> None:
        """Raises ListenError if the files of the certificates are invalid; the old ones stay in use. New connections
        use valid new files even without this check.
        """
        if self.certificates is not None:
            self.certificates.check_files()

    async def stop(self) -> None:
        """Ends all calls, writes settled tasks and closes the journal, within stop_timeout_s."""
        timeout_s = self.config.stop_timeout_s
        self._intake.stopping = True
        self._health.stop()
        self.driver.usage.stop()
        if self.fatal is None:
            await asyncio.wait(
                [asyncio.ensure_future(self.driver.write_buffer.flush_and_wait())], timeout=timeout_s / 4
            )
        self.driver.stop()
        # A short grace period: streams do not end by themselves. Their peers reconnect to the next master.
        await self._server.stop(min(0.2, timeout_s / 4))
        await self._audit.finish(timeout_s / 4)
        await asyncio.sleep(0)  # lets scheduled callbacks append their entries
        # Until the server stopped, clients got outcomes whose entries are still in the write buffer.
        self.driver.write_buffer.flush()
        try:
            await asyncio.to_thread(self.journal.close, timeout_s / 4)
        except JournalError as error:
            self._die(str(error))
        self._metrics.stop()
        self.driver.history.stop()
        log.info("master stopped")
