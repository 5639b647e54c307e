"""Models and embeddings by OpenAI's own client, unmodified, against a real fleet with real weights."""

import base64
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openai", reason="OpenAI's client is not installed")
import openai

from tests.fleet import Fleet
from tests.gateway.openai_api.conftest import minilm

MODEL = "all-MiniLM-L6-v2"
TEXTS = ["A cat sat on the mat.", "GPUs are fast.", "Why is the sky blue?"]


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "ending", "judge", "tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(
        openai.NotFoundError, match="there is no model 'nope'; there are all-MiniLM-L6-v2, ending, judge"
    ):
        client.models.retrieve("nope")


@pytest.mark.parametrize("encoding", ["base64", "float"])
def test_embeddings_are_those_of_sentence_transformers(client: openai.OpenAI, encoding: Any) -> None:
    import sentence_transformers

    model = sentence_transformers.SentenceTransformer(str(minilm()), device="cpu")
    answer = client.embeddings.create(input=TEXTS, model=MODEL, encoding_format=encoding)
    rows: list[Any] = [each.embedding for each in answer.data]
    found = np.array([np.frombuffer(base64.b64decode(row), "<f4") if isinstance(row, str) else row for row in rows])
    assert np.abs(found - model.encode(TEXTS, normalize_embeddings=True)).max() < 1e-5
    assert [each.index for each in answer.data] == [0, 1, 2]
    tokens = sum(len(ids) for ids in model.tokenizer(TEXTS)["input_ids"])
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (tokens, tokens, MODEL)


def test_a_long_list_is_in_order_and_one_text_needs_no_list(client: openai.OpenAI, fleet: Fleet) -> None:
    texts = [f"{TEXTS[n % 3]} {n}" for n in range(150)]
    found = np.array([each.embedding for each in client.embeddings.create(input=texts, model=MODEL).data])
    with fleet.client() as own:
        assert np.abs(found - own.embed(texts, model=MODEL)).max() < 1e-5
    one = client.embeddings.create(input=texts[7], model=MODEL).data
    assert np.abs(np.array(one[0].embedding) - found[7]).max() < 1e-5


def test_dimensions_cut_and_normalise(client: openai.OpenAI) -> None:
    whole = np.array(client.embeddings.create(input=TEXTS[0], model=MODEL).data[0].embedding)
    cut = np.array(client.embeddings.create(input=TEXTS[0], model=MODEL, dimensions=16).data[0].embedding)
    assert np.abs(cut - whole[:16] / np.linalg.norm(whole[:16])).max() < 1e-6
    with pytest.raises(openai.BadRequestError, match="dimensions is 999: the model's vectors have 384") as caught:
        client.embeddings.create(input=TEXTS[0], model=MODEL, dimensions=999)
    assert caught.value.param == "dimensions"


def test_tokens_are_embedded_as_their_text(client: openai.OpenAI) -> None:
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(minilm())
    tokens = tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    wanted = client.embeddings.create(input=TEXTS, model=MODEL)
    found = client.embeddings.create(input=tokens, model=MODEL)
    assert found.usage == wanted.usage
    difference = np.array([d.embedding for d in found.data]) - np.array([d.embedding for d in wanted.data])
    assert np.abs(difference).max() < 1e-5
    one = client.embeddings.create(input=tokens[0], model=MODEL).data[0].embedding
    assert np.abs(np.array(one) - np.array(wanted.data[0].embedding)).max() < 1e-5


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "it may not be empty"),
        (["a", 1], "a list of texts, or lists of token ids"),
        ([[]], "it may not be empty"),
        ([[1, 10**12]], "input: "),
        ([[1, 10**7]], "10000000"),
        (["a"] * 10_001, "send at most 10,000"),
        (7, "Expected `str | array`, got `int`"),
    ],
)
def test_wrong_inputs_are_bad_requests(client: openai.OpenAI, given: Any, says: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/embeddings", body={"input": given, "model": MODEL}, cast_to=object)
    assert says in str(caught.value)
