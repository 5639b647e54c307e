"""Runs in the engine process: receives batches, has engines run them, and sends reports.

Threads: one reads the socket, so that a cancellation takes effect at once; in a process without a model it also
prepares the next batch while one runs. In a process with a model, another thread loads the model and then prepares the
batches. The main thread runs the batches of the first slot, and one more thread those of each further slot. One thread
flushes reports that would otherwise wait for the end of a long task, and one sends the model's facts whenever they have
changed. Only one thread at a time enters an engine whose batches run together.
"""

import contextlib
import dataclasses
import importlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from multigpu._handling.attempts import MESSAGE_BYTES_MAX, text_of
from multigpu._transport.payloads import Writer
from multigpu.handlers import registered_handlers

from multigpu_worker.engine import model as models
from multigpu_worker.engine.channel import AgentChannel
from multigpu_worker.engine.leases import Leases
from multigpu_worker.engine.reporter import BatchReporter, Reporting, flush_forever
from multigpu_worker.engine.work import Work, items_of
from multigpu_worker.engines.base import Batch, Engine, EngineSettings
from multigpu_worker.engines.common import self_test
from multigpu_worker.engines.registry import build
from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.ipc.slots import SlotPage
from multigpu_worker.repository.model import ModelSpec

EXIT_BROKEN = 71

# A batch's frame and blobs, and the set of its leases that were given back.
Received = tuple[frames.Message, list[bytes], set[int]]


