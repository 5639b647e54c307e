"""Watching outcomes from a cursor on, over broken streams, without gap or repetition.

The master's cursors stand after a whole frame of outcomes; the client's stand after each outcome: the cursor of the
frame before, how many outcomes to skip, and the last of them. The order of outcomes after a cursor never changes.
"""

import asyncio
import re
from collections.abc import AsyncGenerator

import grpc
import grpc.aio

from multigpu._transport.connection import RETRYABLE_CODES, UNARY_TIMEOUT_S, Connection, backoff_s, cut_off
from multigpu.errors import ClientClosedError, CursorExpiredError, TransportError
from multigpu.outcome import Outcome
from multigpu.v1 import task_service_pb2

# A client's cursor that points inside a frame is "<cursor>#<outcomes to skip>.<task_id of the last of them>".
_MARK = "#"
_MARKED = re.compile(rf"(.*){_MARK}([0-9]{{1,20}})\.([0-9]{{1,20}})", re.DOTALL)
# Consecutive streams without a response that end in another way than UNAVAILABLE.
_FAILURES_MAX = 8
_SKIPPED_ANOTHER = (
    "the outcome at this cursor is not in the journal: it was removed, or an older copy of the journal was restored; "
    "begin with an empty cursor, which gives the oldest outcome that is there"
)


async def frames(
    connection: Connection, request: task_service_pb2.WatchRequest
) -> AsyncGenerator[list[tuple[Outcome, str]], None]:
    """Yields lists of (outcome, cursor), for ever. Lists may be empty. The first list shows that the master has
    accepted the cursor. Raises CursorExpiredError, TransportError.
    """
    request.cursor, skip, last_task_id = _parse(request.cursor)
    give_up = asyncio.get_running_loop().time() + connection.connect_timeout_s
    reached = False
    failures = odd_failures = 0
    while True:
        stream = connection.stub.Watch(request, metadata=connection.metadata())
        try:
            async for response in stream:
                reached = True
                failures = odd_failures = 0
                frame, skip = _frame(request, response, skip, last_task_id)
                if response.cursor:
                    request.cursor, request.from_now = response.cursor, False
                if not skip:
                    yield frame
        except grpc.aio.AioRpcError:
            pass  # stream.code() has the status
        except asyncio.CancelledError:
            if not cut_off():
                raise
        finally:
            stream.cancel()
        code = await stream.code()
        failures += 1
        odd_failures = 0 if code is grpc.StatusCode.UNAVAILABLE else odd_failures + 1
        if code not in RETRYABLE_CODES or odd_failures > _FAILURES_MAX:
            raise connection.explain(code, await stream.details())
        if not reached and asyncio.get_running_loop().time() > give_up:
            raise connection.explain(grpc.StatusCode.UNAVAILABLE, await stream.details())
        await asyncio.sleep(backoff_s(failures))
        connection.refresh()


async def current_cursor(connection: Connection, timeout_s: float | None) -> str:
    """The cursor after the newest outcome. Raises CallTimeoutError, TransportError."""
    timeout_s = UNARY_TIMEOUT_S if timeout_s is None else timeout_s
    request = task_service_pb2.WatchRequest(from_now=True)
    stream = connection.stub.Watch(request, timeout=timeout_s, metadata=connection.metadata())
    try:
        response = await anext(aiter(stream))
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise connection.late(timeout_s) from None
        raise connection.explain(error.code(), error.details()) from None
    except asyncio.CancelledError:
        if not cut_off():
            raise
        if connection.closed:
            raise ClientClosedError("the client was closed before the call ended") from None
        raise connection.explain(grpc.StatusCode.UNAVAILABLE, "the connection was closed") from None
    finally:
        stream.cancel()
    return str(response.cursor)


def _frame(
    request: task_service_pb2.WatchRequest, response: task_service_pb2.WatchResponse, skip: int, last_task_id: int
) -> tuple[list[tuple[Outcome, str]], int]:
    """The outcomes of a frame, each with its cursor, without those to skip; and how many are still to be skipped."""
    frame: list[tuple[Outcome, str]] = []
    outcomes = response.outcomes
    if outcomes and request.from_now:
        raise TransportError("the master sent outcomes before a cursor: it speaks another protocol")
    for index, message in enumerate(outcomes, start=1):
        if skip:
            skip -= 1
            if not skip and message.task_id != last_task_id:
                raise CursorExpiredError(_SKIPPED_ANOTHER)
            continue
        is_last = index == len(outcomes)
        cursor = response.cursor if is_last else f"{request.cursor}{_MARK}{index}.{message.task_id}"
        frame.append((Outcome(message), cursor))
    return frame, skip


def _parse(cursor: str) -> tuple[str, int, int]:
    """The master's part of a cursor, how many outcomes to skip, and the task_id of the last of them."""
    marked = _MARKED.fullmatch(cursor)
    return (marked[1], int(marked[2]), int(marked[3])) if marked else (cursor, 0, 0)
