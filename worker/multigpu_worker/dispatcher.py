"""Leases to engine processes, and their reports to the session.

The session (what is held) and the batcher (what goes next) do no I/O; the engine processes do it and call
back. Tasks of a model go to a process of that model, which models/loader.py loads when they wait for it; all others go
to the default process. Each process holds one batch more than it has slots, so that the next one is prepared while one
runs. All on the event loop, and nothing here waits.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

from multigpu.daemon.telemetry import span_from

from multigpu_worker.device.energy import NO_USAGE, Usage
from multigpu_worker.device.sampler import Sampler
from multigpu_worker.health_monitor import HealthMonitor
from multigpu_worker.models.loader import ModelLoader
from multigpu_worker.processes.batch import EngineBatch
from multigpu_worker.processes.blame.evidence import Judgement
from multigpu_worker.processes.death import Death
from multigpu_worker.processes.model_process import ModelProcess
from multigpu_worker.processes.pool import EnginePool
from multigpu_worker.processes.process import EngineProcess
from multigpu_worker.processes.reports import BatchReports
from multigpu_worker.repository.model import BatchRules
from multigpu_worker.session.batcher import Batcher
from multigpu_worker.session.lease import Lease, Spec
from multigpu_worker.session.session import Report, ReportState, Session, TaskError

# With more unsent bytes the engines have to wait, until half of them are sent.
UNSENT_BYTES_MAX = 64 << 20
# The limit of handlers that take batches: they count tasks.
TOKENS_UNLIMITED = 1 << 40
# Error types of leases that are given back. The master does not count these as losses.
MAKES_ROOM = "ModelMakesRoom"
RECALLED = "Recalled"


class Dispatcher:
    def __init__(self, worker_id: str, session: Session, batcher: Batcher, pool: EnginePool, sampler: Sampler) -> None:
        self.session = session
        self.batcher = batcher
        # Engines are not read, because too much is unsent.
        self.paused = False
        # Give nothing to engines any more.
        self.stopped = False
        # Set when a lease or report was settled.
        self.settled = asyncio.Event()
        self._worker_id = worker_id
        self._pool = pool
        self._sampler = sampler
        # Kinds of the default process whose tasks run one by one.
        self._one_by_one: frozenset[str] = frozenset()
        # When pump() must run again, and its timer.
        self._pump_timer: tuple[float, asyncio.Handle] | None = None

    def connect(self, loader: ModelLoader, health_monitor: HealthMonitor, wake: Callable[[], None]) -> None:
        """`wake`: something can be sent to the master."""
        self._loader = loader
        self._health_monitor = health_monitor
        self._wake = wake
        self._set_rules()

    # What the master sends.

    def grant(self, spec: Spec, leases: list[Lease]) -> None:
        self.session.grant(leases)
        serves = self._loader.routes.serves(spec.kind)
        if self._runs(spec):
            rank = self.batcher.add(spec, leases)
            self._pool.preempt_unbegun(rank, self._loader.routes.key_of(spec) if serves else None)
        else:
            self._reject(leases, spec)

    def revoke(self, lease_ids: Iterable[int]) -> None:
        revoked = [self.session.revoke(lease_id) for lease_id in lease_ids]
        self._pool.cancel([lease for lease in revoked if lease is not None])
        self.settled.set()

    def recall(self, lease_ids: Iterable[int]) -> None:
        outside = self._pool.recall(self.session.recall(lease_ids))
        self.return_leases(outside, "recalled", RECALLED)

    def offers(self) -> list[tuple[str, list[str]]]:
        """The kinds that run here, each with the names of its models."""
        kinds = self._pool.default.kinds
        without_model = [(kind, list[str]()) for kind in kinds if not self._loader.routes.serves(kind)]
        return without_model + self._loader.routes.offers()

    def concurrency(self) -> dict[str, int]:
        """How many tasks of a kind without models a slot runs together, where it is more than one."""
        return {info.kind: info.tasks_max for info in self._pool.default.kinds.values() if info.tasks_max > 1}

    def _runs(self, spec: Spec) -> bool:
        """Tasks of this spec can run here, perhaps after a model was loaded."""
        if self._loader.routes.serves(spec.kind):
            return self._loader.routes.key_of(spec) is not None
        return spec.kind in self._pool.default.kinds

    def _reject(self, leases: list[Lease], spec: Spec) -> None:
        """Fail tasks of a kind or model that this worker does not offer."""
        if self._loader.routes.serves(spec.kind):
            error = TaskError(type="UnknownModel", message=self._loader.routes.why_not(spec), retryable=False)
        else:
            kinds = ", ".join(sorted(kind for kind, _ in self.offers()))
            message = f"worker {self._worker_id} doesn't run {spec.kind!r}; it runs {kinds}"
            error = TaskError(type="UnknownKind", message=message, retryable=False)
        self.fail(leases, error)

    # To the engines.

    def pump(self) -> None:
        """Keep the engines supplied."""
        waiting: set[Spec] = set()
        # When processes that have enough for now want their next batches.
        later_s: list[float] = []
        now_s = time.monotonic()

        def may(spec: Spec) -> bool:
            process = self._target(spec, self.batcher.first(spec))
            if process is None:
                waiting.add(spec)
                return False
            if self._is_one_by_one(spec) or process.pace.due_s() <= now_s:
                return True
            later_s.append(process.pace.due_s())
            return False

        while leases := self.batcher.pop(one_by_one=self._is_one_by_one, may=may, now_s=now_s):
            spec = leases[0].spec
            process = self._target(spec, leases[0])
            assert process is not None
            self._sampler.begin_work()
            process.dispatch(leases, one_by_one=self._is_one_by_one(spec))
            if self.paused:  # it may have been started since the others were paused
                process.pause(paused=True)
            waiting.clear()
        due_s = min([due_s for due_s in (self.batcher.due_s(), *later_s) if due_s is not None], default=None)
        if due_s is not None:
            self._pump_at(due_s, now_s)
        if waiting:
            self._loader.wanted({model for spec in waiting if (model := self._loader.routes.key_of(spec)) is not None})

    def _is_one_by_one(self, spec: Spec) -> bool:
        """Whether the engine that runs these tasks runs one after the other."""
        if self._loader.routes.serves(spec.kind):
            return self._loader.routes.key_of(spec) in self._loader.one_by_one
        return spec.kind in self._one_by_one

    def _target(self, spec: Spec, first: Lease | None) -> EngineProcess | None:
        """The process that can take a batch of these now, which begins with `first`."""
        serves = self._loader.routes.serves(spec.kind)
        model = self._loader.routes.key_of(spec) if serves else None
        if first is not None and first.exclusive and not self._loader.alone(model):
            return None
        if serves:
            return None if model is None else self._pool.target(model, first)
        return self._pool.default if self._pool.default.takes(first) else None

    def _pump_at(self, due_s: float, now_s: float) -> None:
        if self._pump_timer is not None:
            if now_s <= self._pump_timer[0] <= due_s:
                return
            self._pump_timer[1].cancel()
        self._pump_timer = due_s, asyncio.get_running_loop().call_at(due_s, self._pump_again)

    def _pump_again(self) -> None:
        """A batch has waited long enough to grow, or a process should have its next one."""
        self._pump_timer = None
        self.pump()

    # Callbacks of the engine processes.

    def engine_ready(self) -> None:
        kinds = self._pool.default.kinds.values()
        self._one_by_one = frozenset(info.kind for info in kinds if info.one_by_one)
        self._set_rules()
        self.pump()

    def take_reports(self, reports: BatchReports, start_ns: int) -> None:
        for lease, fraction, note in reports.progress:
            lease.fraction, lease.note = fraction, note
        for lease, text in reports.logs:
            self.session.log(lease, text)
        for lease, data, content_type in reports.partials:
            if not self.session.partial(lease, data, content_type):
                self._pool.cancel([lease])
        for lease, data in reports.checkpoints:  # saved after these outputs
            self.session.save(lease, data)
        units = sum(report.lease.units for report in reports.reports)
        usage = self._usage(start_ns, reports.finish_ns, units) if units else NO_USAGE
        self._report(start_ns, reports.finish_ns, reports.reports, usage)

    def _usage(self, start_ns: int, finish_ns: int, units: int) -> Usage:
        device_s = max(0, finish_ns - start_ns) / 1e9 / self._pool.batches_running()
        energy = self._sampler.measure(start_ns, finish_ns, units)
        return Usage(device_s_per_unit=device_s / units, energy=energy)

    def given_back(self, leases: list[Lease]) -> None:
        self.return_leases([lease for lease in leases if lease.recalled], "recalled", RECALLED)
        self.batcher.give_way([lease for lease in leases if not lease.recalled])
        self.pump()

    def batch_done(self, process: EngineProcess, batch: EngineBatch, work_ns: int) -> None:
        if batch.one_by_one and batch.settled:
            self.batcher.measure(batch.spec, batch.settled, work_ns / 1e9)
        if process.model:
            self._loader.used(process.model)
        self.pump()
        self._note_idle()

    def engine_died(self, process: EngineProcess, death: Death, judged: Judgement, external_cause: str) -> None:
        monitor = self._health_monitor
        self._pool.died(process)
        self._note_idle()
        if self._pool.runs_self_test(process):
            monitor.self_test.engine_died(external_cause)
        began_ns = (now_ns := time.time_ns()) - max([slot.ran_ns() for slot in death.slots], default=0)
        if monitor.grace_s and any(report.broke_engine for report in judged.reports):
            # If an XID explains the death, the health monitor returns these leases first, and this report is dropped.
            asyncio.get_running_loop().call_later(monitor.grace_s, self._report, began_ns, now_ns, judged.reports)
        else:
            self._report(began_ns, now_ns, judged.reports)
        self.return_leases([lease for lease in judged.again if lease.recalled], "recalled", RECALLED)
        self.batcher.put_back([lease for lease in judged.again if not lease.recalled])
        if judged.hardware:
            monitor.memory_failed(judged.hardware)
        if death.fault is not None:
            self._pool.lost()
            self.want_heartbeat()
        if isinstance(process, ModelProcess) and not self.stopped:
            self._loader.process_died(process, death)
            self.pump()

    def handlers_reloaded(self) -> None:
        """The default process may run other kinds now."""
        self._loader.changed = True
        self.want_heartbeat()
        gone = [lease for lease in self.session.leases.values() if not self._runs(lease.spec)]
        self.return_leases(gone, "the reloaded handlers don't have its kind")
        self.pump()

    def _note_idle(self) -> None:
        if not self._pool.busy:
            self._sampler.end_work()

    # Callbacks of the model loader and the health monitor.

    def waiting(self) -> list[Lease]:
        """The leases that are in no engine."""
        inside = self._pool.inside()
        return [lease for lease_id, lease in self.session.leases.items() if lease_id not in inside]

    def may_load(self) -> bool:
        """The device is well, and the worker is not about to stop."""
        pool = self._pool
        return pool.ready and not pool.parked and self._health_monitor.health.fit and not self.stopped

    def routes_changed(self) -> None:
        """Another model serves a name, or one is ready."""
        self._set_rules()
        self.pump()

    def _set_rules(self) -> None:
        """How tasks are batched: for models, and for handlers that take batches."""
        kinds = self._pool.default.kinds.values()
        handlers = {
            (info.kind, ""): BatchRules(tasks_max=info.tasks_max, tokens_max=TOKENS_UNLIMITED, delay_s=info.delay_s)
            for info in kinds
            if info.tasks_max
        }
        self.batcher.rules = self._loader.routes.rules() | handlers

    def want_heartbeat(self) -> None:
        """Tell the master now how things are."""
        self.session.heartbeat_due = True
        self._wake()

    def give_back(self, why: str, *, running: bool) -> None:
        """Return leases uncharged: those that wait for an engine, or all."""
        self.session.return_all(why, time.time_ns(), kept=() if running else self._pool.inside())
        if running:
            self._pool.forget()
            self._sampler.end_work()
        self._outgoing()

    # To the master.

    def fail(self, leases: list[Lease], error: TaskError) -> None:
        for lease in leases:
            lease.dropped = True
        now_ns = time.time_ns()
        self._report(now_ns, now_ns, [Report(lease, ReportState.FAILED, error=error) for lease in leases])

    def return_leases(self, leases: list[Lease], why: str, error_type: str = MAKES_ROOM) -> None:
        """Return leases uncharged."""
        self.session.give_back(leases, why, time.time_ns(), error_type)
        self._outgoing()

    def _report(self, start_ns: int, finish_ns: int, reports: list[Report], usage: Usage = NO_USAGE) -> None:
        """Take reports, of which there may be none; partial outputs that came with them are in the session."""
        for report in reports:
            if report.lease.traceparent:
                self._trace(report, start_ns, finish_ns)
        self.session.report(start_ns, finish_ns, reports, usage)
        self._outgoing()

    def _outgoing(self) -> None:
        if self.session.unsent_bytes > UNSENT_BYTES_MAX and not self.paused:
            self.paused = True
            self._pool.pause(paused=True)
        if self.session.connected:
            self._wake()
        self.settled.set()

    def frame_taken(self) -> None:
        """The stream has taken what there was to send, or a part of it."""
        if self.paused and self.session.unsent_bytes < UNSENT_BYTES_MAX // 2:
            self.paused = False
            self._pool.pause(paused=False)

    def _trace(self, report: Report, start_ns: int, finish_ns: int) -> None:
        attributes = {
            "multigpu.task_id": report.lease.task_id,
            "multigpu.lease_id": report.lease.lease_id,
            "multigpu.attempt": report.lease.attempt,
            "multigpu.kind": report.lease.spec.kind,
            "multigpu.worker_id": self._worker_id,
        }
        span_from(report.lease.traceparent, "multigpu.run", start_ns, finish_ns, attributes)
