"""AsyncClient.embed: texts in, one array out."""

from collections.abc import AsyncIterator
from typing import Any

import multigpu
import numpy as np
import pytest
from multigpu.v1 import embed_pb2, task_pb2

from tests.client.scripted_master import Reply, ScriptedMaster, Spec, Task


def vectors_of(texts: list[str]) -> np.ndarray:
    return np.array([[len(text), sum(map(ord, text)) % 1000, 1] for text in texts], "<f4")


def embed(spec: Spec, task: Task) -> Reply:
    texts = list(embed_pb2.EmbedPayload.FromString(task.payload).texts)
    assert task.units == len(texts)
    result = embed_pb2.EmbedResult(dimension=3, values=vectors_of(texts).tobytes()).SerializeToString()
    return task_pb2.Outcome(state=task_pb2.OUTCOME_STATE_SUCCEEDED, result=result)


async def test_embed_gives_one_row_a_text() -> None:
    async with ScriptedMaster(embed) as master, multigpu.AsyncClient(master.address) as client:
        texts = [f"text {i} żółw" * (i % 5) for i in range(1001)]
        vectors = await client.embed(texts, model="my-model", batch_size=10, priority=1)
        assert vectors.dtype == np.float32
        assert vectors.flags.writeable
        np.testing.assert_array_equal(vectors, vectors_of(texts))
        assert {(spec.kind, spec.model, spec.priority) for spec in master.specs} == {("embed", "my-model", 1)}
        assert len(master.inputs) == 101

        async def texts_async() -> AsyncIterator[str]:
            for text in texts:
                yield text

        np.testing.assert_array_equal(await client.embed(texts_async()), vectors_of(texts))
        np.testing.assert_array_equal(await client.embed(text for text in texts), vectors_of(texts))
        assert (await client.embed([])).shape == (0, 0)
        sizes = [len(rows) async for rows in client.embed_iter(texts, batch_size=400)]
        assert sizes == [400, 400, 201]


async def test_embed_rejects_other_types_than_texts() -> None:
    async with ScriptedMaster(embed) as master, multigpu.AsyncClient(master.address) as client:
        with pytest.raises(TypeError, match=r"\[text\]"):
            await client.embed("one text")
        with pytest.raises(multigpu.InvalidTaskError, match="one of them is of type int"):
            await client.embed(["fine", 3])  # type: ignore[list-item]
        with pytest.raises(multigpu.InvalidTaskError, match="one of them is of type bytes"):
            await client.embed(["fine", b"x"])  # type: ignore[list-item]
        with pytest.raises(multigpu.InvalidTaskError, match="Unicode"):
            await client.embed(["\ud800"])
        with pytest.raises(ValueError, match="batch_size is 0"):
            await client.embed(["x"], batch_size=0)


@pytest.mark.parametrize("option", [{"ordered": False}, {"return_exceptions": True}, {"max_in_flight": 5}], ids=repr)
async def test_embed_has_no_options_of_maps(option: Any) -> None:
    """Rows in another order would belong to other texts."""
    async with ScriptedMaster(embed) as master, multigpu.AsyncClient(master.address) as client:
        with pytest.raises(TypeError, match=f"{next(iter(option))} is an option of a map"):
            await client.embed(["one", "two"], batch_size=1, **option)
        assert not master.inputs


async def test_a_result_with_another_number_of_vectors_is_an_error() -> None:
    def answer(spec: Spec, task: Task) -> Reply:
        result = embed_pb2.EmbedResult(dimension=3, values=bytes(12)).SerializeToString()
        return task_pb2.Outcome(state=task_pb2.OUTCOME_STATE_SUCCEEDED, result=result)

    async with ScriptedMaster(answer) as master, multigpu.AsyncClient(master.address) as client:
        with pytest.raises(multigpu.TransportError, match="12 bytes for 2 vectors of 3"):
            await client.embed(["a", "b"])


async def test_vectors_of_different_models_are_an_error() -> None:
    def answer(spec: Spec, task: Task) -> Reply:
        dimension = len(embed_pb2.EmbedPayload.FromString(task.payload).texts[0])
        result = embed_pb2.EmbedResult(dimension=dimension, values=bytes(4 * dimension)).SerializeToString()
        return task_pb2.Outcome(state=task_pb2.OUTCOME_STATE_SUCCEEDED, result=result)

    async with ScriptedMaster(answer) as master, multigpu.AsyncClient(master.address) as client:
        with pytest.raises(multigpu.TransportError, match=r"vectors of 2, others of 3.*name the model"):
            await client.embed(["ab", "abc"], batch_size=1)
