"""The tasks of a LocalClient, and the reporter by which the threads that run them report to the event loop."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Protocol

from multigpu._handling.attempts import (
    CHECKPOINT_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    NOTE_BYTES_MAX,
    TRACEBACK_BYTES_MAX,
    TYPE_BYTES_MAX,
    Item,
    end_of,
    last_lines,
    text_of,
)
from multigpu.v1 import task_pb2, task_service_pb2

Send = Callable[[task_service_pb2.RunResponse], None]


class LocalTask:
    """A task and its progress."""

    def __init__(self, task_id: int, spec: task_pb2.TaskSpec, given: task_pb2.TaskInput, *, of_run: bool) -> None:
        """`of_run`: submitted by Run, so that a withdrawal ends it."""
        self.given = given
        self.of_run = of_run
        self.message = task_pb2.Task(
            task_id=task_id,
            request_id=given.request_id,
            spec=spec,
            partition_key=given.partition_key,
            payload_bytes=len(given.payload),
            state=task_pb2.TASK_STATE_QUEUED,
        )
        self.message.submit_time.GetCurrentTime()
        # Tasks with the same key may run in one batch.
        self.batch_key = spec.kind, spec.model, tuple(sorted(spec.parameters.items())), spec.content_type
        self.stages = task_pb2.Stages(submit_time=self.message.submit_time)
        # The running attempt; 0: none.
        self.lease_id = 0
        self.checkpoint = b""
        self.partials: list[tuple[bytes, str]] = []
        # Read by the handler's thread.
        self.cancelled = False
        self.ended = asyncio.Event()
        # The Run stream that waits for it.
        self.send: Send | None = None

    def matches(self, wanted: task_service_pb2.TaskFilter) -> bool:
        message, spec = self.message, self.message.spec
        submitted_ns = message.submit_time.ToNanoseconds()
        return (
            (not wanted.states or message.state in wanted.states)
            and (not wanted.outcomes or (self.ended.is_set() and message.outcome.state in wanted.outcomes))
            and wanted.queue in ("", spec.queue or "default")
            and wanted.kind in ("", spec.kind)
            and wanted.model in ("", spec.model)
            and wanted.worker_id in ("", message.worker_id)
            and (not wanted.HasField("submitted_after") or submitted_ns > wanted.submitted_after.ToNanoseconds())
            and (not wanted.HasField("submitted_before") or submitted_ns < wanted.submitted_before.ToNanoseconds())
            and (not wanted.retrying or (message.state == task_pb2.TASK_STATE_QUEUED and message.attempts > 0))
        )


class Reports(Protocol):
    """Called on the event loop, for the running attempt of a task."""

    def succeeded(self, task: LocalTask, result: bytes, content_type: str) -> None: ...
    def failed(self, task: LocalTask, error: task_pb2.TaskError) -> None: ...
    def put_out(self, task: LocalTask, data: bytes, content_type: str) -> None:
        """A partial output."""


class LocalReporter:
    """The Reporter of one batch. Reports of attempts that are over are ignored."""

    def __init__(self, master: Reports, loop: asyncio.AbstractEventLoop, tasks: Mapping[int, LocalTask]) -> None:
        self._master = master
        self._loop = loop
        self._tasks = tasks

    def _report(self, item: Item, report: Callable[[LocalTask], object]) -> None:
        task = self._tasks[item.lease_id]

        def on_loop() -> None:
            if task.lease_id == item.lease_id:
                report(task)

        with contextlib.suppress(RuntimeError):  # the client is closed, and its loop has ended
            self._loop.call_soon_threadsafe(on_loop)

    def begin(self, item: Item) -> None:
        pass

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        self._report(item, lambda task: self._master.succeeded(task, result, content_type))

    def fail(self, item: Item, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        error = task_pb2.TaskError(
            type=text_of(error_type, TYPE_BYTES_MAX), message=text_of(message, MESSAGE_BYTES_MAX), retryable=retryable,
            traceback=end_of(traceback, TRACEBACK_BYTES_MAX),
        )  # fmt: skip
        self._report(item, lambda task: self._master.failed(task, error))

    def partial(self, item: Item, data: bytes, content_type: str = "") -> None:
        self._report(item, lambda task: self._master.put_out(task, data, content_type))

    def progress(self, item: Item, fraction: float, note: str = "") -> None:
        shown = task_pb2.Progress(fraction=min(1.0, max(0.0, float(fraction))), note=text_of(note, NOTE_BYTES_MAX))

        def report(task: LocalTask) -> None:
            shown.steps = task.message.progress.steps + 1
            task.message.progress.CopyFrom(shown)

        self._report(item, report)

    def log(self, item: Item, text: str) -> None:
        self._report(item, lambda task: setattr(task.message, "log", last_lines(task.message.log + text)))

    def checkpoint(self, item: Item, data: bytes) -> None:
        if len(data) > CHECKPOINT_BYTES_MAX:
            raise ValueError(f"a checkpoint has {len(data)} bytes, the limit is {CHECKPOINT_BYTES_MAX}")
        self._report(item, lambda task: setattr(task, "checkpoint", bytes(data)))

    def cancelled(self, item: Item) -> bool:
        return self._tasks[item.lease_id].cancelled

    def beat(self) -> None:
        pass
