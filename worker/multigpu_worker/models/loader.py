"""Loads and unloads the worker's models.

residency.py decides which models to load and unload; the loader has the pool do it, and keeps the state of each model:
its memory, how long it took to load, why loading failed. It is level-triggered: `reconcile` compares the actual with
the wanted state, and is called after every change and regularly while something is in progress.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from multigpu_worker.daemon_thread import to_daemon_thread
from multigpu_worker.device.sampler import Sampler
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.models.model_sizes import ModelSizes, slots_of
from multigpu_worker.models.residency import ModelState, Resident, plan
from multigpu_worker.models.routes import ModelRoutes
from multigpu_worker.processes.death import Death
from multigpu_worker.processes.load_watch import LoadWatch
from multigpu_worker.processes.model_process import ModelProcess
from multigpu_worker.processes.pool import EnginePool
from multigpu_worker.processes.process import EngineProcess
from multigpu_worker.processes.reports import ModelLoaded
from multigpu_worker.repository.model import Scan
from multigpu_worker.session.lease import Lease, Spec
from multigpu_worker.session.session import Session, TaskError

log = structlog.get_logger()

# A load that uses no CPU time for this long, or for progress_timeout_s if that is set, counts as hanging.
LOAD_STILL_S = 60.0
LOAD_S_MAX = 1800.0
_LOAD_CHECK_S = 0.5
# Error types of failed loads: the engine ran out of memory; the model's files are at fault.
OUT_OF_MEMORY = frozenset({"MemoryError", "OutOfMemoryError"})
FILES_AT_FAULT = frozenset({"ModelFolderError"})
# A model in use is measured again at this interval.
MEASURE_S = 30.0
# From this number of deaths during loads of a model on, a kill from outside counts as a failed load, too.
KILLS_MAX = 2


class LeaseHolder(Protocol):
    """The members of the dispatcher that the loader uses."""

    session: Session

    def waiting(self) -> list[Lease]:
        """The leases that are in no engine."""

    def fail(self, leases: list[Lease], error: TaskError) -> None: ...
    def return_leases(self, leases: list[Lease], why: str) -> None: ...
    def can_load(self) -> bool:
        """The device is fit, and the worker is not stopping."""

    def want_heartbeat(self) -> None: ...
    def routes_changed(self) -> None:
        """Another model serves a name now, or a model has become ready."""


class ModelLoader:
    """Runs on the event loop."""

    def __init__(
        self,
        dispatcher: LeaseHolder,
        pool: EnginePool,
        sampler: Sampler,
        catalog: Scan,
        settings: EngineSettings,
        *,
        limit_bytes: int,
        progress_timeout_s: float,
        eager: bool,
    ) -> None:
        """`eager`: keep a spare process before the first model is loaded."""
        self.limit_bytes = limit_bytes
        self._sizes = ModelSizes(settings, sampler, limit_bytes, self._resized)
        self._sizes.prepare(catalog.models)
        self.routes = ModelRoutes(catalog, settings.engine, self._sizes.of)
        # Keys of models that have been loaded, and whose engines run one task after the other.
        self.one_by_one: set[str] = set()
        # The master does not know the current routes yet.
        self.changed = False
        # An exclusive lease was held at the last reconciliation.
        self._exclusive = False
        self._dispatcher = dispatcher
        self._pool = pool
        self._eager = eager
        # Ids of pinned and of unwanted models.
        self._desired: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._load_watch = LoadWatch(progress_timeout_s or LOAD_STILL_S, _LOAD_CHECK_S)
        self._loads_checked_s = 0.0
        # The instances that have loaded their model, by the model's key.
        self._loaded: dict[str, set[ModelProcess]] = {}
        self._kills: Counter[str] = Counter()

    # --- requests ----------------------------------------------------------------------------------------------------

    def wanted(self, keys: Iterable[str]) -> None:
        """Leases wait for these models, which cannot take a batch now."""
        new = False
        now_s = time.monotonic()
        for key in keys:
            resident = self.routes.residents[key]
            if resident.wanted_at is None and resident.state in (ModelState.ABSENT, ModelState.UNLOADING):
                resident.wanted_at = now_s
                new = True
        if new:
            self.reconcile()

    def nothing_else_loaded(self, key: str | None) -> bool:
        """Whether no other model is in memory. If one is, `tick` unloads it, because an exclusive lease waits."""
        return not any(r.key != key and r.state is not ModelState.ABSENT for r in self.routes.residents.values())

    def used(self, key: str) -> None:
        """A batch has ended on a model."""
        resident = self.routes.residents.get(key)
        if resident is not None:
            resident.used_at = time.monotonic()
            resident.used_ns = time.time_ns()
            if resident.state is ModelState.UNLOADING or self._desired[1] or self.routes.replaced():
                self.reconcile()

    def set_desired(self, pinned: Iterable[str], unwanted: Iterable[str]) -> None:
        """The ids of models that the master wants to stay, and of those that it wants unloaded."""
        before = self._desired
        self._desired = frozenset(pinned), frozenset(unwanted)
        if self._desired != before:
            self.reconcile()
            self._dispatcher.want_heartbeat()

    async def put(self, catalog: Scan) -> None:
        """Apply a changed repository. A thread reads the models' files first, which takes long for large models."""
        await to_daemon_thread(self._sizes.prepare, catalog.models)
        self._reroute(lambda: self.routes.put(catalog))
        self._report_change()
        self.reconcile()
        self._dispatcher.routes_changed()

    def _reroute(self, change: Callable[[], None]) -> None:
        """Change the routes. Fail the waiting leases whose model has no route any more."""
        served = {lease.spec for lease in self._dispatcher.waiting() if self.routes.key_of(lease.spec) is not None}
        change()
        for spec in served:
            if self.routes.key_of(spec) is None:
                self._fail_removed([lease for lease in self._dispatcher.waiting() if lease.spec == spec], spec)

    def _fail_removed(self, leases: list[Lease], spec: Spec) -> None:
        """The failure is retryable unless the repository has other versions: a replaced version does not come back."""
        text = f"the model {spec.model!r} is gone from this worker's repository: {self.routes.why_not(spec)}"
        error = TaskError(type="UnknownModel", message=text, retryable=not self.routes.other_versions(spec))
        self._dispatcher.fail(leases, error)

    def _report_change(self) -> None:
        self.changed = True
        self._dispatcher.want_heartbeat()

    def _resized(self) -> None:
        self._report_change()
        self.reconcile()

    # --- reconciliation ----------------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Bring the actual state closer to the wanted state."""
        now_s = time.monotonic()
        self._update(now_s)
        for resident in list(self.routes.residents.values()):
            self._reconcile_one(resident, now_s)
        for resident in self.routes.replaced():
            if not resident.leases:
                self._retire(resident, "another version has taken its place", now_s)
        if not self._dispatcher.can_load():
            return
        found = plan(self.routes.residents.values(), self.limit_bytes, now_s)
        for resident, room_bytes in found.too_large:
            self._too_large(resident, room_bytes)
        for resident in found.unload:
            log.info("model makes room", model=resident.model)
            self._unload(resident, now_s)
        for resident in found.retire:
            self._retire(resident, "its model makes room for another one", now_s)
        for resident in found.load:
            self._load(resident, now_s)

    def _update(self, now_s: float) -> None:
        """Set the fields of residents that depend on the held leases and on the master's wishes."""
        pinned, unwanted = self._desired
        leases: Counter[str | None] = Counter()
        self._exclusive = self._holds_exclusive()
        for spec, count in Counter(lease.spec for lease in self._dispatcher.session.leases.values()).items():
            leases[self.routes.key_of(spec)] += count
        for resident in self.routes.residents.values():
            resident.leases = leases[resident.key]
            resident.pinned = resident.model in pinned and not resident.upcoming
            resident.unwanted = resident.model in unwanted or (self._exclusive and not resident.leases)
            absent = resident.state is ModelState.ABSENT
            waits = bool(resident.leases) and (absent or resident.state is ModelState.UNLOADING)
            if not (waits or (absent and (resident.pinned or resident.upcoming))) or resident.unwanted:
                resident.wanted_at = None
            elif resident.wanted_at is None:
                resident.wanted_at = now_s

    def _holds_exclusive(self) -> bool:
        return any(lease.exclusive for lease in self._dispatcher.session.leases.values())

    def _reconcile_one(self, resident: Resident, now_s: float) -> None:
        """Take the steps that depend on this model alone."""
        if resident.state is ModelState.UNLOADING and not self._busy(resident):
            self._pool.unload(resident.key)
        absent = resident.state is ModelState.ABSENT
        if resident.unwanted and resident.state is ModelState.READY and not resident.leases:
            self._unload(resident, now_s)
        elif resident.unwanted and absent and resident.leases:  # granted before the master wanted it unloaded
            self._dispatcher.return_leases(self._waiting(resident), "its model is not wanted here")
        elif absent and resident.leases and now_s < resident.retry_at:
            self._fail(resident, "ModelLoadError")

    def _waiting(self, resident: Resident) -> list[Lease]:
        return [lease for lease in self._dispatcher.waiting() if self.routes.key_of(lease.spec) == resident.key]

    def _busy(self, resident: Resident) -> bool:
        return any(process.batches for process in self._pool.models.get(resident.key, ()))

    def _pids(self, resident: Resident) -> list[int]:
        return [process.pid for process in self._pool.models.get(resident.key, ())]

    def _load(self, resident: Resident, now_s: float) -> None:
        log.info("loading a model", model=resident.model, expected_bytes=resident.memory_bytes)
        resident.enter(ModelState.LOADING, now_s)
        self._loaded[resident.key] = set()
        self._pool.load(resident.key, resident.spec, slots_of(resident.spec), self.routes.imports_of(resident))
        self._dispatcher.want_heartbeat()

    def _unload(self, resident: Resident, now_s: float) -> None:
        resident.enter(ModelState.UNLOADING, now_s)
        self._pool.unload(resident.key)
        self._dispatcher.want_heartbeat()

    def _retire(self, resident: Resident, why: str, now_s: float) -> None:
        """Unload a model once its running batches are done. It takes no new ones."""
        log.info("model retires", model=resident.model, why=why)
        resident.enter(ModelState.UNLOADING, now_s)
        for process in self._pool.models.get(resident.key, ()):
            process.takes_no_batches = True
        waiting = self._waiting(resident)
        if resident.key in self.routes.serving:
            self._dispatcher.return_leases(waiting, why)
        elif waiting:
            self._fail_removed(waiting, waiting[0].spec)
        if not self._busy(resident):
            self._pool.unload(resident.key)
        self._dispatcher.want_heartbeat()

    def _too_large(self, resident: Resident, room_bytes: int) -> None:
        takes = "it takes" if resident.measured else "it is expected to take"
        resident.record_failure(
            f"the model {resident.model!r} does not fit: {takes} {resident.memory_bytes >> 20} MiB, and beside the "
            f"pinned models there are {max(0, room_bytes) >> 20} MiB (model_memory_bytes is {self.limit_bytes >> 20} "
            "MiB); raise model_memory_bytes, unpin a model, or run it on a larger device",
            time.monotonic(),
        )
        self._fail(resident, "OutOfMemory")

    def _fail(self, resident: Resident, error_type: str) -> None:
        """Fail the leases that wait for a model that cannot be loaded."""
        resident.wanted_at = None
        if leases := self._waiting(resident):
            error = TaskError(type=error_type, message=resident.error, retryable=not resident.fails_everywhere)
            self._dispatcher.fail(leases, error)

    # --- events of the pool ------------------------------------------------------------------------------------------

    def model_loaded(self, process: ModelProcess, report: ModelLoaded) -> None:
        if process.takes_no_batches:
            return
        resident = self.routes.residents[process.model]
        loaded = self._loaded.setdefault(resident.key, set())
        loaded.add(process)
        self._load_watch.forget(process.pid)
        if report.one_by_one:
            self.one_by_one.add(resident.key)
        else:
            self.one_by_one.discard(resident.key)
        if resident.state is not ModelState.LOADING or len(loaded) < resident.spec.instances:
            self._dispatcher.routes_changed()  # this process can take batches
            return
        resident.loaded(report.load_s, report.facts, time.monotonic())
        resident.signature = report.signature
        self._kills.pop(resident.key, None)
        log.info("model ready", model=resident.model, load_s=round(report.load_s, 3), facts=report.facts)
        self._sizes.measure(resident, self._pids(resident), report.device_bytes)
        if resident.upcoming:
            self._reroute(self.routes.switch)
            self.reconcile()
        self._report_change()
        self._dispatcher.routes_changed()

    def facts_changed(self, process: ModelProcess, facts: dict[str, str]) -> None:
        if process.takes_no_batches:
            return
        self.routes.residents[process.model].facts = facts
        self._report_change()

    def load_failed(self, process: ModelProcess, error_type: str, message: str, *, retryable: bool) -> None:
        if process.takes_no_batches:
            return
        resident = self.routes.residents[process.model]
        self._load_watch.forget(process.pid)
        others = [each for each in self._pool.models.get(resident.key, ()) if each is not process]
        if resident.state is not ModelState.LOADING and others:  # this process was to replace a dead instance
            log.warning("an instance of a model failed to load", model=process.model, error=message)
            self._pool.end(process)
            return
        if error_type in OUT_OF_MEMORY and self._expect_more(resident):
            log.warning("a model found less memory than it takes", model=resident.model, error=message)
            self._pool.unload(resident.key, grace_s=0.0)
            resident.enter(ModelState.ABSENT, time.monotonic())
            self._dispatcher.want_heartbeat()
            self.reconcile()
            return
        error = f"the model {resident.model!r} can't be loaded: {message} ({error_type})"
        self._load_ended(resident, error, fails_everywhere=not retryable, files_at_fault=error_type in FILES_AT_FAULT)

    def _expect_more(self, resident: Resident) -> bool:
        """Double the expected size of a model that ran out of memory beside others, so that some of them are unloaded.

        Returns False if no other model could be unloaded, or if the expected size is already the largest possible.
        """
        others = [r for r in self.routes.residents.values() if r is not resident and r.state is not ModelState.ABSENT]
        room_bytes = self.limit_bytes - sum(r.memory_bytes for r in others if r.pinned)
        if resident.memory_bytes >= room_bytes or all(r.pinned for r in others):
            return False
        resident.memory_bytes, resident.measured = min(2 * resident.memory_bytes, room_bytes), False
        return True

    def _load_ended(
        self, resident: Resident, error: str, *, fails_everywhere: bool = False, files_at_fault: bool = False
    ) -> None:
        """A load failed. `fails_everywhere`: it would on any worker; `files_at_fault`: it does until they change."""
        log.warning("model failed to load", model=resident.model, error=error)
        resident.record_failure(
            error, time.monotonic(), fails_everywhere=fails_everywhere, files_at_fault=files_at_fault
        )
        self._pool.unload(resident.key, grace_s=0.0)
        self._fail(resident, "ModelLoadError")
        self._reroute(self.routes.switch)
        self._report_change()

    def process_died(self, process: EngineProcess, death: Death) -> None:
        """A process of a model, or the spare process, has ended. The pool has already removed it."""
        self._load_watch.forget(process.pid)
        resident = self.routes.residents.get(process.model)
        if resident is None:
            return
        loaded = self._loaded.get(resident.key, set())
        was_loaded = process in loaded
        loaded.discard(process)
        others = bool(self._pool.models.get(resident.key)) and not self._pool.device_released
        if process.takes_no_batches:
            gone = resident.key not in self._pool.models and not self._pool.has_ending_process(resident.key)
            if resident.state is ModelState.UNLOADING and gone:
                resident.enter(ModelState.ABSENT, time.monotonic())
        elif resident.state is ModelState.LOADING or not (was_loaded or others):
            self._died_loading(resident, death)
        elif not others:
            resident.enter(ModelState.ABSENT, time.monotonic())
        elif was_loaded and resident.state is ModelState.READY:  # other instances go on: replace this one
            self._pool.add(resident.key, resident.spec, slots_of(resident.spec), self.routes.imports_of(resident))
        else:
            log.warning("an instance of a model is not replaced", model=resident.model, died=death.summary)
        self._reroute(self.routes.switch)
        self._dispatcher.want_heartbeat()
        self.reconcile()

    def _died_loading(self, resident: Resident, death: Death) -> None:
        if self._pool.device_released:  # the health monitor ended it
            resident.enter(ModelState.ABSENT, time.monotonic())
            return
        self._kills[resident.key] += 1
        if (death.killed or death.fault is not None) and self._kills[resident.key] < KILLS_MAX:
            resident.enter(ModelState.ABSENT, time.monotonic())
            self._pool.unload(resident.key, grace_s=0.0)
        else:
            error = f"the engine process {death.summary} while it loaded the model {resident.model!r}"
            self._load_ended(resident, error)

    def tick(self) -> None:
        """Check the loads in progress, measure models in use, and keep a spare process."""
        now_s = time.monotonic()
        moving = (ModelState.LOADING, ModelState.UNLOADING)
        exclusive = self._exclusive or self._holds_exclusive()  # held at the last reconciliation, or held now
        if exclusive or any(r.state in moving or r.wanted_at is not None for r in self.routes.residents.values()):
            self.reconcile()
        if now_s - self._loads_checked_s < _LOAD_CHECK_S:
            return
        self._loads_checked_s = now_s
        for resident in list(self.routes.residents.values()):
            if resident.state is ModelState.LOADING:
                self._watch(resident, now_s)
            elif resident.state is ModelState.READY and resident.used_at > resident.measured_at <= now_s - MEASURE_S:
                self._sizes.measure(resident, self._pids(resident), again=True)
        if self._dispatcher.can_load():
            self._keep_spare()

    def _watch(self, resident: Resident, now_s: float) -> None:
        done = {process.pid for process in self._loaded.get(resident.key, ())}
        pids = [pid for pid in self._pids(resident) if pid not in done]
        if self._load_watch.stuck(pids, now_s):
            self._load_ended(resident, f"the loading of the model {resident.model!r} does not move, so it was ended")
        elif now_s - resident.entered_at > LOAD_S_MAX:
            self._load_ended(resident, f"the model {resident.model!r} was not loaded after {LOAD_S_MAX:g} s")

    def _keep_spare(self) -> None:
        """Keep a process for the next load, with the imports that most models in the state ABSENT need."""
        residents = self.routes.residents.values()
        if any(r.state is ModelState.LOADING for r in residents):  # a spare would take CPU time from the load
            return
        absent = [r for r in residents if r.state is ModelState.ABSENT and not r.unwanted]
        begun = self._eager or any(r.loads for r in residents)
        imports = Counter(self.routes.imports_of(resident) for resident in absent)
        self._pool.keep_spare(imports.most_common(1)[0][0] if begun and imports else None)