class Runtime:
    def __init__(
        self, channel: AgentChannel, page: SlotPage, settings: EngineSettings, *, result_bytes_max: int
    ) -> None:
        self.page = page
        self.settings = dataclasses.replace(settings, result_bytes_max=result_bytes_max)
        self._channel = channel
        self._leases = Leases(channel)
        # The writers of large results, of durable and of other tasks; None: the master shares no directory.
        self._writers: dict[bool, Writer | None] = {True: None, False: None}
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        # Batches that wait to be prepared. None: this process has no model, and the reader prepares batches itself.
        self._unprepared: queue.SimpleQueue[Received] | None = None
        self._model: models.LoadedModel | None = None
        self._engines: dict[str, Engine] = {}
        # By kind; taken to enter an engine whose batches run together.
        self._engine_locks: dict[str, threading.Lock] = {}
        self._reporting = Reporting(
            channel=channel,
            leases=self._leases,
            page=page,
            result_bytes_max=result_bytes_max,
            embedding_cache=self._embedding_cache,
            unflushed=queue.SimpleQueue(),
        )

    def serve(self) -> None:
        """Serve until the agent is gone, then end the process. Never returns."""
        self._start_threads()
        _thread(_needed, "reader", self._read)
        _needed(self._run, 0)

    def _start_threads(self) -> None:
        _thread(_needed, "flusher", flush_forever, self._reporting.unflushed)
        # Before the first frame is read: a "load" changes the number of slots, and starts their threads itself.
        self._start_slots()

    def _start_slots(self) -> None:
        """Start the threads of all slots but the first, which has the main thread."""
        for slot in range(1, self.settings.slots):
            _thread(_needed, f"slot-{slot}", self._run, slot)

    # The reader.

    def _read(self) -> None:
        try:
            for message, blobs in self._channel.frames:
                self._handle(message, blobs)
        except (EOFError, ConnectionError):
            os._exit(0)

    def _handle(self, message: frames.Message, blobs: list[bytes]) -> None:
        match message:
            case ("batch", *_, rows):
                given_back = self._leases.add_batch(row[0] for row in rows)
                if self._unprepared is None:
                    self._work.put(self._prepared(message, blobs, given_back))
                else:
                    self._unprepared.put((message, blobs, given_back))
            case ("cancel", lease_ids):
                self._leases.cancelled.update(lease_ids)
            case ("give_back", lease_ids):
                self._leases.give_back(lease_ids)
            case ("pinned", count):
                self._channel.pinned(count)
            case ("payloads", path):
                self._writers = {durable: Writer(Path(path)) if path else None for durable in (True, False)}
            case ("load", model_id, plain, slots):
                self._unprepared = queue.SimpleQueue()
                spec = ModelSpec.from_plain(plain)
                self.settings = dataclasses.replace(self.settings, slots=slots, models={model_id: spec})
                _thread(_needed, "preparer", self._load_and_prepare, spec, self._unprepared)
            case ("self_test", test_id, has_models):
                _thread(self._self_test, "self-test", test_id, has_models)
            case ("close", end):
                self._close(end=end)
            case _:
                raise ValueError(f"unknown message {message[0]!r}")

    def _close(self, *, end: bool) -> None:
        """Close the engines and handlers. Nothing runs, unless a drain timed out. `end`: then end the process; else the
        agent ends it.
        """
        for engine in self._engines.values():
            close = getattr(engine, "close", None)
            if close is not None:
                close()
        if registered_handlers():
            importlib.import_module("multigpu_worker.engines.handlers.engine").close()
        sys.stdout.flush()
        sys.stderr.flush()
        if end:
            os._exit(0)
        self._channel.send(("closed",))

    # The preparer.

    def _load_and_prepare(self, spec: ModelSpec, unprepared: queue.SimpleQueue[Received]) -> None:
        """Load the model, then prepare its batches one after the other."""
        self._load(spec)
        while True:
            self._work.put(self._prepared(*unprepared.get()))

    def _load(self, spec: ModelSpec) -> None:
        begin_s = time.monotonic()
        model = models.load(self._channel, self.settings, spec)
        if model is None:
            return
        load_s = time.monotonic() - begin_s
        self._model = model
        self._engines[spec.kind] = model.engine
        self._engine_locks[spec.kind] = threading.Lock()
        self._start_slots()
        one_by_one = bool(model.engine.one_by_one)
        signature = model.signature.plain()
        self._channel.send(("loaded", model.facts_sent, load_s, one_by_one, models.device_bytes(), signature))
        _thread(model.send_facts_forever, "facts", self._channel)

    def _prepared(self, message: frames.Message, blobs: list[bytes], given_back: set[int]) -> Work:
        _, batch_id, kind, model, parameters, content_type, durable, rows = message
        items, lost = items_of(rows, blobs)
        batch = Batch(kind, model, dict(parameters), content_type, items)
        writer = self._writers[durable]
        try:
            engine = self._engines.get(kind)
            if engine is None:
                engine = self._engines[kind] = build(kind, self.settings)
                self._engine_locks[kind] = threading.Lock()
            self.page.view[SlotPage.PREPARED] = batch_id
            work = Work(batch_id, batch, engine, engine.prepare(batch) if items else None, lost, writer, given_back)
        except Exception as error:  # noqa: BLE001  an engine that can't be built or can't prepare fails the batch
            work = Work(batch_id, batch, None, error, lost, writer, given_back)
        # If preparing ends the process, PREPARED still names the batch, and the agent suspects its leases.
        self.page.view[SlotPage.PREPARED] = 0
        return work

    # The slots.

    def _run(self, slot: int) -> None:
        view = self.page.view
        at = slot * SlotPage.FIELDS
        while True:
            work = self._work.get()
            reporter = BatchReporter(self._reporting, work, at)
            # STARTED is set when the batch begins, not while it waits for its engine.
            with self._engine_lock(work):
                if work.engine is None or not work.engine.one_by_one:
                    reporter.begin_all()
                view[at + SlotPage.LEASE] = 0
                view[at + SlotPage.STARTED] = time.monotonic_ns()
                view[at + SlotPage.BATCH] = work.batch_id
                _run_batch(work, reporter)
                view[at + SlotPage.LEASE] = 0
                view[at + SlotPage.BATCH] = 0
            reporter.begin_all()  # items that the engine passed over
            reporter.finish()
            self._leases.end_batch((item.lease_id for item in work.batch.items), work.given_back)

    def _engine_lock(self, work: Work) -> contextlib.AbstractContextManager[object]:
        if work.engine is None or work.engine.one_by_one:
            return contextlib.nullcontext()
        return self._engine_locks[work.batch.kind]

    def _embedding_cache(self) -> dict[str, int]:
        for engine in list(self._engines.values()):
            counts = getattr(engine, "cache_counts", lambda: None)()
            if counts is not None:
                return dataclasses.asdict(counts)
        return {}

    # The self-test.

    def _self_test(self, test_id: int, has_models: bool) -> None:
        """Run the task with a known answer. Torch is worth importing for it only where the worker has models."""
        passed: bool | None = None
        detail = "this engine doesn't use torch"
        device = self.settings.device
        if self_test.able(device, models=has_models):
            if self_test.loaded():
                passed, detail = self_test.attempt(device, lambda: self._channel.send(("self_test_begun", test_id)))
            else:
                # No task needs torch in this process: a subprocess imports it, so that its memory is freed afterwards.
                passed, detail = self_test.run_in_subprocess(device)
        self._channel.send(("self_test", test_id, passed, text_of(detail, MESSAGE_BYTES_MAX)))


def _run_batch(work: Work, reporter: BatchReporter) -> None:
    for item, reason in work.lost:
        reporter.fail(item, "PayloadLost", f"the payload can't be read from its file: {reason}", retryable=True)
    if not work.batch.items:
        return
    if work.engine is None:
        assert isinstance(work.prepared, Exception)
        reporter.fail_rest(work.prepared)
        return
    try:
        work.engine.run(work.batch, work.prepared, reporter)
    except BaseException as error:  # noqa: BLE001  charged to the tasks that have begun
        reporter.fail_rest(error)


def _thread(target: object, name: str, *args: object) -> None:
    threading.Thread(target=target, args=args, name=name, daemon=True).start()  # type: ignore[arg-type]


def _needed(run: Callable[..., object], *args: object) -> None:
    """Call a function that does not return. If it raises, end the process: without this thread it must not linger."""
    try:
        run(*args)
    except BaseException:  # noqa: BLE001  whatever it is
        try:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(EXIT_BROKEN)
