"""AsyncClient: the client for asyncio programs; the synchronous Client is this one on a thread of its own.

Two roads lead to the master. `submit` and `submit_many` hand tasks over and return their ids once they are safe on the
master's disk. `run`, `map`, `stream` and `embed` wait for the outcomes on one Run stream that all calls of a client
share: what many coroutines ask for at the same time travels in the same frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack

from multigpu._calls.mapping import AsyncMap
from multigpu._calls.streaming import AsyncStream
from multigpu._calls.submitting import cut, single
from multigpu._calls.timeouts import pop_timeout
from multigpu._kinds import classification, generation, inference
from multigpu._kinds.embedding import CHUNK_TEXTS, KIND, Chunks, Stack, check_texts
from multigpu._transport.connection import current_traceparent
from multigpu._transport.core import Core, outcome, unpicklable, value, value_or_error
from multigpu.errors import MultigpuError
from multigpu.options import CallOptions, EmbedOptions, Input, SpecOptions, TaskOptions, split_options

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import ArrayLike

    from multigpu._kinds.classification import Label, Subject
    from multigpu._kinds.embedding import Vectors
    from multigpu._kinds.generation import AsyncGeneration, GenerateOptions, Prompt
    from multigpu._kinds.inference import Arrays
    from multigpu._transport.core import TaskName
    from multigpu._transport.run_state import Answer
    from multigpu.errors import RejectedError
    from multigpu.outcome import Outcome, Task
    from multigpu.v1 import task_service_pb2

T = TypeVar("T")


class AsyncClient:
    """A client of one master, for one event loop.

    `master` is HOST:PORT, by default that of MGPU_MASTER, else of the config file, else 127.0.0.1:7433. `window_tasks`
    and `window_bytes` bound what all calls together have unsettled; past them calls wait. Nothing is connected before
    the first call; a master that can't be reached for `connect_timeout_s` is an UnavailableError.
    A setting out of range is a ValueError.
    """

    def __init__(
        self,
        master: str | None = None,
        *,
        window_tasks: int | None = None,
        window_bytes: int | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        self._core = Core(master, window_tasks, window_bytes, connect_timeout_s)
        self.master: str = self._core.connection.master

    def __reduce__(self) -> NoReturn:
        raise unpicklable(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection. Calls under way raise ClientClosedError; their durable tasks go on in the master."""
        await self._core.close()

    # Tasks that are handed over.

    async def submit(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> int:
        """Hands one task over and returns its task_id, once it is on the master's disk. Raises RejectedError."""
        own, shared = split_options(options)
        return single(await self.submit_many(kind, (Input(payload=payload, **own),), **shared))

    async def submit_many(
        self, kind: str, payloads: Iterable[Any], **options: Unpack[SpecOptions]
    ) -> list[int | RejectedError]:
        """Hands many tasks over, in calls of up to 10,000 tasks and 32 MiB.

        `payloads` may hold Inputs. Returns, for each payload in its order, the task_id or the error that says why that
        task was not taken. An error that ends it has what was answered before in `submitted`; those tasks go on.
        """
        submission = self._core.submission(pop_timeout(options))
        results: list[int | RejectedError] = []
        try:
            for request in cut(self._core.calls.inputs(kind, payloads, options, current_traceparent())):
                results += await submission.send(request)
        except asyncio.CancelledError:
            await submission.undo()
            raise
        except MultigpuError as error:
            error.submitted = results
            raise
        return results

    # Tasks that are waited for.

    async def run(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> Any:
        """Runs one task and returns its result. Raises TaskError, RejectedError, TransportError.

        Cancelling the coroutine cancels the task.
        """
        return (await self.run_outcome(kind, payload, **options)).value()

    async def run_outcome(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> Outcome:
        """As `run`, but returns how the task ended, however it ended. Raises RejectedError, TransportError."""
        return await self._core.run(kind, payload, dict(options), current_traceparent())

    def stream(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> AsyncStream[Any]:
        """Runs one task and yields its partial outputs, decoded as `run` decodes a result, each exactly once.

        Read to its end it has the `outcome`, whose `value()` is what the handler returned. Raises, after the outputs,
        the TaskError of a task that did not succeed. Closing the iterator, or letting go of it, cancels the task.
        """
        return AsyncStream(self._core.parts(kind, payload, dict(options), current_traceparent()))

    def map(
        self,
        kind: str,
        payloads: Iterable[Any] | AsyncIterable[Any],
        *,
        ordered: bool = True,
        window: int | None = None,
        return_exceptions: bool = False,
        **options: Unpack[SpecOptions],
    ) -> AsyncGenerator[Any, None]:
        """Runs a task for each payload and yields the results, in the order of the payloads or as they complete.

        At most `window` payloads (default: the client's) are pulled ahead of the results handed over. A synchronous
        iterable is pulled on the event loop: one that blocks belongs behind an asynchronous one. Payloads may be
        Inputs. An error ends the map and cancels what it started; with `return_exceptions` it takes the place of the
        result. Close the iterator (contextlib.aclosing) to stop early.
        """
        convert = value_or_error if return_exceptions else value
        return self._map(kind, payloads, ordered, window, options, convert, answer_errors=return_exceptions)

    def map_outcomes(
        self,
        kind: str,
        payloads: Iterable[Any] | AsyncIterable[Any],
        *,
        ordered: bool = True,
        window: int | None = None,
        **options: Unpack[SpecOptions],
    ) -> AsyncGenerator[Outcome, None]:
        """As `map`, but yields how each task ended, however it ended. A rejected task still ends the map."""
        return self._map(kind, payloads, ordered, window, options, outcome, answer_errors=False)

    def _map(
        self,
        kind: str,
        payloads: Iterable[Any] | AsyncIterable[Any],
        ordered: bool,
        window: int | None,
        options: Any,
        convert: Callable[[Answer], T],
        *,
        answer_errors: bool,
    ) -> AsyncGenerator[T, None]:
        core, timeout_s = self._core, pop_timeout(options)
        make_call = core.calls.many(kind, options, current_traceparent(), answer_errors=answer_errors)
        buffer = core.map_buffer(ordered=ordered, window=window)
        return AsyncMap(core.stream, buffer, make_call, timeout_s).run(payloads, convert)

    # Embeddings.

    async def embed(
        self,
        texts: Iterable[str] | AsyncIterable[str],
        model: str = "",
        *,
        chunk: int = CHUNK_TEXTS,
        **options: Unpack[EmbedOptions],
    ) -> Vectors:
        """The vectors of texts: float32 [n, dimension], in the order of the texts. No texts: [0, 0].

        `model`: default, the workers' own. `chunk`: texts in a task, 1 to 10,000. Raises as `map`.
        """
        stack = Stack(texts)
        async with aclosing(self.embed_iter(texts, model, chunk=chunk, **options)) as parts:
            async for rows in parts:
                stack.add(rows)
        return stack.array()

    async def embed_iter(
        self,
        texts: Iterable[str] | AsyncIterable[str],
        model: str = "",
        *,
        chunk: int = CHUNK_TEXTS,
        **options: Unpack[EmbedOptions],
    ) -> AsyncGenerator[Vectors, None]:
        """As `embed`, for input without end: yields the vectors of `chunk` texts at a time, float32 [≤ chunk, dim]."""
        check_texts(texts)
        chunks = Chunks(chunk)
        inputs = chunks.cut_async(texts) if isinstance(texts, AsyncIterable) else chunks.cut(texts)
        async with aclosing(self.map_outcomes(KIND, inputs, model=model, **options)) as outcomes:
            async for outcome in outcomes:
                yield chunks.rows(outcome)

    # Text.

    def generate(self, prompt: Prompt, model: str = "", **options: Unpack[GenerateOptions]) -> AsyncGeneration:
        """Goes on with a text, or answers in a conversation: an iterator of pieces of text, as they come.

        Read to its end it has the whole as `result`. Closing it, or letting go of it, cancels the task. `prompt`: a
        str, or messages such as {"role": "user", "content": "…"}. `model`: default, the workers' own. Raises as
        `stream`.
        """
        payload, task = generation.task_of(prompt, options)
        parts = self._core.parts(generation.KIND, payload, {"model": model, **task}, current_traceparent())
        return generation.AsyncGeneration(parts)

    # Models.

    async def infer(
        self, model: str, inputs: Mapping[str, ArrayLike], outputs: Sequence[str] = (), **options: Unpack[CallOptions]
    ) -> Arrays:
        """What a model gives for arrays by the names of its inputs: read-only arrays by the names of its outputs.

        `outputs`: which to return; default, all. Raises as `run`; a wrong name, type or shape is a TaskFailed.
        """
        payload, examples = inference.input_of(inputs, outputs)
        return inference.arrays_of(await self.run(inference.KIND, payload, model=model, units=examples, **options))

    async def infer_map(
        self,
        model: str,
        inputs: Iterable[Mapping[str, ArrayLike]],
        outputs: Sequence[str] = (),
        *,
        ordered: bool = True,
        window: int | None = None,
        return_exceptions: bool = False,
        **options: Unpack[EmbedOptions],
    ) -> AsyncGenerator[Arrays, None]:
        """As `infer`, for many inputs: a task for each. See `map` for the options."""
        how: Any = {"ordered": ordered, "window": window, "return_exceptions": return_exceptions, **options}
        payloads = inference.inputs_of(inputs, outputs)
        async with aclosing(self.map(inference.KIND, payloads, model=model, **how)) as results:
            async for result in results:
                yield inference.arrays_of(result)

    async def classify(
        self, model: str, subject: Subject, top_k: int = classification.TOP_K, **options: Unpack[CallOptions]
    ) -> list[Label]:
        """The likeliest classes of a picture (its bytes, or a Path to it) or a text (str), the likeliest first.

        Raises as `run`, and OSError for a file that can't be read.
        """
        payload = classification.payload_of(subject, top_k)
        return classification.labels_of(await self.run(classification.KIND, payload, model=model, **options))

    async def classify_map(
        self,
        model: str,
        subjects: Iterable[Subject],
        top_k: int = classification.TOP_K,
        *,
        ordered: bool = True,
        window: int | None = None,
        return_exceptions: bool = False,
        **options: Unpack[EmbedOptions],
    ) -> AsyncGenerator[list[Label], None]:
        """As `classify`, for many pictures or texts: a task for each. See `map` for the options."""
        how: Any = {"ordered": ordered, "window": window, "return_exceptions": return_exceptions, **options}
        payloads = classification.inputs_of(subjects, top_k)
        async with aclosing(self.map(classification.KIND, payloads, model=model, **how)) as results:
            async for result in results:
                yield classification.labels_of(result)

    # Tasks that are known.

    async def get(self, task: TaskName, *, wait_s: float = 0.0) -> Task:
        """A task by its task_id (int) or request_id (str). Waits up to `wait_s` for it to end. Raises NotFoundError."""
        return await self._core.get(task, wait_s)

    async def cancel(self, *tasks: TaskName, reason: str = "") -> task_service_pb2.CancelResponse:
        """Cancels tasks by task_id (int) or request_id (str).

        The answer says which it ended, which had already ended, and which the master doesn't know.
        """
        return await self._core.cancel(tasks, reason)

    async def watch(
        self, *, cursor: str = "", from_now: bool = False, queue: str = "", kind: str = ""
    ) -> AsyncGenerator[tuple[Outcome, str], None]:
        """Yields (outcome, cursor) for every durable task that ends, without gap or repetition; reconnects by itself.

        Saving the cursor, and passing it to a later watch with the same filters, goes on after that outcome. An empty
        cursor begins with the oldest retained outcome, or now with `from_now`. Raises CursorExpiredError.
        """
        async with aclosing(self._core.watch(cursor, from_now, queue, kind)) as frames:
            async for frame in frames:
                for pair in frame:
                    yield pair

    async def count(self, task_filter: task_service_pb2.TaskFilter | None = None) -> task_service_pb2.CountResponse:
        """How many tasks a filter matches, by state and outcome. Default: all."""
        return await self._core.count(task_filter)

    async def list_tasks(
        self, task_filter: task_service_pb2.TaskFilter | None = None, *, page_size: int = 1000
    ) -> AsyncGenerator[Task, None]:
        """Tasks that a filter matches, the newest first; their outcomes come without results. Default: all."""
        async with aclosing(self._core.pages(task_filter, page_size)) as pages:
            async for page in pages:
                for task in page:
                    yield task
