"""ScriptedMaster: a TaskService that a test scripts, over real gRPC. It schedules nothing and runs nothing.

It answers each task by a function of the test, and keeps every input, in order. Its outcomes
outlive its streams and its restarts, as a master's do, so that a client that comes back is answered and not run again.
"""
# ruff: noqa: N802  gRPC names the methods

import asyncio
import json
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Self

import grpc
import grpc.aio
from multigpu.v1 import task_pb2, task_service_pb2, task_service_pb2_grpc

OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
)
Spec = task_pb2.TaskSpec
Task = task_pb2.TaskInput
Reply = task_pb2.Outcome | task_service_pb2.Rejection | None
Answer = Callable[[Spec, Task], Reply]


def echo(spec: Spec, task: Task) -> task_pb2.Outcome:
    return task_pb2.Outcome(
        state=task_pb2.OUTCOME_STATE_SUCCEEDED, result=task.payload, content_type=spec.content_type, attempts=1
    )


def inputs_of(batch: task_pb2.TaskBatch) -> list[task_pb2.TaskInput]:
    """All inputs of a batch, those in columns too."""
    columns = zip(batch.request_ids, batch.payloads, strict=True)
    return [*batch.inputs, *[task_pb2.TaskInput(request_id=name, payload=data) for name, data in columns]]


