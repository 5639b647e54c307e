"""One engine process as the agent sees it: the batches in it, its reports, and its end.

child.py has the process of the operating system. This module has the agent's state of each process: which leases are
inside, which of them were cancelled, when it must be ended, and which leases are charged for its death (blame/). The
two subclasses are in default_process.py and model_process.py. All of this runs on the event loop.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Protocol

import structlog
from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.engines.handlers.sources import Sources
from multigpu_worker.mps.engines import Mps
from multigpu_worker.processes.batch import EngineBatch, rows_of, running_leases
from multigpu_worker.processes.blame.evidence import Evidence, Judgement
from multigpu_worker.processes.blame.limits import Limits
from multigpu_worker.processes.child import ChildProcess, ProcessSettings
from multigpu_worker.processes.death import Death
from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.output import OutputLog
from multigpu_worker.processes.reports import BatchReports, pin_results, read_reports
from multigpu_worker.session.batcher import tokens_of
from multigpu_worker.session.lease import Lease
from multigpu_worker.session.pace import Pace
from multigpu_worker.supervision import supervised
from multigpu_worker.waiting import until

log = structlog.get_logger()

# The agent acknowledges pinned results to the engine when it has this many, or with the next heartbeat.
PINNED_MAX = 16


class DispatcherCallbacks(Protocol):
    def engine_ready(self) -> None:
        """The default process can take batches."""

    def apply_reports(self, reports: BatchReports, start_ns: int) -> None: ...
    def given_back(self, leases: list[Lease]) -> None:
        """The engine has given these leases back: it has not begun them."""

    def batch_done(self, process: "EngineProcess", batch: EngineBatch, work_ns: int) -> None: ...
    def engine_died(self, process: "EngineProcess", death: Death, judged: Judgement, external_cause: str) -> None: ...


class SelfTestCallbacks(Protocol):
    def begun(self, test_id: int) -> None: ...
    def done(self, test_id: int, passed: bool | None, detail: str) -> None: ...


class HealthMonitorCallbacks(Protocol):
    def suspects(self, lease_id: int) -> bool:
        """Whether a lease ran at an XID of class APPLICATION."""


class Callbacks:
    """Set when the worker is composed, before any process is started."""

    dispatcher: DispatcherCallbacks
    self_test: SelfTestCallbacks
    health_monitor: HealthMonitorCallbacks


class EngineProcess:
    """Subclasses start the process, read the frames that only they get, and decide what follows its death."""

    # The key of its model in the pool, and the model's id; empty: it has none, or none yet.
    model = ""
    model_id = ""

    def __init__(
        self,
        settings: ProcessSettings,
        callbacks: Callbacks,
        slots_max: int,
        imports: tuple[str, ...] | None = None,
    ) -> None:
        """`slots_max`: the number of slots for which the shared page has room. `imports`: as for ChildProcess."""
        self.settings = settings
        self.imports = imports
        # The version of the handlers to import. None: the process reads the files.
        self.sources: Sources | None = None
        # None: no process runs. `pid`: of the last one; 0: there was none.
        self.child: ChildProcess | None = None
        self.pid = 0
        self.stopping = False
        self._callbacks = callbacks
        self._slots_max = slots_max
        self._loop = asyncio.get_running_loop()
        self._output = OutputLog(self._loop)
        # The system could not start the process: `_died` will be called.
        self._dying = False
        # Under MPS: the task that waits until the process may start.
        self._starting: asyncio.Task[None] | None = None
        # The process takes no new batches.
        self.takes_no_batches = False
        self.slots = settings.engine.slots
        # The batches in the engine, by batch_id.
        self.batches: dict[int, EngineBatch] = {}
        # When to hand over batches that run together.
        self.pace = Pace()
        # The last report of its embedding cache.
        self.embedding_cache: pb.EmbeddingCache | None = None
        # The number of slots in which cancelled calls run on; after the end of such an engine, the number of all its
        # slots, until the next process is ready.
        self.occupied = 0
        self._limits = Limits(progress_timeout_s=settings.progress_timeout_s, cancel_grace_s=settings.cancel_grace_s)
        ran_at_xid = lambda lease_id: callbacks.health_monitor.suspects(lease_id)  # noqa: E731, PLW0108  set later
        self._evidence = Evidence(ran_at_xid, settings.memory_bytes)
        self._batch_ids = itertools.count(1)
        self._cancelled_ns: dict[int, int] = {}
        # The number of results that are pinned, and not acknowledged to the engine yet.
        self._pinned = 0

    # The process.

    @property
    def ready(self) -> bool:
        """It can take batches."""
        return self.child is not None and self.child.ready

    def send(self, message: frames.Message, blobs: list[bytes]) -> None:
        assert self.child is not None
        assert self.child.ready
        self.child.channel.send(message, blobs)

    def pause(self, *, paused: bool) -> None:
        """Read nothing from the engine for now, or go on."""
        if self.child is not None and self.child.ready:
            self.child.channel.pause(paused=paused)

    def kill(self) -> None:
        """Call ChildProcess.kill if a process runs."""
        if self.child is not None:
            self.child.kill()

    def stop(self) -> None:
        """End the process for good; `stopped` waits for that."""
        self.stopping = True
        if self.child is not None:
            self.child.last = True
        self.kill()

    async def stopped(self) -> None:
        await until(lambda: self.child is None)
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        self._output.close()

    def _may_spawn(self) -> bool:
        return not self.stopping and not self._dying and self.child is None

    def _respawn(self) -> None:
        """Start the process; under MPS, as soon as an engine can connect to the MPS server."""
        if not self._may_spawn():
            return
        if self.settings.mps is None:
            self._spawn()
        elif self._starting is None:
            self._starting = supervised(asyncio.create_task(self._respawn_under_mps(self.settings.mps)))

    async def _respawn_under_mps(self, mps: Mps) -> None:
        await mps.restarted()
        self._starting = None
        if self._may_spawn():
            self._spawn()

    def _spawn(self) -> None:
        try:
            self.child = ChildProcess(
                self.settings,
                self._slots_max,
                self._output.open(),
                self.apply_frame,
                self._ended,
                sources=self.sources,
                imports=self.imports,
            )
        except OSError as error:  # the owner of this object does not expect its death before this call returns
            self._dying = True
            self._loop.call_soon(self._died, Death(returncode=1, slots=[], start_error=str(error)))
            return
        self.pid = self.child.pid

    def _ended(self, death: Death) -> None:
        self.child = None
        self._died(death)

    # Leases.

    def takes(self, lease: Lease | None) -> bool:
        """Whether it can take a batch that begins with this lease. It holds one batch for each slot and one that it
        prepares; but a suspect's batch must be the only one.

        While a cancelled call runs on, it prepares none: the engine may not answer when asked to give the batch back.
        """
        if not self.ready or self.takes_no_batches or len(self.batches) > self.slots - (self.occupied > 0):
            return False
        if lease is not None and lease.suspect and self.batches:
            return False
        # The batch of a suspect contains no other lease.
        return not any(lease.suspect for batch in self.batches.values() for lease in islice(batch.leases.values(), 1))

    def update_running(self) -> list[Lease]:
        """The leases that the process runs at this instant. Updates their `running` and `steps`."""
        found = []
        if self.batches and self.child is not None:
            for state in self.child.page.sample():
                for lease in running_leases(state, self.batches.get(state.batch_id)):
                    lease.running = True
                    lease.steps = max(lease.steps, state.beats)
                    found.append(lease)
        return found

    def dispatch(self, leases: list[Lease], *, one_by_one: bool) -> None:
        """Send the leases to the engine as one batch."""
        spec = leases[0].spec
        batch_id = next(self._batch_ids)
        blobs: list[bytes] = []
        rows = rows_of(leases, blobs)
        self.batches[batch_id] = EngineBatch(batch_id, {lease.lease_id: lease for lease in leases}, one_by_one, spec)
        if not one_by_one:
            self.pace.begin(batch_id, sum(map(tokens_of, leases)), time.monotonic())
        model = self.model_id or spec.model
        self.send(("batch", batch_id, spec.kind, model, spec.parameters, spec.content_type, spec.durable, rows), blobs)

    def cancel(self, leases: list[Lease]) -> None:
        """Cancel the given leases, as far as they are in the engine."""
        inside = self.inside()
        cancelled = [lease.lease_id for lease in leases if lease.lease_id in inside]
        if cancelled and self.ready:
            self.send(("cancel", cancelled), [])
            self._cancelled_ns.update(dict.fromkeys(cancelled, time.monotonic_ns()))

    def recall(self, leases: list[Lease]) -> list[Lease]:
        """Ask the engine to give back the leases that it has not begun. Returns the leases that are not in it."""
        inside = self.inside()
        if self.ready and (asked := [lease.lease_id for lease in leases if lease.lease_id in inside]):
            self.send(("give_back", asked), [])
        return [lease for lease in leases if lease.lease_id not in inside]

    def inside(self) -> set[int]:
        return {lease_id for batch in self.batches.values() for lease_id in batch.leases}

    def share(self) -> None:
        """Send the engine the directory for large results."""
        if self.ready:
            self.send(("payloads", self.settings.sharing.path), [])

    def acknowledge_pinned(self) -> None:
        """Tell the engine how many more results are pinned: it can release them."""
        if self._pinned and self.ready:
            self.send(("pinned", self._pinned), [])
            self._pinned = 0

    def check(self, *, memory: bool) -> None:
        """End the engine if a task breaks a limit. `memory`: also check the memory of the engine process."""
        child = self.child
        if child is None or not child.ready:
            return
        now_ns = time.monotonic_ns()  # before: the agent may be suspended, and the engine go on to another task
        slots = child.page.sample()
        running = [running_leases(state, self.batches.get(state.batch_id)) for state in slots if self._cancelled_ns]
        self.occupied = sum(bool(leases) and all(lease.dropped for lease in leases) for leases in running)
        if not self.batches:
            return
        violation = self._limits.check(now_ns, slots, self.batches, self._cancelled_ns)
        if violation is not None:
            self._evidence.violation = violation
        elif memory and 0 < self.settings.memory_bytes < child.memory_used_bytes():
            self._evidence.out_of_memory = True
        else:
            return
        child.kill()

    def end_uncharged(self) -> None:
        """End the process, if there is one, and charge no lease: its leases go on in the next process."""
        if self.child is not None and self._evidence.violation is None:
            self._evidence.end_uncharged()
        self.kill()

    def forget(self) -> None:
        """Forget all leases: they were given back to the master."""
        self._clear()
        self._evidence.forget()

    def _clear(self) -> None:
        self.batches.clear()
        self.pace.clear()
        self._cancelled_ns.clear()

    # Frames.

    def apply_frame(self, message: frames.Message, blobs: list[bytes]) -> None:
        """Apply a frame. Raises FrameError if it makes no sense; any other exception is an error of the agent."""
        try:
            carry_out = self.parse_frame(message, blobs)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise frames.FrameError(f"a frame makes no sense: {error!r}") from error
        carry_out()

    def parse_frame(self, message: frames.Message, blobs: list[bytes]) -> Callable[[], None]:
        """Check a frame and return the function that applies it. Raises TypeError, ValueError, LookupError or
        AttributeError if it makes no sense.
        """
        match message[0]:
            case "reports":
                return self._read_reports(message, blobs)
            case "given_back":
                _, lease_ids = message
                if any(type(lease_id) is not int for lease_id in lease_ids):
                    raise TypeError(f"leases {lease_ids!r} are given back")
                return partial(self._given_back, lease_ids)
            case "self_test":
                _, test_id, passed, detail = message
                if type(test_id) is not int or passed not in (True, False, None) or type(detail) is not str:
                    raise TypeError(f"a self-test with {test_id!r}, {passed!r}, {detail!r}")
                return partial(self._callbacks.self_test.done, test_id, passed, detail)
            case "self_test_begun":
                (_, test_id) = message
                return partial(self._callbacks.self_test.begun, test_id)
            case other:
                raise ValueError(f"unknown message {other!r}")

    def _read_reports(self, message: frames.Message, blobs: list[bytes]) -> Callable[[], None]:
        _, batch_id, start_ns, finish_ns, succeeded, failed, *rest = message
        succeeded, lost, places = pin_results(self.settings.sharing, succeeded)
        self._pinned += places
        if self._pinned >= PINNED_MAX:
            self.acknowledge_pinned()
        batch = self.batches.get(batch_id)
        if batch is None:  # all of its leases were given back
            return lambda: None
        if failed := [*failed, *lost]:
            reported_ns = time.monotonic_ns() - (time.time_ns() - finish_ns)
            failed = self._evidence.keep_back(failed, one_by_one=batch.one_by_one, reported_ns=reported_ns)
        read = read_reports(batch.leases, blobs, start_ns, finish_ns, succeeded, failed, *rest)
        return partial(self._reports, batch, read)

    def _reports(self, batch: EngineBatch, read: BatchReports) -> None:
        for report in read.reports:
            batch.leases.pop(report.lease.lease_id, None)
            self._cancelled_ns.pop(report.lease.lease_id, None)
        batch.settled += len(read.reports)
        # Begins with the first frame since the last report: the frames in between were about the same tasks.
        start_ns = batch.first_unsettled_frame_ns or read.start_ns
        batch.first_unsettled_frame_ns = 0 if read.reports else start_ns
        self._callbacks.dispatcher.apply_reports(read, start_ns)
        if self._evidence.context_lost:  # the engine can't go on; Evidence.judge decides about its leases
            assert self.child is not None
            self.child.ready = False
            self._loop.call_soon(self.child.kill)
        elif read.done:
            self.embedding_cache = read.embedding_cache
            self._done(batch, read.work_ns)

    def _done(self, batch: EngineBatch, work_ns: int) -> None:
        del self.batches[batch.batch_id]
        if not batch.one_by_one:
            self.pace.end(batch.batch_id, time.monotonic())
        for lease_id in batch.leases if self._cancelled_ns else ():
            self._cancelled_ns.pop(lease_id, None)
        self._callbacks.dispatcher.batch_done(self, batch, work_ns)

    def _given_back(self, lease_ids: list[int]) -> None:
        given_back: list[Lease] = []
        for batch in list(self.batches.values()):
            given_back += [batch.leases.pop(lease_id) for lease_id in lease_ids if lease_id in batch.leases]
            if not batch.leases and not batch.settled:  # the frame that ends the batch will be ignored
                del self.batches[batch.batch_id]
                self.pace.drop(batch.batch_id)
        for lease in given_back:
            self._cancelled_ns.pop(lease.lease_id, None)
        self._callbacks.dispatcher.given_back(given_back)

    def _died(self, death: Death) -> None:
        self._dying = False
        inside = bool(self.batches)
        judged = self._evidence.judge(death, self.batches)
        external_cause = (
            judged.reason if inside or judged.ended_from_outside else "it was unloaded" if self.takes_no_batches else ""
        )
        if inside or not self.takes_no_batches:
            log.warning(
                "engine died",
                model=self.model,
                how=death.summary,
                reason=judged.reason,
                failed_task_ids=[report.lease.task_id for report in judged.reports],
                suspect_task_ids=[lease.task_id for lease in judged.again if lease.suspect],
                again=len(judged.again),
            )
        self.occupied = self.slots if self.occupied else 0
        self._clear()
        self._pinned = 0
        self._limits.reset()
        for lease in judged.again:
            lease.running = False
        self._callbacks.dispatcher.engine_died(self, death, judged, external_cause)
