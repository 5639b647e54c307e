"""The worker's middle: what comes down the link goes to the engine, what the engine says goes up the link.

All of it runs on one event loop and none of it waits: the session (what we hold and owe), the batcher (what goes
next) and the watch (when the engine must be ended) are plain values; the link and the engine host do the I/O and call
in here. The engine holds one batch more than there are slots, so that the next one is prepared while one runs.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import structlog
from multigpu.config import WorkerConfig
from multigpu.credentials import Credentials
from multigpu.payloads import Elsewhere, Reference
from multigpu.telemetry import span_from
from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker import ipc, wire
from multigpu_worker.batcher import Batcher, BatchLimits
from multigpu_worker.caretaker import Caretaker
from multigpu_worker.deaths import Deaths
from multigpu_worker.device import Device
from multigpu_worker.energy import Energy
from multigpu_worker.engine_host import Death, EngineHost, EngineStartError
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.link import Link, Metadata
from multigpu_worker.mps import Mps, MpsStatus
from multigpu_worker.sampler import Sampler
from multigpu_worker.session import Lease, Report, ReportState, Session, SessionLimits, TaskError
from multigpu_worker.sharing import Sharing
from multigpu_worker.watch import EngineBatch, Watch, running_leases

log = structlog.get_logger()

TICK_S = 0.05
# The engine's memory is looked at every so many ticks.
MEMORY_TICKS = 2
FRAME_BYTES_MAX = 4 << 20
# Past so many unsent bytes the engine has to wait, until the link has sent half of them.
UNSENT_BYTES_MAX = 64 << 20
# Results taken hold of before the engine is told, if not by the next heartbeat.
TELL_TAKEN = 16
# A heartbeat waits so long for a fresh word of the device's sensors, and goes with the last one if none comes.
SAMPLE_TIMEOUT_S = 0.5
# A report has to fit into one message, with room for what goes beside the result.
RESULT_BYTES_MAX = (64 << 20) - (64 << 10)


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
        mps: Mps | None = None,
        mps_off: MpsStatus | None = None,
    ) -> None:
        self.config = config
        self.identity = identity
        self.device = device
        self.memory_bytes = memory_bytes
        self.session = Session(SessionLimits())
        self.batcher = Batcher(
            BatchLimits(tasks_max=config.batch_tasks_max, tokens_max=config.batch_tokens_max), config.slots
        )
        self.watch = Watch(progress_timeout_s=config.progress_timeout_s, cancel_grace_s=config.cancel_grace_s)
        self.host = EngineHost(
            settings,
            self,
            memory_bytes=memory_bytes,
            result_bytes_max=min(config.result_bytes_max, RESULT_BYTES_MAX),
            visible_devices=device.visible_devices,
            mps=mps,
        )
        # Why it runs without MPS.
        self._mps_off = mps_off
        self.link = Link(config.master, self, Credentials.of(config))
        self.sharing = Sharing()
        # Results that we have taken hold of, and the engine doesn't know of it.
        self._untold = 0
        self._key_due = False
        # In the engine, by batch id.
        self.batches: dict[int, EngineBatch] = {}
        self.draining = False
        self._stopped = False
        self._batch_id = 0
        self._one_by_one: frozenset[str] = frozenset()
        self._cancelled_ns: dict[int, int] = {}
        self._paused = False
        self.sampler = Sampler(device)
        self.care = Caretaker(self, device, self.sampler, self.host, canary_interval_s=config.canary_interval_s)
        self.deaths = Deaths(self.care.suspects, memory_bytes)
        self._resident_models: Sequence[str] = ()
        self._embedding_cache: pb.EmbeddingCache | None = None
        # How often the engine was looked at: what systemd's watchdog goes by.
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
        """
        try:
            try:
                await self.host.start()
            except EngineStartError:
                if self._stopped:  # by us, before it was ready
                    return
                raise
            log.info("engine ready", pid=self.host.pid, kinds=sorted(self.host.kinds))
            self.sampler.start()
            chores = [asyncio.create_task(chore) for chore in (self._beat(), self._tick(), self.care.run())]
            if self.host.mps is not None:
                chores.append(asyncio.create_task(self.host.mps.watch(self.host.kill)))
            try:
                await self.link.run()
            finally:
                for chore in chores:
                    chore.cancel()
                await asyncio.gather(*chores, return_exceptions=True)
        finally:
            self.sampler.stop()
            self.host.stop()
            await self.host.stopped()

    async def drain(self, timeout_s: float) -> None:
        """Take no more work, finish what is held within the timeout, give back the rest, and end the stream."""
        self.draining = True
        self._want_heartbeat()
        log.info("draining", leases=len(self.session.leases), timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._stopped and (self.session.leases or self.session.owes()):
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            log.warning("giving back what was not finished in time", leases=len(self.session.leases))
        if not self._stopped:
            self.stop("the worker is stopping")

    def stop(self, reason: str) -> None:
        """Give back whatever is held, and end the engine and the stream."""
        self._stopped = True
        self._settled.set()
        self.session.return_all(reason, time.time_ns())
        self.batches.clear()
        self.host.stop()
        self.link.close()

    # What the link asks and tells.

    def hello(self) -> pb.SessionRequest:
        self._note_running()
        return wire.hello(self.identity, self.host.kinds.values(), self.session.held(hello=True))

    def connected(self, welcome: pb.SessionResponse, metadata: Metadata) -> None:
        words = welcome.welcome
        self._key_due = self.sharing.begin(metadata)
        if self.host.ready:
            self.host.send(("payloads", self.sharing.path), [])
        self._last_frame = 0
        self._heartbeat_s = min(max(wire.seconds_of(words.heartbeat_interval) or 1.0, 0.01), 60.0)
        self._cancel(self.session.welcome(words.adopted_lease_ids))
        log.info("session begins", master=self.config.master, session_id=words.session_id, master_version=words.version)
        self._want_heartbeat()
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
            if spec.kind in self.host.kinds:
                self.batcher.add(spec, leases)
            else:
                self._refuse(leases, spec.kind)
        if response.revocations:
            revoked = [self.session.revoke(revocation.lease_id) for revocation in response.revocations]
            self._cancel([lease for lease in revoked if lease is not None])
            self._settled.set()
        if response.HasField("desired"):
            self.care.asked(response.desired.check)
        if response.lease_batches and self.care.unusable:  # they crossed our word
            self.give_back("the device can't be used", running=True)
        elif response.lease_batches:
            self._pump()

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
                resident_models=self._resident_models,
                embedding_cache=self._embedding_cache,
                draining=self.draining,
                mps=self._mps_off if self.host.mps is None else self.host.mps.status,
                health=wire.health_message(self.care.health, self.care.checks_passed),
            )
            if self._key_due and self.sharing.directory is not None:  # it comes before any result of the session
                self._key_due = False
                request.payload_key = self.sharing.directory.key
            return request
        if not self.session.owes():
            self._settled.set()
            return None
        request = wire.request_of(self.session.take_frame(FRAME_BYTES_MAX, time.monotonic()), self.sharing.lend)
        if self._paused and self.session.unsent_bytes < UNSENT_BYTES_MAX // 2:
            self._paused = False
            self.host.pause(paused=False)
        return request

    def disconnected(self, reason: str) -> None:
        if not self._stopped:
            log.warning("session broke", reason=reason, leases=len(self.session.leases))
        self._cancel(self.session.break_stream())

    # What the engine tells.

    def engine_ready(self) -> None:
        self._one_by_one = frozenset(info.kind for info in self.host.kinds.values() if info.one_by_one)
        self.host.send(("payloads", self.sharing.path), [])
        self._pump()

    def engine_said(self, message: ipc.Message, blobs: list[bytes]) -> None:
        if message[0] == "canary":
            self.care.canary_answered(*message[1:])
            return
        if message[0] == "singing":
            self.care.canary_begun(*message[1:])
            return
        (
            _,
            batch_id,
            start_ns,
            finish_ns,
            succeeded,
            failed,
            partials,
            progress,
            checkpoints,
            done,
            work_ns,
            models,
            cache,
        ) = message
        embedding_cache = pb.EmbeddingCache(**cache) if cache else None
        if any(type(result) is tuple for _, result, _ in succeeded):
            succeeded, failed = self._take_hold(succeeded, failed)
        batch = self.batches.get(batch_id)
        if batch is None:  # returned in a drain
            return
        leases = batch.leases
        if failed:
            failed = self.deaths.keep_back(failed, one_by_one=batch.one_by_one)
        if self.deaths.pending:  # the engine is of no use any more, and its leases wait for the judgement
            done = False
            self.host.ready = False
            asyncio.get_running_loop().call_soon(self._end_engine, self.host.pid)
        for lease_id, data in checkpoints:
            self.session.save(leases[lease_id], data if type(data) is bytes else blobs[data])
        for lease_id, fraction, note in progress:
            leases[lease_id].fraction, leases[lease_id].note = fraction, note
        for lease_id, data in partials:
            lease = leases[lease_id]
            if not self.session.partial(lease, data if type(data) is bytes else blobs[data]):
                self._cancel([lease])
        # All of it is read before any of it counts: words that make no sense must leave every lease with its batch.
        reports = [
            Report(
                leases[lease_id],
                ReportState.SUCCEEDED,
                blobs[result] if type(result) is int else result,
                content_type,
            )
            for lease_id, result, content_type in succeeded
        ]
        for lease_id, error_type, text, retryable, traceback in failed:
            error = TaskError(type=error_type, message=text, retryable=retryable, traceback=traceback)
            reports.append(Report(leases[lease_id], ReportState.FAILED, error=error))
        for report in reports:
            leases.pop(report.lease.lease_id, None)
        batch.settled += len(reports)
        energy = None if self.sampler.meter is None else self._energy(batch, start_ns, finish_ns, reports)
        self._report(start_ns, finish_ns, reports, energy)
        if done:
            self._embedding_cache = embedding_cache
            self._batch_done(batch, work_ns, models)

    def _end_engine(self, pid: int) -> None:
        """Ends this engine, unless it has died meanwhile and another is in its place."""
        if self.host.pid == pid:
            self.host.kill()

    def _energy(self, batch: EngineBatch, start_ns: int, finish_ns: int, reports: list[Report]) -> Energy | None:
        """What each unit of these tasks' work took, since something was last settled in their batch."""
        start_ns = batch.unsettled_ns or start_ns
        batch.unsettled_ns = 0 if reports else start_ns
        return self.sampler.measure(start_ns, finish_ns, sum(report.lease.units for report in reports))

    def _take_hold(self, succeeded: list[Any], failed: list[Any]) -> tuple[list[Any], list[Any]]:
        """Pins results that lie in files, before the engine lets go of them."""
        held, lost, places = [], [], 0
        for lease_id, result, content_type in succeeded:
            if type(result) is tuple:
                places += 1
                try:
                    result = self.sharing.pin(*result)  # noqa: PLW2901  it was only its place
                except OSError as error:
                    lost.append((lease_id, "ResultLost", f"the result is gone from where it lay: {error}", True, ""))
                    continue
            held.append((lease_id, result, content_type))
        self._untold += places
        if self._untold >= TELL_TAKEN:
            self._tell_taken()
        return held, [*failed, *lost]

    def _tell_taken(self) -> None:
        """Lets the engine forget the results that we have taken hold of."""
        if self._untold and self.host.ready:
            self.host.send(("taken", self._untold), [])
            self._untold = 0

    def engine_died(self, death: Death) -> None:
        judged = self.deaths.judge(death, self.batches)
        log.warning(
            "engine died",
            how=death.words,
            reason=judged.reason,
            failed_task_ids=[report.lease.task_id for report in judged.reports],
            again=len(judged.again),
        )
        others = judged.reason if self.batches or judged.by_others else ""
        self.batches.clear()
        self.sampler.end_work()
        self.care.engine_died(others)
        self._cancelled_ns.clear()
        self._untold = 0
        self.watch.reset()
        self._paused = False
        self._resident_models = ()
        self._embedding_cache = None
        now_ns = time.time_ns()
        if self.care.grace_s and any(report.broke_engine for report in judged.reports):
            # What the device has to say of it comes soon: if that is to blame, these leases are given back before.
            asyncio.get_running_loop().call_later(self.care.grace_s, self._report, now_ns, now_ns, judged.reports)
        else:
            self._report(now_ns, now_ns, judged.reports)
        for lease in judged.again:
            lease.running = False
        self.batcher.put_back(judged.again)
        if judged.hardware:
            self.care.memory_failed(judged.hardware)
        if death.fault is not None:
            self._want_heartbeat()

    # What the caretaker of the device asks for.

    def give_back(self, why: str, *, running: bool) -> None:
        """Return leases uncharged: those that wait for the engine, or all."""
        inside = () if running else {lease_id for batch in self.batches.values() for lease_id in batch.leases}
        self.session.return_all(why, time.time_ns(), kept=inside)
        if running:
            self.batches.clear()
            self.sampler.end_work()
            self._cancelled_ns.clear()
            self.deaths.forget()
        self._outgoing()

    def want_heartbeat(self) -> None:
        """Tell the master now how things are."""
        self._want_heartbeat()

    def running(self) -> list[int]:
        """The leases that the engine runs at this instant."""
        slots = self.host.sample()
        return [lease.lease_id for s in slots for lease in running_leases(s, self.batches.get(s.batch_id))]

    def idle(self) -> bool:
        """Whether the engine is there and has nothing to do."""
        return self.host.ready and not self.batches

    def replace_engine(self) -> None:
        """End the engine and start another; what is in it goes on there, and nobody is charged for that."""
        self.deaths.replace()
        self.host.kill()

    # Between the two.

    def _pump(self) -> None:
        """Keep the engine supplied."""
        while self.host.ready and len(self.batches) <= self.config.slots:
            leases = self.batcher.pop(one_by_one=self._one_by_one)
            if not leases:
                return
            self._dispatch(leases)

    def _dispatch(self, leases: list[Lease]) -> None:
        spec = leases[0].spec
        self._batch_id += 1
        blobs: list[bytes] = []
        rows = [
            (
                lease.lease_id,
                lease.task_id,
                lease.attempt,
                _way_of(lease.payload, blobs),
                lease.units,
                lease.checkpoint if lease.saved is None else lease.saved,
                lease.partials_received + lease.partials_made,
            )
            for lease in leases
        ]
        self.sampler.begin_work()
        self.batches[self._batch_id] = EngineBatch(
            self._batch_id, {lease.lease_id: lease for lease in leases}, spec.kind in self._one_by_one, spec
        )
        message = (
            "batch",
            self._batch_id,
            spec.kind,
            spec.model,
            spec.parameters,
            spec.content_type,
            spec.durable,
            rows,
        )
        self.host.send(message, blobs)

    def _batch_done(self, batch: EngineBatch, work_ns: int, resident_models: Sequence[str]) -> None:
        del self.batches[batch.batch_id]
        if self._cancelled_ns:
            for lease_id in batch.leases:
                self._cancelled_ns.pop(lease_id, None)
        if batch.one_by_one and batch.settled:
            self.batcher.measure(batch.spec, batch.settled, work_ns / 1e9)
        self._resident_models = resident_models
        self._pump()
        if not self.batches:
            self.sampler.end_work()

    def _report(self, start_ns: int, finish_ns: int, reports: list[Report], energy: Energy | None = None) -> None:
        if not reports:
            return
        for report in reports:
            if report.lease.traceparent:
                self._trace(report, start_ns, finish_ns)
        self.session.report(start_ns, finish_ns, reports, energy)
        self._outgoing()

    def _outgoing(self) -> None:
        if self.session.unsent_bytes > UNSENT_BYTES_MAX and not self._paused and self.host.ready:
            self._paused = True
            self.host.pause(paused=True)
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

    def _refuse(self, leases: Iterable[Lease], kind: str) -> None:
        """A kind that the engine doesn't offer: the master was told, so this is its error, but not the task's."""
        message = f"worker {self.identity.worker_id} doesn't run {kind!r}; it runs {', '.join(sorted(self.host.kinds))}"
        error = TaskError(type="UnknownKind", message=message, retryable=False)
        now_ns = time.time_ns()
        self._report(now_ns, now_ns, [Report(lease, ReportState.FAILED, error=error) for lease in leases])

    def _cancel(self, leases: list[Lease]) -> None:
        """Tell the engine that nobody wants these any more; those that wait are dropped when their turn comes."""
        inside = [
            lease.lease_id for lease in leases if any(lease.lease_id in batch.leases for batch in self.batches.values())
        ]
        if inside and self.host.ready:
            now_ns = time.monotonic_ns()
            self._cancelled_ns.update(dict.fromkeys(inside, now_ns))
            self.host.send(("cancel", inside), [])

    def _note_running(self) -> None:
        """Read from the engine's page which leases run, and how often they have moved."""
        for state in self.host.sample():
            for lease in running_leases(state, self.batches.get(state.batch_id)):
                lease.running = True
                lease.steps = max(lease.steps, state.beats)

    def _want_heartbeat(self) -> None:
        self._heartbeat_wanted = True
        self.link.wake()

    async def _beat(self) -> None:
        """Send a heartbeat at the master's interval, with the device's state."""
        while True:
            await self.sampler.sample(min(SAMPLE_TIMEOUT_S, self._heartbeat_s))
            self._tell_taken()
            if self.session.connected:
                self._want_heartbeat()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._welcomed.wait()
            self._welcomed.clear()

    async def _tick(self) -> None:
        """Look at the engine: does what runs keep its limits?"""
        while True:
            await asyncio.sleep(TICK_S)
            self.ticks += 1
            if not self.batches or not self.host.ready or self._paused:
                continue
            if self.config.slots > 1 and self.sampler.meter is not None:
                self.sampler.running = max(1, sum(state.batch_id != 0 for state in self.host.sample()))
            verdict = self.watch.check(time.monotonic_ns(), self.host.sample(), self.batches, self._cancelled_ns)
            if verdict is not None:
                self.deaths.verdict = verdict
                self.host.kill()
            elif (
                self.memory_bytes
                and self.ticks % MEMORY_TICKS == 0
                and self.host.memory_used_bytes() > self.memory_bytes
            ):
                self.deaths.out_of_memory = True
                self.host.kill()


def _way_of(payload: bytes | Sized, blobs: list[bytes]) -> bytes | int | tuple[str, int, int]:
    """What the engine is told of a payload: itself, its number among the blobs, or where it lies."""
    if isinstance(payload, bytes):
        return ipc.put(payload, blobs)
    assert isinstance(payload, Reference)
    assert isinstance(payload.pin, Elsewhere)
    return payload.pin.path, payload.offset, payload.size_bytes
