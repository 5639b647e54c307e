"""Both ways of a bidirectional stream: frames in to a function, frames out from an outbox."""

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
    """Feeds every message of the stream to `on_message` and writes the outbox's frames, until the peer half-closes and
    owes and is owed nothing, or the outbox is aborted (then the call ends with that status).
    """
    handler = asyncio.current_task()
    assert handler is not None, "handlers run in a task"
    aborted: StreamClosedError | None = None

    def on_abort(reason: StreamClosedError) -> None:
        nonlocal aborted
        aborted = reason
        handler.cancel()

    async def pump() -> None:
        with contextlib.suppress(StreamClosedError):
            while True:
                await context.write(serialize(await outbox.next()))

    outbox.on_abort = on_abort
    writer = asyncio.ensure_future(pump())
    try:
        while (message := await context.read()) is not grpc.aio.EOF:
            await on_message(message)
        if outbox.owed > 0:
            await outbox.settled_up()
        outbox.finish()
        await writer
    except asyncio.CancelledError:
        if aborted is None:
            raise
        handler.uncancel()
    finally:
        outbox.on_abort = None
        writer.cancel()
        # The peer may be gone: whatever the writer met then is of no interest.
        await asyncio.gather(writer, return_exceptions=True)
    if aborted is not None:
        try:
            await context.abort(grpc.StatusCode[aborted.code], str(aborted))
        except grpc.aio.UsageError as error:  # `on_message` was about to reject the call, and has told the peer
            raise grpc.aio.AbortError("it was rejected already") from error
