"""Calls the user's handlers (multigpu.handlers), in the engine process of a worker or in multigpu.testing.LocalClient.

A task runs in the thread that runs its batch. All async handlers share one event loop in a separate thread, so they can
share connections; the calls of a batch run together, at most as many as the handler's `concurrency`.
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from multigpu import _ranks
from multigpu._encoding import encode
from multigpu._handling.arguments import ArgumentsError, Parameters
from multigpu._handling.attempts import Batch, Item, Reporter, message_of
from multigpu.contexts import LocalContext, current_context, task_log
from multigpu.handlers import Handler

# How often a waiting async handler is checked for cancellation.
_POLL_S = 0.05


class WrongResultTypeError(TypeError):
    """A handler returned or yielded something that can't be sent."""


class HandlerContext:
    """The `multigpu.Context` of one attempt."""

    __slots__ = (
        "_item", "_place", "_reporter", "attempt", "checkpoint", "device", "grouped", "parameters",
        "partials_received", "task_id",
    )  # fmt: skip

    def __init__(self, device: str, item: Item, parameters: Mapping[str, str], reporter: Reporter) -> None:
        self._item = item
        self._reporter = reporter
        self.device = device
        self.parameters = _ranks.own_parameters(parameters)
        self._place = _ranks.place_of(parameters)
        self.grouped = False  # it has tried to make a process group
        self.task_id = item.task_id
        self.attempt = item.attempt
        self.checkpoint = item.checkpoint
        self.partials_received = item.partials_received

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def world_size(self) -> int:
        return self._place.world_size

    def init_process_group(self, backend: str = "") -> None:
        self.grouped = True
        _ranks.init_process_group(self._place, backend or ("nccl" if self.device.startswith("cuda") else "gloo"))

    @property
    def log(self) -> "logging.LoggerAdapter[logging.Logger]":
        return task_log(f"task {self.task_id}, attempt {self.attempt}: ", self._keep)

    def _keep(self, level: str, text: str) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        self._reporter.log(self._item, f"{time}Z attempt {self.attempt} {level} {text}\n")

    @property
    def cancelled(self) -> bool:
        return self._reporter.cancelled(self._item)

    def save_checkpoint(self, data: bytes) -> None:
        if not self.rank:
            self._reporter.checkpoint(self._item, data)

    def progress(self, fraction: float, note: str = "") -> None:
        self._reporter.progress(self._item, fraction, note)


class Instances:
    """The functions to call. Those of classes belong to an instance, which is made when it is first needed.

    `device`: for their contexts.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.context = LocalContext(device)
        self._made: dict[Handler, Callable[..., Any]] = {}
        self._making = threading.RLock()

    def function_of(self, handler: Handler) -> Callable[..., Any]:
        """Raises whatever the class's __init__ raises."""
        if handler.cls is None:
            return handler.function
        with self._making:
            if handler not in self._made:
                before = current_context.set(self.context)
                try:
                    self._made[handler] = handler.cls()
                finally:
                    current_context.reset(before)
            return self._made[handler]

    def close(self) -> None:
        """Calls `close` of each instance that has one, in the reverse order of their making. Logs what it raises."""
        with self._making:
            made, self._made = self._made, {}
        for handler, instance in reversed(made.items()):
            close = getattr(instance, "close", None)
            if not callable(close):
                continue
            try:
                closing = close()
                if inspect.iscoroutine(closing):
                    asyncio.run_coroutine_threadsafe(closing, _event_loop()).result()
            except BaseException:
                self.context.log.exception("close() of the handler %s failed", handler.kind)


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def engine_of(handler: Handler, instances: Instances) -> "HandlerEngine":
    if handler.batching is not None:
        return BatchHandlerEngine(handler, instances)
    return (AsyncHandlerEngine if handler.concurrency_of_async else HandlerEngine)(handler, instances)


