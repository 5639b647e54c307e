"""Collects the reports of an engine about a batch, and sends them to the agent.

A report is sent at once if the last frame was sent at least 2 ms before; otherwise with a later report, by the
flusher's thread, or at the end of the batch. So reports of fast tasks share a frame.
"""

import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from multigpu._handling.attempts import (
    CHECKPOINT_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    NOTE_BYTES_MAX,
    TRACEBACK_BYTES_MAX,
    TYPE_BYTES_MAX,
    end_of,
    last_lines,
    message_of,
    text_of,
)
from multigpu._transport.payloads import LARGE_BYTES, Reference

from multigpu_worker.engine.channel import EXIT_FORKED, AgentChannel
from multigpu_worker.engine.leases import Leases
from multigpu_worker.engine.work import Work
from multigpu_worker.engines.base import Item
from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.ipc.slots import SlotPage

FLUSH_NS = 2_000_000
# Reports of this size or more are sent without delay.
FLUSH_BYTES = 4 << 20
# Where a large result is stored: name of the file, offset, size.
Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """Objects that all reporters of a process use."""

    channel: AgentChannel
    leases: Leases
    page: SlotPage
    result_bytes_max: int
    # Returns the counters of the embedding cache; empty: there is no cache.
    embedding_cache: Callable[[], dict[str, int]]
    # Reporters with unsent reports, for the flusher's thread.
    unflushed: "queue.SimpleQueue[BatchReporter]"


