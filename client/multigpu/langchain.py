"""LangChain's `Embeddings` on a fleet: what used another class there changes one line.

    from multigpu.langchain import MultiGpuEmbeddings

    embeddings = MultiGpuEmbeddings()          # was: HuggingFaceEmbeddings(model_name=…), say

Documents go out in tasks of `batch_size` texts, spread over all workers; a query is a task of its own, and served
before documents that wait. Connections are made at the first call, and again where the old one doesn't fit: in a copy
that was pickled, and, as an asyncio connection belongs to its event loop, once for each loop. A child that was forked
after the first call has none and gets none: gRPC does not survive it.

Needs langchain-core: pip install 'multigpu[langchain]'.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self, Unpack

from multigpu import AsyncClient, Client
from multigpu._kinds.embedding import CHUNK_TEXTS, Chunks, check_texts
from multigpu._transport import forks

try:
    from langchain_core.embeddings import Embeddings
except ImportError as error:
    raise ImportError(
        f"multigpu.langchain needs langchain-core ({error}): pip install 'multigpu[langchain]'", name=error.name
    ) from error

if TYPE_CHECKING:
    from types import TracebackType

    from multigpu.options import EmbedOptions

# 1 is served first, 3 is the default of a task: somebody waits for a query.
QUERY_PRIORITY = 2


class MultiGpuEmbeddings(Embeddings):
    """Embeds documents and queries with a model of the fleet. Safe to share between threads and event loops.

    `model`: a name that workers serve (`mgpuctl workers` lists them); default, the workers' own. `master`: HOST:PORT,
    as of Client. `batch_size`: documents in one task, 1 to 10,000. `precision`: fp32 (the default), bf16 or fp16.
    `query_priority`: 1 (served first) to 5. Any other option of a task, such as `labels`, `queue` or `run_timeout_s`,
    holds for documents and queries.

    Every call raises as Client.embed: UnavailableError if nobody answers at the master's address, UnplaceableError if
    no worker has the model, TaskError if a task did not succeed; TypeError for what is no text.
    """

    def __init__(
        self,
        model: str = "",
        *,
        master: str | None = None,
        batch_size: int = CHUNK_TEXTS,
        precision: str = "",
        query_priority: int = QUERY_PRIORITY,
        connect_timeout_s: float = 10.0,
        **options: Unpack[EmbedOptions],
    ) -> None:
        forks.check()
        Chunks(batch_size)  # ValueError: out of range
        # What LangChain's users look for, and what a pickled copy is made of.
        self.model = model
        # Read now: a variable that is set for the making alone counts.
        self.master = master or _default_master()
        self.batch_size = batch_size
        self.precision = precision
        self.query_priority = query_priority
        self.connect_timeout_s = connect_timeout_s
        self.options: EmbedOptions = {**options}
        if precision:
            self.options["parameters"] = {**options.get("parameters", {}), "precision": precision}
        self._connect_lazily()

    def _connect_lazily(self) -> None:
        self._lock = threading.Lock()
        self._client: tuple[int, Client] | None = None
        self._async_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[int, AsyncClient]]
        self._async_clients = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"MultiGpuEmbeddings(model={self.model!r}, master={self.master!r})"

    # LangChain's interface.

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector for each text, in order."""
        check_texts(texts)
        return _lists(self._sync().embed(texts, self.model, chunk=self.batch_size, **self.options))

    def embed_query(self, text: str) -> list[float]:
        """The vector of one text."""
        return _lists(self._sync().embed([_one(text)], self.model, **self._query_options()))[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector for each text, in order. Cancelling the coroutine cancels its tasks."""
        check_texts(texts)
        return _lists(await self._async().embed(texts, self.model, chunk=self.batch_size, **self.options))

    async def aembed_query(self, text: str) -> list[float]:
        """The vector of one text. Cancelling the coroutine cancels its task."""
        return _lists(await self._async().embed([_one(text)], self.model, **self._query_options()))[0]

    # Connections.

    def close(self) -> None:
        """Ends the synchronous connection; a later call makes another. Not needed at exit."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None and client[0] == os.getpid():
            client[1].close()

    async def aclose(self) -> None:
        """Ends the connection of this event loop; a later call makes another. Call it before the loop ends."""
        with self._lock:
            client = self._async_clients.pop(asyncio.get_running_loop(), None)
        if client is not None and client[0] == os.getpid():
            await client[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _sync(self) -> Client:
        forks.check()
        with self._lock:
            if self._client is None or self._client[0] != os.getpid():
                client = Client(self.master, connect_timeout_s=self.connect_timeout_s)
                self._client = os.getpid(), client
            return self._client[1]

    def _async(self) -> AsyncClient:
        forks.check()
        loop = asyncio.get_running_loop()
        with self._lock:
            known = self._async_clients.get(loop)
            if known is None or known[0] != os.getpid():
                known = os.getpid(), AsyncClient(self.master, connect_timeout_s=self.connect_timeout_s)
                self._async_clients[loop] = known
            return known[1]

    def _query_options(self) -> EmbedOptions:
        return {**self.options, "priority": self.query_priority}

    # Copies go without the connections.

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect_lazily()


def _default_master() -> str:
    from multigpu.config.config import load_client_config  # noqa: PLC0415  only where no master is named

    return load_client_config().master


def _one(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"a query is one string, not {type(text).__name__}; for several use embed_documents")
    return text


def _lists(vectors: Any) -> list[list[float]]:
    lists: list[list[float]] = vectors.tolist()
    return lists
