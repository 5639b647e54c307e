"""The engine processes of a worker: the default process, one or more for each model in memory, and a spare.

Each model has separate processes, so that unloading it frees all of its memory, and so that the death of a process
affects only its own batches. A new process spends most of its time on importing torch and similar libraries, so a spare
process may have done that ahead: the next model is loaded there. models/loader.py decides which models are in memory.
"""

import os
import time
from collections.abc import Iterator

from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.processes.child import ProcessSettings
from multigpu_worker.processes.default_process import DefaultProcess
from multigpu_worker.processes.model_process import ModelLoaderCallbacks, ModelProcess
from multigpu_worker.processes.process import Callbacks, EngineProcess
from multigpu_worker.repository.model import ModelSpec
from multigpu_worker.session.lease import Lease
from multigpu_worker.waiting import until

# How long an engine may take to write its files: when its model is unloaded, and when the worker stops.
CLOSE_GRACE_S = 0.5
STOP_GRACE_S = 2.0
# How long `close` of the handler classes may take.
HANDLERS_CLOSE_S = 3.0
# After a spare process has died by itself, no other is started for this long.
SPARE_DELAY_S = 30.0


class EnginePool:
    """Runs on the event loop."""

    # Set when the worker is composed.
    model_loader: ModelLoaderCallbacks

    def __init__(self, settings: ProcessSettings) -> None:
        self.callbacks = Callbacks()
        self._settings = settings
        self.mps = settings.mps
        self.default = DefaultProcess(settings, self.callbacks)
        # Processes that load or have a model, by the loader's key: an old and a new version may have the same model id.
        self.models: dict[str, list[ModelProcess]] = {}
        self.device_released = False
        # The number of slots in which cancelled calls run on.
        self.occupied = 0
        self._spare: ModelProcess | None = None
        self._spare_due_s = 0.0
        # Asked to end, and not dead yet.
        self._ending: set[EngineProcess] = set()
        self._stopping: list[EngineProcess] = []
        self._self_tester: EngineProcess | None = None
        # The counters of the embedding caches of dead processes.
        self._cache_before = pb.EmbeddingCache()

    async def start(self) -> None:
        """Start the default process. Raises EngineStartError if it can't start."""
        await self.default.start()

    @property
    def ready(self) -> bool:
        """The default process can take batches."""
        return self.default.ready

    @property
    def busy(self) -> bool:
        return any(process.batches for process in self)

    @property
    def idle(self) -> bool:
        """The default process is ready, and no process has a batch."""
        return self.ready and not self.busy

    def __iter__(self) -> Iterator[EngineProcess]:
        """The processes that may have batches."""
        yield self.default
        for processes in self.models.values():
            yield from processes
        yield from self._ending

    def owns(self, pid: int) -> bool:
        """Whether a process is one of the engines, or was started in one."""
        try:
            return os.getsid(pid) in {process.pid for process in self}
        except OSError:
            return False

    # Leases.

    def target(self, model: str, lease: Lease | None) -> EngineProcess | None:
        """The process of a model that should have the batch that begins with this lease; None: none can take it."""
        free = [process for process in self.models.get(model, ()) if process.takes(lease)]
        return min(free, key=lambda process: len(process.batches), default=None)

    def inside(self) -> set[int]:
        """The ids of the leases that are in an engine."""
        return set[int]().union(*(process.inside() for process in self))

    def update_running(self) -> list[int]:
        """The ids of the leases that run at this instant. Updates their `running` and `steps`."""
        return [lease.lease_id for process in self for lease in process.update_running()]

    def batches_running(self) -> int:
        """The number of batches that run now, at least 1. A process runs at most one in each slot."""
        return max(1, sum([min(len(process.batches), process.slots) for process in self]))

    def cancel(self, leases: list[Lease]) -> None:
        for process in self:
            process.cancel(leases)

    def recall(self, leases: list[Lease]) -> list[Lease]:
        """Ask the engines to give back the leases that they have not begun. Returns those that are in no engine."""
        for process in self:
            leases = process.recall(leases)
        return leases

    def preempt_unbegun(self, rank: int, model: str | None) -> None:
        """Ask the engines of a model (None: the default process) to give back the unbegun leases of all batches that a
        lease of this rank (batcher.py) goes before. Each batch is asked back only once.
        """
        for process in (self.default,) if model is None else self.models.get(model, ()):
            for batch in process.batches.values():
                lease = next(iter(batch.leases.values()), None)
                if lease is not None and lease.rank > rank and not batch.give_back_requested:
                    batch.give_back_requested = True
                    process.recall(list(batch.leases.values()))

    def forget(self) -> None:
        """Forget all leases: they were given back to the master."""
        for process in self:
            process.forget()

    # Models.

    def load(self, model: str, spec: ModelSpec, slots: int, imports: tuple[str, ...]) -> None:
        """Begin to load a model, in as many processes as it has instances."""
        assert model not in self.models
        self.models[model] = []
        for _ in range(spec.instances):
            self.add(model, spec, slots, imports)

    def add(self, model: str, spec: ModelSpec, slots: int, imports: tuple[str, ...]) -> None:
        """Begin to load another instance of a model."""
        if self._spare is not None and self._spare.imports == imports:
            process, self._spare = self._spare, None
        else:
            process = ModelProcess(self._settings, self.callbacks, self.model_loader, imports)
        process.load(model, spec, slots)
        self.models[model].append(process)

    def unload(self, model: str, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """End the processes of a model. They should have no batches any more."""
        for process in self.models.pop(model, ()):
            self._retire(process, grace_s)

    def end(self, process: ModelProcess) -> None:
        """End one process of a model. It must have no batches."""
        self.models[process.model].remove(process)
        self._retire(process, 0.0)

    def _retire(self, process: ModelProcess, grace_s: float) -> None:
        self._ending.add(process)
        process.end(grace_s)

    def has_ending_process(self, model: str) -> bool:
        """A process of this model is still about to end."""
        return any(process.model == model for process in self._ending)

    def keep_spare(self, imports: tuple[str, ...] | None) -> None:
        """Keep a spare process with these imports; None: keep no spare process."""
        if self._spare is not None and imports != self._spare.imports:
            spare, self._spare = self._spare, None
            self._retire(spare, 0.0)
        if (
            imports is not None
            and self._spare is None
            and not self.device_released
            and time.monotonic() >= self._spare_due_s
        ):
            self._spare = ModelProcess(self._settings, self.callbacks, self.model_loader, imports)

    def died(self, process: EngineProcess) -> None:
        """A process has ended. The default process starts another by itself."""
        self._remember_cache(process)
        if not isinstance(process, ModelProcess):
            return
        self._ending.discard(process)
        if process is self._spare:
            self._spare = None
            self._spare_due_s = time.monotonic() + SPARE_DELAY_S
        processes = self.models.get(process.model)
        if processes is not None and process in processes:
            processes.remove(process)
            if not processes:
                del self.models[process.model]

    # All processes.

    def share(self) -> None:
        for process in self:
            process.share()

    def acknowledge_pinned(self) -> None:
        for process in self:
            process.acknowledge_pinned()

    def check(self, *, memory: bool) -> bool:
        """Call EngineProcess.check for all. Returns whether the number of occupied slots has changed."""
        for process in list(self):
            process.check(memory=memory)
        before, self.occupied = self.occupied, sum(process.occupied for process in self)
        return self.occupied != before

    def pause(self, *, paused: bool) -> None:
        """Read nothing from engines for now, or go on."""
        for process in self:
            process.pause(paused=paused)

    def end_all_uncharged(self) -> None:
        """End all processes and charge no lease. The default process starts again; models, when tasks wait for them."""
        for process in list(self):
            process.end_uncharged()

    def end_all_after_fault(self) -> None:
        """End all processes: the GPU's MPS server has a fault, and waits for its clients to end."""
        for process in list(self):
            process.kill()
        self.keep_spare(None)

    def release_device(self) -> None:
        """End all processes, and start none until `use_device`: the device must be released."""
        self.device_released = True
        self.default.release_device()
        self.keep_spare(None)
        for processes in list(self.models.values()):
            for process in list(processes):
                process.kill()

    def use_device(self) -> None:
        self.device_released = False
        self.default.use_device()

    def embedding_cache(self) -> pb.EmbeddingCache | None:
        """The sums of all embedding caches' counters, and what the caches hold now; None: there is no cache."""
        total = pb.EmbeddingCache()
        total.CopyFrom(self._cache_before)
        for process in self:
            cache = process.embedding_cache
            if cache is not None:
                _add(total, cache)
                total.entries += cache.entries
                total.size_bytes += cache.size_bytes
        return total if total.ByteSize() else None

    def _remember_cache(self, process: EngineProcess) -> None:
        if process.embedding_cache is not None:
            _add(self._cache_before, process.embedding_cache)
        process.embedding_cache = None

    async def close(self) -> None:
        """Before the worker stops: let handlers close, and the models' engines write their files."""
        self.keep_spare(None)
        for model in list(self.models):
            self.unload(model, grace_s=STOP_GRACE_S)
        await self.default.close_handlers(HANDLERS_CLOSE_S)
        await until(lambda: not self._ending)  # each is killed when its grace is over

    def stop(self) -> None:
        """End all processes for good; `stopped` waits for that."""
        self.device_released = True
        self._stopping = [*self, *([self._spare] if self._spare is not None else [])]
        for process in self._stopping:
            process.stop()

    async def stopped(self) -> None:
        for process in self._stopping:
            await process.stopped()

    # The self-test.

    def run_self_test(self, test_id: int) -> None:
        """Have a process run the self-test: one with a model, which has loaded torch, or else the default process."""
        idle = [p for ps in self.models.values() for p in ps if p.ready and not p.batches and not p.takes_no_batches]
        self._self_tester = idle[0] if idle else self.default
        self._self_tester.send(("self_test", test_id, bool(self._settings.engine.models)), [])

    def runs_self_test(self, process: EngineProcess) -> bool:
        """Whether this is the process that was last asked to run the self-test."""
        return process is self._self_tester


def _add(total: pb.EmbeddingCache, cache: pb.EmbeddingCache) -> None:
    total.hits += cache.hits
    total.joined += cache.joined
    total.misses += cache.misses
