"""Client: the synchronous client, for programs without an event loop. Safe to share between threads.

It does the work of an AsyncClient on a private loop thread. Iterables that a caller passes are pulled on the caller's
thread, and results cross between the threads in chunks. Ctrl-C in a waiting call cancels the tasks that the call
started, waits until the master has confirmed it, and raises KeyboardInterrupt. The same call with the same request_ids
then continues: tasks that had ended are answered, and those that were cancelled run again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from multigpu import errors
from multigpu._calls.core import BaseClient, Core
from multigpu._calls.mapping import SyncMap
from multigpu._calls.streaming import Stream, SyncIterator
from multigpu._calls.submitting import Submission, cut, single
from multigpu._calls.timeouts import pop_timeout
from multigpu._kinds import classification, generation, inference
from multigpu._kinds.embedding import CHUNK_TEXTS, KIND, Chunks, Stack, check_texts
from multigpu._transport.loop_thread import LoopThread
from multigpu._transport.traceparent import current_traceparent
from multigpu.errors import Outcome
from multigpu.options import (
    CallOptions,
    EmbedOptions,
    Input,
    MapOptions,
    SpecMapOptions,
    SpecOptions,
    TaskOptions,
    split_options,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from multigpu._calls.calls import Encode
    from multigpu._calls.core import TaskName
    from multigpu._kinds.classification import Label, Subject
    from multigpu._kinds.embedding import Vectors
    from multigpu._kinds.generation import GenerateOptions, Generation, Prompt
    from multigpu._kinds.inference import Arrays
    from multigpu.outcome import Task
    from multigpu.v1 import task_service_pb2

T = TypeVar("T")


class Client(BaseClient):
    """A client of one master. Takes the arguments of AsyncClient, and raises the same errors."""

    def _start(self) -> None:
        self._closed = False
        self._thread = LoopThread("multigpu client")
        # Runs at exit if the client is never closed.
        self._finalizer = weakref.finalize(self, _finish, self._core, self._thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        interrupted = exc_type is not None and issubclass(exc_type, KeyboardInterrupt)
        if interrupted and not (self._closed or self._thread.inherited):
            # Ctrl-C between two results of a map, for example: cancel everything that this client started.
            self._thread.loop.call_soon_threadsafe(self._core.stream.withdraw_where, lambda _: True)
        self.close()

    def close(self) -> None:
        """Ends the connection. Pending calls raise ClientClosedError; their durable tasks go on in the master."""
        self._closed = True
        self._finalizer()

    # Submitting.

    def submit(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> int:
        """Submits one task and returns its task_id, once it is on the master's disk. Raises RejectedError."""
        own, shared = split_options(options)
        return single(self.submit_many(kind, (Input(payload=payload, **own),), **shared))

    def submit_many(
        self, kind: str, payloads: Iterable[Any], **options: Unpack[SpecOptions]
    ) -> list[int | errors.RejectedError]:
        """Submits many tasks; returns the task_id of each, or the error by which it was rejected. See AsyncClient."""
        submission = Submission(self._core.connection, pop_timeout(options))
        results: list[int | errors.RejectedError] = []
        try:
            for request in cut(self._core.calls.inputs(kind, payloads, options, current_traceparent())):
                results += self._wait(submission.send(request))
        except KeyboardInterrupt:
            self._thread.submit(submission.undo()).result()
            raise
        except errors.MultigpuError as error:
            error.submitted = results
            raise
        return results

    # Running: these calls wait for the outcomes.

    def run(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> Any:
        """Runs one task and returns its result. Raises TaskError, RejectedError, TransportError."""
        return self.run_outcome(kind, payload, **options).value()

    def run_outcome(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> Outcome:
        """As `run`, but returns the outcome, whatever it is. Raises RejectedError, TransportError."""
        return self._wait(self._core.run(kind, payload, dict(options), current_traceparent()))

    def stream(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> Stream[Any]:
        """Runs one task and yields its partial outputs; read to its end, the iterator has the `outcome`.

        Closing it, from any thread, cancels the task. See AsyncClient.
        """
        return Stream(self._iterate(self._core.parts(kind, payload, dict(options), current_traceparent())))

    def map(self, kind: str, payloads: Iterable[Any], **options: Unpack[SpecMapOptions]) -> Iterator[Any]:
        """Runs a task for each payload and yields the results, in the order of the payloads unless `ordered` is False.

        At most `window` payloads (default: the client's) are pulled ahead of the results taken, on the caller's thread,
        while it waits for a result. Payloads may be Inputs. An error ends the map and cancels what it started; with
        `return_exceptions` it takes the place of the result.
        """
        return self._map(kind, payloads, options, Outcome.value)

    def map_outcomes(self, kind: str, payloads: Iterable[Any], **options: Unpack[SpecMapOptions]) -> Iterator[Outcome]:
        """As `map`, but yields the outcome of each task, whatever it is. A rejected task still ends the map."""
        return self._map(kind, payloads, options, lambda outcome: outcome)

    def _map(
        self, kind: str, payloads: Any, options: Any, read: Callable[[Outcome], T], encode: Encode | None = None
    ) -> Iterator[T]:
        self._check()
        buffer, convert = self._core.map(kind, options, read, encode)
        return self._interruptible(SyncMap(self._thread, self._core.stream, buffer).run(iter(payloads), convert))

    # Embeddings.

    def embed(
        self, texts: Iterable[str], model: str = "", *, chunk: int = CHUNK_TEXTS, **options: Unpack[EmbedOptions]
    ) -> Vectors:
        """The vectors of texts: float32 [n, dimension], in the order of the texts. No texts: [0, 0].

        `model`: default, the workers' own. `chunk`: texts in a task, 1 to 10,000. Raises as `map`.
        """
        stack = Stack(texts)
        for rows in self.embed_iter(texts, model, chunk=chunk, **options):
            stack.add(rows)
        return stack.array()

    def embed_iter(
        self, texts: Iterable[str], model: str = "", *, chunk: int = CHUNK_TEXTS, **options: Unpack[EmbedOptions]
    ) -> Iterator[Vectors]:
        """As `embed`, for endless input: yields the vectors of `chunk` texts at a time, float32 [≤ chunk, dim]."""
        check_texts(texts)
        chunks = Chunks(chunk)
        return self._map(KIND, chunks.cut(texts), {"model": model, **options}, chunks.rows)

    # Text.

    def generate(self, prompt: Prompt, model: str = "", **options: Unpack[GenerateOptions]) -> Generation:
        """Continues a text, or answers in a conversation: an iterator of pieces of text, as they come.

        Read to its end it has the whole as `result`. Closing or dropping it cancels the task. `prompt`: a str, or
        messages such as {"role": "user", "content": "…"}. `model`: default, the workers' own. Raises as `stream`.
        """
        payload, task = generation.task_of(prompt, options)
        parts = self._core.parts(generation.KIND, payload, {"model": model, **task}, current_traceparent())
        return generation.Generation(self._iterate(parts))

    # Models.

    def infer(
        self, model: str, inputs: Mapping[str, ArrayLike], outputs: Sequence[str] = (), **options: Unpack[CallOptions]
    ) -> Arrays:
        """Runs a model: arrays by the names of its inputs in, read-only arrays by the names of its outputs out.

        `outputs`: which to return; default, all. Raises as `run`; a wrong name, type or shape is a TaskFailed.
        """
        payload, examples = inference.input_of(inputs, outputs)
        return inference.arrays_of(self.run(inference.KIND, payload, model=model, units=examples, **options))

    def infer_map(
        self,
        model: str,
        inputs: Iterable[Mapping[str, ArrayLike]],
        outputs: Sequence[str] = (),
        **options: Unpack[MapOptions],
    ) -> Iterator[Arrays]:
        """As `infer`, for many inputs: a task for each. See `map`."""
        encode = partial(inference.task_of, outputs=outputs)
        return self._map(inference.KIND, inputs, {"model": model, **options}, inference.read, encode)

    def classify(
        self, model: str, subject: Subject, top_k: int = classification.TOP_K, **options: Unpack[CallOptions]
    ) -> list[Label]:
        """The most likely classes of a picture (its bytes, or a Path to it) or a text (str), the most likely first.

        Raises as `run`, and OSError for a file that can't be read.
        """
        payload = classification.payload_of(subject, top_k)
        return classification.labels_of(self.run(classification.KIND, payload, model=model, **options))

    def classify_map(
        self,
        model: str,
        subjects: Iterable[Subject],
        top_k: int = classification.TOP_K,
        **options: Unpack[MapOptions],
    ) -> Iterator[list[Label]]:
        """As `classify`, for many pictures or texts: a task for each. See `map`."""
        encode = classification.encoder(subjects, top_k)
        return self._map(classification.KIND, subjects, {"model": model, **options}, classification.read, encode)

    # Submitted tasks.

    def get(self, task: TaskName, *, wait_s: float = 0.0) -> Task:
        """A task by its task_id (int) or request_id (str). Waits up to `wait_s` for it to end. Raises NotFoundError."""
        return self._wait(self._core.get(task, wait_s))

    def cancel(self, *tasks: TaskName, reason: str = "") -> task_service_pb2.CancelResponse:
        """Cancels tasks by task_id (int) or request_id (str). See AsyncClient."""
        return self._wait(self._core.cancel(tasks, reason))

    def watch(
        self, *, cursor: str = "", from_now: bool = False, queue: str = "", kind: str = ""
    ) -> Generator[tuple[Outcome, str], None, None]:
        """Yields (outcome, cursor) for every durable task that ends, until it is closed. See AsyncClient."""
        return self._flatten(self._core.watch(cursor, from_now, queue, kind))

    def count(self, task_filter: task_service_pb2.TaskFilter | None = None) -> task_service_pb2.CountResponse:
        """How many tasks a filter matches, by state and outcome. Default: all."""
        return self._wait(self._core.count(task_filter))

    def list_tasks(
        self, task_filter: task_service_pb2.TaskFilter | None = None, *, page_size: int = 1000
    ) -> Generator[Task, None, None]:
        """Tasks that a filter matches, the newest first; their outcomes come without results. Default: all."""
        return self._flatten(self._core.pages(task_filter, page_size))

    # Between the threads.

    def _check(self) -> None:
        if self._closed:
            raise errors.ClientClosedError("this client is closed; make a new one")
        self._thread.check()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            self._check()
        except errors.ClientClosedError:
            coroutine.close()
            raise
        future = self._thread.submit(coroutine)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise errors.ClientClosedError("the client was closed before the call ended") from None
        except KeyboardInterrupt:
            future.cancel()
            self._confirm_cancellations()
            raise

    def _iterate(self, generator: AsyncGenerator[T, None]) -> SyncIterator[T]:
        self._thread.check()
        return SyncIterator(generator, self._thread, self._wait)

    def _flatten(self, generator: AsyncGenerator[Iterable[T], None]) -> Generator[T, None, None]:
        with contextlib.closing(self._iterate(generator)) as frames:
            for frame in frames:
                yield from frame

    def _interruptible(self, items: Iterator[T]) -> Iterator[T]:
        """Yields the items; after Ctrl-C, waits until the master has confirmed the cancellations."""
        try:
            yield from items
        except KeyboardInterrupt:
            self._confirm_cancellations()
            raise

    def _confirm_cancellations(self) -> None:
        with contextlib.suppress(concurrent.futures.CancelledError):
            self._thread.submit(self._core.stream.cancellations()).result()


def _finish(core: Core, thread: LoopThread) -> None:
    """Ends the client and its thread, unless they belong to the parent of a fork."""
    if not thread.inherited:
        thread.finish(core.close())
