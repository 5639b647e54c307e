"""POST /embed_all, /tokenize and /decode: what sentence-transformers and transformers give."""

from typing import Any

import numpy as np
import pytest
import sentence_transformers
import transformers

from tests.gateway.conftest import GatewayProcess
from tests.gateway.openai_api.conftest import minilm

MODEL = "all-MiniLM-L6-v2"
HEADERS = {"X-Multigpu-Model": MODEL}
TEXTS = ["Zoë's café costs 3 €.", "GPUs are fast.", "One word more than the model takes. " * 60]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(minilm()), model_max_length=1_000_000)


def post(gateway: GatewayProcess, path: str, body: Any) -> Any:
    response, found = gateway.call("POST", path, body, HEADERS)
    assert response.status == 200, found
    return found


@pytest.mark.parametrize("path", ["/embed_all", f"/tei/{MODEL}/embed_all"])
def test_embed_all_equals_sentence_transformers(gateway: GatewayProcess, tokenizer: Any, path: str) -> None:
    reference = sentence_transformers.SentenceTransformer(str(minilm()), device="cpu")
    expected = [each.numpy() for each in reference.encode(TEXTS, output_value="token_embeddings")]
    response, found = gateway.call("POST", path, {"inputs": TEXTS, "truncate": True}, HEADERS)
    assert response.getheader("x-compute-tokens") == str(sum(map(len, expected)))
    assert [np.shape(each) for each in found] == [each.shape for each in expected]
    assert max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True)) < 1e-4
    ids = tokenizer(TEXTS[1], add_special_tokens=False)["input_ids"]
    for inputs in (TEXTS[1], ids):
        (one,) = post(gateway, path, {"inputs": inputs})
        assert np.abs(one - expected[1]).max() < 1e-4


@pytest.mark.parametrize("path", ["/tokenize", f"/tei/{MODEL}/tokenize"])
def test_tokenize_has_teis_form_and_transformers_tokens(gateway: GatewayProcess, tokenizer: Any, path: str) -> None:
    found = post(gateway, path, {"inputs": TEXTS})
    assert [[token["id"] for token in each] for each in found] == tokenizer(TEXTS)["input_ids"]
    # The tokenizer has no truncation here, unlike that of vectors.
    assert len(found[2]) > 256
    first, second, *_, last = found[1]
    assert first == {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert second == {"id": 14246, "text": "GP", "special": False, "start": 0, "stop": 2}
    assert last == {"id": 102, "text": "[SEP]", "special": True, "start": None, "stop": None}
    (bare,) = post(gateway, path, {"inputs": TEXTS[0], "add_special_tokens": False})
    assert bare == found[0][1:-1]


@pytest.mark.parametrize("path", ["/decode", f"/tei/{MODEL}/decode"])
def test_decode_equals_transformers(gateway: GatewayProcess, tokenizer: Any, path: str) -> None:
    ids = tokenizer(TEXTS)["input_ids"]
    plain = {"clean_up_tokenization_spaces": False}
    without = [tokenizer.decode(each, skip_special_tokens=True, **plain) for each in ids]
    assert post(gateway, path, {"ids": ids}) == without
    assert post(gateway, path, {"ids": ids[0]}) == without[:1]
    assert post(gateway, path, {"ids": ids[0], "skip_special_tokens": False}) == [tokenizer.decode(ids[0], **plain)]


@pytest.mark.parametrize(
    ("path", "body", "status", "type_", "says"),
    [
        ("/embed_all", {"inputs": []}, 400, "Empty", "`inputs` cannot be empty"),
        ("/embed_all", {"inputs": ["x", ""]}, 400, "Empty", "`inputs` cannot be empty"),
        ("/embed_all", {"inputs": "x", "truncate": False}, 422, "Validation", "truncate is false"),
        ("/embed_all", {"inputs": "x", "prompt_name": "q"}, 422, "Validation", "prompt_name is not served"),
        ("/embed_all", {"inputs": [99_999]}, 422, "Validation", "tokens[0].ids[0] is 99999"),
        ("/tokenize", {"inputs": []}, 400, "Empty", "`inputs` cannot be empty"),
        ("/tokenize", {"inputs": [5]}, 422, "Validation", "inputs[0]"),
        ("/tokenize", {"inputs": "x", "prompt_name": "q"}, 422, "Validation", "prompt_name is not served"),
        ("/tokenize", {"inputs": "x" * 1_000_001}, 422, "Validation", "send at most 1,000,000"),
        ("/decode", {"ids": []}, 400, "Empty", "`ids` cannot be empty"),
        ("/decode", {"ids": [[5], []]}, 422, "Validation", "lists of token ids"),
        ("/decode", {"ids": [5, [5]]}, 422, "Validation", "lists of token ids"),
        ("/decode", {"ids": ["x"]}, 422, "Validation", "ids[0]"),
        ("/decode", {"ids": [99_999]}, 422, "Validation", "tokens[0].ids[0] is 99999"),
        ("/decode", {"ids": [-1]}, 422, "Validation", "ids:"),
        ("/tei/judge/tokenize", {"inputs": "x"}, 424, "Backend", "serves rerank, not embed"),
    ],
)  # fmt: skip
def test_wrong_inputs_have_teis_errors(
    gateway: GatewayProcess, path: str, body: Any, status: int, type_: str, says: str
) -> None:
    response, found = gateway.call("POST", path, body)
    assert (response.status, found["error_type"]) == (status, type_), found
    assert says in found["error"]
