"""The composition root: builds the rooms, connects them, and takes them down in order. It decides nothing."""

import asyncio
import gc
import random
from collections.abc import Sequence

import structlog
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection
from multigpu.config.config import ConfigError, MasterConfig, TelemetryConfig
from multigpu.v1 import admin_service_pb2, task_service_pb2, worker_service_pb2

from multigpu_master import VERSION, settings
from multigpu_master.clock import Clock, SavedSkew
from multigpu_master.core import events as ev
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.driver import Driver
from multigpu_master.journal.protocol import Entry, Journal, JournalError
from multigpu_master.rpc import health_service
from multigpu_master.rpc.admin.service import AdminService
from multigpu_master.rpc.intake import Intake
from multigpu_master.rpc.registration import add_reflection, add_service
from multigpu_master.rpc.task_service import TaskService
from multigpu_master.rpc.transport import Server, read_small
from multigpu_master.rpc.worker_service import WorkerService
from multigpu_master.security import listeners as doors
from multigpu_master.security import setup as security
from multigpu_master.security.audit import Audit
from multigpu_master.security.auth import Gate
from multigpu_master.strategies.registry import StrategyError, canonical_name, load_strategies
from multigpu_master.telemetry.metrics import MasterMetrics
from multigpu_master.telemetry.worker_log import WorkerLog
from multigpu_master.wire import messages as wire
from multigpu_master.wire.specs import SpecReader

log = structlog.get_logger()

# Not for connections: the journal, audit.log and the metrics need some at any time.
DESCRIPTORS_KEPT = 256
# Between two looks at whether the host's clock was set.
CLOCK_LOOK_S = 1.0
HEALTH_MASTER, HEALTH_WORKER = "master", "worker/"


class Rejection(Exception):  # noqa: N818  it is what the master does, not an error of its own
    """The master will not start; the message says why and what to do."""


class WrongSetting(Rejection):
    """It can't start until somebody changes its settings, or puts the files there that they name."""


