"""Inside the engine process: batches in, engines run, reports out.

Threads: one reads the socket, so that a cancellation takes effect at once and the next batch is prepared while one
runs; with a model another one prepares, which may have to load something first; the main thread runs batches, and one
more thread for each further slot; one flushes reports that would otherwise wait behind a long task. Engines whose
batches run together are entered by one thread at a time.

Reports leave when a batch ends, or as soon as 2 ms have passed since the last ones left: fast tasks share a frame, slow
ones don't wait.

User code may fork. A forked child that comes back here believes that it is us: it is sent away (`os._exit`) before it
can say a word. Python tells us of a fork; one that happened behind its back is found out before anything is sent.
"""

import contextlib
import dataclasses
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from multigpu._transport.payloads import LARGE_BYTES, Reference, Writer, read_file
from multigpu.repository.files import require_hashes
from multigpu.repository.model import ModelSpec

from multigpu_worker.engines.base import Batch, Engine, EngineSettings, Item
from multigpu_worker.engines.common import self_test as canary
from multigpu_worker.engines.registry import build, build_model_engine
from multigpu_worker.processes import ipc
from multigpu_worker.processes.blobs import BlobMemory

FLUSH_NS = 2_000_000
FLUSH_S = FLUSH_NS / 1e9
# Reports don't wait for one another past so many bytes.
FLUSH_BYTES = 4 << 20
CHECKPOINT_BYTES_MAX = 1 << 20
# The contract's limits.
TYPE_BYTES_MAX = 256
MESSAGE_BYTES_MAX = 8 << 10
TRACEBACK_BYTES_MAX = 16 << 10
NOTE_BYTES_MAX = 1 << 10
# Where a large result lies: segment, offset, size.
Place = tuple[str, int, int]
# What a CUDA context takes, beside what torch counts.
CUDA_CONTEXT_BYTES = 400 << 20
# How the process ends when it can't go on; the agent says the rest.
EXIT_FORKED = 70
EXIT_BROKEN = 71


# A batch as it came, and the set of its leases that are given back.
Received = tuple[ipc.Message, list[bytes], set[int]]


@dataclass(slots=True)
class Work:
    """A batch on its way to a slot."""

    batch_id: int
    batch: Batch
    # None: it could not be had, and `prepared` is the reason.
    engine: Engine | None
    prepared: object
    # Their payloads could not be read, for these reasons.
    lost: list[tuple[Item, str]]
    # Where large results go; None: to the agent, as they are.
    writer: Writer | None
    # Leases that were given back before they were begun. They may come again in another batch.
    given_back: set[int]


