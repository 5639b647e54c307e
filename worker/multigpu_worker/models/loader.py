"""Keeps the worker's models: loads those that are asked for, makes room, and knows what to say of each.

residency.py decides; here the decisions are carried out by the pool, and what comes of them is remembered: what a model
takes, measured when it was loaded, how long that took, and why it failed. Level-triggered: `look` compares what is with
what is wanted, and is called whenever something may have changed, and again and again while something is under way.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import structlog
from multigpu.repository.files import digest
from multigpu.repository.model import BatchRules, ModelSpec

from multigpu_worker.device.sampler import Sampler
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.models import catalog as catalogs
from multigpu_worker.models.catalog import Catalog
from multigpu_worker.models.load_watch import LoadWatch
from multigpu_worker.models.measured_sizes import Figure, Figures
from multigpu_worker.models.memory_estimates import estimate_bytes, measure_bytes
from multigpu_worker.models.residency import ModelState, Resident, plan
from multigpu_worker.models.routes import Shelf
from multigpu_worker.processes.death import Death
from multigpu_worker.processes.model_host import MODEL_SLOTS_MAX
from multigpu_worker.processes.pool import EnginePool
from multigpu_worker.processes.process import EngineProcess
from multigpu_worker.processes.reports import ModelLoaded
from multigpu_worker.session.session import Lease, Spec, TaskError
from multigpu_worker.supervision import supervised

log = structlog.get_logger()

# A model may run so many tasks at a time where its kind joins running ones, and it says no other number.
CONCURRENCY = 8
# A loading that uses no processor for so long hangs; where the config has a limit for progress, that one holds.
LOAD_STILL_S = 60.0
LOAD_S_MAX = 1800.0
_LOAD_LOOK_S = 0.5
# How errors are called that say so.
OUT_OF_MEMORY = frozenset({"MemoryError", "OutOfMemoryError"})
# How an error is called whose cause is the model's files.
FAULTY = frozenset({"ModelFolderError"})
# What a loaded model takes is measured again so often, as long as it is used: its memory may have grown.
MEASURE_S = 30.0
# By less than this share it has not.
GROWTH = 0.05
# An engine killed from outside while it loads is not the model's fault, so often.
KILLS_MAX = 2


class Owner(Protocol):
    """What the agent does for its keeper."""

    def waiting(self, key: str) -> list[Lease]:
        """The leases that wait for a model."""

    def waiting_specs(self) -> set[Spec]:
        """What is asked for by leases that wait for models."""

    def waiting_of(self, spec: Spec) -> list[Lease]:
        """The leases of this spec that wait."""

    def held(self) -> Mapping[str, int]:
        """How many leases are held for each model, waiting or running."""

    def fail(self, leases: list[Lease], error: TaskError) -> None: ...
    def return_leases(self, leases: list[Lease], why: str) -> None: ...
    def may_load(self) -> bool:
        """The device is well, and the worker is not about to stop."""

    def want_heartbeat(self) -> None: ...
    def routes_changed(self) -> None:
        """Another model serves a name, or one is ready."""


class ModelKeeper:
    """See the module. All on the event loop."""

    def __init__(
        self,
        owner: Owner,
        pool: EnginePool,
        sampler: Sampler,
        catalog: Catalog,
        settings: EngineSettings,
        *,
        limit_bytes: int,
        progress_timeout_s: float,
        eager: bool,
    ) -> None:
        """`eager`: keep a spare process from the beginning."""
        self.limit_bytes = limit_bytes
        self._settings = settings
        self._device = sampler.device.info
        self._figures = Figures(
            Path(settings.artifacts),
            {
                "device": self._device.product,
                "engine": settings.engine,
                "precision": settings.precision,
                "threads": str(settings.threads),
            },
        )
        # What each model of the catalog is expected to take.
        self._expected = {model: self._read(spec) for model, spec in catalog.specs.items()}
        self.shelf = Shelf(catalog, settings.engine, self._expect)
        # Kinds whose engines, as far as any were loaded, run one task after the other.
        self.one_by_one: frozenset[str] = frozenset()
        # What is offered is not what the master was told.
        self.changed = False
        self._owner = owner
        self._pool = pool
        self._sampler = sampler
        self._eager = eager
        self._pinned: frozenset[str] = frozenset()
        self._unwanted: frozenset[str] = frozenset()
        self._load_watch = LoadWatch(progress_timeout_s or LOAD_STILL_S)
        self._looked_s = 0.0
        self._loaded: dict[str, set[EngineProcess]] = {}
        self._kills: dict[str, int] = {}
        self._chores: set[asyncio.Task[None]] = set()

    # What tasks ask for.

    def serves(self, kind: str) -> bool:
        """Tasks of this kind run on a model."""
        return (kind, "") in self.shelf.routes

    def model_of(self, spec: Spec) -> str | None:
        """The key of the model that tasks of this spec run on; None: there is none."""
        return self.shelf.routes.get((spec.kind, spec.model))

    def why_not(self, spec: Spec) -> str:
        """What to tell tasks whose model isn't here."""
        return catalogs.unknown(spec.kind, spec.model, dict(self.shelf.offers()).get(spec.kind, ()))

    def rules(self) -> dict[tuple[str, str], BatchRules]:
        """How batches are put together, by the kind of task and what it says."""
        residents = self.shelf.residents
        return {route: residents[key].spec.batch for route, key in self.shelf.routes.items()}

    def wanted(self, models: Iterable[str]) -> None:
        """Leases wait for these models, and they can take no batch now."""
        new = False
        now_s = time.monotonic()
        for model in models:
            resident = self.shelf.residents[model]
            if resident.wanted_s is None and resident.state in (ModelState.ABSENT, ModelState.UNLOADING):
                resident.wanted_s = now_s
                new = True
        if new:
            self.look()

    def used(self, key: str) -> None:
        """A batch has ended on it."""
        resident = self.shelf.residents.get(key)
        if resident is not None:
            resident.used_s = time.monotonic()
            resident.used_ns = time.time_ns()
            if resident.state is ModelState.UNLOADING or self._unwanted or self.shelf.replaced():
                self.look()

    def desire(self, pinned: Iterable[str], unwanted: Iterable[str]) -> None:
        """The ids of models that the master wants to stay, and of those that must go."""
        before = self._pinned, self._unwanted
        self._pinned, self._unwanted = frozenset(pinned), frozenset(unwanted)
        if (self._pinned, self._unwanted) != before:
            self.look()
            self._owner.want_heartbeat()

    async def put(self, catalog: Catalog) -> None:
        """The repository has changed. Files are read in a thread: the vocabulary of a large model takes long."""
        known = self.shelf.catalog.specs
        new = {model: spec for model, spec in catalog.specs.items() if known.get(model) != spec}
        read = await asyncio.to_thread(lambda: {model: self._read(spec) for model, spec in new.items()})
        self._expected = {model: (self._expected | read)[model] for model in catalog.specs}
        self._rename(lambda: self.shelf.put(catalog))
        self._tell()
        self.look()
        self._owner.routes_changed()

    def _rename(self, change: Callable[[], None]) -> None:
        """Have the shelf change what names mean. What waits for one that means nothing any more fails."""
        waiting = self._owner.waiting_specs()
        change()
        for spec in waiting:
            if self.model_of(spec) is None:
                self._owner.fail(self._owner.waiting_of(spec), self._gone(spec))

    def _gone(self, spec: Spec) -> TaskError:
        """Why nothing serves these tasks any more. A model may come back; a version that has a successor won't."""
        text = f"the model {spec.model!r} is gone from this worker's repository: {self.why_not(spec)}"
        replaced = bool(catalogs.other_versions(spec.model, dict(self.shelf.offers()).get(spec.kind, ())))
        return TaskError(type="UnknownModel", message=text, retryable=not replaced)

    def _tell(self) -> None:
        self.changed = True
        self._owner.want_heartbeat()

    # What is and what ought to be.

    def look(self) -> None:
        """Bring what is nearer to what is wanted."""
        now_s = time.monotonic()
        held = self._owner.held()
        for resident in self.shelf.residents.values():
            resident.leases = held.get(resident.key, 0)
            resident.pinned = resident.model in self._pinned and not resident.upcoming
            resident.unwanted = resident.model in self._unwanted
        for resident in list(self.shelf.residents.values()):
            self._look_at(resident, now_s)
        self._retire_replaced(now_s)
        if not self._owner.may_load():
            return
        found = plan(self.shelf.residents.values(), self.limit_bytes, now_s)
        for resident, room_bytes in found.too_large:
            self._too_large(resident, room_bytes)
        for resident in found.unload:
            log.info("model makes room", model=resident.model)
            self._unload(resident, now_s)
        for resident in found.retire:
            self._retire(resident, "its model makes room for another one", now_s)
        for resident in found.load:
            self._load(resident, now_s)

    def _look_at(self, resident: Resident, now_s: float) -> None:
        """What concerns one model alone."""
        absent = resident.state is ModelState.ABSENT
        waits = bool(resident.leases) and (absent or resident.state is ModelState.UNLOADING)
        if not (waits or (absent and (resident.pinned or resident.upcoming))) or resident.unwanted:
            resident.wanted_s = None
        elif resident.wanted_s is None:
            resident.wanted_s = now_s
        if resident.state is ModelState.UNLOADING and not self._busy(resident):
            self._pool.unload(resident.key)
        if resident.unwanted and resident.state is ModelState.READY and not resident.leases:
            self._unload(resident, now_s)
        elif resident.unwanted and absent and resident.leases:  # they crossed the master's word
            self._owner.return_leases(self._owner.waiting(resident.key), "its model is not wanted here")
        elif absent and resident.leases and now_s < resident.retry_s:
            self._fail(resident, "ModelLoadError")

    def _retire_replaced(self, now_s: float) -> None:
        """What runs on models that have a successor may finish, and so may what named them; what waits by a name that
        has gone over is their successors'.
        """
        for resident in self.shelf.replaced():
            if not resident.leases:
                self._retire(resident, "another version has taken its place", now_s)

    def _busy(self, resident: Resident) -> bool:
        return any(process.batches for process in self._pool.models.get(resident.key, ()))

    def _load(self, resident: Resident, now_s: float) -> None:
        spec = resident.spec
        log.info("loading a model", model=resident.model, expected_bytes=resident.memory_bytes)
        resident.enter(ModelState.LOADING, now_s)
        self._loaded[resident.key] = set()
        self._pool.load(resident.key, spec, self._slots(resident.spec), self._imports(resident))
        self._owner.want_heartbeat()

    def _imports(self, resident: Resident) -> tuple[str, ...]:
        return catalogs.imports_of(resident.spec, self.shelf.engine)

    def slots_max(self) -> int:
        """The most tasks that any one of the models that are served runs at a time."""
        served = (self.shelf.residents[key] for key in set(self.shelf.routes.values()))
        return max((self._slots(resident.spec) * resident.spec.instances for resident in served), default=1)

    @staticmethod
    def _slots(spec: ModelSpec) -> int:
        return min(spec.concurrency or CONCURRENCY, MODEL_SLOTS_MAX) if spec.kind == "generate" else 1

    def _read(self, spec: ModelSpec) -> tuple[int, float, bool]:
        """What a model took the last time, also before this worker began; else an estimate. Any thread may call it.

        Bytes, seconds of loading, and whether that was measured.
        """
        kept = self._figures.find(spec)
        if kept is not None:
            return kept.memory_bytes, kept.load_s, True
        slots = self._slots(spec)
        estimate = estimate_bytes(spec, self._settings, self._device, slots=slots, limit_bytes=self.limit_bytes)
        return estimate, 0.0, False

    def _expect(self, resident: Resident) -> None:
        resident.memory_bytes, resident.load_s, resident.measured = self._expected[resident.model]

    def _unload(self, resident: Resident, now_s: float) -> None:
        resident.enter(ModelState.UNLOADING, now_s)
        self._pool.unload(resident.key)
        self._owner.want_heartbeat()

    def _retire(self, resident: Resident, why: str, now_s: float) -> None:
        """It takes nothing more, and goes when what runs on it is done."""
        log.info("model retires", model=resident.model, why=why)
        resident.enter(ModelState.UNLOADING, now_s)
        for process in self._pool.models.get(resident.key, ()):
            process.retiring = True
        waiting = self._owner.waiting(resident.key)
        if resident.key in self.shelf.serving:
            self._owner.return_leases(waiting, why)
        elif waiting:
            self._owner.fail(waiting, self._gone(waiting[0].spec))
        if not self._busy(resident):
            self._pool.unload(resident.key)
        self._owner.want_heartbeat()

    def _too_large(self, resident: Resident, room_bytes: int) -> None:
        words = "it takes" if resident.measured else "it is expected to take"
        resident.failed(
            f"the model {resident.model!r} does not fit: {words} {resident.memory_bytes >> 20} MiB, and beside the "
            f"pinned models there are {max(0, room_bytes) >> 20} MiB (model_memory_bytes is {self.limit_bytes >> 20} "
            "MiB); raise model_memory_bytes, unpin a model, or run it on a larger device",
            time.monotonic(),
        )
        self._fail(resident, "OutOfMemory")

    def _fail(self, resident: Resident, error_type: str) -> None:
        leases = self._owner.waiting(resident.key)
        resident.wanted_s = None
        if leases:
            self._owner.fail(
                leases, TaskError(type=error_type, message=resident.error, retryable=not resident.hopeless)
            )

    # What the pool tells.

    def model_loaded(self, process: EngineProcess, loaded: ModelLoaded) -> None:
        """One of its instances is there."""
        if process.retiring:
            return
        resident = self.shelf.residents[process.model]
        instances = self._loaded.setdefault(resident.key, set())
        instances.add(process)
        self._load_watch.forget(process.host.pid)
        if loaded.one_by_one:
            self.one_by_one |= {resident.spec.kind}
        if resident.state is not ModelState.LOADING or len(instances) < resident.spec.instances:
            return
        now_s = time.monotonic()
        resident.load_s, resident.facts = loaded.load_s, loaded.facts
        resident.loads += 1
        resident.failures, resident.error, resident.retry_s = 0, "", 0.0
        self._kills.pop(resident.key, None)
        resident.wanted_s = None
        resident.used_s = now_s
        resident.enter(ModelState.READY, now_s)
        log.info("model ready", model=resident.model, load_s=round(loaded.load_s, 3), facts=loaded.facts)
        self._begin_measure(resident, loaded.device_bytes)
        if resident.upcoming:
            self._rename(self.shelf.switch)
            self.look()
        self._tell()
        self._owner.routes_changed()

    def facts_changed(self, process: EngineProcess, facts: dict[str, str]) -> None:
        """What serves its tasks has changed."""
        self.shelf.residents[process.model].facts = facts
        self._tell()

    def _begin_measure(self, resident: Resident, device_bytes: int = 0, *, again: bool = False) -> None:
        resident.measured_s = time.monotonic()
        task = supervised(asyncio.create_task(self._measure(resident, device_bytes, again=again)))
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def _measure(self, resident: Resident, device_bytes: int, *, again: bool) -> None:
        pids = [process.host.pid for process in self._pool.models.get(resident.key, ())]
        found_bytes = await measure_bytes(pids, self._sampler, device_bytes * len(pids))
        if found_bytes > (resident.memory_bytes * (1 + GROWTH) if again else 0):
            resident.memory_bytes, resident.measured = found_bytes, True
            self._tell()
            self.look()
            figure = Figure(memory_bytes=found_bytes, load_s=resident.load_s)
            await asyncio.to_thread(self._figures.keep, resident.spec, figure)
        if not resident.digest:
            with contextlib.suppress(OSError):  # the files are gone by now
                resident.digest = await asyncio.to_thread(digest, resident.spec)
                self._tell()

    def load_failed(self, process: EngineProcess, error_type: str, message: str, *, retryable: bool) -> None:
        if process.retiring:
            return
        resident = self.shelf.residents[process.model]
        self._load_watch.forget(process.host.pid)
        if resident.state is not ModelState.LOADING:  # an instance that was to take a dead one's place
            log.warning("an instance of a model failed to load", model=process.model, error=message)
            self._pool.end(process)
            return
        if error_type in OUT_OF_MEMORY and self._expect_more(resident):
            log.warning("a model found less memory than it takes", model=resident.model, error=message)
            self._pool.unload(resident.key, grace_s=0.0)
            resident.enter(ModelState.ABSENT, time.monotonic())
            self._owner.want_heartbeat()
            self.look()
            return
        error = f"the model {resident.model!r} can't be loaded: {message} ({error_type})"
        self._failed(process.model, error, hopeless=not retryable, faulty=error_type in FAULTY)

    def _expect_more(self, resident: Resident) -> bool:
        """Whether others may go for a model that ran out of memory beside them: it is expected to take twice as much
        then, or all that there is.
        """
        others = [r for r in self.shelf.residents.values() if r is not resident and r.state is not ModelState.ABSENT]
        room_bytes = self.limit_bytes - sum(r.memory_bytes for r in others if r.pinned)
        if resident.memory_bytes >= room_bytes or all(r.pinned for r in others):
            return False
        resident.memory_bytes, resident.measured = min(2 * resident.memory_bytes, room_bytes), False
        return True

    def _failed(self, key: str, error: str, *, hopeless: bool = False, faulty: bool = False) -> None:
        """`hopeless`: it would fail on any worker; `faulty`: as long as its files are what they are."""
        resident = self.shelf.residents[key]
        log.warning("model failed to load", model=resident.model, error=error)
        resident.failed(error, time.monotonic(), hopeless=hopeless, faulty=faulty)
        self._pool.unload(key, grace_s=0.0)
        self._fail(resident, "ModelLoadError")
        self._rename(self.shelf.switch)
        self._tell()

    def process_died(self, process: EngineProcess, death: Death) -> None:
        """A process of a model, or the spare, has ended; the pool knows."""
        self._load_watch.forget(process.host.pid)
        resident = self.shelf.residents.get(process.model)
        if resident is None:
            return
        self._loaded.get(resident.key, set()).discard(process)
        now_s = time.monotonic()
        if process.retiring:
            gone = resident.key not in self._pool.models and not self._pool.leaving(resident.key)
            if resident.state is ModelState.UNLOADING and gone:
                resident.enter(ModelState.ABSENT, now_s)
        elif resident.state is ModelState.LOADING:
            self._died_loading(resident, death, now_s)
        elif self._pool.models.get(resident.key):  # its other instances go on
            self._pool.add(resident.key, resident.spec, self._slots(resident.spec), self._imports(resident))
        else:
            resident.enter(ModelState.ABSENT, now_s)
        self._rename(self.shelf.switch)
        self._owner.want_heartbeat()
        self.look()

    def _died_loading(self, resident: Resident, death: Death, now_s: float) -> None:
        key = resident.key
        if self._pool.parked:  # it was ended by us
            resident.enter(ModelState.ABSENT, now_s)
            return
        kills = self._kills[key] = self._kills.get(key, 0) + 1
        if (death.killed or death.fault is not None) and kills < KILLS_MAX:
            resident.enter(ModelState.ABSENT, now_s)
            self._pool.unload(key, grace_s=0.0)
        else:
            self._failed(key, f"the engine process {death.words} while it loaded the model {resident.model!r}")

    # Now and then.

    def tick(self) -> None:
        """See whether what is under way moves, and whether what waits can go on."""
        now_s = time.monotonic()
        states = [r for r in self.shelf.residents.values() if r.state in (ModelState.LOADING, ModelState.UNLOADING)]
        if states or any(r.wanted_s is not None for r in self.shelf.residents.values()):
            self.look()
        if now_s - self._looked_s < _LOAD_LOOK_S:
            return
        self._looked_s = now_s
        for resident in list(self.shelf.residents.values()):
            if resident.state is ModelState.LOADING:
                self._watch(resident, now_s)
            elif resident.state is ModelState.READY and resident.used_s > resident.measured_s <= now_s - MEASURE_S:
                self._begin_measure(resident, again=True)
        self._keep_spare()

    def _watch(self, resident: Resident, now_s: float) -> None:
        loaded = self._loaded.get(resident.key, set())
        pids = [p.host.pid for p in self._pool.models.get(resident.key, ()) if p not in loaded]
        if self._load_watch.stuck(pids, now_s):
            self._failed(resident.key, f"the loading of the model {resident.model!r} does not move, so it was ended")
        elif now_s - resident.since_s > LOAD_S_MAX:
            self._failed(resident.key, f"the model {resident.model!r} was not loaded after {LOAD_S_MAX:g} s")

    def _keep_spare(self) -> None:
        """Have a process stand by for the next model, if there is one that could be loaded."""
        absent = [r for r in self.shelf.residents.values() if r.state is ModelState.ABSENT and not r.unwanted]
        loading = any(r.state is ModelState.LOADING for r in self.shelf.residents.values())
        begun = self._eager or any(r.loads for r in self.shelf.residents.values())
        if loading or not self._owner.may_load():
            return  # it would only be in the way
        if not begun or not absent:
            self._pool.keep_spare(None)
            return
        counts: dict[tuple[str, ...], int] = {}
        for resident in absent:
            imports = self._imports(resident)
            counts[imports] = counts.get(imports, 0) + 1
        self._pool.keep_spare(max(counts, key=lambda imports: counts[imports]))
