"""The gateway's connections to the master, one for each token."""

from contextlib import AsyncExitStack

import pytest
from multigpu.config.config import GatewayConfig
from multigpu_gateway import clients
from multigpu_gateway.clients import Clients


async def test_unused_connections_are_closed_though_older_ones_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long streams kept all that were opened after them."""
    monkeypatch.setattr(clients, "UNUSED_MAX", 2)
    kept = Clients(GatewayConfig(master="127.0.0.1:1"))
    async with AsyncExitStack() as streams:
        for n in range(3):
            await streams.enter_async_context(kept.acquire(f"stream {n}"))
        for n in range(5):
            async with kept.acquire(f"call {n}"):
                pass
        assert list(kept._by_token) == ["stream 0", "stream 1", "stream 2", "call 3", "call 4"]
    await kept.close()


async def test_a_master_that_requires_tokens_is_not_asked_for_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that keeps its Host has each of its requests checked."""
    kept = Clients(GatewayConfig(master="127.0.0.1:1"))
    answers = iter([False, True])  # no third question

    async def rejects(_timeout_s: float | None) -> bool:
        return next(answers)

    monkeypatch.setattr(kept, "_rejects_no_token", rejects)
    assert [await kept.requires_tokens() for _ in range(4)] == [False, True, True, True]
    await kept.close()
