"""LocalMaster: what a master and one worker are for a LocalClient. It takes the messages of TaskService, runs the
handlers of this process on threads, one for each slot, and keeps every task until it is closed.

All methods run on the client's event loop. The threads report to it through LocalReporter.
"""

import asyncio
import contextlib
import difflib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from multigpu import errors
from multigpu._handling.attempts import Batch, Item
from multigpu._handling.engine import HandlerEngine, Instances, engine_of, report_failure
from multigpu._transport.run_state import WITHDRAWN
from multigpu.handlers import ATTEMPTS_DEFAULT, RESERVED_KINDS, Handler, registered_handlers
from multigpu.testing._tasks import LocalReporter, LocalTask, Send
from multigpu.v1 import task_pb2, task_service_pb2

WORKER_ID = "local"
# How long closing waits for running handlers, which see `context().cancelled`, and for `close` of handler classes.
_CLOSE_S = 3.0
# How often a batch that may grow is looked at.
_GROW_POLL_S = 0.002


class LocalMaster:
    def __init__(self, slots: int, device: str) -> None:
        self._device = device
        self._instances = Instances(device)
        self._engines: dict[Handler, tuple[HandlerEngine, threading.Lock]] = {}
        self._ids = itertools.count(1)
        self._tasks: dict[int, LocalTask] = {}
        self._by_request: dict[str, LocalTask] = {}
        self._queue: deque[LocalTask] = deque()
        self._free = slots
        self._running: set[asyncio.Task[None]] = set()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_serve, args=(self._jobs,), name=f"local slot {slot}", daemon=True)
            for slot in range(slots)
        ]
        for thread in self._threads:
            thread.start()

    # Calls of the client.

    async def unary(self, method: str, request: Any) -> Any:
        match method:
            case "Submit":
                return self._submit(request)
            case "Get":
                return await self._get(request)
            case "Cancel":
                return self._cancel(request)
            case "List":
                tasks = self._tasks.values() if request.oldest_first else reversed(self._tasks.values())
                found = [self._listed(task) for task in tasks if task.matches(request.filter)]
                return task_service_pb2.ListResponse(tasks=found)
        assert method == "Count", method
        response = task_service_pb2.CountResponse()
        for task in self._tasks.values():
            if task.matches(request.filter):
                state = task.message.outcome.state if task.ended.is_set() else 0
                name = task_pb2.OutcomeState.Name(state) if state else task_pb2.TaskState.Name(task.message.state)
                field = name.removeprefix("OUTCOME_STATE_").removeprefix("TASK_STATE_").lower()
                setattr(response, field, getattr(response, field) + 1)
        return response

    def receive(self, frame: task_service_pb2.RunRequest, send: Send) -> None:
        """A frame of the Run stream; `send` answers it."""

        def reject(request_id: str, code: int, message: str = "") -> None:
            rejection = task_service_pb2.Rejection(request_id=request_id, code=code, message=message)
            send(task_service_pb2.RunResponse(rejected=[rejection]))

        for request_id in frame.cancel_request_ids:
            task = self._by_request.get(request_id)
            if task is None or task.ended.is_set():
                reject(request_id, errors.NOT_FOUND)
            elif task.of_run:
                self._end_cancelled(task, WITHDRAWN, "")
            else:
                task.send = None
                reject(request_id, errors.CANCELLED)
        for request_id in frame.follow_request_ids:
            task = self._by_request.get(request_id)
            if task is None:
                reject(request_id, errors.NOT_FOUND, f"LocalClient has no task with the request_id {request_id!r}")
            else:
                self._follow(task, send)
        for spec, given in _inputs(frame.batches):
            accepted = self._accept(spec, given, of_run=True)
            if isinstance(accepted, LocalTask):
                self._follow(accepted, send)
            else:
                reject(given.request_id, accepted.code, accepted.message)
        self._start()

    def _follow(self, task: LocalTask, send: Send) -> None:
        task.send = send
        if task.ended.is_set():
            send(task_service_pb2.RunResponse(outcomes=[task.message.outcome]))

    def _submit(self, request: task_service_pb2.SubmitRequest) -> task_service_pb2.SubmitResponse:
        response = task_service_pb2.SubmitResponse()
        for spec, given in _inputs(request.batches):
            accepted = self._accept(spec, given, of_run=False)
            if isinstance(accepted, LocalTask):
                response.results.add(task_id=accepted.message.task_id)
            else:
                response.results.add(rejection=accepted)
        self._start()
        return response

    def _accept(
        self, spec: task_pb2.TaskSpec, given: task_pb2.TaskInput, *, of_run: bool
    ) -> LocalTask | task_service_pb2.Rejection:
        known = self._by_request.get(given.request_id)
        if known is not None and not (spec.retry_failed and known.ended.is_set() and _failed(known)):
            mine, other = known.message.spec, spec
            same = (mine.kind, mine.model, mine.content_type) == (other.kind, other.model, other.content_type)
            if same and mine.parameters == other.parameters and known.given.payload == given.payload:
                return known
            message = f"another task has the request_id {given.request_id!r}; use a request_id for one task only"
            return task_service_pb2.Rejection(code=errors.ALREADY_EXISTS, message=message)
        if why := _unplaceable(spec.kind):
            return task_service_pb2.Rejection(code=errors.FAILED_PRECONDITION, message=why)
        task = LocalTask(next(self._ids), spec, given, of_run=of_run)
        self._tasks[task.message.task_id] = self._by_request[given.request_id] = task
        self._queue.append(task)
        return task

    def _find(self, name: int | str) -> LocalTask | None:
        return self._by_request.get(name) if isinstance(name, str) else self._tasks.get(name)

    async def _get(self, request: task_service_pb2.GetRequest) -> task_service_pb2.GetResponse:
        name = request.request_id or request.task_id
        task = self._find(name)
        if task is None:
            raise errors.NotFoundError(f"LocalClient has no task {name!r}")
        if request.wait.ToNanoseconds():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(task.ended.wait(), request.wait.ToNanoseconds() / 1e9)
        return task_service_pb2.GetResponse(task=task.message)

    def _cancel(self, request: task_service_pb2.CancelRequest) -> task_service_pb2.CancelResponse:
        response = task_service_pb2.CancelResponse()
        names: list[int | str] = [*request.task_ids, *request.request_ids]
        for name in names:
            task = self._find(name)
            if task is None:
                response.unknown.append(str(name))
            elif task.ended.is_set():
                response.settled_task_ids.append(task.message.task_id)
            else:
                self._end_cancelled(task, WITHDRAWN if request.withdraw else "Cancelled", request.reason)
                response.cancelled_task_ids.append(task.message.task_id)
        return response

    def _listed(self, task: LocalTask) -> task_pb2.Task:
        message = task_pb2.Task()
        message.CopyFrom(task.message)
        if task.ended.is_set():
            message.outcome.ClearField("result")
            message.outcome.ClearField("partials")
        return message

    # Attempts.

    def _start(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            running = asyncio.get_running_loop().create_task(self._run(self._queue.popleft()))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    async def _run(self, first: LocalTask) -> None:
        """Runs a task, and with it others of its batch, in one slot."""
        try:
            handler = registered_handlers()[first.message.spec.kind]
            tasks = [first]
            if handler.batching is not None:
                tasks += await self._mates(first, handler.batching.max_size - 1, handler.batching.max_wait_ms / 1000)
            if tasks := [task for task in tasks if not task.ended.is_set()]:
                await self._attempt(handler, tasks)
        finally:
            self._free += 1
            self._start()

    async def _mates(self, first: LocalTask, count: int, wait_s: float) -> list[LocalTask]:
        """Takes up to `count` tasks that run in a batch with the first from the queue, and waits for them."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + wait_s
        while True:
            mates = list(islice((task for task in self._queue if task.batch_key == first.batch_key), count))
            left_s = give_up - loop.time()
            if len(mates) == count or left_s <= 0:
                break
            await asyncio.sleep(min(left_s, _GROW_POLL_S))
        chosen = set(mates)
        self._queue = deque(task for task in self._queue if task not in chosen)
        return mates

    async def _attempt(self, handler: Handler, tasks: list[LocalTask]) -> None:
        spec = tasks[0].message.spec
        items = []
        for task in tasks:
            message = task.message
            message.attempts += 1
            message.state, message.worker_id = task_pb2.TASK_STATE_LEASED, WORKER_ID
            message.lease_id = task.lease_id = next(self._ids)
            task.stages.dispatch_time.GetCurrentTime()
            task.stages.start_time.GetCurrentTime()
            given = task.given
            numbers = task.lease_id, message.task_id, message.attempts
            items.append(Item(*numbers, given.payload, given.units or 1, task.checkpoint, len(task.partials)))
        batch = Batch(spec.kind, spec.model, dict(spec.parameters), spec.content_type, items)
        loop = asyncio.get_running_loop()
        reporter = LocalReporter(self, loop, {task.lease_id: task for task in tasks})
        await self._in_slot(partial(self._work, handler, batch, reporter))

    async def _in_slot(self, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def job() -> None:
            try:
                work()
            finally:
                with contextlib.suppress(RuntimeError):  # the client is closed, and its loop has ended
                    loop.call_soon_threadsafe(done.set)

        self._jobs.put(job)
        await done.wait()

    def _work(self, handler: Handler, batch: Batch, reporter: LocalReporter) -> None:
        """On the slot's thread."""
        try:
            if handler not in self._engines:  # another slot may make one at the same time: the first is kept
                self._engines.setdefault(handler, (engine_of(handler, self._instances), threading.Lock()))
            engine, together = self._engines[handler]
            with contextlib.nullcontext() if engine.one_by_one else together:
                engine.run(batch, engine.prepare(batch), reporter)
        except BaseException as error:  # noqa: BLE001  the __init__ of a class may raise anything
            for item in batch.items:
                report_failure(handler, item, error, reporter)

    # Reports of the running attempt.

    def succeeded(self, task: LocalTask, result: bytes, content_type: str) -> None:
        outcome = task_pb2.Outcome(state=task_pb2.OUTCOME_STATE_SUCCEEDED, result=result, content_type=content_type)
        self._end(task, outcome)

    def failed(self, task: LocalTask, error: task_pb2.TaskError) -> None:
        message = task.message
        task.lease_id = 0
        message.last_error.CopyFrom(error)
        if error.retryable and message.attempts < (message.spec.attempts_max or ATTEMPTS_DEFAULT):
            message.state, message.worker_id = task_pb2.TASK_STATE_QUEUED, ""
            self._queue.append(task)
            return
        state = task_pb2.OUTCOME_STATE_DEAD_LETTERED if error.retryable else task_pb2.OUTCOME_STATE_FAILED
        self._end(task, task_pb2.Outcome(state=state, error=error))

    def put_out(self, task: LocalTask, data: bytes, content_type: str) -> None:
        """A partial output."""
        task.partials.append((data, content_type))
        if task.send is not None:
            output = task_service_pb2.Partial(
                request_id=task.message.request_id, task_id=task.message.task_id, index=len(task.partials) - 1,
                data=data, content_type=content_type,
            )  # fmt: skip
            task.send(task_service_pb2.RunResponse(partials=[output]))

    def _end_cancelled(self, task: LocalTask, error_type: str, reason: str) -> None:
        task.cancelled = True
        if error_type == WITHDRAWN:
            del self._by_request[task.message.request_id]
        error = task_pb2.TaskError(type=error_type, message=reason or "cancelled by the client")
        self._end(task, task_pb2.Outcome(state=task_pb2.OUTCOME_STATE_CANCELLED, error=error))

    def _end(self, task: LocalTask, outcome: task_pb2.Outcome) -> None:
        message = task.message
        task.lease_id = 0
        task.stages.finish_time.GetCurrentTime()
        outcome.task_id, outcome.request_id, outcome.attempts = message.task_id, message.request_id, message.attempts
        outcome.stages.CopyFrom(task.stages)
        if message.attempts:
            outcome.worker_id, outcome.device_id = WORKER_ID, self._device
        outcome.partials.extend(data for data, _ in task.partials)
        outcome.partial_content_types.extend(content_type for _, content_type in task.partials)
        outcome.log = message.log
        message.ClearField("log")
        message.state = task_pb2.TASK_STATE_SETTLED
        message.outcome.CopyFrom(outcome)
        task.ended.set()
        if task.send is not None:
            task.send(task_service_pb2.RunResponse(outcomes=[outcome]))

    async def close(self) -> None:
        self._queue.clear()
        for task in self._tasks.values():
            task.cancelled = True
        if self._running:
            await asyncio.wait(self._running, timeout=_CLOSE_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._in_slot(self._instances.close), _CLOSE_S)
        for _ in self._threads:
            self._jobs.put(None)


def _serve(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """The thread of a slot. It does not keep the client alive."""
    while (job := jobs.get()) is not None:
        job()
        del job


def _inputs(batches: Any) -> Iterator[tuple[task_pb2.TaskSpec, task_pb2.TaskInput]]:
    for batch in batches:
        for given in batch.inputs:
            yield batch.spec, given
        for request_id, payload in zip(batch.request_ids, batch.payloads, strict=True):
            yield batch.spec, task_pb2.TaskInput(request_id=request_id, payload=payload)


def _failed(task: LocalTask) -> bool:
    return task.message.outcome.state != task_pb2.OUTCOME_STATE_SUCCEEDED


def _unplaceable(kind: str) -> str:
    """Why a task of this kind can't run here; "": it can."""
    kinds = sorted(registered_handlers())
    if kind in kinds:
        return ""
    if kind in RESERVED_KINDS:
        return (
            f"LocalClient runs handlers only: it has no engine for {kind!r}; test this with the fixture multigpu_fleet"
        )
    near = difflib.get_close_matches(kind, kinds, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    there = f"it has {', '.join(kinds)}" if kinds else "import the module that registers it"
    return f"this process has no handler for the kind {kind!r}{hint} ({there})"