class HandlerEngine:
    """Of one handler."""

    one_by_one: ClassVar[bool] = True

    def __init__(self, handler: Handler, instances: Instances) -> None:
        self._handler = handler
        self._function = instances.function_of(handler)
        batched = handler.batching is not None
        self._parameters = Parameters(handler.function, of_class=handler.cls is not None, batched=batched)
        self._context = instances.context
        concurrency = handler.concurrency
        self._turn: contextlib.AbstractContextManager[Any] = (
            threading.BoundedSemaphore(concurrency) if concurrency else contextlib.nullcontext()
        )

    def prepare(self, batch: Batch) -> object:
        # Nothing ahead of time: a bad payload must fail only its task.
        return batch.items

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        del prepared
        for item in batch.items:
            if reporter.cancelled(item):
                continue
            with self._turn:
                if reporter.cancelled(item):  # meanwhile
                    continue
                reporter.begin(item)
                try:
                    result, content_type = self._call(batch, item, reporter)
                except BaseException as error:  # noqa: BLE001  user code may raise anything: it fails its task only
                    report_failure(self._handler, item, error, reporter)
                else:
                    reporter.succeed(item, result, content_type)

    def _call(self, batch: Batch, item: Item, reporter: Reporter) -> tuple[bytes, str]:
        args, kwargs = self._parameters.of(item.payload, batch.content_type)
        context = HandlerContext(self._context.device, item, batch.parameters, reporter)
        before = current_context.set(context)
        try:
            return self._result_of(self._function(*args, **kwargs), item, reporter)
        except BaseException as error:
            if context.grouped:
                _ranks.hold_back(error, lambda: context.cancelled)
            raise
        finally:
            current_context.reset(before)
            if context.grouped:
                _ranks.destroy_process_group()

    @staticmethod
    def _result_of(returned: Any, item: Item, reporter: Reporter) -> tuple[bytes, str]:
        if type(returned) is bytes:  # the most frequent case
            return returned, ""
        if inspect.isgenerator(returned):
            returned = _drive(returned, item, reporter)
        elif inspect.iscoroutine(returned) or inspect.isasyncgen(returned):  # of a decorated asynchronous function
            coroutine = _drive_async(returned, item, reporter) if inspect.isasyncgen(returned) else returned
            future = asyncio.run_coroutine_threadsafe(coroutine, _event_loop())
            while not concurrent.futures.wait([future], _POLL_S).done:
                if reporter.cancelled(item):
                    future.cancel()
            returned = future.result()
        return _encode(returned)


