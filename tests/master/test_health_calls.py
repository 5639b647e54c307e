"""The limit of open calls to the gRPC health service, whose peers do not read the responses."""

import asyncio

import pytest
from grpc_health.v1 import health_pb2
from multigpu_master.errors import ExhaustedError
from multigpu_master.rpc.health_service import ALL_CALLS_MAX, CALLS_MAX, Health


class DeafCall:
    """The context of a call whose peer reads no response."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    async def write(self, _message: object) -> None:
        await asyncio.Event().wait()


async def test_open_calls_of_all_connections_are_limited() -> None:
    health = Health()
    health.set("", health_pb2.HealthCheckResponse.SERVING)
    request = health_pb2.HealthCheckRequest()
    calls = [
        asyncio.create_task(health.Check(request, DeafCall(f"ipv4:10.0.0.1:{n // CALLS_MAX}")))
        for n in range(ALL_CALLS_MAX)
    ]
    await asyncio.sleep(0)
    with pytest.raises(ExhaustedError, match="health calls are open"):
        await health.Check(request, DeafCall("ipv4:10.0.0.2:1"))
    calls.pop().cancel()
    await asyncio.sleep(0.01)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(health.Check(request, DeafCall("ipv4:10.0.0.2:1")), 0.05)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_the_connections_of_a_unix_socket_are_not_one() -> None:
    """gRPC gives all of them the same peer."""
    health = Health()
    health.set("", health_pb2.HealthCheckResponse.SERVING)
    request = health_pb2.HealthCheckRequest()
    for peer, error in (("unix:", TimeoutError), ("ipv4:10.0.0.1:1", ExhaustedError)):
        calls = [asyncio.create_task(health.Check(request, DeafCall(peer))) for _ in range(CALLS_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(error):
            await asyncio.wait_for(health.Check(request, DeafCall(peer)), 0.05)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
