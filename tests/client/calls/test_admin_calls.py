"""Calls of AdminService while the master ends."""

# ruff: noqa: N802  gRPC names the methods

import asyncio
from collections import Counter
from typing import Any

import grpc
import grpc.aio
import pytest
from multigpu import AsyncAdminClient, CallTimeoutError, UnavailableError
from multigpu.fleet import Role
from multigpu.v1 import admin_service_pb2, admin_service_pb2_grpc


class _Stopping(admin_service_pb2_grpc.AdminServiceServicer):
    """A master that ends the first call of each method unanswered."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    async def _answer(self, method: str, response: Any, context: Any) -> Any:
        self.calls[method] += 1
        if self.calls[method] == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the master is stopping")
        return response

    async def ListTokens(self, _request: Any, context: Any) -> Any:
        return await self._answer("ListTokens", admin_service_pb2.ListTokensResponse(), context)

    async def CreateToken(self, _request: Any, context: Any) -> Any:
        return await self._answer("CreateToken", admin_service_pb2.CreateTokenResponse(), context)


async def test_calls_that_are_not_safe_to_repeat_are_made_once() -> None:
    """A second token was made, and nobody saw the first one's secret."""
    master, server = _Stopping(), grpc.aio.server()
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(master, server)  # type: ignore[no-untyped-call]  # generated
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with AsyncAdminClient(address) as client:
            assert await client.list_tokens() == []
            with pytest.raises(UnavailableError, match="may have done it"):
                await client.create_token("ci", [Role.SUBMIT])
    finally:
        await server.stop(None)
    assert master.calls == {"ListTokens": 2, "CreateToken": 1}


async def test_a_call_that_is_made_once_waits_no_longer_than_its_timeout_for_a_connection() -> None:
    async with AsyncAdminClient("127.0.0.1:1", connect_timeout_s=60, timeout=0.1) as client:
        with pytest.raises(CallTimeoutError, match=r"within 0\.1 s"):
            await asyncio.wait_for(client.create_token("ci", [Role.SUBMIT]), 10)