class AsyncHandlerEngine(HandlerEngine):
    """Of an asynchronous handler: the calls of a batch run concurrently on the event loop of all such handlers."""

    one_by_one: ClassVar[bool] = False

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        del prepared
        running = {
            asyncio.run_coroutine_threadsafe(self._report(batch, item, reporter), _event_loop()): item
            for item in batch.items
            if not reporter.cancelled(item)
        }
        while running:
            ended, _ = concurrent.futures.wait(running, _POLL_S, concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                del running[future]
            for future, item in running.items():
                if reporter.cancelled(item):
                    future.cancel()

    async def _report(self, batch: Batch, item: Item, reporter: Reporter) -> None:
        try:
            result, content_type = await self._result(batch, item, reporter)
        except BaseException as error:  # noqa: BLE001  as in HandlerEngine.run
            report_failure(self._handler, item, error, reporter)
        else:
            reporter.succeed(item, result, content_type)

    async def _result(self, batch: Batch, item: Item, reporter: Reporter) -> tuple[bytes, str]:
        """As `_call`, on the event loop."""
        args, kwargs = self._parameters.of(item.payload, batch.content_type)
        context = HandlerContext(self._context.device, item, batch.parameters, reporter)
        current_context.set(context)
        try:
            returned: Any = self._function(*args, **kwargs)
            if inspect.isasyncgen(returned):
                returned = _drive_async(returned, item, reporter)
            return _encode(await returned)
        except BaseException as error:
            if context.grouped:
                await asyncio.to_thread(_ranks.hold_back, error, lambda: context.cancelled)
            raise
        finally:
            if context.grouped:
                _ranks.destroy_process_group()


class BatchHandlerEngine(HandlerEngine):
    """Of a handler that takes the values of a batch together."""

    one_by_one: ClassVar[bool] = False

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        del prepared
        items: list[Item] = []
        values: list[Any] = []
        for item in batch.items:
            if reporter.cancelled(item):
                continue
            try:
                values.append(self._value(batch, item))
                items.append(item)
            except ArgumentsError as error:
                report_failure(self._handler, item, error, reporter)
        if items:
            self._run_together(items, values, reporter)

    def _value(self, batch: Batch, item: Item) -> Any:
        if _ranks.WORLD_SIZE in batch.parameters:
            raise ArgumentsError("a handler that takes batches can't run on several workers: leave world_size out")
        (value,), _ = self._parameters.of(item.payload, batch.content_type)
        return value

    def _run_together(self, items: Sequence[Item], values: Sequence[Any], reporter: Reporter) -> None:
        """If the call raises, runs each item alone, so that the one at fault fails alone."""
        failure: BaseException | None = None
        results: list[Any] = []
        try:
            results = self._call_together(list(values))
        except BaseException as error:  # noqa: BLE001  as in HandlerEngine.run
            failure = error
        if failure is not None and len(items) > 1 and not isinstance(failure, WrongResultTypeError):
            for item, value in zip(items, values, strict=True):
                reporter.beat()
                self._run_together([item], [value], reporter)
            return
        if failure is not None:
            results = [failure] * len(items)
        for item, result in zip(items, results, strict=True):
            self._settle(item, result, reporter)

    def _settle(self, item: Item, result: Any, reporter: Reporter) -> None:
        if isinstance(result, BaseException):
            report_failure(self._handler, item, result, reporter)
            return
        try:
            encoded = _encode(result)
        except WrongResultTypeError as error:
            report_failure(self._handler, item, error, reporter)
        else:
            reporter.succeed(item, *encoded)

    def _call_together(self, values: list[Any]) -> list[Any]:
        before = current_context.set(self._context)
        try:
            return self._results_of(self._function(values), len(values))
        finally:
            current_context.reset(before)

    @staticmethod
    def _results_of(returned: Any, count: int) -> list[Any]:
        if inspect.iscoroutine(returned):
            returned = asyncio.run_coroutine_threadsafe(returned, _event_loop()).result()
        try:
            iterator = iter(returned)
        except TypeError:
            iterator = iter(())
        results = list(iterator)  # outside the try: a lazy iterable runs the handler's own code here
        if isinstance(returned, (str, bytes, Mapping)) or len(results) != count:
            gave = f"{len(results)} results" if isinstance(returned, (list, tuple)) else f"a {type(returned).__name__}"
            raise WrongResultTypeError(
                f"the batched handler gave {gave} for a batch of {count}; return a list, one for each"
            )
        return results


def _event_loop() -> asyncio.AbstractEventLoop:
    global _loop  # noqa: PLW0603  one for each process
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="handlers-loop", daemon=True).start()
        return _loop


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
    async with contextlib.aclosing(generator):
        async for output in generator:
            if delivered:
                delivered -= 1
                reporter.beat()
            else:
                reporter.partial(item, *_encode(output))
            if reporter.cancelled(item):
                return


def _encode(value: Any) -> tuple[bytes, str]:
    """Encode a result, and return its content type."""
    try:
        return encode(value)
    except ValueError as error:
        raise WrongResultTypeError(
            f"the handler gave a value of type {type(value).__name__}, which can't be sent ({error}); return bytes, "
            "None, a JSON value, or what is made of these and NumPy arrays"
        ) from error


def report_failure(handler: Handler, item: Item, error: BaseException, reporter: Reporter) -> None:
    text = "".join(traceback.format_exception(error))
    if isinstance(error, MemoryError):
        # Another worker may have more.
        message = f"the handler ran out of memory, the host's or the worker's engine_memory_bytes: {message_of(error)}"
        reporter.fail(item, "OutOfMemory", message, retryable=True, traceback=text)
    elif isinstance(error, WrongResultTypeError):
        reporter.fail(item, "WrongResultType", str(error), retryable=False)
    elif isinstance(error, ArgumentsError):
        reporter.fail(item, "BadInput", str(error), retryable=False)
    else:
        left = handler.retries is None or item.attempt <= handler.retries
        retryable = left and isinstance(error, handler.retry_on)
        reporter.fail(item, _class_name(type(error)), message_of(error), retryable=retryable, traceback=text)


def _class_name(cls: type[BaseException]) -> str:
    """By which a client that has imported the class's module finds it."""
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
