"""What a client is made of: one connection, one window, one Run stream, and the calls that go over them.

Everything here runs on one event loop, except that `calls` and `map_buffer` may be used on another thread.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from multigpu._calls import watching
from multigpu._calls.calls import (
    CallFactory,
    Encode,
    FollowCall,
    FollowMapCall,
    FollowStreamCall,
    FutureCall,
    StreamCall,
)
from multigpu._calls.mapping import AsyncMap, MapBuffer, MapCall
from multigpu._calls.progress import ProgressBar
from multigpu._calls.streaming import Part
from multigpu._calls.submitting import MakeHandle, Submission
from multigpu._calls.timeouts import CANCELLED, GOES_ON, pop_timeout, within
from multigpu._encoding import RAW
from multigpu._transport import forks
from multigpu._transport.call import Answer, Call
from multigpu._transport.connection import UNARY_TIMEOUT_S, Connection
from multigpu._transport.credentials import Credentials
from multigpu._transport.run_stream import RunStream, closed_error
from multigpu._transport.traceparent import current_traceparent
from multigpu._transport.window import Window
from multigpu.config.config import ConfigError, load_client_config
from multigpu.config.settings import ClientConfig
from multigpu.errors import ClientClosedError, MultigpuError, NotFoundError, TransportError
from multigpu.options import AnyIterable, to_proto_duration
from multigpu.outcome import Outcome, TaskError, TaskName
from multigpu.task import Task
from multigpu.v1 import admin_service_pb2, task_service_pb2

T = TypeVar("T")
# The longest wait of one Get. A longer one is repeated, so that a dead connection is noticed.
_GET_WAIT_S = 30.0
PAGE_SIZE_MAX = 1000
# More than the 10 s after which the master rejects a call that finds no disk space.
ADMIN_TIMEOUT_S = 15.0
# Tasks in one Cancel call.
_CANCEL_TASKS_MAX = 10_000


class Core:
    def __init__(
        self, settings: Mapping[str, Any], token: str | None, timeout_s: float | None, connect_timeout_s: float,
        defaults: Mapping[str, Any], connection: Connection | None = None, *, wait_when_full: bool = True,
    ) -> None:  # fmt: skip
        """`settings`: of ClientConfig, where they differ from the configuration. `defaults`: SpecOptions. `connection`:
        not to a master, so no configuration is loaded.
        """
        forks.holds(self)
        if not (isinstance(connect_timeout_s, int | float) and connect_timeout_s >= 0):
            raise ConfigError(f"connect_timeout_s: {connect_timeout_s!r} is not a number of seconds")
        config = dataclasses.replace(load_client_config() if connection is None else ClientConfig(), **settings)
        if token is not None:
            config = dataclasses.replace(config, token_file="")
        if timeout_s is not None:
            defaults = {"timeout": timeout_s, **defaults}
        self.window = Window(config.max_in_flight, config.max_in_flight_bytes)
        if connection is None:
            credentials = Credentials.of_client(config) if token is None else Credentials.of(config, token=token)
            connection = Connection(config.master, connect_timeout_s, credentials)
        self.connection = connection
        self.stream = RunStream(self.connection, self.window, wait_when_full=wait_when_full)
        # Calls of other threads that wait for the window.
        self._waiting: dict[Call, asyncio.Task[None]] = {}
        self._set_defaults(defaults)

    def _set_defaults(self, defaults: Mapping[str, Any]) -> None:
        own = dict(defaults)
        self._timeout_s = pop_timeout(own)
        self.calls = CallFactory(own)
        self._defaults = defaults

    def with_options(self, options: Mapping[str, Any]) -> Core:
        """The same connection, with other defaults for calls."""
        other = copy.copy(self)
        other._set_defaults({**self._defaults, **options})  # noqa: SLF001  its own class
        return other

    @property
    def master(self) -> str:
        return self.connection.master

    async def leave(self, _exc_type: type[BaseException] | None) -> None:
        """The end of the client's `with` block."""
        await self.close()

    async def close(self) -> None:
        if forks.lost():
            return  # the connection is the parent's
        # Maps that were left early, by an iterator that still has a name.
        self.stream.abandon_where(lambda call: isinstance(call, MapCall) and call.buffer.begun)
        await self.stream.close()
        await self.connection.close()

    async def run(self, kind: str, payload: Any, options: dict[str, Any], traceparent: str) -> Outcome:
        self.connection.check()
        timeout_s = self.pop_timeout(options)
        return await self._outcome(
            self.calls.one(FutureCall, kind, payload, options, traceparent), timeout_s, CANCELLED
        )

    def start(self, call: Call) -> None:
        """Starts a call from another thread. An error is its answer."""
        try:
            self.connection.check()
            if not self.stream.try_start(call):
                waiting = self._waiting[call] = asyncio.create_task(self.stream.start((call,)))
                waiting.add_done_callback(partial(self._started, call))
        except ClientClosedError as error:
            call.settle(error)

    def _started(self, call: Call, waiting: asyncio.Task[None]) -> None:
        del self._waiting[call]
        error = closed_error() if waiting.cancelled() else waiting.exception()
        if error is not None:
            assert isinstance(error, MultigpuError), "starting a call raises nothing else"
            call.settle(error)

    async def withdraw(self, call: Call) -> None:
        """The caller of `start` has left. Harmless if the call is settled."""
        waiting = self._waiting.get(call)
        if waiting is None or not waiting.cancel():  # it may have ended, and _started is about to run
            self.stream.withdraw(call)

    def rejection(self, call: Call) -> str:
        """Why the call does not reach the master now, or ""."""
        return self.stream.rejection(lambda each: each is call)

    async def _answer(self, call: FutureCall) -> Answer:
        if not self.stream.try_start(call):
            await self.stream.start((call,))
        return await call.future

    async def parts(
        self, kind: str, payload: Any, options: dict[str, Any], traceparent: str
    ) -> AsyncGenerator[Part | Outcome, None]:
        """The partial outputs of a task, and at last the outcome of one that SUCCEEDED."""
        self.connection.check()
        timeout_s = self.pop_timeout(options)
        call = self.calls.one(StreamCall, kind, payload, options, traceparent)
        try:
            rejection = partial(self.rejection, call)
            await within(timeout_s, self.stream.start((call,)), rejection)
            while isinstance(item := await within(timeout_s, call.next_item(), rejection), Part):
                yield item
            yield item
        finally:
            if not call.done:
                self.stream.withdraw(call)

    async def follow(self, task_id: int, request_id: str, timeout_s: float | None) -> Outcome:
        """The outcome of a task that was submitted before."""
        self.connection.check()
        timeout_s = self._timeout_of(timeout_s)
        if request_id:
            found = await self._outcome(FollowCall(request_id), timeout_s, GOES_ON)
            if found.task_id == task_id:
                return found
        # It has no request_id, or has ended before another task got the same one.
        return await within(timeout_s, self._ended(task_id), lambda: "", GOES_ON)

    async def _ended(self, task_id: int) -> Outcome:
        while (found := (await self.get(task_id, _GET_WAIT_S, None)).outcome) is None:
            pass
        return found

    async def follow_parts(
        self, task_id: int, request_id: str, timeout_s: float | None
    ) -> AsyncGenerator[Part | Outcome, None]:
        """The partial outputs of a task that was submitted before, and at last its outcome, whatever it is."""
        self.connection.check()
        timeout_s = self._timeout_of(timeout_s)
        # A task that has ended may have left its request_id to another task, and one without can't be followed.
        ended = (await self.get(task_id, 0.0, timeout_s)).outcome
        if ended is None and not request_id:
            ended = await within(timeout_s, self._ended(task_id), lambda: "", GOES_ON)
        if ended is not None:
            message = ended.message
            types = message.partial_content_types or [RAW] * len(message.partials)
            for data, content_type in zip(message.partials, types, strict=True):
                yield Part(data, content_type)
            yield ended
            return
        call = FollowStreamCall(request_id)
        rejection = partial(self.rejection, call)
        try:
            await within(timeout_s, self.stream.start((call,)), rejection, GOES_ON)
            while isinstance(item := await within(timeout_s, call.next_item(), rejection, GOES_ON), Part):
                yield item
            yield item if item.task_id == task_id else await self._ended(task_id)
        finally:
            if not call.done:
                self.stream.withdraw(call)

    async def _outcome(self, call: FutureCall, timeout_s: float | None, fate: str) -> Outcome:
        try:
            answer: Answer = await within(timeout_s, self._answer(call), partial(self.rejection, call), fate)
        finally:
            if not call.done:
                self.stream.withdraw(call)
        return outcome(answer)

    def follow_buffer(
        self, ordered: bool, timeout_s: float | None, total: bool
    ) -> tuple[MapBuffer, Callable[[Any], Any]]:  # fmt: skip
        """As map_buffer, for a map of handles to handles whose tasks have ended. `total`: the timeout is of all."""
        buffer = MapBuffer(
            FollowMapCall, ordered=ordered, tasks_max=self.window.tasks_max, bytes_max=self.window.bytes_max,
            timeout_s=self._timeout_of(timeout_s), total=total, fate=GOES_ON,
        )  # fmt: skip

        def convert(answer: Any) -> Any:
            if isinstance(answer, FollowMapCall):
                return answer.handle
            raise answer

        return buffer, convert

    def pop_timeout(self, options: Any) -> float | None:
        """Removes `timeout` from the options of a call. Returns it, or else the client's."""
        return pop_timeout(options, self._timeout_s)

    def _timeout_of(self, timeout_s: float | None) -> float | None:
        return self.pop_timeout({"timeout": timeout_s})

    def _unary(self, method: str, request: Any, timeout_s: float | None, wait_s: float = 0.0) -> Awaitable[Any]:
        """Calls a method of TaskService that may take `wait_s`."""
        limit_s = self._timeout_of(timeout_s)
        return self.connection.unary(method, request, (UNARY_TIMEOUT_S if limit_s is None else limit_s) + wait_s)

    def submission(self, timeout_s: float | None, make_handle: MakeHandle) -> Submission:
        return Submission(self.connection, timeout_s, make_handle)

    def map(
        self, kind: str, payloads: AnyIterable[Any], options: Any, read: Callable[[Outcome], T], encode: Encode | None,
        bar: ProgressBar | None,
    ) -> AsyncGenerator[T, None]:  # fmt: skip
        buffer, convert = self.map_buffer(kind, options, read, encode)
        results = AsyncMap(self.stream, buffer).run(payloads, convert)
        return results if bar is None else bar.of_async(results)

    def map_buffer(
        self, kind: str, options: Any, read: Callable[[Outcome], T], encode: Encode | None
    ) -> tuple[MapBuffer, Callable[[Answer], T]]:
        """The buffer of a map, and what it yields for an answer. `options`: SpecMapOptions; `read`: of an outcome."""
        timeout_s, window = self.pop_timeout(options), options.pop("max_in_flight", None)
        ordered, return_errors = options.pop("ordered", True), options.pop("return_exceptions", False)
        make_call = self.calls.many(kind, options, current_traceparent(), encode, answer_errors=return_errors)
        if window is not None and window < 1:
            raise ValueError(f"max_in_flight is {window}; it must be at least 1")
        tasks_max = min(window or self.window.tasks_max, self.window.tasks_max)
        bytes_max = self.window.bytes_max
        buffer = MapBuffer(make_call, ordered=ordered, tasks_max=tasks_max, bytes_max=bytes_max, timeout_s=timeout_s)

        def convert(answer: Answer) -> Any:
            try:
                return read(outcome(answer))
            except (TransportError, ClientClosedError):
                raise  # no item is at fault, and the next one would meet it too
            except Exception as error:
                if return_errors and (error is answer or isinstance(error, TaskError)):
                    return error.with_traceback(None)
                raise

        return buffer, convert

    async def get(self, task: TaskName, wait_s: float, timeout_s: float | None, rank: int = 0) -> Task:
        give_up = time.monotonic() + wait_s
        request = task_service_pb2.GetRequest(rank=rank)
        task = _named(task)
        if isinstance(task, str):
            request.request_id = task
        else:
            request.task_id = task
        while True:
            left_s = max(0.0, min(give_up - time.monotonic(), _GET_WAIT_S))
            request.wait.CopyFrom(to_proto_duration(left_s))
            try:
                response = await self._unary("Get", request, timeout_s, left_s)
            except NotFoundError as error:
                if isinstance(task, str) and task.isdecimal():
                    raise NotFoundError(f"{error}. A str is a request_id; a task_id is an int: {task}") from error
                raise
            found = Task(response.task)
            if found.outcome is not None or time.monotonic() >= give_up:
                return found

    async def cancel(
        self, tasks: tuple[TaskName, ...], reason: str, timeout_s: float | None
    ) -> task_service_pb2.CancelResponse:
        response = task_service_pb2.CancelResponse()
        for at in range(0, len(tasks), _CANCEL_TASKS_MAX):
            chunk = [_named(task) for task in tasks[at : at + _CANCEL_TASKS_MAX]]
            request = task_service_pb2.CancelRequest(
                task_ids=[task for task in chunk if isinstance(task, int)],
                request_ids=[task for task in chunk if isinstance(task, str)],
                reason=reason,
            )
            response.MergeFrom(await self._unary("Cancel", request, timeout_s))
        return response

    async def count(
        self, task_filter: task_service_pb2.TaskFilter, timeout_s: float | None
    ) -> task_service_pb2.CountResponse:
        request = task_service_pb2.CountRequest(filter=task_filter)
        response: task_service_pb2.CountResponse = await self._unary("Count", request, timeout_s)
        return response

    async def page(self, request: task_service_pb2.ListRequest, timeout_s: float | None) -> tuple[list[Task], str]:
        response = await self._unary("List", request, timeout_s)
        return [Task(message, listed=True) for message in response.tasks], str(response.next_page_token)

    async def pages(
        self, task_filter: task_service_pb2.TaskFilter, timeout_s: float | None, *, oldest_first: bool
    ) -> AsyncGenerator[list[Task], None]:
        request = task_service_pb2.ListRequest(filter=task_filter, page_size=PAGE_SIZE_MAX, oldest_first=oldest_first)
        while True:
            tasks, request.page_token = await self.page(request, timeout_s)
            yield tasks
            if not request.page_token:
                return

    async def current_cursor(self, timeout_s: float | None) -> str:
        return await watching.current_cursor(self.connection, self._timeout_of(timeout_s))

    async def admin(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """Calls a method of AdminService."""
        limit_s = self._timeout_of(timeout_s)
        limit_s = ADMIN_TIMEOUT_S if limit_s is None else limit_s
        return await self.connection.unary(method, request, limit_s, service="admin")

    async def explain(self, task_id: int, timeout_s: float | None) -> Any:
        return await self.admin("Explain", admin_service_pb2.ExplainRequest(task_id=task_id), timeout_s)

    async def admin_pages(self, method: str, request: Any) -> AsyncGenerator[Any, None]:
        """The responses of a method that lists or changes page by page."""
        if "page_size" in request.DESCRIPTOR.fields_by_name:
            request.page_size = PAGE_SIZE_MAX
        while True:
            page = await self.admin(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def watch(
        self, cursor: str, from_now: bool, queue: str, kind: str
    ) -> AsyncGenerator[list[tuple[Outcome, str]], None]:
        request = task_service_pb2.WatchRequest(cursor=cursor, from_now=from_now, queue=queue, kind=kind)
        return watching.frames(self.connection, request)


def _named(task: TaskName) -> int | str:
    if isinstance(task, int) and not isinstance(task, bool):
        if not 0 < task < 1 << 64:
            raise NotFoundError(f"no task has the task_id {task}")
        return task
    if isinstance(task, str):
        return task
    if isinstance(task, uuid.UUID):
        return str(task)
    raise TypeError(f"a task is named by its task_id (int) or its request_id (str or UUID), not {task!r}")


def outcome(answer: Answer) -> Outcome:
    """An answer that is an outcome. Raises one that is an error."""
    if isinstance(answer, Outcome):
        return answer
    raise answer
