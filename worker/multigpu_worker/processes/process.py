"""One engine process as the agent sees it: the batches that are in it, its words about them, and its end.

The process and its socket are host.py's. Here is what the agent has to remember of each: which leases are
inside, which of them were cancelled, what was taken hold of, when it must be ended (watch.py) and who answers for its
death (deaths.py). All of it is for the event loop.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import structlog
from multigpu._transport.payloads import Elsewhere, Reference
from multigpu.config.config import WorkerConfig
from multigpu.v1 import worker_service_pb2 as pb

from multigpu_worker.device.energy import Energy
from multigpu_worker.device.interface import Device
from multigpu_worker.device.sampler import Sampler
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.mps.engines import Mps
from multigpu_worker.processes import ipc
from multigpu_worker.processes.deaths import Deaths, Judgement
from multigpu_worker.processes.host import Death, EngineHost
from multigpu_worker.processes.watch import EngineBatch, Watch, clears, running_leases
from multigpu_worker.session.batcher import tokens_of
from multigpu_worker.session.pace import Pace
from multigpu_worker.session.payload_sharing import Sharing
from multigpu_worker.session.session import Lease, Report, ReportState, Session, TaskError

log = structlog.get_logger()

# Results taken hold of before the engine is told, if not by the next heartbeat.
TELL_TAKEN = 16
# A report has to fit into one message, with room for what goes beside the result.
RESULT_BYTES_MAX = (64 << 20) - (64 << 10)
# Earlier outputs of a task that an engine is handed.
PARTIALS_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWords:
    """What an engine says of a model that it has loaded."""

    facts: dict[str, str]
    load_s: float
    one_by_one: bool
    # Of the GPU's memory, by the engine's own account; 0: none.
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportsFrame:
    """What an engine says of a batch, read."""

    batch: EngineBatch
    start_ns: int
    finish_ns: int
    checkpoints: list[tuple[Lease, bytes]]
    progress: list[tuple[Lease, float, str]]
    partials: list[tuple[Lease, bytes, str]]
    reports: list[Report]
    done: bool
    work_ns: int
    embedding_cache: pb.EmbeddingCache | None


class Owner(Protocol):
    """What the agent does for its processes, and is told by them."""

    session: Session
    sharing: Sharing
    sampler: Sampler

    def engine_ready(self, process: "EngineProcess") -> None:
        """It can take batches; or, if it is for a model, it has imported what it was to."""

    def model_loaded(self, process: "EngineProcess", words: LoadedWords) -> None: ...
    def load_failed(self, process: "EngineProcess", error_type: str, message: str, *, retryable: bool) -> None: ...
    def facts_changed(self, process: "EngineProcess", facts: dict[str, str]) -> None: ...
    def cancel(self, leases: list[Lease]) -> None: ...
    def report(self, start_ns: int, finish_ns: int, reports: list[Report], energy: Energy | None = None) -> None: ...
    def room_made(self) -> None:
        """A suspect is cleared: others may run beside it."""

    def given_back(self, leases: list[Lease]) -> None:
        """The engine has not begun these, and will not."""

    def batch_done(self, process: "EngineProcess", batch: EngineBatch, work_ns: int) -> None: ...
    def engine_died(self, process: "EngineProcess", death: Death, judged: Judgement, others: str) -> None: ...
    def self_test_begun(self, test_id: int) -> None: ...
    def self_test_done(self, test_id: int, right: bool | None, words: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """What all engine processes of a worker have in common."""

    config: WorkerConfig
    engine: EngineSettings
    device: Device
    # Of each process; 0: no limit.
    memory_bytes: int
    mps: Mps | None
    # Whether a lease ran when an XID of the application's kind came.
    suspects: Callable[[int], bool]


class EngineProcess:
    """See the module. `imports`: as of EngineHost."""

    def __init__(self, owner: Owner, settings: ProcessSettings, imports: tuple[str, ...] | None = None) -> None:
        config = settings.config
        self.owner = owner
        self.memory_bytes = settings.memory_bytes
        self.host = EngineHost(
            settings.engine,
            self,
            memory_bytes=settings.memory_bytes,
            result_bytes_max=min(config.result_bytes_max, RESULT_BYTES_MAX),
            visible_devices=settings.device.visible_devices,
            mps=settings.mps,
            imports=imports,
        )
        # What the pool knows its model by, and the model's id; empty: it has none, or none yet.
        self.model = ""
        self.model_id = ""
        # Of a process for a model: its imports are done.
        self.warm = False
        # It takes nothing new.
        self.retiring = False
        self.slots = settings.engine.slots
        # In the engine, by batch id.
        self.batches: dict[int, EngineBatch] = {}
        # Of kinds that run a batch together.
        self.pace = Pace()
        self.watch = Watch(progress_timeout_s=config.progress_timeout_s, cancel_grace_s=config.cancel_grace_s)
        self.deaths = Deaths(settings.suspects, settings.memory_bytes)
        # What its embedding cache has said last.
        self.embedding_cache: pb.EmbeddingCache | None = None
        self._batch_ids = itertools.count(1)
        self._cancelled_ns: dict[int, int] = {}
        # Slots in which cancelled calls run on; once their engine is ended, all until the next one is ready.
        self.occupied = 0
        # Results that we have taken hold of, and the engine doesn't know of it.
        self._untold = 0

    @property
    def room(self) -> bool:
        """It can take a batch: one for each slot, and one to prepare meanwhile; but none beside a suspect. Nothing is
        prepared while a cancelled call runs on: it could not be had back from an engine that listens to nobody.
        """
        if not self.host.ready or self.retiring or len(self.batches) > self.slots - (self.occupied > 0):
            return False
        # A suspect's batch has no other lease.
        return not any(lease.suspect for batch in self.batches.values() for lease in islice(batch.leases.values(), 1))

    def takes(self, lease: Lease | None) -> bool:
        """It can take a batch that begins with this lease."""
        if lease is None or not lease.suspect:
            return self.room
        return self.room and all(other.cleared for batch in self.batches.values() for other in batch.leases.values())

    def running(self) -> list[Lease]:
        """The leases that it runs at this instant; notes how often they have moved."""
        found = []
        if self.batches:
            for state in self.host.sample():
                for lease in running_leases(state, self.batches.get(state.batch_id)):
                    lease.running = True
                    lease.steps = max(lease.steps, state.beats)
                    found.append(lease)
        return found

    def dispatch(self, leases: list[Lease], *, one_by_one: bool) -> None:
        """Have the engine run these together."""
        spec = leases[0].spec
        batch_id = next(self._batch_ids)
        if leases[0].suspect:
            leases[0].partials_dispatched = leases[0].partials_made
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
                _partials_of(lease),
            )
            for lease in leases
        ]
        self.batches[batch_id] = EngineBatch(batch_id, {lease.lease_id: lease for lease in leases}, one_by_one, spec)
        if not one_by_one:
            self.pace.begin(batch_id, sum(map(tokens_of, leases)), time.monotonic())
        model = self.model_id or spec.model
        self.host.send(
            ("batch", batch_id, spec.kind, model, spec.parameters, spec.content_type, spec.durable, rows), blobs
        )

    def cancel(self, leases: list[Lease]) -> None:
        """Tell the engine that nobody wants these any more, as far as they are in it."""
        inside = [
            lease.lease_id for lease in leases if any(lease.lease_id in batch.leases for batch in self.batches.values())
        ]
        if inside and self.host.ready:
            now_ns = time.monotonic_ns()
            self._cancelled_ns.update(dict.fromkeys(inside, now_ns))
            self.host.send(("cancel", inside), [])

    def recall(self, leases: list[Lease]) -> list[Lease]:
        """Ask the engine for what it has not begun of these; `Owner.given_back` gets it. Returns those not inside."""
        inside = {lease_id for batch in self.batches.values() for lease_id in batch.leases}
        if self.host.ready and (asked := [lease.lease_id for lease in leases if lease.lease_id in inside]):
            self.host.send(("give_back", asked), [])
        return [lease for lease in leases if lease.lease_id not in inside]

    def _given_back(self, lease_ids: list[int]) -> None:
        given_back: list[Lease] = []
        for batch in list(self.batches.values()):
            given_back += [batch.leases.pop(lease_id) for lease_id in lease_ids if lease_id in batch.leases]
            if not batch.leases and not batch.settled:  # what the engine says of its end matters to nobody
                del self.batches[batch.batch_id]
                self.pace.drop(batch.batch_id)
        self.owner.given_back(given_back)

    def share(self) -> None:
        """Tell the engine where large results go."""
        if self.host.ready:
            self.host.send(("payloads", self.owner.sharing.path), [])

    def tell_taken(self) -> None:
        """Let the engine forget the results that we have taken hold of."""
        if self._untold and self.host.ready:
            self.host.send(("taken", self._untold), [])
            self._untold = 0

    def check(self, *, memory: bool) -> None:
        """Does what runs keep its limits? Ends the engine if not. `memory`: look at that too."""
        if not self.host.ready:
            return
        self.occupied = self._count_occupied() if self._cancelled_ns else 0
        if not self.batches:
            return
        verdict = self.watch.check(time.monotonic_ns(), self.host.sample(), self.batches, self._cancelled_ns)
        if verdict is not None:
            self.deaths.verdict = verdict
            self.host.kill()
        elif memory and self.memory_bytes and self.host.memory_used_bytes() > self.memory_bytes:
            self.deaths.out_of_memory = True
            self.host.kill()

    def _count_occupied(self) -> int:
        running = [running_leases(state, self.batches.get(state.batch_id)) for state in self.host.sample()]
        return sum(bool(leases) and all(lease.dropped for lease in leases) for leases in running)

    def replace(self) -> None:
        """End the engine by no fault of what is in it: that goes on in another."""
        self.deaths.replace()
        self.host.kill()

    def forget(self) -> None:
        """All that is in it was given back."""
        self.batches.clear()
        self.pace.clear()
        self._cancelled_ns.clear()
        self.deaths.forget()

    # What the host tells.

    def engine_ready(self) -> None:
        self.warm = True
        self.occupied = 0
        self.share()
        self.owner.engine_ready(self)

    def engine_said(self, message: ipc.Message, blobs: list[bytes]) -> Callable[[], None]:
        match message[0]:
            case "reports":
                return self._read_reports(message, blobs)
            case "given_back":
                _, lease_ids = message
                if any(type(lease_id) is not int for lease_id in lease_ids):
                    raise TypeError(f"leases {lease_ids!r} are given back")
                return partial(self._given_back, lease_ids)
            case "self_test":
                _, test_id, right, text = message
                if type(test_id) is not int or right not in (True, False, None) or type(text) is not str:
                    raise TypeError(f"a self-test that says {test_id!r}, {right!r}, {text!r}")
                return partial(self.owner.self_test_done, test_id, right, text)
            case "self_test_begun":
                (_, test_id) = message
                return partial(self.owner.self_test_begun, test_id)
            case "loaded" | "facts" | "load_failed" if not self.model:
                raise ValueError("it is for no model")
            case "loaded":
                _, facts, load_s, one_by_one, device_bytes = message
                words = LoadedWords(
                    facts=_facts_of(facts),
                    load_s=float(load_s),
                    one_by_one=bool(one_by_one),
                    device_bytes=int(device_bytes),
                )
                return partial(self._loaded, words)
            case "facts":
                return partial(self.owner.facts_changed, self, _facts_of(message[1]))
            case "load_failed":
                _, error_type, text, retryable = message
                return partial(self.owner.load_failed, self, str(error_type), str(text), retryable=bool(retryable))
            case other:
                raise ValueError(f"nobody knows the word {other!r}")

    def _loaded(self, words: LoadedWords) -> None:
        self.share()
        self.owner.model_loaded(self, words)

    def _read_reports(self, message: ipc.Message, blobs: list[bytes]) -> Callable[[], None]:
        """All of it is read before any of it counts: words that make no sense must leave every lease with its batch."""
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
            cache,
        ) = message
        embedding_cache = pb.EmbeddingCache(**cache) if cache else None
        if any(type(result) is tuple for _, result, _ in succeeded):
            succeeded, failed = self._take_hold(succeeded, failed)
        batch = self.batches.get(batch_id)
        if batch is None:  # returned in a drain
            return _nothing
        for number in (start_ns, finish_ns, work_ns):
            if type(number) is not int or not 0 <= number < 1 << 63:
                raise ValueError(f"times that are {start_ns!r}, {finish_ns!r}, {work_ns!r}")
        leases = batch.leases
        if failed:
            # When it was said, by the clock of the slots.
            said_ns = time.monotonic_ns() - (time.time_ns() - finish_ns)
            failed = self.deaths.keep_back(failed, one_by_one=batch.one_by_one, said_ns=said_ns)
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
        frame = ReportsFrame(
            batch=batch,
            start_ns=start_ns,
            finish_ns=finish_ns,
            checkpoints=[(leases[lease_id], _bytes_of(data, blobs)) for lease_id, data in checkpoints],
            progress=[(leases[lease_id], float(fraction), str(note)) for lease_id, fraction, note in progress],
            partials=[(leases[lease_id], _bytes_of(data, blobs), str(form)) for lease_id, data, form in partials],
            reports=reports,
            done=bool(done),
            work_ns=work_ns,
            embedding_cache=embedding_cache,
        )
        return partial(self._reports, frame)

    def _reports(self, frame: "ReportsFrame") -> None:
        batch, reports = frame.batch, frame.reports
        for lease, data in frame.checkpoints:
            self.owner.session.save(lease, data)
        for lease, fraction, note in frame.progress:
            lease.fraction, lease.note = fraction, note
        cleared = False
        for lease, data, content_type in frame.partials:
            if not self.owner.session.partial(lease, data, content_type):
                self.owner.cancel([lease])
            cleared = cleared or (lease.suspect and clears(lease))
        for report in reports:
            batch.leases.pop(report.lease.lease_id, None)
        batch.settled += len(reports)
        # Since something was last settled: what came in between was parts of the same tasks.
        start_ns = batch.unsettled_ns or frame.start_ns
        batch.unsettled_ns = 0 if reports else start_ns
        energy = self.owner.sampler.measure(start_ns, frame.finish_ns, sum(report.lease.units for report in reports))
        self.owner.report(start_ns, frame.finish_ns, reports, energy)
        if self.deaths.pending:  # the engine is of no use any more, and its leases wait for the judgement
            self.host.ready = False
            asyncio.get_running_loop().call_soon(self._end, self.host.pid)
        elif frame.done:
            self.embedding_cache = frame.embedding_cache
            self._done(batch, frame.work_ns)
        elif cleared:
            self.owner.room_made()

    def _done(self, batch: EngineBatch, work_ns: int) -> None:
        del self.batches[batch.batch_id]
        if not batch.one_by_one:
            self.pace.end(batch.batch_id, time.monotonic())
        if self._cancelled_ns:
            for lease_id in batch.leases:
                self._cancelled_ns.pop(lease_id, None)
        self.owner.batch_done(self, batch, work_ns)

    def _end(self, pid: int) -> None:
        """Ends this engine, unless it has died meanwhile and another is in its place."""
        if self.host.pid == pid:
            self.host.kill()

    def _take_hold(self, succeeded: list[Any], failed: list[Any]) -> tuple[list[Any], list[Any]]:
        """Pins results that lie in files, before the engine lets go of them."""
        held, lost, places = [], [], 0
        for lease_id, result, content_type in succeeded:
            if type(result) is tuple:
                places += 1
                try:
                    result = self.owner.sharing.pin(*result)  # noqa: PLW2901  it was only its place
                except OSError as error:
                    lost.append((lease_id, "ResultLost", f"the result is gone from where it lay: {error}", True, ""))
                    continue
            held.append((lease_id, result, content_type))
        self._untold += places
        if self._untold >= TELL_TAKEN:
            self.tell_taken()
        return held, [*failed, *lost]

    def engine_died(self, death: Death) -> None:
        inside = bool(self.batches)
        judged = self.deaths.judge(death, self.batches)
        others = judged.reason if inside or judged.by_others else ""
        if inside or not self.retiring:
            log.warning(
                "engine died",
                model=self.model,
                how=death.words,
                reason=judged.reason,
                failed_task_ids=[report.lease.task_id for report in judged.reports],
                suspect_task_ids=[lease.task_id for lease in judged.again if lease.suspect],
                again=len(judged.again),
            )
        self.occupied = self.slots if self.occupied else 0
        self.batches.clear()
        self.pace.clear()
        self._cancelled_ns.clear()
        self._untold = 0
        self.watch.reset()
        for lease in judged.again:
            lease.running = False
        self.owner.engine_died(self, death, judged, others)


def _nothing() -> None:
    """There is nothing to carry out."""


def _facts_of(facts: Any) -> dict[str, str]:
    return {str(name): str(fact) for name, fact in dict(facts).items()}


def _bytes_of(data: bytes | int, blobs: list[bytes]) -> bytes:
    return data if type(data) is bytes else blobs[int(data)]


def _way_of(payload: bytes | Sized, blobs: list[bytes]) -> bytes | int | tuple[str, int, int]:
    """What the engine is told of a payload: itself, its number among the blobs, or where it lies."""
    if isinstance(payload, bytes):
        return ipc.put(payload, blobs)
    assert isinstance(payload, Reference)
    assert isinstance(payload.pin, Elsewhere)
    return payload.pin.path, payload.offset, payload.size_bytes


def _partials_of(lease: Lease) -> tuple[bytes, ...]:
    """All outputs that the task has made so far, if we know them and they are not too many."""
    if not (lease.partials_received or lease.partials_made):
        return ()
    known = (*lease.partials_before, *(data for data, _ in lease.partials or ()))
    if len(known) < lease.partials_received + lease.partials_made or sum(map(len, known)) > PARTIALS_BYTES_MAX:
        return ()
    return known
