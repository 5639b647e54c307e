"""LangChain's `Embeddings` on a fleet: one line of an application changes.

    from multigpu.langchain import MultiGpuEmbeddings

    embeddings = MultiGpuEmbeddings()          # was: HuggingFaceEmbeddings(model_name=…), say

Documents are sent in tasks of `batch_size` texts, spread over all workers; a query is one task, served before waiting
documents. Connections are made lazily, one for each event loop; pickled copies reconnect. A child forked
after the first call can't be used: gRPC does not survive a fork.

Needs langchain-core: pip install 'multigpu[langchain]'.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Self, Unpack

from multigpu import AsyncClient, Client
from multigpu._kinds.embedding import BATCH_SIZE, Chunks, check_texts
from multigpu._transport import forks
from multigpu.config.config import load_client_config
from multigpu.options import EmbedOptions

try:
    from langchain_core.embeddings import Embeddings
except ImportError as error:
    raise ImportError(
        f"multigpu.langchain needs langchain-core ({error}): pip install 'multigpu[langchain]'", name=error.name
    ) from error

# 1 is served first, 3 is the default of tasks. Queries are interactive.
QUERY_PRIORITY = 2


class MultiGpuEmbeddings(Embeddings):
    """Embeds documents and queries with a model of the fleet. Safe to share between threads and event loops.

    `model`: a name that workers serve (`mgpuctl workers` lists them); default, the workers' own. `master`: HOST:PORT,
    as for Client. `batch_size`: documents in one task, 1 to 10,000. `query_priority`: 1 (served first) to 5. Any other
    option of a task, such as `labels`, `queue` or `run_timeout_s`, holds for documents and queries. Every call raises
    as Client.embed.
    """

    def __init__(
        self,
        model: str = "",
        *,
        master: str | None = None,
        batch_size: int = BATCH_SIZE,
        query_priority: int = QUERY_PRIORITY,
        connect_timeout_s: float = 10.0,
        **options: Unpack[EmbedOptions],
    ) -> None:
        forks.check()
        Chunks(batch_size)  # ValueError: out of range
        # LangChain's users expect these attributes; a pickled copy is made of them.
        self.model = model
        # Read now: MGPU_MASTER may be set for the constructor only.
        self.master = master or load_client_config().master
        self.batch_size = batch_size
        self.query_priority = query_priority
        self.connect_timeout_s = connect_timeout_s
        self.options: EmbedOptions = {**options}
        self._connect_lazily()

    def _connect_lazily(self) -> None:
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._async_clients: dict[asyncio.AbstractEventLoop, AsyncClient] = {}

    def __repr__(self) -> str:
        return f"MultiGpuEmbeddings(model={self.model!r}, master={self.master!r})"

    # LangChain's interface.

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector for each text, in order."""
        check_texts(texts)
        return _lists(self._sync().embed(texts, model=self.model, batch_size=self.batch_size, **self.options))

    def embed_query(self, text: str) -> list[float]:
        """The vector of one text."""
        return _lists(self._sync().embed([_one(text)], model=self.model, **self._query_options()))[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector for each text, in order. Cancelling the coroutine cancels its tasks."""
        check_texts(texts)
        return _lists(await self._async().embed(texts, model=self.model, batch_size=self.batch_size, **self.options))

    async def aembed_query(self, text: str) -> list[float]:
        """The vector of one text. Cancelling the coroutine cancels its task."""
        return _lists(await self._async().embed([_one(text)], model=self.model, **self._query_options()))[0]

    # Connections.

    def close(self) -> None:
        """Ends the synchronous connection; a later call makes another. Not needed at exit."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    async def aclose(self) -> None:
        """Ends the connection of this event loop; a later call makes another. Call it before the loop ends."""
        with self._lock:
            client = self._async_clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _sync(self) -> Client:
        with self._lock:
            if self._client is None:
                self._client = Client(self.master, connect_timeout_s=self.connect_timeout_s)
            return self._client

    def _async(self) -> AsyncClient:
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._async_clients:
                for each in [each for each in self._async_clients if each.is_closed()]:
                    del self._async_clients[each]
                self._async_clients[loop] = AsyncClient(self.master, connect_timeout_s=self.connect_timeout_s)
            return self._async_clients[loop]

    def _query_options(self) -> EmbedOptions:
        return {**self.options, "priority": self.query_priority}

    # Copies have no connections.

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect_lazily()


def _one(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"a query is one string, not {type(text).__name__}; for several use embed_documents")
    return text


def _lists(vectors: Any) -> list[list[float]]:
    lists: list[list[float]] = vectors.tolist()
    return lists