class BatchReporter:
    """The reporter (engines/base.py) of one batch in one slot."""

    def __init__(self, runtime: "Runtime", work: Work, slot_at: int) -> None:
        self._runtime = runtime
        self._batch_id = work.batch_id
        self._batch = batch = work.batch
        self._writer = work.writer
        self._view = runtime.page.view
        self._lease_at = slot_at + ipc.SlotPage.LEASE
        self._started_at = slot_at + ipc.SlotPage.STARTED
        self._beats_at = slot_at + ipc.SlotPage.BEATS
        self._lock = threading.Lock()
        self._unbegun = runtime.unbegun
        self._given_back = work.given_back
        self._lost = [item for item, _ in work.lost]
        self._cancelled = runtime.cancelled
        self._result_bytes_max = runtime.result_bytes_max
        self._open = {item.lease_id for item in batch.items}
        self._open.update(item.lease_id for item, _ in work.lost)
        self._start_ns = time.time_ns()
        self._begun_ns = self._flushed_ns = time.monotonic_ns()
        self._clear()

    def _clear(self) -> None:
        # Something is said that was not sent; and the flusher knows.
        self._waits = False
        self._flush_asked = False
        self._succeeded: list[tuple[int, bytes | int | Place, str]] = []
        self._failed: list[tuple[int, str, str, bool, str]] = []
        self._partials: list[tuple[int, bytes | int, str]] = []
        self._progress: dict[int, tuple[float, str]] = {}
        self._checkpoints: dict[int, bytes | int] = {}
        self._blobs: list[bytes] = []
        # Held until the agent was told of them.
        self._written: list[Reference] = []
        self._bytes = 0

    def begin(self, item: Item) -> None:
        lease_id = item.lease_id
        if lease_id in self._unbegun:
            self._runtime.begin([lease_id], self._given_back)
        if lease_id in self._given_back:  # it runs all the same, and may not be spoken of
            self._open.discard(lease_id)
        view = self._view
        view[self._lease_at] = 0
        view[self._started_at] = time.monotonic_ns()
        view[self._lease_at] = lease_id
        if self._waits and not self._flush_asked:
            self._ask_flush()

    def begin_all(self) -> None:
        self._runtime.begin([item.lease_id for item in (*self._batch.items, *self._lost)], self._given_back)
        self._open -= self._given_back

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        if len(result) > self._result_bytes_max:
            message = f"the result has {len(result)} bytes, the worker's result_bytes_max is {self._result_bytes_max}"
            self.fail(item, "ResultTooLarge", message, retryable=False)
            return
        if self._runtime.forked:
            os._exit(EXIT_FORKED)
        with self._lock:
            lease_id = item.lease_id
            if lease_id in self._open:
                self._open.discard(lease_id)
                self._view[self._lease_at] = 0
                self._succeeded.append((lease_id, self._put(result), content_type))
                self._waits = True
                self._flush_if_due(len(result))

    def _put(self, result: bytes) -> bytes | int | Place:
        """Choose the way of a result. A file that can't be written is no reason to fail."""
        if len(result) >= LARGE_BYTES and self._writer is not None:
            with contextlib.suppress(OSError):
                reference = self._writer.put(result)
                self._written.append(reference)
                return reference.pin.name, reference.offset, reference.size_bytes
        return ipc.put(result, self._blobs)

    def fail(self, item: Item, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        with self._entered():
            lease_id = item.lease_id
            if lease_id in self._open:
                self._open.discard(lease_id)
                self._view[self._lease_at] = 0
                error_type = _text(error_type, TYPE_BYTES_MAX)
                message = _text(message, MESSAGE_BYTES_MAX)
                # The end of a traceback says most.
                traceback = _text(traceback[-TRACEBACK_BYTES_MAX:], TRACEBACK_BYTES_MAX)
                self._failed.append((lease_id, error_type, message, retryable, traceback))
                self._waits = True
                self._flush_if_due(len(message) + len(traceback))

    def partial(self, item: Item, data: bytes, content_type: str = "") -> None:
        if len(data) > self._result_bytes_max:
            raise ValueError(
                f"a partial output has {len(data)} bytes, the worker's result_bytes_max is {self._result_bytes_max}"
            )
        with self._entered():
            if item.lease_id in self._open:
                self._view[self._beats_at] += 1
                self._partials.append((item.lease_id, ipc.put(data, self._blobs), content_type))
                self._waits = True
                self._flush_if_due(len(data))
        if self._waits and not self._flush_asked:
            self._ask_flush()

    def progress(self, item: Item, fraction: float, note: str = "") -> None:
        with self._entered():
            if item.lease_id in self._open:
                self._view[self._beats_at] += 1
                self._progress[item.lease_id] = (min(1.0, max(0.0, float(fraction))), _text(note, NOTE_BYTES_MAX))
                self._waits = True
                self._flush_if_due(0)
        if self._waits and not self._flush_asked:
            self._ask_flush()

    def checkpoint(self, item: Item, data: bytes) -> None:
        if len(data) > CHECKPOINT_BYTES_MAX:
            raise ValueError(f"a checkpoint has {len(data)} bytes, the limit is {CHECKPOINT_BYTES_MAX}")
        with self._entered():
            if item.lease_id in self._open:
                self._view[self._beats_at] += 1
                self._checkpoints[item.lease_id] = ipc.put(bytes(data), self._blobs)
                # At once: it is there for the case that what comes next ends the process.
                self._send(done=False)

    def cancelled(self, item: Item) -> bool:
        if item.lease_id in self._unbegun:  # an engine asks before it begins the item
            self._runtime.begin([item.lease_id], self._given_back)
        return item.lease_id in self._cancelled or item.lease_id in self._given_back

    def beat(self) -> None:
        self._view[self._beats_at] += 1

    def flush(self) -> None:
        with self._lock:
            if self._waits:
                self._send(done=False)

    def fail_lost(self, lost: list[tuple[Item, str]]) -> None:
        """Settle the items whose payloads could not be read."""
        for item, why in lost:
            self.fail(item, "PayloadLost", f"the payload can't be read where it lies: {why}", retryable=True)

    def finish(self) -> None:
        """Settle what the engine left unsettled, and say that the batch is over."""
        for item in self._batch.items:
            if item.lease_id in self._open and item.lease_id not in self._cancelled:
                self.fail(item, "EngineError", "the engine returned without a word about the task", retryable=True)
        with self._lock:
            self._send(done=True)

    def fail_rest(self, error: BaseException) -> None:
        """Settle every item that is left: what ran them raised this."""
        text = "".join(traceback.format_exception(error))
        error_type = "OutOfMemory" if isinstance(error, MemoryError) else type(error).__name__
        for item in self._batch.items:
            self.fail(item, error_type, str(error) or error_type, retryable=True, traceback=text)

    def _entered(self) -> threading.Lock:
        """The lock, unless this is a forked child of the process that made us."""
        if self._runtime.forked:
            os._exit(EXIT_FORKED)
        return self._lock

    def _ask_flush(self) -> None:
        self._flush_asked = True
        self._runtime.flush_soon(self)

    def _flush_if_due(self, more_bytes: int) -> None:
        self._bytes += more_bytes
        if self._bytes >= FLUSH_BYTES or time.monotonic_ns() - self._flushed_ns >= FLUSH_NS:
            self._send(done=False)

    def _send(self, *, done: bool) -> None:
        """Send all that waits. The lock is held, so that what was said first leaves first."""
        now_ns = time.time_ns()
        message = (
            "reports",
            self._batch_id,
            self._start_ns,
            now_ns,
            self._succeeded,
            self._failed,
            self._partials,
            [(lease_id, *words) for lease_id, words in self._progress.items()],
            list(self._checkpoints.items()),
            done,
            time.monotonic_ns() - self._begun_ns,
            self._runtime.embedding_cache() if done else {},
        )
        blobs, written = self._blobs, self._written
        self._clear()
        self._runtime.send(message, blobs, written)
        self._flushed_ns = time.monotonic_ns()
        self._start_ns = now_ns


def _text(text: str, bytes_max: int) -> str:
    """Fit for a message: no longer than so many bytes, and without the lone surrogates that UTF-8 can't say."""
    return text.encode("utf-8", "replace")[:bytes_max].decode("utf-8", "ignore")


def _exit_broken() -> NoReturn:
    """End the process, saying why: an exception is being handled."""
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(EXIT_BROKEN)


def _told(facts: dict[str, str]) -> dict[str, str]:
    """Facts as they are sent. Copied at once: another thread may change them."""
    return {str(name): str(fact) for name, fact in facts.copy().items()}


def _device_bytes() -> int:
    """What this process has of a GPU's memory by torch's account, for drivers that don't tell; 0: nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved()) + CUDA_CONTEXT_BYTES


class Runtime:
    def __init__(
        self,
        sock: socket.socket,
        page: ipc.SlotPage,
        blobs: BlobMemory,
        settings: EngineSettings,
        *,
        result_bytes_max: int,
    ) -> None:
        self.page = page
        self.settings = settings
        self.result_bytes_max = result_bytes_max
        # True in a child that user code forked.
        self.forked = False
        self._pid = os.getpid()
        # Leases that nobody wants any more. Emptied whenever no batch is here.
        self.cancelled: set[int] = set()
        # Leases that no slot has begun, each with the set to put it into when it is given back.
        self.unbegun: dict[int, set[int]] = {}
        self._begin_lock = threading.Lock()
        self._sock = sock
        self._blobs = blobs
        # Of results that are kept for long, and of those that aren't; None: nothing is shared.
        self._writers: dict[bool, Writer | None] = {True: None, False: None}
        # Results that the agent was told of and has not yet taken hold of, oldest first.
        self._told: deque[Reference] = deque()
        self._send_lock = threading.Lock()
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        # Batches that wait to be prepared. None: this process has no model, and the reader prepares.
        self._unprepared: queue.SimpleQueue[Received] | None = None
        self._batches = 0
        self._batches_lock = threading.Lock()
        self._engines: dict[str, Engine] = {}
        # The engine of a kind whose batches run together is entered by one thread at a time.
        self._engine_locks: dict[str, threading.Lock] = {}
        self._unflushed: queue.SimpleQueue[BatchReporter] = queue.SimpleQueue()
        # What the engine says of its model, for people, and what of it was told.
        self._facts: dict[str, str] = {}
        self._facts_told: dict[str, str] = {}

    def serve(self) -> None:
        """Serve until the agent goes away. Does not return: the process ends with it."""
        threading.Thread(target=self._flush, name="flusher", daemon=True).start()
        # Before anything is read: a model that is loaded opens its own.
        self._open_slots()
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        self._run(0)

    def _open_slots(self) -> None:
        """The main thread is the first slot's."""
        for slot in range(1, self.settings.slots):
            threading.Thread(target=self._run, args=(slot,), name=f"slot-{slot}", daemon=True).start()

    def send(self, message: ipc.Message, blobs: list[bytes], written: list[Reference]) -> None:
        if os.getpid() != self._pid:
            os._exit(EXIT_FORKED)
        with self._send_lock:
            self._told += written
            try:
                ipc.send(self._sock, ipc.encode(message, blobs, self._blobs.up))
            except OSError:
                os._exit(0)  # the agent is gone, and nobody else is interested

    def begin(self, lease_ids: Iterable[int], given_back: set[int]) -> None:
        """From here on these leases of a batch can't be given back, unless they were before."""
        if self.forked:
            os._exit(EXIT_FORKED)
        with self._begin_lock:
            for lease_id in lease_ids:
                if self.unbegun.get(lease_id) is given_back:
                    del self.unbegun[lease_id]

    def _give_back(self, lease_ids: list[int]) -> None:
        """Give back those of these that no slot has begun."""
        with self._begin_lock:
            given_back = [lease_id for lease_id in lease_ids if lease_id in self.unbegun]
            for lease_id in given_back:
                # In this order: a slot that looks without the lock finds it in one of the two.
                self.unbegun[lease_id].add(lease_id)
                del self.unbegun[lease_id]
            # Under the lock, which a batch takes before it ends: its end must not be told first.
            self.send(("given_back", given_back), [], [])

    def flush_soon(self, reporter: BatchReporter) -> None:
        self._unflushed.put(reporter)

    def embedding_cache(self) -> dict[str, int]:
        """What the embedding cache has done; empty: there is none."""
        for engine in list(self._engines.values()):
            counts = getattr(engine, "cache_counts", lambda: None)()
            if counts is not None:
                return dataclasses.asdict(counts)
        return {}

    def _read(self) -> None:
        try:
            while True:
                message, blobs = ipc.receive(self._sock, self._blobs.down)
                if message[0] == "batch":
                    with self._batches_lock:
                        self._batches += 1
                    given_back: set[int] = set()
                    self.unbegun.update((row[0], given_back) for row in message[-1])
                    if self._unprepared is None:
                        self._work.put(self._work_of(message, blobs, given_back))
                    else:
                        self._unprepared.put((message, blobs, given_back))
                elif message[0] == "give_back":
                    self._give_back(message[1])
                elif message[0] == "load":
                    self._unprepared = queue.SimpleQueue()
                    arguments = (self._unprepared, message)
                    threading.Thread(target=self._prepare, args=arguments, name="preparer", daemon=True).start()
                elif message[0] == "close":
                    self._close(*message[1:])
                elif message[0] == "canary":
                    threading.Thread(target=self._sing, args=message[1:], name="canary", daemon=True).start()
                elif message[0] == "taken":
                    for _ in range(message[1]):
                        self._told.popleft()
                elif message[0] == "payloads":
                    path = message[1]
                    self._writers = {durable: Writer(Path(path)) if path else None for durable in (True, False)}
                else:
                    assert message[0] == "cancel"
                    self.cancelled.update(message[1])
        except (EOFError, ConnectionError):
            os._exit(0)
        except BaseException:  # noqa: BLE001  without a reader the process is of no use, and must not linger
            _exit_broken()

    def _prepare(self, unprepared: queue.SimpleQueue[Received], load: ipc.Message) -> None:
        """Load the model, and prepare its batches one after the other."""
        try:
            self._load(*load[1:])
            while True:
                self._work.put(self._work_of(*unprepared.get()))
        except BaseException:  # noqa: BLE001  as above
            _exit_broken()

    def _load(self, model: str, plain: dict[str, Any], slots: int) -> None:
        """Load the model that this process is for, and say how that went."""
        spec = ModelSpec.from_plain(plain)
        # The user's own module may lie beside the model.
        if ":" in spec.engine or spec.source == "safetensors":
            sys.path.insert(0, str(spec.folder))
        self.settings = dataclasses.replace(self.settings, slots=slots, models={model: spec})
        begin_s = time.monotonic()
        try:
            require_hashes(spec)
            engine = build_model_engine(spec, self.settings)
            self._facts = engine.load()
            self._facts_told = _told(self._facts)
        except BaseException as error:  # noqa: BLE001  whatever loading raises is the model's, or the room's
            traceback.print_exc()
            words = _text(str(error) or type(error).__name__, MESSAGE_BYTES_MAX)
            retryable = getattr(error, "retryable", True)
            self.send(("load_failed", _text(type(error).__name__, TYPE_BYTES_MAX), words, retryable), [], [])
            return
        load_s = time.monotonic() - begin_s
        self._engines[spec.kind] = engine
        self._engine_locks[spec.kind] = threading.Lock()
        self._open_slots()
        self.send(("loaded", self._facts_told, load_s, bool(engine.one_by_one), _device_bytes()), [], [])

    def _tell_facts(self) -> None:
        """Say what has changed of what there is to know of the model."""
        facts = _told(self._facts)
        if facts != self._facts_told:
            self._facts_told = facts
            self.send(("facts", facts), [], [])

    def _close(self, end: bool) -> None:
        """The process ends in peace, by itself or by the agent's hand: nothing runs."""
        for engine in self._engines.values():
            close = getattr(engine, "close", None)
            if close is not None:
                close()
        sys.stdout.flush()
        sys.stderr.flush()
        if end:
            os._exit(0)
        self.send(("closed",), [], [])

    def _sing(self, canary_id: int, models: bool) -> None:
        """Work on the task whose answer is known. `models`: the worker has models, so that torch is worth loading."""
        right: bool | None = None
        words = "this engine doesn't use torch"
        if canary.able(self.settings.device, models=models):
            if canary.loaded():
                right, words = self._sing_with_torch(canary_id)
            else:
                # It has not been loaded for tasks: what it takes of memory, and CUDA's context, must not stay.
                right, words = canary.run_in_subprocess(self.settings.device)
                words = _text(words, MESSAGE_BYTES_MAX)
        self.send(("canary", canary_id, right, words), [], [])

    def _sing_with_torch(self, canary_id: int) -> tuple[bool | None, str]:
        try:
            torch = canary.load()
            shortage = canary.shortage(torch, self.settings.device)
        except Exception as error:  # noqa: BLE001  memory, or an installation that doesn't work: not the device
            return None, _text(f"torch can't be loaded: {error!r}", MESSAGE_BYTES_MAX)
        if shortage:
            return None, shortage
        self.send(("singing", canary_id), [], [])
        try:
            return canary.run(torch, self.settings.device)
        except Exception as error:  # noqa: BLE001  whatever torch raises says that the device is not well
            return False, _text(f"it raised {type(error).__name__}: {error}", MESSAGE_BYTES_MAX)

    def _work_of(self, message: ipc.Message, blobs: list[bytes], given_back: set[int]) -> Work:
        _, batch_id, kind, model, parameters, content_type, durable, rows = message
        items: list[Item] = []
        lost: list[tuple[Item, str]] = []
        for lease_id, task_id, attempt, payload, *rest in rows:
            if type(payload) is int:
                payload = blobs[payload]  # noqa: PLW2901  it was only its place
            elif type(payload) is tuple:
                try:
                    payload = read_file(*payload)  # noqa: PLW2901  as above
                except OSError as error:
                    lost.append((Item(lease_id, task_id, attempt, b"", *rest), str(error)))
                    continue
            items.append(Item(lease_id, task_id, attempt, payload, *rest))
        batch = Batch(kind, model, dict(parameters), content_type, items)
        try:
            engine = self._engines.get(kind)
            if engine is None:
                engine = self._engines[kind] = build(kind)
                self._engine_locks[kind] = threading.Lock()
            self.page.view[ipc.SlotPage.PREPARED] = batch_id
            prepared = engine.prepare(batch) if items else None
            self.page.view[ipc.SlotPage.PREPARED] = 0
            return Work(batch_id, batch, engine, prepared, lost, self._writers[durable], given_back)
        except Exception as error:  # noqa: BLE001  an engine that can't be built or can't prepare fails the batch
            self.page.view[ipc.SlotPage.PREPARED] = 0
            return Work(batch_id, batch, None, error, lost, None, given_back)

    def _run(self, slot: int) -> None:
        view = self.page.view
        at = slot * ipc.SlotPage.FIELDS
        while True:
            work = self._work.get()
            reporter = BatchReporter(self, work, at)
            # The clock starts when the batch does, and not while it waits for its engine.
            with self._turn(work):
                if work.engine is None or not work.engine.one_by_one:
                    reporter.begin_all()
                view[at + ipc.SlotPage.LEASE] = 0
                view[at + ipc.SlotPage.STARTED] = time.monotonic_ns()
                view[at + ipc.SlotPage.BATCH] = work.batch_id
                self._run_batch(work, reporter)
                view[at + ipc.SlotPage.LEASE] = 0
                view[at + ipc.SlotPage.BATCH] = 0
            reporter.begin_all()  # those that its engine passed over
            reporter.finish()
            if self._facts:
                self._tell_facts()
            with self._batches_lock:
                self._batches -= 1
                if self._batches == 0:
                    self.cancelled.clear()

    def _turn(self, work: Work) -> contextlib.AbstractContextManager[object]:
        """What a batch has to hold while it runs."""
        if work.engine is None or work.engine.one_by_one:
            return contextlib.nullcontext()
        return self._engine_locks[work.batch.kind]

    @staticmethod
    def _run_batch(work: Work, reporter: BatchReporter) -> None:
        reporter.fail_lost(work.lost)
        if not work.batch.items:
            return
        if work.engine is None:
            assert isinstance(work.prepared, Exception)
            reporter.fail_rest(work.prepared)
            return
        try:
            work.engine.run(work.batch, work.prepared, reporter)
        except BaseException as error:  # noqa: BLE001  whatever an engine raises is charged to its batch
            reporter.fail_rest(error)

    def _flush(self) -> None:
        while True:
            waiting = {self._unflushed.get()}
            time.sleep(FLUSH_S)
            while True:
                try:
                    waiting.add(self._unflushed.get_nowait())
                except queue.Empty:
                    break
            for reporter in waiting:
                reporter.flush()
