"""The worker's middle: what comes down the link goes to an engine, what an engine says goes up the link.

All of it runs on one event loop and none of it waits: the session (what we hold and owe) and the batcher (what goes
next) are plain values; the link and the engine processes do the I/O and call in here. Each engine holds one batch more
than it has slots, so that the next one is prepared while one runs. Tasks of a model go to a process of that model
(processes/pool.py), which models/loader.py has loaded when they wait for it; all others go to the base.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from multigpu._transport.credentials import Credentials
from multigpu.config.config import WorkerConfig
from multigpu.daemon.telemetry import span_from
from multigpu.repository.model import ModelFolderError, Scan
from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.device.energy import Energy
from multigpu_worker.device.health_monitor import HealthMonitor
from multigpu_worker.device.interface import Device
from multigpu_worker.device.sampler import Sampler
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.models.loader import ModelLoader
from multigpu_worker.models.messages import model_messages, residency_messages
from multigpu_worker.mps.engines import Mps
from multigpu_worker.mps.status import MpsStatus
from multigpu_worker.processes.deaths import Judgement
from multigpu_worker.processes.host import Death, EngineStartError
from multigpu_worker.processes.pool import EnginePool
from multigpu_worker.processes.process import EngineProcess, LoadedWords, ProcessSettings
from multigpu_worker.processes.reload import HandlersReload
from multigpu_worker.processes.watch import EngineBatch
from multigpu_worker.session import wire
from multigpu_worker.session.batcher import Batcher, BatchLimits
from multigpu_worker.session.link import Link, Metadata, ProtocolMismatchError, TakenOverError
from multigpu_worker.session.payload_sharing import Sharing
from multigpu_worker.session.session import Lease, Report, ReportState, Session, SessionLimits, Spec, TaskError
from multigpu_worker.supervision import Supervision

log = structlog.get_logger()

TICK_S = 0.05
MEMORY_TICKS = 2  # from one look at the engines' memory to the next
FRAME_BYTES_MAX = 4 << 20
# Past so many unsent bytes the engines have to wait, until the link has sent half of them.
UNSENT_BYTES_MAX = 64 << 20
# The master does not count leases that are given back for these.
MAKES_ROOM = "ModelMakesRoom"
RECALLED = "Recalled"
# A heartbeat waits so long for a fresh word of the device's sensors, and goes with the last one if none comes.
SAMPLE_TIMEOUT_S = 0.5


class Agent:
    """Owns a worker's parts; `run` is its life. Must be made on the event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: wire.Identity,
        device: Device,
        settings: EngineSettings,
        *,
        memory_bytes: int,
        find_catalog: Callable[[], Scan] = Scan,
        model_memory_bytes: int = 0,
        mps: Mps | None = None,
        mps_off: MpsStatus | None = None,
    ) -> None:
        self.config = config
        self.identity = identity
        self.device = device
        self.session = Session(SessionLimits())
        self.batcher = Batcher(
            BatchLimits(
                tasks_max=config.batch_tasks_max, tokens_max=config.batch_tokens_max, delay_s=config.batch_delay_s
            ),
            config.slots,
        )
        self.sampler = Sampler(device)
        processes = ProcessSettings(
            config=config,
            engine=settings,
            device=device,
            memory_bytes=memory_bytes,
            mps=mps,
            suspects=lambda lease_id: self.health_monitor.suspects(lease_id),  # noqa: PLW0108  it is made below
        )
        self.pool = EnginePool(self, processes)
        self._find_catalog = find_catalog
        self._catalog = find_catalog()
        self.loader = ModelLoader(
            self,
            self.pool,
            self.sampler,
            self._catalog,
            settings,
            limit_bytes=model_memory_bytes,
            progress_timeout_s=config.progress_timeout_s,
            # With only the packaged model, keep no spare process.
            eager=bool(config.models or config.model_repository or config.default_model),
        )
        self.batcher.rules = self.loader.routes.rules()
        # Why it runs without MPS.
        self._mps_off = mps_off
        self.link = Link(config.master, self, Credentials.of(config))
        self.sharing = Sharing()
        self._key_due = False
        self.draining = False
        self._stopped = False
        self._one_by_one: frozenset[str] = frozenset()
        self._paused = False
        # When a batch that waits to grow must go.
        self._growth: tuple[float, asyncio.Handle] | None = None
        self.health_monitor: HealthMonitor = HealthMonitor(
            self, device, self.sampler, self.pool, settings.artifacts, self_test_interval_s=config.canary_interval_s
        )
        self.handlers = HandlersReload(self.pool.base, config.drain_timeout_s, self._reloaded)
        # How often the engines were looked at: what systemd's watchdog goes by.
        self.ticks = 0
        self._heartbeat_wanted = False
        self._heartbeat_s = 1.0
        self._last_frame = 0
        # The interval of heartbeats may be another one now.
        self._welcomed = asyncio.Event()
        self._settled = asyncio.Event()

    async def run(self) -> None:
        """Start the engine, then work until `drain` or `stop` has come to its end.

        EngineStartError: the engine can't start. ProtocolMismatchError: the master speaks another version.
        TakenOverError: another worker has our id. ExceptionGroup: an error of our own, wherever it was raised.
        """
        supervision = Supervision()
        try:
            try:
                await self.pool.start()
            except EngineStartError:
                if self._stopped:  # by us, before it was ready
                    return
                raise
            base = self.pool.base.host
            log.info("engine ready", pid=base.pid, kinds=sorted({kind for kind, _ in self._offers()}))
            self.sampler.start()
            chores = [supervision.watch(), self._beat(), self._tick(), self.health_monitor.run(), self.handlers.run()]
            if self.config.model_repository and self.config.repository_poll_s:
                chores.append(self._poll())
            if self.pool.mps is not None:
                chores.append(self.pool.mps.watch(self.pool.lost))
            await self._work(chores)
        finally:
            self.sampler.stop()
            self.pool.stop()
            await self.pool.stopped()

    async def _work(self, chores: list[Coroutine[Any, Any, None]]) -> None:
        """Keep the session, with these beside it: one that fails ends all."""
        rejected: Exception | None = None
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(chore) for chore in chores]
            try:
                await self.link.run()
            except (ProtocolMismatchError, TakenOverError) as error:
                rejected = error
            for task in tasks:
                task.cancel()
        if rejected is not None:
            raise rejected

    async def drain(self, timeout_s: float) -> None:
        """Take no more work, finish what is held within the timeout, give back the rest, and end the stream."""
        self.draining = True
        self.want_heartbeat()
        log.info("draining", leases=len(self.session.leases), timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._stopped and (self.session.leases or self.session.owes()):
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            log.warning("giving back what was not finished in time", leases=len(self.session.leases))
        if not self._stopped:
            self.session.return_all("the worker is stopping", time.time_ns())
            self.pool.forget()
            await self.pool.close()
        if not self._stopped:
            self.stop("the worker is stopping")

    def stop(self, reason: str) -> None:
        """Give back whatever is held, and end the engine and the stream."""
        self._stopped = True
        self._settled.set()
        self.session.return_all(reason, time.time_ns())
        self.pool.forget()
        self.pool.stop()
        self.link.close()

    # What the link asks and tells.

    def hello(self) -> pb.SessionRequest:
        self._note_running()
        self.loader.changed = False
        # A worker that runs more of one kind at a time says so, or the master would hold back what could join.
        slots = max(self.identity.slots, self.loader.slots_max())
        return wire.hello(
            dataclasses.replace(self.identity, slots=slots),
            self._offers(),
            self.session.held(hello=True),
            models=model_messages(self.loader.routes),
            model_memory_bytes=self.loader.limit_bytes,
            incarnation=self.session.incarnation,
        )

    def _offers(self) -> list[tuple[str, list[str]]]:
        """The kinds that run here, each with the names of its models."""
        plain = [(kind, list[str]()) for kind in self.pool.base.host.kinds if not self.loader.routes.serves(kind)]
        return plain + self.loader.routes.offers()

    def _catalog_change(self) -> pb.Catalog | None:
        """What is offered, if it is not what this session's master was told."""
        if not self.loader.changed:
            return None
        self.loader.changed = False
        return wire.catalog_message(self._offers(), model_messages(self.loader.routes))

    def connected(self, welcome: pb.SessionResponse, metadata: Metadata) -> None:
        words = welcome.welcome
        self._key_due = self.sharing.begin(metadata)
        self.pool.share()
        self._last_frame = 0
        self._heartbeat_s = min(max(wire.seconds_of(words.heartbeat_interval) or 1.0, 0.01), 60.0)
        self.cancel(self.session.welcome(words.adopted_lease_ids, words.incarnation))
        log.info("session begins", master=self.config.master, session_id=words.session_id, master_version=words.version)
        self.want_heartbeat()
        self._welcomed.set()
        self.received(welcome)

    def received(self, response: pb.SessionResponse) -> None:
        self._last_frame = response.frame
        if response.results_taken:
            self.sharing.taken(response.results_taken)
        for batch in response.lease_batches:
            spec, leases = wire.leases_of(batch, self.sharing.path)
            if any(lease.lease_id in self.session.leases for lease in leases):
                raise wire.BadFrameError("it grants a lease that we hold")
            self.session.grant(leases)
            if self._runs(spec):
                self.pool.let_pass(self.batcher.add(spec, leases))
            else:
                self._reject(leases, spec)
        if response.revocations:
            revoked = [self.session.revoke(revocation.lease_id) for revocation in response.revocations]
            self.cancel([lease for lease in revoked if lease is not None])
            self._settled.set()
        if response.recalled_lease_ids:
            self.return_leases(self.pool.recall(self.session.recall(response.recalled_lease_ids)), "recalled", RECALLED)
        if response.reload_handlers:
            self.handlers.want()
        if response.HasField("desired"):
            self.health_monitor.asked(response.desired.check)
            self.loader.desire(response.desired.pinned_models, response.desired.unwanted_models)
        if response.lease_batches and self.health_monitor.health.unusable:  # they crossed our word
            self.give_back("the device can't be used", running=self.health_monitor.health.barred)
        elif response.lease_batches:
            self.pump()

    def next_frame(self) -> pb.SessionRequest | None:
        # First the heartbeat: reports that it overtakes would still be listed, those that overtook it would not.
        if self._heartbeat_wanted or self.session.heartbeat_due:
            self._heartbeat_wanted = False
            self._note_running()
            sample = self.sampler.latest
            request = wire.heartbeat(
                self.session.held(hello=False),
                last_frame=self._last_frame,
                telemetry=None if sample is None else sample.telemetry,
                sample_ns=0 if sample is None else sample.time_ns,
                models=residency_messages(self.loader.routes),
                catalog=self._catalog_change(),
                embedding_cache=self.pool.embedding_cache(),
                draining=self.draining,
                mps=self._mps_off if self.pool.mps is None else self.pool.mps.status,
                health=wire.health_message(self.health_monitor.health, self.health_monitor.checks_passed),
                handlers=self.handlers.message(),
                occupied_slots=self.pool.occupied,
            )
            if self._key_due and self.sharing.directory is not None:  # it comes before any result of the session
                self._key_due = False
                request.payload_key = self.sharing.directory.key
            return request
        reports = None
        if self.session.owes():
            reports = wire.request_of(self.session.take_frame(FRAME_BYTES_MAX, time.monotonic()), self.sharing.lend)
        else:
            self._settled.set()
        if self._paused and self.session.unsent_bytes < UNSENT_BYTES_MAX // 2:
            self._paused = False
            self.pool.pause(paused=False)
        return reports

    def disconnected(self, reason: str) -> None:
        if not self._stopped:
            log.warning("session broke", reason=reason, leases=len(self.session.leases))
        self.cancel(self.session.break_stream())

    # What the engine tells.

    def engine_ready(self, process: EngineProcess) -> None:
        if process is self.pool.base:
            self._one_by_one = frozenset(info.kind for info in process.host.kinds.values() if info.one_by_one)
            self.pump()

    def model_loaded(self, process: EngineProcess, words: LoadedWords) -> None:
        self.loader.model_loaded(process, words)
        self.batcher.rules = self.loader.routes.rules()  # a new version may have come to serve

    def load_failed(self, process: EngineProcess, error_type: str, message: str, *, retryable: bool) -> None:
        self.loader.load_failed(process, error_type, message, retryable=retryable)

    def facts_changed(self, process: EngineProcess, facts: dict[str, str]) -> None:
        self.loader.facts_changed(process, facts)

    def self_test_begun(self, test_id: int) -> None:
        self.health_monitor.self_test.begun(test_id)

    def self_test_done(self, test_id: int, right: bool | None, words: str) -> None:
        self.health_monitor.self_test.done(test_id, right, words)

    def room_made(self) -> None:
        self.pump()

    def given_back(self, leases: list[Lease]) -> None:
        self.return_leases([lease for lease in leases if lease.recalled], "recalled", RECALLED)
        self.batcher.give_way([lease for lease in leases if not lease.recalled])
        self.pump()

    def _reloaded(self) -> None:
        """The engine may run other kinds now."""
        self.loader.changed = True
        self.want_heartbeat()
        gone = [lease for lease in self.session.leases.values() if not self._runs(lease.spec)]
        self.return_leases(gone, "the reloaded handlers don't have its kind")
        self.pump()

    def batch_done(self, process: EngineProcess, batch: EngineBatch, work_ns: int) -> None:
        if batch.one_by_one and batch.settled:
            self.batcher.measure(batch.spec, batch.settled, work_ns / 1e9)
        if process.model:
            self.loader.used(process.model)
        self.pump()
        if not self._busy():
            self.sampler.end_work()

    def engine_died(self, process: EngineProcess, death: Death, judged: Judgement, others: str) -> None:
        self.pool.died(process)
        if not self._busy():
            self.sampler.end_work()
        if self.pool.runs_self_test(process):
            self.health_monitor.self_test.engine_died(others)
        began_ns = (now_ns := time.time_ns()) - max([slot.ran_ns() for slot in death.slots], default=0)
        if self.health_monitor.grace_s and any(report.broke_engine for report in judged.reports):
            # What the device has to say of it comes soon: if that is to blame, these leases are given back before.
            asyncio.get_running_loop().call_later(
                self.health_monitor.grace_s, self.report, began_ns, now_ns, judged.reports
            )
        else:
            self.report(began_ns, now_ns, judged.reports)
        self.batcher.put_back(judged.again)
        if judged.hardware:
            self.health_monitor.memory_failed(judged.hardware)
        if death.fault is not None:
            self.pool.lost()
            self.want_heartbeat()
        if process.host.imports is not None and not self._stopped:
            self.loader.process_died(process, death)
            self.pump()

    # Callbacks of the model loader.

    def waiting(self) -> list[Lease]:
        """The leases that are in no engine."""
        inside = self._inside()
        return [lease for lease_id, lease in self.session.leases.items() if lease_id not in inside]

    def fail(self, leases: list[Lease], error: TaskError) -> None:
        """These leases can't be run here."""
        for lease in leases:
            lease.dropped = True
        now_ns = time.time_ns()
        self.report(now_ns, now_ns, [Report(lease, ReportState.FAILED, error=error) for lease in leases])

    def return_leases(self, leases: list[Lease], why: str, error_type: str = MAKES_ROOM) -> None:
        """Give these back uncharged."""
        self.session.give_back(leases, why, time.time_ns(), error_type)
        self._outgoing()

    def may_load(self) -> bool:
        """The device is well, and the worker is not about to stop."""
        return self.pool.ready and not self.pool.parked and self.health_monitor.health.fit and not self._stopped

    # Callbacks of the health monitor.

    def give_back(self, why: str, *, running: bool) -> None:
        """Return leases uncharged: those that wait for the engine, or all."""
        self.session.return_all(why, time.time_ns(), kept=() if running else self._inside())
        if running:
            self.pool.forget()
            self.sampler.end_work()
        self._outgoing()

    def want_heartbeat(self) -> None:
        """Tell the master now how things are."""
        self._heartbeat_wanted = True
        self.link.wake()

    def running(self) -> list[int]:
        """The leases that the engine runs at this instant."""
        return [lease.lease_id for process in self.pool for lease in process.running()]

    def idle(self) -> bool:
        """Whether the engines are there and have nothing to do."""
        return self.pool.idle

    def replace_engine(self) -> None:
        """End the engines and start others; what is in them goes on there, and nobody is charged for that."""
        self.pool.replace()

    # Between the two.

    def _runs(self, spec: Spec) -> bool:
        """There is something here that can run tasks of this spec, or can be loaded."""
        if self.loader.routes.serves(spec.kind):
            return self.loader.routes.key_of(spec) is not None
        return spec.kind in self.pool.base.host.kinds

    def _target(self, spec: Spec, first: Lease | None) -> EngineProcess | None:
        """The process that should have a batch of these, which begins with `first`, now; None: none can take it."""
        if self.loader.routes.serves(spec.kind):
            model = self.loader.routes.key_of(spec)
            return None if model is None else self.pool.target(model, first)
        return self.pool.base if self.pool.base.takes(first) else None

    def pump(self) -> None:
        """Keep the engines supplied."""
        waiting: set[Spec] = set()
        # When engines that have enough for now should have their next batches.
        later_s: list[float] = []
        now_s = time.monotonic()
        one_by_one = self._one_by_one | self.loader.one_by_one

        def may(spec: Spec) -> bool:
            process = self._target(spec, self.batcher.first(spec))
            if process is None:
                waiting.add(spec)
                return False
            if spec.kind in one_by_one or process.pace.due_s() <= now_s:
                return True
            later_s.append(process.pace.due_s())
            return False

        while leases := self.batcher.pop(one_by_one=one_by_one, may=may, now_s=now_s):
            spec = leases[0].spec
            process = self._target(spec, leases[0])
            assert process is not None
            self.sampler.begin_work()
            process.dispatch(leases, one_by_one=spec.kind in one_by_one)
            waiting.clear()
        due_s = min([due_s for due_s in (self.batcher.due_s(), *later_s) if due_s is not None], default=None)
        if due_s is not None and (self._growth is None or not now_s <= self._growth[0] <= due_s):
            if self._growth is not None:
                self._growth[1].cancel()
            self._growth = due_s, asyncio.get_running_loop().call_at(due_s, self._grown)
        if waiting:
            self.loader.wanted({model for spec in waiting if (model := self.loader.routes.key_of(spec)) is not None})

    def _grown(self) -> None:
        """A batch has waited long enough."""
        self._growth = None
        self.pump()

    def _busy(self) -> bool:
        return any(process.batches for process in self.pool)

    def _inside(self) -> set[int]:
        """The leases that are in an engine."""
        return {lease_id for process in self.pool for batch in process.batches.values() for lease_id in batch.leases}

    def report(self, start_ns: int, finish_ns: int, reports: list[Report], energy: Energy | None = None) -> None:
        """Take reports, of which there may be none; partial outputs that came with them are in the session."""
        for report in reports:
            if report.lease.traceparent:
                self._trace(report, start_ns, finish_ns)
        self.session.report(start_ns, finish_ns, reports, energy)
        self._outgoing()

    def _outgoing(self) -> None:
        if self.session.unsent_bytes > UNSENT_BYTES_MAX and not self._paused:
            self._paused = True
            self.pool.pause(paused=True)
        if self.session.connected:
            self.link.wake()
        self._settled.set()

    def _trace(self, report: Report, start_ns: int, finish_ns: int) -> None:
        attributes = {
            "multigpu.task_id": report.lease.task_id,
            "multigpu.lease_id": report.lease.lease_id,
            "multigpu.attempt": report.lease.attempt,
            "multigpu.kind": report.lease.spec.kind,
            "multigpu.worker_id": self.identity.worker_id,
        }
        span_from(report.lease.traceparent, "multigpu.run", start_ns, finish_ns, attributes)

    def _reject(self, leases: list[Lease], spec: Spec) -> None:
        """What nothing here offers: the master was told, so this is its error, but not the task's."""
        if self.loader.routes.serves(spec.kind):
            error = TaskError(type="UnknownModel", message=self.loader.routes.why_not(spec), retryable=False)
        else:
            kinds = ", ".join(sorted(kind for kind, _ in self._offers()))
            message = f"worker {self.identity.worker_id} doesn't run {spec.kind!r}; it runs {kinds}"
            error = TaskError(type="UnknownKind", message=message, retryable=False)
        self.fail(leases, error)

    def cancel(self, leases: list[Lease]) -> None:
        """Tell the engines that nobody wants these any more; those that wait are dropped when their turn comes."""
        for process in self.pool:
            process.cancel(leases)

    def _note_running(self) -> None:
        """Read from the engines' pages which leases run, and how often they have moved."""
        for process in self.pool:
            process.running()

    async def _beat(self) -> None:
        """Send a heartbeat at the master's interval, with the device's state."""
        while True:
            await self.sampler.sample(min(SAMPLE_TIMEOUT_S, self._heartbeat_s))
            self.sampler.count_sharers(self.pool.owns)
            self.pool.tell_taken()
            if self.session.connected:
                self.want_heartbeat()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._welcomed.wait()
            self._welcomed.clear()

    async def _poll(self) -> None:
        """See whether models came, went or changed in the repository."""
        while True:
            await asyncio.sleep(self.config.repository_poll_s)
            try:
                found = await asyncio.to_thread(self._find_catalog)
            except (ModelFolderError, OSError, ValueError) as error:
                log.warning("the model repository can't be read; what was there goes on", error=str(error))
                continue
            if found != self._catalog:
                log.info("the model repository has changed", models=len(found.models), errors=dict(found.errors))
                self._catalog = found
                await self.loader.put(found)
                self.batcher.rules = self.loader.routes.rules()

    async def _tick(self) -> None:
        """Look at the engines: does what runs keep its limits, do models come and go as they should?"""
        while True:
            await asyncio.sleep(TICK_S)
            self.ticks += 1
            if self._paused:
                continue
            if self.pool.check(memory=self.ticks % MEMORY_TICKS == 0):
                self.want_heartbeat()
            if self.sampler.meter is not None and self._busy():
                slots = [state for process in self.pool if process.batches for state in process.host.sample()]
                self.sampler.running = max(1, sum(state.batch_id != 0 for state in slots))
            self.loader.tick()
