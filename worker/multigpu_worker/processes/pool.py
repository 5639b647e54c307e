"""The engine processes of a worker: the base, one or more for each model in memory, and a spare.

The base runs whatever needs no model. A model has processes of its own, so that unloading it gives every byte back, and
so that one that dies takes only its own batches along. What takes longest in a new process is to import torch and its
like, so a spare one may stand by that has done it: the next model is loaded there.

Which models are to be in memory is models/loader.py's to say.
"""

import asyncio
import os
import time
from collections.abc import Iterator

import structlog
from multigpu.repository.model import ModelSpec
from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.processes.process import EngineProcess, Owner, ProcessSettings
from multigpu_worker.session.session import Lease

log = structlog.get_logger()

# An engine that is unloaded may write so long, and all of them when the worker stops.
CLOSE_GRACE_S = 0.5
STOP_GRACE_S = 2.0
_GONE_POLL_S = 0.01
# After a spare process died by itself there is none for so long.
SPARE_DELAY_S = 30.0


class EnginePool:
    """See the module. All on the event loop."""

    def __init__(self, owner: Owner, settings: ProcessSettings) -> None:
        self._owner = owner
        self._settings = settings
        self.mps = settings.mps
        self.base = EngineProcess(owner, settings)
        # Loading or ready, by the model's id.
        self.models: dict[str, list[EngineProcess]] = {}
        self.parked = False
        self._spare: EngineProcess | None = None
        self._spare_imports: tuple[str, ...] = ()
        self._spare_due_s = 0.0
        # On their way out.
        self._ending: set[EngineProcess] = set()
        self._stopping: list[EngineProcess] = []
        self._self_tester: EngineProcess | None = None
        # Slots in which cancelled calls run on.
        self.occupied = 0
        # What the embedding caches of processes that are gone have done.
        self._cache_before = pb.EmbeddingCache()

    async def start(self) -> None:
        """Start the base. EngineStartError: it can't be."""
        await self.base.host.start()

    @property
    def ready(self) -> bool:
        """The base can take batches."""
        return self.base.host.ready

    def start_error(self) -> str:
        """Why the base can't start; empty: it is ready, or may be soon, or it is not wanted."""
        return self.base.host.start_error()

    @property
    def idle(self) -> bool:
        """The base is there, and nothing has anything to do."""
        return self.ready and not any(process.batches for process in self)

    def __iter__(self) -> Iterator[EngineProcess]:
        """Those that may have work in them."""
        yield self.base
        for processes in self.models.values():
            yield from processes
        yield from self._ending

    def owns(self, pid: int) -> bool:
        """Whether a process is one of the engines, or began in one."""
        try:
            return os.getsid(pid) in {process.host.pid for process in self}
        except OSError:
            return False

    def target(self, model: str, lease: Lease | None) -> EngineProcess | None:
        """The process of a model that should have the batch that begins with this lease; None: none can take it."""
        best = None
        for process in self.models.get(model, ()):
            if process.takes(lease) and (best is None or len(process.batches) < len(best.batches)):
                best = process
        return best

    def recall(self, leases: list[Lease]) -> list[Lease]:
        """Ask the engines for what they have not begun of these. Returns those that are in no engine."""
        for process in self:
            leases = process.recall(leases)
        return leases

    def let_pass(self, rank: int) -> None:
        """Ask the engines, once, for the batches that a lease of this rank (batcher.py) goes before."""
        for process in self:
            for batch in process.batches.values():
                lease = next(iter(batch.leases.values()), None)
                if lease is not None and lease.rank > rank and not batch.asked_back:
                    batch.asked_back = True
                    process.recall(list(batch.leases.values()))

    # Models come and go. `model` is the model loader's key: an id may have an old and a new one.

    def load(self, model: str, spec: ModelSpec, slots: int, imports: tuple[str, ...]) -> None:
        """Begin to load a model, in as many processes as it wants instances."""
        assert model not in self.models
        self.models[model] = []
        for _ in range(spec.instances):
            self.add(model, spec, slots, imports)

    def add(self, model: str, spec: ModelSpec, slots: int, imports: tuple[str, ...]) -> None:
        """Begin to load another instance of it."""
        if self._spare is not None and self._spare_imports == imports:
            process, self._spare = self._spare, None
        else:
            process = EngineProcess(self._owner, self._settings, imports)
            process.host.begin()
        process.model, process.model_id, process.slots = model, spec.id, slots
        process.host.load(spec.id, spec, slots)
        self.models[model].append(process)

    def unload(self, model: str, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """End the processes of a model. What is in them ought to be done."""
        for process in self.models.pop(model, ()):
            self._retire(process)
            process.host.end(grace_s)

    def end(self, process: EngineProcess) -> None:
        """End one of the processes of a model, which has nothing to do."""
        self.models[process.model].remove(process)
        self._retire(process)
        process.host.end(0.0)

    def leaving(self, model: str) -> bool:
        """A process of this model is still on its way out."""
        return any(process.model == model for process in self._ending)

    def keep_spare(self, imports: tuple[str, ...] | None) -> None:
        """Have a spare process with these imports, or none."""
        if self._spare is not None and (imports is None or imports != self._spare_imports):
            spare, self._spare = self._spare, None
            self._retire(spare)
            spare.host.end(0.0)
        if imports is not None and self._spare is None and not self.parked and time.monotonic() >= self._spare_due_s:
            self._spare, self._spare_imports = EngineProcess(self._owner, self._settings, imports), imports
            self._spare.host.begin()

    def died(self, process: EngineProcess) -> None:
        """A process has ended. The base comes again by itself."""
        self._remember_cache(process)
        if process.host.imports is None:
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

    def _retire(self, process: EngineProcess) -> None:
        process.retiring = True
        self._ending.add(process)

    # For all of them.

    def share(self) -> None:
        for process in self:
            process.share()

    def tell_taken(self) -> None:
        for process in self:
            process.tell_taken()

    def check(self, *, memory: bool) -> bool:
        """Does what runs keep its limits? As EngineProcess.check. True: not as many slots are occupied as before."""
        for process in list(self):
            process.check(memory=memory)
        before, self.occupied = self.occupied, sum(process.occupied for process in self)
        return self.occupied != before

    def pause(self, *, paused: bool) -> None:
        """Read nothing more from engines for now, or go on."""
        for process in self:
            if process.host.ready:
                process.host.pause(paused=paused)

    def forget(self) -> None:
        """Whatever is in any of them was given back."""
        for process in self:
            process.forget()

    def replace(self) -> None:
        """End all, by no fault of what is in them: the base comes again, and models when they are asked for."""
        for process in list(self):
            process.replace()

    def lost(self) -> None:
        """The GPU's MPS server stands still: no process on it can go on, and it waits for them to end."""
        for process in list(self):
            process.host.kill()
        self.keep_spare(None)

    def park(self) -> None:
        """End all, and start none until `unpark`: the device must be let go of."""
        self.parked = True
        self.base.host.park()
        self._end_models()

    def unpark(self) -> None:
        self.parked = False
        self.base.host.unpark()

    def _end_models(self) -> None:
        self.keep_spare(None)
        for processes in list(self.models.values()):
            for process in list(processes):
                process.host.kill()

    def embedding_cache(self) -> pb.EmbeddingCache | None:
        """What the caches have done in all, and hold now; None: there is none."""
        total = pb.EmbeddingCache()
        total.CopyFrom(self._cache_before)
        for process in self:
            cache = process.embedding_cache
            if cache is not None:
                total.hits, total.joined = total.hits + cache.hits, total.joined + cache.joined
                total.misses, total.entries = total.misses + cache.misses, total.entries + cache.entries
                total.size_bytes += cache.size_bytes
        return total if total.ByteSize() else None

    def _remember_cache(self, process: EngineProcess) -> None:
        """What its cache has done stays done."""
        cache, process.embedding_cache = process.embedding_cache, None
        if cache is not None:
            before = self._cache_before
            before.hits, before.joined = before.hits + cache.hits, before.joined + cache.joined
            before.misses += cache.misses

    async def close(self) -> None:
        """The worker stops in peace: let the models' engines write what they have yet to write."""
        self.keep_spare(None)
        for model in list(self.models):
            self.unload(model, grace_s=STOP_GRACE_S)
        while self._ending:  # noqa: ASYNC110  bounded: each is killed when its grace is over
            await asyncio.sleep(_GONE_POLL_S)

    def stop(self) -> None:
        """End all for good: at once, but under MPS, where `stopped` waits for it."""
        self.parked = True
        self._stopping = list(self) + ([self._spare] if self._spare is not None else [])
        for process in self._stopping:  # the kernel takes a while for each: none waits for another's end
            process.host.kill()
        for process in self._stopping:
            process.host.stop()

    async def stopped(self) -> None:
        """Wait until stopped processes are gone."""
        for process in self._stopping:
            await process.host.stopped()

    # The self-test.

    def run_self_test(self, test_id: int) -> None:
        """Have a process run the self-test: one with a model, which has loaded torch, or else the base."""
        idle = [p for ps in self.models.values() for p in ps if p.host.ready and not p.batches and not p.retiring]
        self._self_tester = idle[0] if idle else self.base
        self._self_tester.host.send(("self_test", test_id, self._has_models()), [])

    def _has_models(self) -> bool:
        return bool(self._settings.engine.models)

    def runs_self_test(self, process: EngineProcess) -> bool:
        """Whether this is the process that was last asked to run the self-test."""
        return process is self._self_tester
