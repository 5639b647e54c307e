"""MultiGpuEmbeddings: what its tasks look like to a master."""

import asyncio

import pytest

pytest.importorskip("langchain_core", reason="the extra `langchain` is not installed")

from multigpu import errors
from multigpu.langchain import MultiGpuEmbeddings

from tests.client.calls.test_embed import embed, vectors_of
from tests.client.scripted_master import ScriptedMaster


async def test_documents_are_batched_and_queries_have_priority() -> None:
    async with (
        ScriptedMaster(embed) as master,
        MultiGpuEmbeddings("m", master=master.address, batch_size=10, queue="rag") as embeddings,
    ):
        texts = [f"text {n}" for n in range(101)]
        assert await embeddings.aembed_documents(texts) == vectors_of(texts).tolist()
        assert len(master.inputs) == 11
        assert {spec.priority for spec in master.specs} == {0}  # the default
        assert await embeddings.aembed_query("which text?") == vectors_of(["which text?"]).tolist()[0]
        assert len(master.inputs) == 12
        assert {spec.priority for spec in master.specs} == {0, 2}
        named = {(spec.kind, spec.model, spec.queue) for spec in master.specs}
        assert named == {("embed", "m", "rag")}


def test_a_loop_that_was_closed_is_forgotten() -> None:
    """A program that runs asyncio.run for each request kept every loop, with a client and a channel."""
    embeddings = MultiGpuEmbeddings("m", master="127.0.0.1:1", connect_timeout_s=0.01)
    for _ in range(3):
        with pytest.raises(errors.TransportError):
            asyncio.run(embeddings.aembed_query("x"))
    assert len(embeddings._async_clients) == 1