class Master:
    """A running master. `clock`: the journal's, too. `descriptors`: how many this process may have open."""

    def __init__(
        self,
        config: MasterConfig,
        journal: Journal,
        clock: Clock,
        descriptors: int = 1024,
        telemetry: TelemetryConfig | None = None,
    ) -> None:
        self.config = config
        self._telemetry = telemetry or TelemetryConfig()
        self.journal = journal
        self._clock = clock
        self.address = ""
        self.fatal: str | None = None
        self.stopped = asyncio.Event()
        self.driver: Driver
        self._descriptors = descriptors
        self._server = Server(max(descriptors - DESCRIPTORS_KEPT, descriptors // 2))
        self._audit = Audit(config.data_dir)
        self._health = health_service.Health()
        self._serving: asyncio.Task[None] | None = None
        self._saving_skew: asyncio.Task[None] | None = None
        self._intake: Intake
        self._metrics: MasterMetrics
        self._worker_log: WorkerLog
        self.gate: Gate | None = None
        self.certificates: doors.Certificates | None = None

    async def start(self) -> None:
        """Recovers what the journal holds, then opens the doors. Rejection: it can't."""
        config = self.config
        try:
            doors.check(config)
        except doors.DoorError as error:
            raise WrongSetting(str(error)) from error
        try:
            strategies = load_strategies()
        except StrategyError as error:
            raise Rejection(str(error)) from error
        strategy = canonical_name(config.strategy, strategies)
        if strategy is None:
            raise WrongSetting(f"no strategy {config.strategy!r}; there are: {', '.join(sorted(strategies))}")
        try:
            recovered = self.journal.open(self._on_commit)
            self._resume_clock(settings.saved_skew(recovered.settings))
        except JournalError as error:
            raise Rejection(str(error)) from error
        limits = Limits(
            tasks_max=config.queue_tasks_max,
            bytes_max=config.queue_bytes_max,
            ephemeral_bytes_max=config.ephemeral_bytes_max,
            session_timeout_s=config.session_timeout_s,
            memory_threshold=config.memory_threshold_percent / 100,
            breaker_share=config.breaker_share,
            breaker_window_s=config.breaker_window_s,
        )
        core = Core(strategies, limits, recovered.incarnations[-1].first_id, random.random, strategy)
        specs = SpecReader(config.result_ttl_max_s, self._clock.skew)
        driver = self.driver = Driver(
            core, self.journal, recovered, specs, self._clock.now, config.stream_bytes_max, self._die
        )
        driver.on_worker_changed = self._worker_changed
        self._worker_log = WorkerLog(driver)
        driver.journaling.learn_requests()
        self._intake = Intake(driver, config.payload_bytes_max)
        now = driver.now()
        try:
            expected = settings.restore(core, recovered.settings, now)
            tasks = [wire.restored_task(r, specs.restore(r.spec)) for r in recovered.tasks]
        except JournalError as error:
            raise Rejection(str(error)) from error
        driver.handle(ev.Recover(tasks, now + config.reconnect_grace_s if expected else now))
        self.journal.payloads.sweep()
        # A million queued tasks are not worth looking at again in every full collection.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        try:
            self.gate = await security.open_gate(config, recovered.settings, driver.now, driver.journaling.save)
        except (JournalError, OSError) as error:
            raise Rejection(f"the tokens can't be read or written: {error}") from error
        self._saving_skew = asyncio.create_task(self._save_skew())
        await self._open_doors(driver)
        log.info(
            "master ready", address=self.address, epoch=recovered.epoch,
            incarnation=driver.incarnations.current, recovered_tasks=len(tasks),
            awaited_workers=expected, strategy=core.strategy, data_dir=str(config.data_dir), version=VERSION,
            tls=bool(config.tls_cert), certificates=bool(config.tls_client_ca), tokens=config.require_tokens,
            descriptors=self._descriptors,
        )  # fmt: skip

    def _resume_clock(self, saved: SavedSkew | None) -> None:
        """At once when the journal is open: its sweeper waits for SWEEP_AFTER_S, and nothing has been recovered yet."""
        if saved is not None:
            self._clock.resume(saved)
            log.warning("the host's clock was set: the master's follows slowly", ahead_s=round(self._clock.skew(), 3))

    async def _save_skew(self) -> None:
        """For the next master, to whom all that we stamped would else be older or younger than it is."""
        while True:
            if (saved := self._clock.unsaved()) is not None:
                self.driver.journaling.remember(settings.clock_setting(saved))
            await asyncio.sleep(CLOCK_LOOK_S)

    def _on_commit(self, entries: Sequence[Entry], first_cursor: int, error: JournalError | None) -> None:
        """On the journal's thread. Nothing is appended before there is a driver."""
        self.driver.journaling.on_commit(entries, first_cursor, error)

    async def _open_doors(self, driver: Driver) -> None:
        config, server = self.config, self._server
        offer = self.journal.payloads.offer() if config.share_payloads else ()
        task_service = TaskService(driver, self._intake, config.submit_tasks_max, config.stream_bytes_max, offer)
        worker_service = WorkerService(driver, VERSION, config.heartbeat_interval_s, config.session_timeout_s, offer)
        services = {
            task_service_pb2.DESCRIPTOR.services_by_name["TaskService"]: task_service,
            worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"]: worker_service,
            admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]: AdminService(driver, VERSION, self.gate),
        }
        for descriptor, servicer in services.items():
            add_service(server, descriptor, servicer, self.gate, self._audit)
        add_service(server, health_pb2.DESCRIPTOR.services_by_name["Health"], self._health, read=read_small)
        names = [d.full_name for d in services]
        add_reflection(server, (*names, health_service.NAME, reflection.SERVICE_NAME), self.gate)
        try:
            if config.tls_cert:
                self.certificates = doors.Certificates(config)
            port = doors.open_port(server, config, self.certificates)
            self._metrics = MasterMetrics(driver, config, self._telemetry)
            self._metrics.start()
        except doors.DoorError as error:
            raise WrongSetting(str(error)) from error
        except ConfigError as error:  # an address that is taken, say
            raise Rejection(str(error)) from error
        except RuntimeError as error:
            raise Rejection(
                f"can't listen on {config.listen}: {error}; is another master there? choose another --listen"
            ) from error
        host = config.listen.rpartition(":")[0]
        self.address = config.listen if config.listen.startswith("unix:") else f"{host}:{port}"
        await server.start()
        self._serving = asyncio.create_task(self._end_with_server())
        for name in ("", HEALTH_MASTER, *names):
            self._health.set(name, health_service.RESPONSE.SERVING)
        for worker_id in driver.core.fleet.workers:  # those of the last master, until they come back
            self._health.set(HEALTH_WORKER + worker_id, health_service.RESPONSE.NOT_SERVING)

    def _worker_changed(self, change: ev.WorkerChanged) -> None:
        worker = change.worker
        driver = self.driver
        if change.gone:
            self._worker_log.forget(worker)
        elif not self._intake.stopping:
            self._worker_log.changed(worker)
        if change.remember and not self._intake.stopping:  # sessions that we end are to be awaited by the next master
            setting = settings.worker_setting(worker)
            driver.journaling.remember(dict.fromkeys(setting) if change.gone else setting)
            state = health_service.RESPONSE.SERVING if worker.accepting else health_service.RESPONSE.NOT_SERVING
            self._health.set(
                HEALTH_WORKER + worker.worker_id, health_service.RESPONSE.SERVICE_UNKNOWN if change.gone else state
            )
        driver.watchers.wake("workers")

    def _die(self, reason: str) -> None:
        """The journal failed: what is on the disk can only be known by reading it again, in a new process."""
        if self.fatal is None:
            self.fatal = reason
            log.critical("master ends", reason=reason)
            self.stopped.set()

    async def _end_with_server(self) -> None:
        """GRPC ends a server that met an error of its own, and the process would live on and serve nobody."""
        try:
            await self._server.wait_for_termination()
        except Exception:
            log.exception("the gRPC server failed")
        if not self._intake.stopping:
            self._die("the gRPC server ended")

    def reload(self) -> None:
        """Reads the certificate's files again, as every new connection does. DoorError: they are no good, and those
        before them stay in force.
        """
        if self.certificates is not None:
            self.certificates.reload()

    async def stop(self) -> None:
        """Closes the doors, writes what was settled, and lets go of the journal, within stop_timeout_s."""
        timeout_s = self.config.stop_timeout_s
        self._intake.stopping = True
        if self._saving_skew is not None:
            self._saving_skew.cancel()
        self._health.stop()
        if self.fatal is None:
            await asyncio.wait([asyncio.ensure_future(self.driver.journaling.all_durable())], timeout=timeout_s / 3)
        # Streams don't end by themselves: their peers reconnect to whoever is there next.
        await self._server.stop(min(0.2, timeout_s / 3))
        await self._audit.finish(timeout_s / 3)
        try:
            await asyncio.to_thread(self.journal.close, timeout_s / 3)
        except JournalError as error:
            self._die(str(error))
        self._metrics.stop()
        log.info("master stopped")
