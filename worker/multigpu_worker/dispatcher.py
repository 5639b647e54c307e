"""Passes leases to engine processes, and their reports to the session.

The session (which leases are held) and the batcher (which leases go next) do no I/O; the engine processes do it and
call back. Tasks of a model go to a process of that model, which models/loader.py starts when tasks wait for the model;
all others go to the default process. Each process holds one batch more than it has slots, so that the next batch is
prepared while one runs. All of this runs on the event loop, and nothing here waits.
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

# With more unsent bytes than this the engines are paused, until fewer than half of this are unsent.
UNSENT_BYTES_MAX = 64 << 20
# The token limit of handlers that take batches: only the number of tasks limits their batches.
TOKENS_UNLIMITED = 1 << 40
# Error types of leases that are given back. The master does not count leases with these types as losses.
MAKES_ROOM = "ModelMakesRoom"
RECALLED = "Recalled"


class Dispatcher:
    def __init__(self, worker_id: str, session: Session, batcher: Batcher, pool: EnginePool, sampler: Sampler) -> None:
        self.session = session
        self.batcher = batcher
        # Nothing is read from the engines, because too much is unsent.
        self.paused = False
        # Give nothing to engines any more.
        self.stopped = False
        # Set when leases or unsent reports may have become fewer.
        self.settled = asyncio.Event()
        self._worker_id = worker_id
        self._pool = pool
        self._sampler = sampler
        # Kinds of the default process whose tasks run one by one.
        self._one_by_one: frozenset[str] = frozenset()
        # When pump() must run again, and its timer.
        self._pump_timer: tuple[float, asyncio.Handle] | None = None

    def connect(self, loader: ModelLoader, health_monitor: HealthMonitor, wake: Callable[[], None]) -> None:
        """`wake`: called when there is something to send to the master."""
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
        """For each kind of the default process whose slots run several tasks together: how many."""
        return {info.kind: info.tasks_max for info in self._pool.default.kinds.values() if info.tasks_max > 1}

    def _runs(self, spec: Spec) -> bool:
        """Whether tasks of this spec can run here, perhaps after their model is loaded."""
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

    # Batches to the engines.

    def pump(self) -> None:
        """Give batches to the engines that can take one, and ask the loader for the models that tasks wait for."""
        waiting: set[Spec] = set()
        # When processes that have enough batches for now are to get the next one.
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
            if self.paused:  # this process may have been started after the others were paused
                process.pause(paused=True)
            waiting.clear()
        due_s = min([due_s for due_s in (self.batcher.due_s(), *later_s) if due_s is not None], default=None)
        if due_s is not None:
            self._pump_at(due_s, now_s)
        if waiting:
            self._loader.wanted({model for spec in waiting if (model := self._loader.routes.key_of(spec)) is not None})

    def _is_one_by_one(self, spec: Spec) -> bool:
        """Whether the engine that runs tasks of this spec runs them one after the other."""
        if self._loader.routes.serves(spec.kind):
            return self._loader.routes.key_of(spec) in self._loader.one_by_one
        return spec.kind in self._one_by_one

    def _target(self, spec: Spec, first: Lease | None) -> EngineProcess | None:
        """The process that can now take a batch of `spec` that begins with `first`; None: there is none."""
        serves = self._loader.routes.serves(spec.kind)
        model = self._loader.routes.key_of(spec) if serves else None
        if first is not None and first.exclusive and not self._loader.nothing_else_loaded(model):
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
        """The delay of a batch is over, or a process is to get its next batch."""
        self._pump_timer = None
        self.pump()

    # Callbacks of the engine processes.

    def engine_ready(self) -> None:
        kinds = self._pool.default.kinds.values()
        self._one_by_one = frozenset(info.kind for info in kinds if info.one_by_one)
        self._set_rules()
        self.pump()

    def apply_reports(self, reports: BatchReports, start_ns: int) -> None:
        for lease, fraction, note in reports.progress:
            lease.fraction, lease.note = fraction, note
        for lease, text in reports.logs:
            self.session.log(lease, text)
        for lease, data, content_type in reports.partials:
            if not self.session.partial(lease, data, content_type):
                self._pool.cancel([lease])
        for lease, data in reports.checkpoints:  # saved after the partial outputs of the same frame
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
        self.batcher.requeue_in_place([lease for lease in leases if not lease.recalled])
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
            # If an XID explains the death, the health monitor returns these leases in the meantime: then the session
            # drops these reports.
            asyncio.get_running_loop().call_later(monitor.grace_s, self._report, began_ns, now_ns, judged.reports)
        else:
            self._report(began_ns, now_ns, judged.reports)
        self.return_leases([lease for lease in judged.again if lease.recalled], "recalled", RECALLED)
        self.batcher.requeue_first([lease for lease in judged.again if not lease.recalled])
        if judged.hardware:
            monitor.memory_failed(judged.hardware)
        if death.fault is not None:
            self._pool.end_all_after_fault()
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

    def can_load(self) -> bool:
        """Whether models may be loaded: the default process is ready, the device fit, and the worker not stopping."""
        pool = self._pool
        return pool.ready and not pool.device_released and self._health_monitor.health.fit and not self.stopped

    def routes_changed(self) -> None:
        """Another model serves a name now, or a model has become ready."""
        self._set_rules()
        self.pump()

    def _set_rules(self) -> None:
        """Set the batching rules of models and of handlers that take batches."""
        kinds = self._pool.default.kinds.values()
        handlers = {
            (info.kind, ""): BatchRules(tasks_max=info.tasks_max, tokens_max=TOKENS_UNLIMITED, delay_s=info.delay_s)
            for info in kinds
            if info.tasks_max
        }
        self.batcher.rules = self._loader.routes.rules() | handlers

    def want_heartbeat(self) -> None:
        """Make a heartbeat the next frame, and send it now."""
        self.session.heartbeat_due = True
        self._wake()

    def give_back(self, why: str, *, running: bool) -> None:
        """Return leases uncharged: those that are in no engine; with `running`, all."""
        self.session.return_all_leases(why, time.time_ns(), kept=() if running else self._pool.inside())
        if running:
            self._pool.forget()
            self._sampler.end_work()
        self._after_queueing()

    # Reports to the master.

    def fail(self, leases: list[Lease], error: TaskError) -> None:
        for lease in leases:
            lease.dropped = True
        now_ns = time.time_ns()
        self._report(now_ns, now_ns, [Report(lease, ReportState.FAILED, error=error) for lease in leases])

    def return_leases(self, leases: list[Lease], why: str, error_type: str = MAKES_ROOM) -> None:
        """Return leases uncharged."""
        self.session.return_leases(leases, why, time.time_ns(), error_type)
        self._after_queueing()

    def _report(self, start_ns: int, finish_ns: int, reports: list[Report], usage: Usage = NO_USAGE) -> None:
        """Queue reports (perhaps none) and have them sent. The session already has the frame's partial outputs."""
        for report in reports:
            if report.lease.traceparent:
                self._trace(report, start_ns, finish_ns)
        self.session.report(start_ns, finish_ns, reports, usage)
        self._after_queueing()

    def _after_queueing(self) -> None:
        if self.session.unsent_bytes > UNSENT_BYTES_MAX and not self.paused:
            self.paused = True
            self._pool.pause(paused=True)
        if self.session.connected:
            self._wake()
        self.settled.set()

    def resume_if_drained(self) -> None:
        """The session may have fewer unsent bytes now: let the engines go on if these are few enough."""
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
