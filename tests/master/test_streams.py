"""Streams that end in two ways at once."""

import asyncio
from typing import Any

import grpc
import pytest
from multigpu.v1 import worker_service_pb2
from multigpu_master.rpc.outbox import Outbox
from multigpu_master.rpc.status import reject
from multigpu_master.rpc.streams import serve_stream


async def test_a_call_that_is_rejected_while_its_stream_is_ended_is_rejected_once() -> None:
    """A worker whose session is taken over while the master rejects what it said."""
    ends: list[BaseException] = []

    async def handler(_requests: Any, context: Any) -> None:
        outbox: Outbox[Any] = Outbox(worker_service_pb2.SessionResponse, None)  # type: ignore[arg-type]  # nothing large

        async def on_message(_data: bytes) -> None:
            outbox.abort("ABORTED", "taken over")
            await reject(context, grpc.StatusCode.INVALID_ARGUMENT, "no such thing")

        try:
            await serve_stream(context, outbox, on_message, lambda frame: frame.SerializeToString())
        except BaseException as error:
            ends.append(error)
            raise

    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Call": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream("/test/Call")()
            await call.write(b"x")
            with pytest.raises(grpc.aio.AioRpcError) as told:
                async with asyncio.timeout(10):
                    await call.read()
    finally:
        await server.stop(0)
    assert told.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED)
    assert [type(error) for error in ends] == [grpc.aio.AbortError]
