"""The gateway's connections to the master. Each token has its own clients, so that the master itself checks the roles,
queues and rates of every token.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from multigpu import AsyncAdminClient, AsyncClient, errors
from multigpu.config.config import GatewayConfig

# Of the tokens whose clients are unused, this many keep them open: those that were used last.
UNUSED_MAX = 256
CHECK_TIMEOUT_S = 2.0
# How long a master that rejected a call without a token is taken to reject others.
TOKENS_ASKED_S = 10.0
# Limits of the SDK on a token's tasks in flight and their bytes: so high that the master's limits apply first.
TASKS_MAX, BYTES_MAX = 1_000_000, 1 << 30


class ClientPair:
    """The clients of one token, which all its requests share."""

    def __init__(self, settings: dict[str, Any], token: str) -> None:
        limits: dict[str, Any] = {"max_in_flight": TASKS_MAX, "max_in_flight_bytes": BYTES_MAX}
        self.client = AsyncClient(token=token, wait_when_full=False, **limits, **settings)
        self.admin = AsyncAdminClient(token=token, **settings)
        self.users = 0

    async def close(self) -> None:
        await self.client.close()
        await self.admin.close()


class Clients:
    """The clients of every token. The token "" stands for requests without one."""

    def __init__(self, config: GatewayConfig) -> None:
        self._settings: dict[str, Any] = {"master": config.master, "connect_timeout_s": config.connect_timeout_s}
        self._settings |= {name: getattr(config, name) for name in ("tls_ca", "tls_cert", "tls_key")}
        self._by_token: OrderedDict[str, ClientPair] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        # By the loop's clock.
        self._tokens_asked_until_s = 0.0

    @contextlib.asynccontextmanager
    async def acquire(self, token: str) -> AsyncIterator[ClientPair]:
        """Yields the clients of a token. They stay open until the block ends."""
        found = self._by_token.get(token)
        if found is None:
            found = self._by_token[token] = ClientPair(self._settings, token)
        self._by_token.move_to_end(token)
        found.users += 1
        try:
            yield found
        finally:
            found.users -= 1
            self._close_unused()

    async def asks_for_tokens(self, timeout_s: float | None = None) -> bool:
        """Whether the master rejects calls without a token, or did so in the last TOKENS_ASKED_S. Raises MultigpuError
        if it does not answer within `timeout_s`; None: as long as any call waits.
        """
        now_s = asyncio.get_running_loop().time()
        if timeout_s is None and now_s < self._tokens_asked_until_s:
            return True
        async with self.acquire("") as connected:
            try:
                await connected.client.count(timeout=timeout_s)
            except errors.AccessError:
                self._tokens_asked_until_s = now_s + TOKENS_ASKED_S
                return True
        return False

    async def check_master(self) -> None:
        """Raises MultigpuError if the master does not answer. Needs no token."""
        await self.asks_for_tokens(CHECK_TIMEOUT_S)

    def _close_unused(self) -> None:
        if len(self._by_token) <= UNUSED_MAX:
            return
        unused = [token for token, each in self._by_token.items() if not each.users]
        for token in unused[: max(0, len(unused) - UNUSED_MAX)]:
            close = self._by_token.pop(token).close()
            task = asyncio.get_running_loop().create_task(close, name="close an unused connection")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._closing, *(each.close() for each in self._by_token.values()))
        self._by_token.clear()
