"""A write to a peer that is gone logs no error, and the server goes on."""

import asyncio
from typing import Any

import grpc
import pytest
import structlog
from multigpu.v1 import worker_service_pb2
from multigpu_master.rpc.services import add_service

SESSION = "/multigpu.v1.WorkerService/Session"


class Late:
    """A WorkerService that writes to the worker, or ends the session, only when the worker is gone."""

    def __init__(self, *, write: bool) -> None:
        self.tried = asyncio.Event()
        self._write = write

    async def Session(self, context: Any) -> None:  # noqa: N802  gRPC's name
        await context.write(worker_service_pb2.SessionResponse(frame=1).SerializeToString())
        gone = asyncio.Event()
        context.add_done_callback(lambda _: gone.set())
        try:
            await gone.wait()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        try:
            if self._write:
                await context.write(worker_service_pb2.SessionResponse(frame=2).SerializeToString())
            else:
                await context.abort(grpc.StatusCode.ABORTED, "nothing heard")
        finally:
            self.tried.set()


async def serve_and_vanish(*, write: bool, caplog: Any) -> list[Any]:
    """The log lines about a client that disconnects before the write."""
    servicer = Late(write=write)
    server = grpc.aio.server()
    add_service(server, worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"], servicer)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with structlog.testing.capture_logs() as logs:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream(SESSION)()
            await call.read()
            call.cancel()
            await asyncio.wait_for(servicer.tried.wait(), 120)
            # The server still serves.
            again = channel.stream_stream(SESSION)()
            assert await again.read() is not grpc.aio.EOF
            again.cancel()
        await asyncio.sleep(0.1)
    await server.stop(0)
    # gRPC's poller also logs errors about closed event loops of earlier tests.
    errors = [r for r in caplog.records if r.levelname == "ERROR" and "PollerCompletionQueue" not in r.getMessage()]
    return [*logs, *errors]


@pytest.mark.parametrize("write", [False, True])
async def test_a_write_to_a_peer_that_is_gone(caplog: Any, write: bool) -> None:
    assert not await serve_and_vanish(write=write, caplog=caplog)