class ScriptedMaster(task_service_pb2_grpc.TaskServiceServicer):
    def __init__(self, answer: Answer = echo) -> None:
        # Set by the test.
        self.answer = answer
        self.gate = asyncio.Event()  # outcomes flow while it is set
        self.gate.set()
        self.outcomes_per_frame = 1024
        self.copies = 1  # of each outcome
        self.breaks_after: deque[int] = deque()  # outcomes after which each stream ends
        self.reversed = False
        self.partials: dict[bytes, list[bytes]] = {}  # partial outputs by payload
        self.streams_partials = True
        self.stream_status = grpc.StatusCode.OK  # else: ends every stream at once
        self.keep_inputs = True
        # Read by the test.
        self.inputs: list[task_pb2.TaskInput] = []
        self.specs: list[task_pb2.TaskSpec] = []
        self.cancelled: list[str] = []
        self.frames: list[int] = []  # tasks in each frame received
        self.answered: Counter[str] = Counter()  # outcomes made, by request_id
        self.streams = 0
        self.submits = 0
        self.watched: list[task_pb2.Outcome] = []
        self.watch_break_after = 0
        self.watches = 0
        self.watchers = 0
        # Survives a restart.
        self.tasks: dict[str, int] = {}
        self.outcomes: dict[str, task_pb2.Outcome] = {}
        self.port = 0
        self._server: Any = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> Self:
        self._server = grpc.aio.server(options=OPTIONS)
        task_service_pb2_grpc.add_TaskServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]  # generated
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _task_id(self, request_id: str) -> int:
        return self.tasks.setdefault(request_id, len(self.tasks) + 1)

    def _outcome(self, spec: Spec, task: Task) -> Reply:
        known = self.outcomes.get(task.request_id)
        if known is not None:
            return known
        answer = self.answer(spec, task)
        if answer is None:
            return None
        answer.request_id = task.request_id
        if isinstance(answer, task_pb2.Outcome):
            answer.task_id = self._task_id(task.request_id) if self.keep_inputs else 1
            if self.keep_inputs:
                self.outcomes[task.request_id] = answer
                self.answered[task.request_id] += 1
        return answer

    async def Run(self, requests: Any, context: Any) -> Any:
        self.streams += 1
        if self.stream_status is not grpc.StatusCode.OK:
            await context.abort(self.stream_status, "scripted status")
        waiting: deque[tuple[Spec, Task]] = deque()
        news = asyncio.Event()
        withdrawn: list[str] = []

        async def read() -> None:
            async for request in requests:
                count = 0
                for batch in request.batches:
                    for task in inputs_of(batch):
                        if self.keep_inputs:
                            self.inputs.append(task)
                            self.specs.append(batch.spec)
                        waiting.append((batch.spec, task))
                        count += 1
                self.frames.append(count)
                withdrawn.extend(request.cancel_request_ids)
                self.cancelled.extend(request.cancel_request_ids)
                news.set()

        reader = asyncio.create_task(read())
        left = self.breaks_after.popleft() if self.breaks_after else None
        try:
            while True:
                await news.wait()
                response = task_service_pb2.RunResponse()
                for request_id in withdrawn:
                    outcome = response.outcomes.add(request_id=request_id, state=task_pb2.OUTCOME_STATE_CANCELLED)
                    outcome.error.type = "Withdrawn"
                    self.outcomes[request_id] = outcome
                withdrawn.clear()
                if self.gate.is_set():
                    self._answer_some(waiting, response)
                if left is not None and len(response.outcomes) >= left:
                    del response.outcomes[left:]
                    await context.write(response)
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted to break")
                if response.ByteSize():
                    if left is not None:
                        left -= len(response.outcomes)
                    await context.write(response)
                if not withdrawn and (not waiting or not self.gate.is_set()):
                    news.clear()
                    if waiting:
                        opened = asyncio.create_task(self.gate.wait())
                        arrived = asyncio.create_task(news.wait())
                        await asyncio.wait([opened, arrived], return_when=asyncio.FIRST_COMPLETED)
                        opened.cancel()
                        arrived.cancel()
                        news.set()
        finally:
            reader.cancel()

    def _answer_some(self, waiting: deque[Any], response: task_service_pb2.RunResponse) -> None:
        for _ in range(min(self.outcomes_per_frame, len(waiting))):
            spec, task = waiting.pop() if self.reversed else waiting.popleft()
            yielded = self.partials.get(task.payload, [])
            for index, data in enumerate(yielded):
                if index >= task.partials_received and self.streams_partials:
                    response.partials.add(request_id=task.request_id, index=index, data=data)
            answer = self._outcome(spec, task)
            if isinstance(answer, task_service_pb2.Rejection):
                response.rejected.append(answer)
            elif answer is not None:
                answer.partials[:] = yielded
                response.outcomes.extend([answer] * self.copies)

    async def Submit(self, request: Any, context: Any) -> Any:
        self.submits += 1
        response = task_service_pb2.SubmitResponse()
        for batch in request.batches:
            for task in batch.inputs:
                self.inputs.append(task)
                self.specs.append(batch.spec)
                answer = self._outcome(batch.spec, task)
                if isinstance(answer, task_service_pb2.Rejection):
                    response.results.add(rejection=answer)
                else:
                    response.results.add(task_id=self._task_id(task.request_id))
        return response

    async def Cancel(self, request: Any, context: Any) -> Any:
        self.cancelled.extend(request.request_ids)
        return task_service_pb2.CancelResponse(
            cancelled_task_ids=[*request.task_ids, *(self.tasks[i] for i in request.request_ids if i in self.tasks)],
            unknown=[i for i in request.request_ids if i not in self.tasks],
        )

    async def Get(self, request: Any, context: Any) -> Any:
        for request_id, task_id in self.tasks.items():
            if request.task_id == task_id or request.request_id == request_id:
                outcome = self.outcomes.get(request_id)
                state = task_pb2.TASK_STATE_SETTLED if outcome else task_pb2.TASK_STATE_QUEUED
                task = task_pb2.Task(task_id=task_id, request_id=request_id, state=state, outcome=outcome)
                return task_service_pb2.GetResponse(task=task)
        return await context.abort(grpc.StatusCode.NOT_FOUND, "no such task")

    async def Count(self, request: Any, context: Any) -> Any:
        return task_service_pb2.CountResponse(queued=len(self.tasks))

    def _listed(self, request_id: str) -> task_pb2.Outcome | None:
        outcome = self.outcomes.get(request_id)
        return task_pb2.Outcome(task_id=outcome.task_id, state=outcome.state) if outcome is not None else None

    async def List(self, request: Any, context: Any) -> Any:
        start = int(request.page_token or 0)
        ids = list(self.tasks.items())[start : start + request.page_size]
        more = start + request.page_size < len(self.tasks)
        return task_service_pb2.ListResponse(
            tasks=[task_pb2.Task(task_id=n, request_id=r, outcome=self._listed(r)) for r, n in ids],
            next_page_token=str(start + request.page_size) if more else "",
        )

    async def Watch(self, request: Any, context: Any) -> Any:
        """Sends `watched` in frames of three; a cursor is an index. Breaks after `watch_break_after` outcomes."""
        position = int(request.cursor or 0)
        if position < 0:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "those outcomes were removed")
        self.watches += 1
        self.watchers += 1
        try:
            await self._watch(position, context)
        finally:
            self.watchers -= 1

    async def _watch(self, position: int, context: Any) -> None:
        await context.write(task_service_pb2.WatchResponse(cursor=str(position)))
        sent = 0
        while True:
            frame = self.watched[position : position + 3]
            if frame:
                position += len(frame)
                await context.write(task_service_pb2.WatchResponse(outcomes=frame, cursor=str(position)))
                sent += len(frame)
                if self.watch_break_after and sent >= self.watch_break_after:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted to break")
            else:
                await asyncio.sleep(0.01)


class ThreadedMaster:
    """A ScriptedMaster on its own loop and thread, for tests of the synchronous client."""

    def __init__(self, answer: Answer = echo) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda *_: None)  # gRPC's loops wake each other; see loop_thread
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.master: ScriptedMaster = self.call(self._make(answer))

    async def _make(self, answer: Answer) -> ScriptedMaster:
        return await ScriptedMaster(answer).start()

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)

    def __enter__(self) -> ScriptedMaster:
        return self.master

    def __exit__(self, *_: object) -> None:
        self.call(self.master.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)


def failed(type_: str, message: str = "") -> task_pb2.Outcome:
    return task_pb2.Outcome(
        state=task_pb2.OUTCOME_STATE_FAILED, error=task_pb2.TaskError(type=type_, message=message), attempts=1
    )


def as_json(value: Any) -> task_pb2.Outcome:
    return task_pb2.Outcome(
        state=task_pb2.OUTCOME_STATE_SUCCEEDED,
        result=json.dumps(value).encode(),
        content_type="application/json",
        attempts=1,
    )
