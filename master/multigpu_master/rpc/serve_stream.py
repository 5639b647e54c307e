"""The loop that reads and writes a bidirectional stream.

mypyc does not compile this module, which awaits while it handles an exception: see hatch_build.py.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from multigpu_master.errors import call_error
from multigpu_master.outbox import Outbox

F = TypeVar("F")


async def serve_stream(
    context: Any,
    outbox: Outbox[F],
    on_message: Callable[[bytes], Awaitable[None]],
    serialize: Callable[[F], bytes],
) -> None:
    """Serves the stream until the peer has half-closed it and no outcome is pending. Raises the error of `abort`."""

    async def write_frames() -> None:
        while (frame := await outbox.next()) is not None:
            try:
                data = serialize(frame)
            except Exception as error:  # noqa: BLE001  the peer would wait for this frame for ever
                outbox.abort(call_error(error, "a stream"))
                return
            await context.write(data)

    writer = asyncio.create_task(write_frames())

    async def read_messages() -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await on_message(message)
        await outbox.wait_none_pending()
        outbox.finish()
        await writer

    reader = asyncio.create_task(read_messages())
    try:
        ends: list[asyncio.Future[Any]] = [reader, outbox.aborted]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if outbox.aborted.done():
            raise outbox.aborted.result()
        await reader
    finally:
        reader.cancel()
        writer.cancel()
        await asyncio.gather(reader, writer, return_exceptions=True)
