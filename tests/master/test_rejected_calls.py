"""A rejected call leaves no reference cycle behind."""

import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from multigpu.daemon.grpc_server import Server
from multigpu.v1 import task_service_pb2
from multigpu_master.errors import NotFoundError
from multigpu_master.rpc.services import add_service

SERVICE = task_service_pb2.DESCRIPTOR.services_by_name["TaskService"]
METADATA = (("x-kept", "v" * 100),)


class _Local:
    """Lives as long as the frame that refers to it."""


class Rejecting:
    def __init__(self) -> None:
        self.seen: list[weakref.ref[_Local]] = []

    def __getattr__(self, name: str) -> Any:
        async def method(*_args: Any) -> None:
            local = _Local()
            self.seen.append(weakref.ref(local))
            try:
                int("no number: the context of what follows")
            except ValueError:
                raise NotFoundError("no")  # noqa: B904  its context must go, too

        return method


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Rejecting, grpc.aio.Channel]]:
    server, servicer = Server(100), Rejecting()
    add_service(server, SERVICE, servicer)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield servicer, channel
    await server.stop(0)


async def _rejected(channel: grpc.aio.Channel, path: str) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.stream_unary(path)(iter([b""]), metadata=METADATA)
    code: grpc.StatusCode = caught.value.code()
    del caught
    return code


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("method", ["Get", "List", "Cancel", "Submit", "Run", "Watch"])
async def test_a_rejected_call_keeps_no_frames(served: tuple[Rejecting, grpc.aio.Channel], method: str) -> None:
    servicer, channel = served
    for _ in range(3):
        assert await _rejected(channel, f"/{SERVICE.full_name}/{method}") is grpc.StatusCode.NOT_FOUND
    # The last call may not have ended.
    await _rejected(channel, "/no.such.Service/Method")
    assert len(servicer.seen) == 3
    assert not any(ref() for ref in servicer.seen)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("path", [f"/{SERVICE.full_name}/Get", "/no.such.Service/Method"])
async def test_no_call_keeps_its_metadata(served: tuple[Rejecting, grpc.aio.Channel], path: str) -> None:
    _, channel = served
    for _ in range(20):
        await _rejected(channel, path)
    left = [o for o in gc.get_objects() if type(o).__name__ == "_HandlerCallDetails"]
    assert len(left) < 5, "gRPC's own search for handlers makes a cycle with the metadata of each call"
