"""Responses that are streams of server-sent events."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from multigpu_gateway.errors import HttpError, http_error
from multigpu_gateway.http import Request

_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """Returns an event whose data is the value in JSON."""
    return b"data: " + _encode(value) + b"\n\n"


async def send_events(
    request: Request, events: AsyncGenerator[bytes, None], error_of: Callable[[HttpError], bytes], end: bytes
) -> None:
    """Responds with these events and then `end`. The response begins with the first item of `events`, which may be
    b"": the request is valid. Raises an error that occurs before the response has begun, so that the response can have
    the error's status; sends a later error as an event. HEAD: ends the response when it has begun.
    """
    async with aclosing(events), request.while_connected(events=True):
        try:
            async for data in events:
                await request.begin_events()
                if request.method == "HEAD":
                    break
                if data:
                    await request.write(data)
            await request.begin_events()
        except Exception as error:
            failure = http_error(error)
            if not request.responded:
                raise failure from error
            await request.write(error_of(failure))
        await request.write(end, more=False)
