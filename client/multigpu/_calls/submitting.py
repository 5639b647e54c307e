"""Submitting tasks by the unary Submit, in calls of limited size.

Every input has a request_id: a call whose response was lost is repeated, and gives the same tasks.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from multigpu._transport.connection import UNARY_TIMEOUT_S, Connection
from multigpu.errors import MultigpuError, RejectedError, TransportError
from multigpu.v1 import task_pb2, task_service_pb2

_CALL_TASKS_MAX = 10_000
_CALL_BYTES_MAX = 32 << 20
# How long an undo waits for the pending call, and for each of its own.
_UNDO_TIMEOUT_S = 2.0

SpecAndInput = tuple[task_pb2.TaskSpec, task_pb2.TaskInput]
# From a task_id and a request_id.
MakeHandle = Callable[[int, str], Any]


class Submission:
    """One submit or submit_many: sends requests one after the other, in a `with` block whose cancellation cancels what
    it sent.
    """

    def __init__(self, connection: Connection, timeout_s: float | None, make_handle: MakeHandle) -> None:
        self._connection = connection
        self._make_handle = make_handle
        # What is left for further requests; None: no limit.
        self._left_s = timeout_s
        # A handle or an error for each input.
        self.results: list[Any] = []
        self._request_ids: list[str] = []
        self._pending: asyncio.Future[task_service_pb2.SubmitResponse] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, asyncio.CancelledError):
            await self.undo()
        elif isinstance(error, MultigpuError):
            error.submitted = self.results

    async def send(self, request: task_service_pb2.SubmitRequest) -> None:
        """Adds to `results`. Cancelled, it leaves the call pending, for `undo`."""
        request_ids = [each.request_id for batch in request.batches for each in batch.inputs]
        self._request_ids += request_ids
        begin = time.monotonic()
        limit_s = UNARY_TIMEOUT_S if self._left_s is None else self._left_s
        self._pending = asyncio.ensure_future(self._connection.unary("Submit", request, limit_s))
        response = await asyncio.shield(self._pending)
        if self._left_s is not None:
            self._left_s = max(0.0, self._left_s - (time.monotonic() - begin))
        if len(response.results) != len(request_ids):
            raise TransportError(f"the master answered {len(response.results)} of {len(request_ids)} tasks")
        for each, request_id in zip(response.results, request_ids, strict=True):
            rejected = each.HasField("rejection")
            handle = RejectedError.of(each.rejection) if rejected else self._make_handle(each.task_id, request_id)
            self.results.append(handle)

    async def undo(self) -> None:
        """Cancels every submitted task, once the pending call has ended."""
        if self._pending is not None:
            await asyncio.wait([self._pending], timeout=_UNDO_TIMEOUT_S)
            if not self._pending.cancel():
                self._pending.exception()  # retrieved, for asyncio
        for start in range(0, len(self._request_ids), _CALL_TASKS_MAX):
            part = self._request_ids[start : start + _CALL_TASKS_MAX]
            request = task_service_pb2.CancelRequest(request_ids=part, reason="the submit was cancelled", withdraw=True)
            try:
                await asyncio.wait_for(self._connection.unary("Cancel", request), _UNDO_TIMEOUT_S)
            except (MultigpuError, TimeoutError):
                return  # no connection: the tasks go on, as if this process had died


def cut(inputs: Iterable[SpecAndInput]) -> Iterator[task_service_pb2.SubmitRequest]:
    """Requests of up to 10,000 tasks and 32 MiB; a larger payload goes alone."""
    request = task_service_pb2.SubmitRequest()
    tasks = nbytes = 0
    batch: task_pb2.TaskBatch | None = None
    last_spec: task_pb2.TaskSpec | None = None
    for spec, task_input in inputs:
        size = len(task_input.payload)
        if tasks and (tasks == _CALL_TASKS_MAX or nbytes + size > _CALL_BYTES_MAX):
            yield request
            request = task_service_pb2.SubmitRequest()
            tasks = nbytes = 0
            batch = None
        if batch is None or spec is not last_spec:
            batch = request.batches.add()
            batch.spec.CopyFrom(spec)
            last_spec = spec
        batch.inputs.append(task_input)
        tasks += 1
        nbytes += size
    if tasks:
        yield request


def single(results: list[Any]) -> Any:
    """The handle of the only task submitted. Raises its RejectedError."""
    (result,) = results
    if isinstance(result, RejectedError):
        raise result
    return result
