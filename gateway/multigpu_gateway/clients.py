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
# After the master has rejected a call without a token, it is asked again after this time at the earliest.
TOKENS_KNOWN_S = 10.0
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
        # Until then, by the loop's clock, the master is known to require tokens.
        self._tokens_known_until_s = 0.0

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

    async def requires_tokens(self) -> bool:
        """Whether the master rejects calls without a token, or did so in the last TOKENS_KNOWN_S. Waits for a master
        that restarts, as any call does. Raises MultigpuError if it does not answer.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._tokens_known_until_s and await self._rejects_no_token(None):
            self._tokens_known_until_s = now_s + TOKENS_KNOWN_S
        return now_s < self._tokens_known_until_s

    async def check_master(self) -> None:
        """Raises MultigpuError if the master does not answer. Needs no token."""
        await self._rejects_no_token(CHECK_TIMEOUT_S)

    async def _rejects_no_token(self, timeout_s: float | None) -> bool:
        async with self.acquire("") as pair:
            try:
                await pair.client.count(timeout=timeout_s)
            except errors.AccessError as error:
                if error.local:  # the master was not asked
                    raise
                return True
        return False

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
