"""LangChain and LlamaIndex, unmodified, as clients of a real fleet."""

from pathlib import Path

import numpy as np
import pytest
import sentence_transformers

from tests.gateway.clients.conftest import program
from tests.gateway.conftest import GatewayProcess
from tests.gateway.openai_api.conftest import minilm
from tests.gateway.openai_api.test_embeddings import TEXTS
from tests.gateway.openai_api.test_generate import TALK, greedy
from tests.worker.generate.generating import Plain

pytestmark = pytest.mark.slow

LIBRARIES = {
    "langchain": ("langchain-openai==1.7.4",),
    "llama_index": ("llama-index-embeddings-openai-like==0.4.0", "llama-index-llms-openai-like==0.8.1"),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_vectors_texts_streams_and_errors_are_what_the_library_promises(
    gateway: GatewayProcess, tiny: Path, tmp_path: Path, library: str
) -> None:
    run = program(tmp_path / "env", library, *LIBRARIES[library])
    found = run(gateway.url, TEXTS, TALK)
    model = sentence_transformers.SentenceTransformer(str(minilm()), device="cpu")
    expected = model.encode(TEXTS, normalize_embeddings=True)
    assert np.abs(np.array(found["documents"]) - expected).max() < 1e-5
    assert np.abs(np.array(found["query"]) - expected[0]).max() < 1e-5
    text = greedy(Plain.load(tiny), 24)
    assert (found["text"], found["output_tokens"]) == (text, 24)
    assert "".join(each or "" for each in found["pieces"]) == text
    assert len(found["pieces"]) > 5
    assert found["error"] == "model_not_found"
