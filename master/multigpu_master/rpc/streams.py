"""A bidirectional stream: reads messages into a function and writes frames from an outbox."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from multigpu_master.rpc.outbox import Outbox, StreamClosedError

F = TypeVar("F")


async def serve_stream(
    context: Any,
    outbox: Outbox[F],
    on_message: Callable[[bytes], Awaitable[None]],
    serialize: Callable[[F], bytes],
) -> None:
    """Serves the stream until the peer has half-closed and has every pending outcome, or the outbox is aborted: the
    call ends with the status of the abort.
    """
    handler = asyncio.current_task()
    assert handler is not None, "handlers run in a task"
    aborted: StreamClosedError | None = None

    def on_abort(reason: StreamClosedError) -> None:
        nonlocal aborted
        aborted = reason
        handler.cancel()

    async def write_frames() -> None:
        with contextlib.suppress(StreamClosedError):
            while True:
                await context.write(serialize(await outbox.next()))

    outbox.on_abort = on_abort
    writer = asyncio.ensure_future(write_frames())
    try:
        while (message := await context.read()) is not grpc.aio.EOF:
            await on_message(message)
        if outbox.pending_outcomes > 0:
            await outbox.no_pending_outcomes()
        outbox.finish()
        await writer
    except asyncio.CancelledError:
        if aborted is None:
            raise
        handler.uncancel()
    finally:
        outbox.on_abort = None
        writer.cancel()
        # Its exception only says that the peer is gone.
        await asyncio.gather(writer, return_exceptions=True)
    if aborted is not None:
        try:
            await context.abort(grpc.StatusCode[aborted.code], str(aborted))
        except grpc.aio.UsageError as error:  # `on_message` had rejected the call at the same time
            raise grpc.aio.AbortError("it was rejected already") from error
