"""The gateway's connections to the master, one for each token."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from multigpu.config.config import GatewayConfig
from multigpu.errors import AccessError
from multigpu_gateway import clients
from multigpu_gateway.clients import Clients
from multigpu_gateway.errors import http_error
from multigpu_gateway.main import check_tokens


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


async def test_a_gateway_whose_own_files_are_wrong_does_not_take_that_for_a_master_with_tokens(tmp_path: Path) -> None:
    config = GatewayConfig(http="0.0.0.0:0", master="127.0.0.1:1", tls_ca=str(tmp_path / "missing"))
    kept = Clients(config)
    with pytest.raises(AccessError, match="missing") as caught:
        await kept.check_master()
    await kept.close()
    found = http_error(caught.value)
    assert (found.status, found.code) == (503, "master_unavailable")
    assert str(tmp_path) not in found.message, "callers see no paths"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(check_tokens(config), 0.5)
