"""AsyncClient: the client for asyncio programs.

`submit` and `submit_many` return handles once the tasks are safe on the master's disk. `run`, `map`, `stream` and the
calls made of them wait for outcomes on one Run stream that all calls of a client share: tasks that many coroutines
start at the same time travel in the same frames.

tools/generate_sync.py derives multigpu._sync from this folder.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from multigpu._async.base import AsyncBaseClient
from multigpu._async.handles import AsyncTaskHandle
from multigpu._async.streams import AsyncGeneration, AsyncStream
from multigpu._calls.submitting import cut, single
from multigpu._kinds import classification, generation, inference
from multigpu._kinds.embedding import CHUNK_TEXTS, KIND, Chunks, Stack, check_texts
from multigpu._transport.traceparent import current_traceparent
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
from multigpu.outcome import Outcome

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from multigpu._calls.calls import Encode
    from multigpu._kinds.classification import Label, Subject
    from multigpu._kinds.embedding import Vectors
    from multigpu._kinds.generation import GenerateOptions, Prompt
    from multigpu._kinds.inference import Arrays
    from multigpu.errors import RejectedError
    from multigpu.options import AnyIterable
    from multigpu.outcome import TaskName

T = TypeVar("T")


class AsyncClient(AsyncBaseClient):
    """A client of one master, for one event loop. Cancelling a waiting call cancels the tasks that it started.

    `master` is HOST:PORT; default: MGPU_MASTER, else the config file, else 127.0.0.1:7433. `token` and the files
    `tls_ca`, `tls_cert` and `tls_key` have defaults there too. `timeout`: of calls that are given none. `window_tasks`
    and `window_bytes` bound the unsettled tasks of all calls together; past them calls wait. The first call connects; a
    master that can't be reached for `connect_timeout_s` is an UnavailableError. A wrong setting is a ConfigError.
    """

    # Submitting.

    async def submit(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> AsyncTaskHandle:
        """Submits one task and returns its handle, once it is on the master's disk. Raises RejectedError."""
        own, shared = split_options(options)
        handle: AsyncTaskHandle = single(await self.submit_many(kind, (Input(payload=payload, **own),), **shared))
        return handle

    async def submit_many(
        self, kind: str, payloads: Iterable[Any], **options: Unpack[SpecOptions]
    ) -> list[AsyncTaskHandle | RejectedError]:
        """Submits many tasks, in calls of up to 10,000 tasks and 32 MiB.

        `payloads` may hold Inputs. Returns, for each payload in order, the handle or the error by which the task was
        rejected. An error that ends it has the answers until then in `submitted`; those tasks go on.
        """
        make_handle = partial(AsyncTaskHandle, self._core)
        async with self._core.submission(self._core.pop_timeout(options), make_handle) as submission:
            for request in cut(self._core.calls.inputs(kind, payloads, options, current_traceparent())):
                await submission.send(request)
        return submission.results

    async def handle(self, task: TaskName) -> AsyncTaskHandle:
        """The handle of a task that was submitted before, by its task_id (int) or request_id (str). Raises
        NotFoundError.
        """
        found = await self.get(task)
        return AsyncTaskHandle(self._core, found.task_id, found.request_id)

    # Running: these calls wait for the outcomes.

    async def run(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> Any:
        """Runs one task and returns its result. Raises TaskError, RejectedError, TransportError."""
        return (await self.run_outcome(kind, payload, **options)).value()

    async def run_outcome(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> Outcome:
        """As `run`, but returns the outcome, whatever it is. Raises RejectedError, TransportError."""
        return await self._core.run(kind, payload, dict(options), current_traceparent())

    def stream(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> AsyncStream[Any]:
        """Runs one task and yields its partial outputs, decoded as `run` decodes a result, each exactly once.

        Read to its end it has the `outcome`, whose `value()` is what the handler returned. Raises, after the outputs,
        the TaskError of a task that did not succeed. Closing or dropping the iterator cancels the task.
        """
        return AsyncStream(self._core.parts(kind, payload, dict(options), current_traceparent()))

    def map(
        self, kind: str, payloads: AnyIterable[Any], **options: Unpack[SpecMapOptions]
    ) -> AsyncGenerator[Any, None]:
        """Runs a task for each payload and yields the results, in the order of the payloads unless `ordered` is False.

        At most `window` payloads (default: the client's) are pulled ahead of the results taken. A synchronous iterable
        is pulled on the event loop: wrap one that blocks in an asynchronous one. Payloads may be Inputs. An error ends
        the map and cancels what it started; with `return_exceptions` it takes the place of the result. Close the
        iterator (contextlib.aclosing) to stop early.
        """
        return self._map(kind, payloads, options, Outcome.value)

    def map_outcomes(
        self, kind: str, payloads: AnyIterable[Any], **options: Unpack[SpecMapOptions]
    ) -> AsyncGenerator[Outcome, None]:
        """As `map`, but yields the outcome of each task, whatever it is. A rejected task still ends the map."""
        return self._map(kind, payloads, options, lambda outcome: outcome)

    def _map(
        self, kind: str, payloads: Any, options: Any, read: Callable[[Outcome], T], encode: Encode | None = None
    ) -> AsyncGenerator[T, None]:
        return self._core.map(kind, payloads, options, read, encode)

    # Embeddings.

    async def embed(
        self,
        texts: AnyIterable[str],
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

    def embed_iter(
        self,
        texts: AnyIterable[str],
        model: str = "",
        *,
        chunk: int = CHUNK_TEXTS,
        **options: Unpack[EmbedOptions],
    ) -> AsyncGenerator[Vectors, None]:
        """As `embed`, for endless input: yields the vectors of `chunk` texts at a time, float32 [≤ chunk, dim]."""
        check_texts(texts)
        chunks = Chunks(chunk)
        return self._map(KIND, chunks.inputs(texts), {"model": model, **options}, chunks.rows)

    # Text.

    def generate(self, prompt: Prompt, model: str = "", **options: Unpack[GenerateOptions]) -> AsyncGeneration:
        """Continues a text, or answers in a conversation: an iterator of pieces of text, as they come.

        Read to its end it has the whole as `result`. Closing or dropping it cancels the task. `prompt`: a str, or
        messages such as {"role": "user", "content": "…"}. `model`: default, the workers' own. Raises as `stream`.
        """
        payload, task = generation.task_of(prompt, options)
        parts = self._core.parts(generation.KIND, payload, {"model": model, **task}, current_traceparent())
        return AsyncGeneration(parts)

    # Models.

    async def infer(
        self, model: str, inputs: Mapping[str, ArrayLike], outputs: Sequence[str] = (), **options: Unpack[CallOptions]
    ) -> Arrays:
        """Runs a model: arrays by the names of its inputs in, read-only arrays by the names of its outputs out.

        `outputs`: which to return; default, all. Raises as `run`; a wrong name, type or shape is a TaskFailed.
        """
        payload, examples = inference.input_of(inputs, outputs)
        return inference.arrays_of(await self.run(inference.KIND, payload, model=model, units=examples, **options))

    def infer_map(
        self,
        model: str,
        inputs: AnyIterable[Mapping[str, ArrayLike]],
        outputs: Sequence[str] = (),
        **options: Unpack[MapOptions],
    ) -> AsyncGenerator[Arrays, None]:
        """As `infer`, for many inputs: a task for each. See `map`."""
        encode = partial(inference.task_of, outputs=outputs)
        return self._map(inference.KIND, inputs, {"model": model, **options}, inference.read, encode)

    async def classify(
        self, model: str, subject: Subject, top_k: int = classification.TOP_K, **options: Unpack[CallOptions]
    ) -> list[Label]:
        """The most likely classes of a picture (its bytes, or a Path to it) or a text (str), the most likely first.

        Raises as `run`, and OSError for a file that can't be read.
        """
        payload = classification.payload_of(subject, top_k)
        return classification.labels_of(await self.run(classification.KIND, payload, model=model, **options))

    def classify_map(
        self,
        model: str,
        subjects: AnyIterable[Subject],
        top_k: int = classification.TOP_K,
        **options: Unpack[MapOptions],
    ) -> AsyncGenerator[list[Label], None]:
        """As `classify`, for many pictures or texts: a task for each. See `map`."""
        encode = classification.encoder(subjects, top_k)
        return self._map(classification.KIND, subjects, {"model": model, **options}, classification.read, encode)
