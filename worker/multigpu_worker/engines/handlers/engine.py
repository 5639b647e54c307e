"""Runs the user's handlers (multigpu.handlers).

A task runs in the thread that runs its batch. All async handlers share one event loop in a separate thread, so they can
share connections; at most one per slot runs at a time.
"""

import asyncio
import inspect
import json
import threading
import traceback
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping
from typing import Any, ClassVar

from multigpu.handlers import Handler, PermanentError, registered_handlers

from multigpu_worker.engines.base import Batch, Item, Reporter
from multigpu_worker.engines.common.failures import BadInputError, bad_input
from multigpu_worker.engines.common.payloads import JSON

# How often a waiting async handler is checked for cancellation.
_POLL_S = 0.05


class WrongResultTypeError(TypeError):
    """A handler returned or yielded something that is neither bytes nor JSON."""


class HandlerContext:
    """The `multigpu.handlers.Context` of one attempt."""

    __slots__ = ("_item", "_reporter", "attempt", "checkpoint", "parameters", "partials_received", "task_id")

    def __init__(self, item: Item, parameters: Mapping[str, str], reporter: Reporter) -> None:
        self._item = item
        self._reporter = reporter
        self.parameters = parameters
        self.task_id = item.task_id
        self.attempt = item.attempt
        self.checkpoint = item.checkpoint
        self.partials_received = item.partials_received

    @property
    def cancelled(self) -> bool:
        return self._reporter.cancelled(self._item)

    def save_checkpoint(self, data: bytes) -> None:
        self._reporter.checkpoint(self._item, data)

    def progress(self, fraction: float, note: str = "") -> None:
        self._reporter.progress(self._item, fraction, note)


class HandlerEngine:
    one_by_one: ClassVar[bool] = True

    def __init__(self) -> None:
        self._handlers = registered_handlers()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()

    def prepare(self, batch: Batch) -> object:
        # Nothing ahead of time: a bad payload must fail only its task.
        return batch.items

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        del prepared
        handler = self._handlers[batch.kind]
        for item in batch.items:
            if reporter.cancelled(item):
                continue
            reporter.begin(item)
            try:
                result, content_type = self._call(handler, batch, item, reporter)
            except BaseException as error:  # noqa: BLE001  user code may raise anything: it fails its task only
                _fail(item, error, reporter)
            else:
                reporter.succeed(item, result, content_type)

    def _call(self, handler: Handler, batch: Batch, item: Item, reporter: Reporter) -> tuple[bytes, str]:
        value: Any = item.payload
        if batch.content_type == JSON:
            try:
                value = json.loads(item.payload)
            except ValueError as error:
                raise BadInputError(f"the payload is not JSON, though its content type says so: {error}") from error
        elif handler.json_type:
            why = f"the handler takes a {handler.json_type}, and the payload is bytes"
            raise BadInputError(f"{why}: send a JSON value, with content type {JSON} (`mgpuctl submit --parse-json`)")
        returned: Any
        if handler.takes_context:
            returned = handler.function(value, HandlerContext(item, batch.parameters, reporter))
        else:
            returned = handler.function(value)
        if type(returned) is bytes:  # the most frequent case
            return returned, ""
        if inspect.isgenerator(returned):
            returned = _drive(returned, item, reporter)
        elif inspect.iscoroutine(returned):
            returned = self._wait(returned, item, reporter)
        elif inspect.isasyncgen(returned):
            returned = self._wait(_drive_async(returned, item, reporter), item, reporter)
        return _encode(returned)

    def _wait(self, coroutine: Coroutine[Any, Any, Any], item: Item, reporter: Reporter) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._event_loop())
        while True:
            try:
                return future.result(_POLL_S)
            except TimeoutError:
                if future.done():  # the handler raised it
                    return future.result()
                if reporter.cancelled(item):
                    future.cancel()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="handlers-loop", daemon=True).start()
            return self._loop


def _drive(generator: Generator[Any, Any, Any], item: Item, reporter: Reporter) -> Any:
    """Run a generator, send its outputs, and return its result."""
    delivered = item.partials_received
    while True:
        try:
            output = next(generator)
        except StopIteration as stop:
            return stop.value
        if delivered:
            delivered -= 1
            reporter.beat()
        else:
            reporter.partial(item, *_encode(output))
        if reporter.cancelled(item):
            generator.close()
            return None


async def _drive_async(generator: AsyncGenerator[Any, Any], item: Item, reporter: Reporter) -> None:
    delivered = item.partials_received
    async for output in generator:
        if delivered:
            delivered -= 1
            reporter.beat()
        else:
            reporter.partial(item, *_encode(output))
        if reporter.cancelled(item):
            await generator.aclose()
            return


def _encode(value: Any) -> tuple[bytes, str]:
    """Encode a result, and return its content type."""
    if value is None:
        return b"", ""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value), ""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode(), JSON
    except (TypeError, ValueError, RecursionError) as error:
        raise WrongResultTypeError(
            f"the handler gave a {type(value).__name__}, which is neither bytes nor JSON ({error}); "
            "return bytes, None or a JSON value. NaN and Infinity are no JSON"
        ) from error


def _fail(item: Item, error: BaseException, reporter: Reporter) -> None:
    if isinstance(error, MemoryError):
        message = "the handler needed more memory than the worker's engine_memory_bytes allows"
        reporter.fail(item, "OutOfMemory", message, retryable=True)
    elif isinstance(error, WrongResultTypeError):
        reporter.fail(item, "WrongResultType", str(error), retryable=False)
    elif isinstance(error, BadInputError):
        bad_input(error).report(item, reporter)
    else:
        text = "".join(traceback.format_exception(error))
        retryable = not isinstance(error, PermanentError)
        reporter.fail(item, type(error).__name__, _message(error), retryable=retryable, traceback=text)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  user code too
        return "the exception can't say what it is: its __str__ raises"
