"""Answers that are streams of server-sent events."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from multigpu_gateway.errors import HttpError, http_error
from multigpu_gateway.http import Request

_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """An event with a JSON value."""
    return b"data: " + _encode(value) + b"\n\n"


async def send_events(
    request: Request, events: AsyncGenerator[bytes, None], error_of: Callable[[HttpError], bytes], end: bytes
) -> None:
    """Answers with these events, and `end` after the last one. An error before the first event is raised, so that the
    answer has its status, unless it has begun by then; a later one is an event. HEAD gets the status 200.
    """
    async with aclosing(events), request.while_connected(events=True):
        if request.method == "HEAD":
            await request.begin_events()
            await request.write(b"", more=False)
            return
        try:
            async for data in events:
                await request.begin_events()
                await request.write(data)
            await request.begin_events()
        except Exception as error:
            failure = http_error(error)
            if not request.responded:
                raise failure from error
            await request.write(error_of(failure))
        await request.write(end, more=False)
