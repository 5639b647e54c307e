"""Server-sent events: the events of one task, and the outcomes of all tasks."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from multigpu import errors
from multigpu.outcome import Outcome, TaskName

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import HttpError
from multigpu_gateway.events import send_events
from multigpu_gateway.http import Request
from multigpu_gateway.rest.errors import error_body, rest_error
from multigpu_gateway.rest.requests import OutcomesQuery, query_of, wrong
from multigpu_gateway.rest.values import data_fields, outcome_dict

LAST_EVENT_ID = b"last-event-id"
_encode = msgspec.json.Encoder().encode


def named_event(name: str, value: Any, event_id: str = "") -> bytes:
    """Returns an event. `event_id` "": it has no id, and the client's Last-Event-ID stays as it is."""
    head = f"event: {name}\n" + (f"id: {event_id}\n" if event_id else "")
    return head.encode() + b"data: " + _encode(value) + b"\n\n"


def _error_event(error: HttpError) -> bytes:
    return named_event("error", error_body(error))


async def task_events(request: Request, pair: ClientPair, name: TaskName) -> None:
    """Streams the partial outputs of a task after Last-Event-ID, as they arrive, and then its outcome."""
    last = request.header(LAST_EVENT_ID)
    if last and not (last.isascii() and last.isdecimal() and len(last) < 10):
        raise wrong("Last-Event-ID", f"{last!r} is not the id of an event of a task")
    begin = int(last) + 1 if last else 0
    await send_events(request, _task_events(pair, name, begin), _error_event, b"")


async def _task_events(pair: ClientPair, name: TaskName, begin: int) -> AsyncGenerator[bytes, None]:
    handle = await pair.client.handle(name)
    yield b""  # the task exists
    index = 0
    async with aclosing(handle.follow()) as items:
        async for item in items:
            if isinstance(item, Outcome):
                yield named_event("outcome", _without_partials(item))
                return
            if index >= begin:
                value = {"index": index, "content_type": item.content_type}
                value |= data_fields("data", [item.data], [item.content_type], repeated=False)
                yield named_event("partial", value, str(index))
            index += 1


def _without_partials(outcome: Outcome) -> dict[str, Any]:
    value = outcome_dict(outcome)
    for name in ("partials", "partials_base64", "partial_content_types"):
        value.pop(name, None)
    return value


async def outcomes(request: Request, pair: ClientPair) -> None:
    """Streams the outcomes of durable tasks after a cursor, without end."""
    query = query_of(request, OutcomesQuery)
    if cursor := request.header(LAST_EVENT_ID):
        query.cursor, query.from_now = cursor, False
    if query.from_now and query.cursor:
        raise wrong("from_now", "it goes without a cursor")
    await send_events(request, _outcomes(pair, query), _error_event, b"")


async def _outcomes(pair: ClientPair, query: OutcomesQuery) -> AsyncGenerator[bytes, None]:
    cursor = query.cursor
    if query.from_now:
        cursor = await pair.client.current_cursor()
        yield named_event("cursor", {"cursor": cursor}, cursor)
    # AsyncClient.watch hides empty frames, of which the first shows that the master has accepted the cursor.
    frames = pair.client._core.watch(cursor, from_now=False, queue=query.queue, kind=query.kind)  # noqa: SLF001
    try:
        async with aclosing(frames):
            async for frame in frames:
                if not frame:
                    yield b""
                for outcome, after in frame:
                    yield named_event("outcome", outcome_dict(outcome), after)
    except errors.InvalidTaskError as error:
        raise wrong("cursor", error.message) from error
    except errors.CursorExpiredError as error:
        raise rest_error(error) from error
