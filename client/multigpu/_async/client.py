"""AsyncClient: the client for asyncio programs.

`submit` and `submit_many` return handles once the tasks are safe on the master's disk. `run`, `map`, `stream` and the
calls made of them wait for outcomes on one Run stream that all calls of a client share: tasks that many coroutines
start at the same time travel in the same frames.

tools/generate_sync.py derives multigpu._sync from this folder.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from multigpu._async.base import AsyncBaseClient
from multigpu._async.handles import AsyncTaskHandle
from multigpu._async.streams import AsyncGeneration, AsyncStream
from multigpu._calls.progress import ProgressBar, progress_bar
from multigpu._calls.submitting import cut, single
from multigpu._kinds import classification, generation, inference
from multigpu._kinds.documentation import document_options
from multigpu._kinds.embedding import BATCH_SIZE, KIND, Chunks, Stack, check_options, check_texts
from multigpu._kinds.finetuning import finetune_of
from multigpu._kinds.training import KIND as TRAIN
from multigpu._kinds.training import job_of
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
    from multigpu._kinds.finetuning import FinetuneOptions
    from multigpu._kinds.generation import GenerateOptions, Prompt
    from multigpu._kinds.inference import Arrays
    from multigpu.errors import RejectedError
    from multigpu.options import AnyIterable
    from multigpu.outcome import TaskName

T = TypeVar("T")


@document_options
class AsyncClient(AsyncBaseClient):
    """A client of one master, for one event loop. Cancelling a waiting call cancels the tasks that it started.

    `master` is HOST:PORT; default: MGPU_MASTER, else the config file, else 127.0.0.1:7433. `token` ("": none) and the
    files `tls_ca`, `tls_cert` and `tls_key` have defaults there too. The first call connects; a master that can't be
    reached for `connect_timeout_s` is an UnavailableError. A wrong setting is a ConfigError.

    `timeout`: the most seconds that a call may block, of an iterator the wait for each item, when the call itself is
    given none; then it raises CallTimeoutError, a TimeoutError. Default: no limit. `defaults`: options of every task,
    such as {"queue": "night"}. `max_in_flight` (default 8192) and `max_in_flight_bytes` (64 MiB) bound the unsettled
    tasks of all calls together; past them calls wait. Calls also wait while the master has no room; with
    `wait_when_full=False` they raise ResourceExhaustedError.
    """

    def with_options(self, **options: Unpack[SpecOptions]) -> Self:
        """A client with other defaults for its calls: `timeout`, `queue`, `priority`, `labels` … It has the same
        connection and limits as this one, and closing one closes both. Raises as `submit` for a wrong option.
        """
        other = object.__new__(type(self))
        other.master = self.master
        other._core = self._core.with_options(options)
        return other

    # Submitting.

    async def submit(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> AsyncTaskHandle[Any]:
        """Submits one task and returns its handle, once it is on the master's disk. Raises RejectedError."""
        own, shared = split_options(options)
        handle: AsyncTaskHandle[Any] = single(await self.submit_many(kind, (Input(payload=payload, **own),), **shared))
        return handle

    async def submit_many(
        self, kind: str, payloads: Iterable[Any], **options: Unpack[SpecOptions]
    ) -> list[AsyncTaskHandle[Any] | RejectedError]:
        """Submits many tasks, in calls of up to 10,000 tasks and 32 MiB.

        `payloads` may hold Inputs. Returns, for each payload in order, the handle or the error by which the task was
        rejected. An error that ends it has the answers until then in `submitted`; those tasks go on.
        """
        make_handle = partial(AsyncTaskHandle, self._core)
        async with self._core.submission(self._core.pop_timeout(options), make_handle) as submission:
            for request in cut(self._core.calls.inputs(kind, payloads, options, current_traceparent())):
                await submission.send(request)
        return submission.results

    async def handle(self, task: TaskName, *, timeout: float | None = None) -> AsyncTaskHandle[Any]:
        """The handle of a task that was submitted before, by its task_id (int) or request_id (str). Raises
        NotFoundError.
        """
        found = await self.get(task, timeout=timeout)
        return AsyncTaskHandle(self._core, found.task_id, found.request_id)

    async def train(
        self,
        script: str | PathLike[str],
        args: Sequence[str] = (),
        *,
        name: str = "",
        retries: int = 0,
        checkpoints: str = "",
        hang_timeout_s: float = 0.0,
        **options: Unpack[SpecOptions],
    ) -> AsyncTaskHandle[dict[str, Any]]:
        """Starts a training job and returns its handle: `world_size` workers run the script as torchrun would.

        `script`: a file of the workers' train_dir, by its path in it, or an absolute one. `name`: of the job and its
        folder; default: made from the script's. The same name continues a job that was stopped or has failed, from its
        last checkpoint. `retries`: how often the job runs again after the script has ended with an error; a rank that
        was killed, or whose worker was lost, always does. `checkpoints`: an absolute path of the workers' hosts, or a
        URL that fsspec knows; default: in the job's folder. `hang_timeout_s`: after so many seconds in which no rank
        has written or reported anything, the attempt ends with an error that says where each rank is; default: never.
        The result has `name`, `folder`, `seconds`, and the last `step`, `metrics` and `checkpoint` that were reported
        by multigpu.train. Raises RejectedError; ValueError, TypeError: this can't be a job.
        """
        job = job_of(script, args, name, retries, checkpoints, hang_timeout_s, options)
        options["retry_failed"] = True
        return await self.submit(TRAIN, job.payload(), request_id=job.name, **options)

    async def finetune(
        self,
        model: str,
        texts: Iterable[str] = (),
        *,
        file: str = "",
        name: str = "",
        hang_timeout_s: float = 0.0,
        **options: Unpack[FinetuneOptions],
    ) -> AsyncTaskHandle[dict[str, Any]]:
        """Starts a training job that fine-tunes a language model on texts, and returns its handle.

        `model`: of the workers' model repository, NAME or NAME:VERSION. The result is a new version there, which
        workers serve after their next scan. `file`: in place of texts, a file of the workers' hosts with a JSON object
        {"text": "…"} on each line, by its path in their train_dir. `name`, `hang_timeout_s` and the rest as `train`.
        The result has also `finetuned`: what was trained, how well, and what to change. Raises RejectedError;
        ValueError, TypeError.
        """
        tuning, rest = finetune_of(model, texts, file, options)
        job = job_of("", (), name, 0, "", hang_timeout_s, rest, tuning)
        rest["retry_failed"] = True
        return await self.submit(TRAIN, job.payload(), request_id=job.name, **rest)

    # Running: these calls wait for the outcomes.

    async def run(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> Any:
        """Runs one task and returns its result. Raises TaskError, RejectedError, TransportError."""
        return (await self.run_outcome(kind, payload, **options)).value()

    async def run_outcome(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> Outcome:
        """As `run`, but returns the outcome, whatever it is. Raises RejectedError, TransportError."""
        return await self._core.run(kind, payload, dict(options), current_traceparent())

    def stream(self, kind: str, payload: Any, **options: Unpack[TaskOptions]) -> AsyncStream[Any]:
        """Runs one task and yields its partial outputs, decoded as `run` decodes a result, each exactly once.

        Read to its end it has the `outcome`, whose `value()` is what the handler returned: all there is of a handler
        that is no generator. Raises, after the outputs, the TaskError of a task that did not succeed. Closing or
        dropping the iterator cancels the task.
        """
        return AsyncStream(self._core.parts(kind, payload, dict(options), current_traceparent()))

    def map(
        self, kind: str, payloads: AnyIterable[Any], **options: Unpack[SpecMapOptions]
    ) -> AsyncGenerator[Any, None]:
        """Runs a task for each payload and yields the results, in the order of the payloads unless `ordered` is False.

        The call itself submits the first `max_in_flight` payloads (default: the client's), also if nobody reads the
        results; taking results submits more. Of a slow iterator, the call submits what comes within 0.1 s.
        A synchronous iterable is pulled on the event loop: wrap one that blocks in an asynchronous one.
        Payloads may be Inputs. An error ends the map and cancels what it started; with `return_exceptions` it takes the
        place of the result. Close the iterator (contextlib.aclosing) to stop early. `progress` shows a bar, by tqdm.
        """
        return self._map(kind, payloads, options, Outcome.value, bar=_bar_of(options, payloads))

    def map_outcomes(
        self, kind: str, payloads: AnyIterable[Any], **options: Unpack[SpecMapOptions]
    ) -> AsyncGenerator[Outcome, None]:
        """As `map`, but yields the outcome of each task, whatever it is. A rejected task still ends the map."""
        return self._map(kind, payloads, options, lambda outcome: outcome, bar=_bar_of(options, payloads))

    def _map(
        self,
        kind: str,
        payloads: Any,
        options: Any,
        read: Callable[[Outcome], T],
        encode: Encode | None = None,
        bar: ProgressBar | None = None,
    ) -> AsyncGenerator[T, None]:
        return self._core.map(kind, payloads, options, read, encode, bar)

    # Embeddings.

    async def embed(
        self,
        texts: AnyIterable[str],
        *,
        model: str = "",
        batch_size: int = BATCH_SIZE,
        progress: bool = False,
        **options: Unpack[EmbedOptions],
    ) -> Vectors:
        """The vectors of texts: float32 [n, dimension], in the order of the texts. No texts: [0, 0].

        `model`: default, the workers' own. `batch_size`: texts in a task, 1 to 10,000. `progress` shows a bar, by
        tqdm. Raises as `map`.
        """
        stack = Stack(texts)
        rows_of = self.embed_iter(texts, model=model, batch_size=batch_size, progress=progress, **options)
        async with aclosing(rows_of) as parts:
            async for rows in parts:
                stack.add(rows)
        return stack.array()

    def embed_iter(
        self,
        texts: AnyIterable[str],
        *,
        model: str = "",
        batch_size: int = BATCH_SIZE,
        progress: bool = False,
        **options: Unpack[EmbedOptions],
    ) -> AsyncGenerator[Vectors, None]:
        """As `embed`, for endless input: yields the vectors of `batch_size` texts at a time, float32
        [≤ batch_size, dimension], and `progress` counts texts.
        """
        check_texts(texts)
        check_options(options)
        chunks = Chunks(batch_size)
        bar = progress_bar("text", texts, len) if progress else None
        return self._map(KIND, chunks.inputs(texts), {"model": model, **options}, chunks.rows, bar=bar)

    # Text.

    @overload
    def generate(
        self, prompt: Prompt, *, model: str = ..., stream: Literal[False] = ..., **options: Unpack[GenerateOptions]
    ) -> Coroutine[Any, Any, str]: ...
    @overload
    def generate(
        self, prompt: Prompt, *, model: str = ..., stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> AsyncGeneration: ...
    def generate(
        self, prompt: Prompt, *, model: str = "", stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> Any:
        """Continues a text, or answers in a conversation. Returns the text, or raises as `run`.

        `prompt`: a str, or messages such as {"role": "user", "content": "…"}. `model`: default, the workers' own. With
        `stream` it returns an iterator of pieces of text as they come, to be used in a `with` block: leaving the block
        before the end cancels the task. Read to its end it has the whole as `result`. It raises as `stream`.
        """
        payload, task = generation.task_of(prompt, options)
        if not stream:
            return self._text(payload, {"model": model, **task})
        return AsyncGeneration(
            self._core.parts(generation.KIND, payload, {"model": model, **task}, current_traceparent())
        )

    async def _text(self, payload: bytes, options: Any) -> str:
        return generation.text_of(await self._core.run(generation.KIND, payload, options, current_traceparent()))

    # Models.

    async def infer(
        self,
        inputs: Mapping[str, ArrayLike],
        *,
        model: str,
        outputs: Sequence[str] = (),
        **options: Unpack[CallOptions],
    ) -> Arrays:
        """Runs a model: arrays by the names of its inputs in, read-only arrays by the names of its outputs out.

        `outputs`: which to return; default, all. Raises as `run`; a wrong name, type or shape is a TaskFailed.
        """
        payload, examples = inference.input_of(inputs, outputs)
        return inference.arrays_of(await self.run(inference.KIND, payload, model=model, units=examples, **options))

    def infer_map(
        self,
        inputs: AnyIterable[Mapping[str, ArrayLike]],
        *,
        model: str,
        outputs: Sequence[str] = (),
        **options: Unpack[MapOptions],
    ) -> AsyncGenerator[Arrays, None]:
        """As `infer`, for many inputs: a task for each. See `map`."""
        encode = partial(inference.task_of, outputs=outputs)
        bar = _bar_of(options, inputs)
        return self._map(inference.KIND, inputs, {"model": model, **options}, inference.read, encode, bar)

    async def classify(
        self, subject: Subject, *, model: str, top_k: int = classification.TOP_K, **options: Unpack[CallOptions]
    ) -> list[Label]:
        """The most likely classes of a picture (its bytes, or a Path to it) or a text (str), the most likely first.

        Raises as `run`, and OSError for a file that can't be read.
        """
        payload = classification.payload_of(subject, top_k)
        return classification.labels_of(await self.run(classification.KIND, payload, model=model, **options))

    def classify_map(
        self,
        subjects: AnyIterable[Subject],
        *,
        model: str,
        top_k: int = classification.TOP_K,
        **options: Unpack[MapOptions],
    ) -> AsyncGenerator[list[Label], None]:
        """As `classify`, for many pictures or texts: a task for each. See `map`."""
        encode = classification.encoder(subjects, top_k)
        bar = _bar_of(options, subjects)
        return self._map(classification.KIND, subjects, {"model": model, **options}, classification.read, encode, bar)


def _bar_of(options: Any, items: Any) -> ProgressBar | None:
    """Removes `progress` from the options of a map, and makes the bar that it asks for."""
    return progress_bar("task", items) if options.pop("progress", False) else None