class BatchReporter:
    """The reporter (engines/base.py) of one batch in one slot."""

    def __init__(self, shared: Reporting, work: Work, slot_at: int) -> None:
        self._shared = shared
        self._batch_id = work.batch_id
        self._items = [*work.batch.items, *(item for item, _ in work.lost)]
        # The items that the engine got: the payloads of the others are lost.
        self._runnable = work.batch.items
        self._writer = work.writer
        self._view = shared.page.view
        self._lease_at = slot_at + SlotPage.LEASE
        self._started_at = slot_at + SlotPage.STARTED
        self._beats_at = slot_at + SlotPage.BEATS
        self._lock = threading.Lock()
        self._channel = shared.channel
        self._leases = shared.leases
        self._unbegun = shared.leases.unbegun
        self._cancelled = shared.leases.cancelled
        self._given_back = work.given_back
        self._result_bytes_max = shared.result_bytes_max
        # Leases that are not settled, and were not given back.
        self._open = {item.lease_id for item in self._items}
        self._start_ns = time.time_ns()
        self._begun_ns = self._flushed_ns = time.monotonic_ns()
        self._clear()

    def _clear(self) -> None:
        # Whether there are unsent reports, and whether this reporter is in `unflushed`.
        self._waits = False
        self._flush_asked = False
        self._succeeded: list[tuple[int, bytes | int | Place, str]] = []
        self._failed: list[tuple[int, str, str, bool, str]] = []
        self._partials: list[tuple[int, bytes | int, str]] = []
        self._progress: dict[int, tuple[float, str]] = {}
        self._checkpoints: dict[int, bytes | int] = {}
        self._logs: dict[int, str] = {}
        self._blobs: list[bytes] = []
        # Results in shared files; the references keep the files until the frame is sent.
        self._written: list[Reference] = []
        self._bytes = 0

    def begin(self, item: Item) -> None:
        lease_id = item.lease_id
        self._begin(lease_id)
        view = self._view
        view[self._lease_at] = 0
        view[self._started_at] = time.monotonic_ns()
        view[self._lease_at] = lease_id
        if self._waits and not self._flush_asked:
            self._ask_flush()

    def _begin(self, lease_id: int) -> None:
        """Mark a lease as begun, so that it can't be given back. If it already was, its reports are dropped."""
        if lease_id in self._unbegun:
            self._leases.begin([lease_id], self._given_back)
        if lease_id in self._given_back:
            self._open.discard(lease_id)

    def begin_all(self) -> None:
        self._leases.begin([item.lease_id for item in self._items], self._given_back)
        self._open -= self._given_back

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        if len(result) > self._result_bytes_max:
            limit = f"the worker's result_bytes_max is {self._result_bytes_max}"
            message = f"the result has {len(result)} bytes, {limit}: yield it in parts, or return where it is stored"
            self.fail(item, "ResultTooLarge", message, retryable=False)
            return
        if self._channel.forked:
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
        """Write a large result to a shared file. A small one, or one that cannot be written, goes into the frame."""
        if len(result) >= LARGE_BYTES and self._writer is not None:
            with contextlib.suppress(OSError):
                reference = self._writer.put(result)
                self._written.append(reference)
                return reference.pin.name, reference.offset, reference.size_bytes
        return frames.put(result, self._blobs)

    def fail(self, item: Item, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        with self._entered():
            lease_id = item.lease_id
            self._begin(lease_id)  # the item may fail unbegun, and a lease that was given back must not be reported
            if lease_id in self._open:
                self._open.discard(lease_id)
                self._view[self._lease_at] = 0
                error_type = text_of(error_type, TYPE_BYTES_MAX)
                message = text_of(message, MESSAGE_BYTES_MAX)
                # Keep the end of the traceback, which has the error.
                traceback = end_of(traceback, TRACEBACK_BYTES_MAX)
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
                self._partials.append((item.lease_id, frames.put(data, self._blobs), content_type))
                self._waits = True
                self._flush_if_due(len(data))
        if self._waits and not self._flush_asked:
            self._ask_flush()

    def progress(self, item: Item, fraction: float, note: str = "") -> None:
        with self._entered():
            if item.lease_id in self._open:
                self._view[self._beats_at] += 1
                self._progress[item.lease_id] = (min(1.0, max(0.0, float(fraction))), text_of(note, NOTE_BYTES_MAX))
                self._waits = True
                self._flush_if_due(0)
        if self._waits and not self._flush_asked:
            self._ask_flush()

    def log(self, item: Item, text: str) -> None:
        text = text.encode("utf-8", "replace").decode()
        with self._entered():
            if item.lease_id in self._open:
                self._logs[item.lease_id] = last_lines(self._logs.get(item.lease_id, "") + text)
                self._waits = True
        if self._waits and not self._flush_asked:
            self._ask_flush()

    def checkpoint(self, item: Item, data: bytes) -> None:
        if len(data) > CHECKPOINT_BYTES_MAX:
            raise ValueError(f"a checkpoint has {len(data)} bytes, the limit is {CHECKPOINT_BYTES_MAX}")
        with self._entered():
            if item.lease_id in self._open:
                self._view[self._beats_at] += 1
                self._checkpoints[item.lease_id] = frames.put(bytes(data), self._blobs)
                # Sent at once, because the next step may end the process.
                self._send(done=False)

    def cancelled(self, item: Item) -> bool:
        if item.lease_id in self._unbegun:  # the engine that asks will run the item: it can't be given back any more
            self._leases.begin([item.lease_id], self._given_back)
        return item.lease_id in self._cancelled or item.lease_id in self._given_back

    def beat(self) -> None:
        self._view[self._beats_at] += 1
        if self._waits and not self._flush_asked:
            self._ask_flush()

    def flush(self) -> None:
        with self._lock:
            # Reset also if nothing is unsent: the reports may have been sent since `_waits` was checked.
            self._flush_asked = False
            if self._waits:
                self._send(done=False)

    def finish(self) -> None:
        """Fail the items that the engine did not settle, and send the end of the batch."""
        for item in self._items:
            if item.lease_id in self._open and item.lease_id not in self._cancelled:
                self.fail(item, "EngineError", "the engine returned and did not settle the task", retryable=True)
        with self._lock:
            self._send(done=True)

    def fail_rest(self, error: BaseException) -> None:
        """Fail the unsettled items that have begun with the error that the engine raised, and give back the others.

        If none of the batch has begun, all fail: given back, they would come again and again.
        """
        text = "".join(traceback.format_exception(error))
        error_type = "OutOfMemory" if isinstance(error, MemoryError) else type(error).__name__
        unbegun = {lease_id for lease_id in self._open if self._unbegun.get(lease_id) is self._given_back}
        given_back = self._given_back.copy()  # after `unbegun`: the reader's thread moves leases from there to here
        unsettled, unbegun = self._open - given_back, unbegun - given_back
        if unbegun == {item.lease_id for item in self._runnable} - given_back:
            unbegun = set()
        if unbegun == unsettled:  # no task's error says it
            sys.stderr.write(text)
        for item in self._items:
            if item.lease_id not in unbegun:
                self.fail(item, error_type, message_of(error) or error_type, retryable=True, traceback=text)
        if unbegun:
            self.flush()  # the agent must see the failures first: they may show that this engine can't go on
            self._leases.give_back([item.lease_id for item in self._items if item.lease_id in unbegun])

    def _entered(self) -> threading.Lock:
        """Return the lock. In a child that user code forked, end the process instead."""
        if self._channel.forked:
            os._exit(EXIT_FORKED)
        return self._lock

    def _ask_flush(self) -> None:
        self._flush_asked = True
        self._shared.unflushed.put(self)

    def _flush_if_due(self, more_bytes: int) -> None:
        self._bytes += more_bytes
        if self._bytes >= FLUSH_BYTES or time.monotonic_ns() - self._flushed_ns >= FLUSH_NS:
            self._send(done=False)

    def _send(self, *, done: bool) -> None:
        """Send all reports. The caller holds the lock, so that frames leave in order."""
        now_ns = time.time_ns()
        message = (
            "reports",
            self._batch_id,
            self._start_ns,
            now_ns,
            self._succeeded,
            self._failed,
            self._partials,
            [(lease_id, *progress) for lease_id, progress in self._progress.items()],
            list(self._checkpoints.items()),
            list(self._logs.items()),
            done,
            time.monotonic_ns() - self._begun_ns,
            self._shared.embedding_cache() if done else {},
        )
        blobs, written = self._blobs, self._written
        self._clear()
        self._channel.send(message, blobs, written)
        self._flushed_ns = time.monotonic_ns()
        self._start_ns = now_ns


def flush_forever(unflushed: "queue.SimpleQueue[BatchReporter]") -> None:
    """Send, after 2 ms, reports that would otherwise wait until a long task ends. Runs on the flusher's thread."""
    while True:
        waiting = {unflushed.get()}
        time.sleep(FLUSH_NS / 1e9)
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.add(unflushed.get_nowait())
        for reporter in waiting:
            reporter.flush()
