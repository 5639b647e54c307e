"""A bidirectional stream: reads messages into a function and writes frames from an outbox."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from multigpu_master.rpc.outbox import Outbox

F = TypeVar("F")


async def serve_stream(
    context: Any,
    outbox: Outbox[F],
    on_message: Callable[[bytes], Awaitable[None]],
    serialize: Callable[[F], bytes],
) -> None:
    """Serves the stream until the peer has half-closed and has every pending outcome. CallError: it was aborted."""

    async def write_frames() -> None:
        while (frame := await outbox.next()) is not None:
            await context.write(serialize(frame))

    writer = asyncio.create_task(write_frames())

    async def read_messages() -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await on_message(message)
        if outbox.pending_outcomes > 0:
            await outbox.no_pending_outcomes()
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
