"""The API of text-embeddings-inference, by Hugging Face's own client, unmodified, and by plain HTTP."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import multigpu
import numpy as np
import openai
import pytest
import sentence_transformers
import transformers
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess
from tests.gateway.openai_api.conftest import minilm

MODEL = "all-MiniLM-L6-v2"
TEXTS = ["A cat sat on the mat.", "GPUs are fast.", "Why is the sky blue?"]


@pytest.fixture(scope="module")
def reference() -> Any:
    return sentence_transformers.SentenceTransformer(str(minilm()), device="cpu")


@pytest.fixture(scope="module")
def expected(reference: Any) -> Any:
    return reference.encode(TEXTS, normalize_embeddings=True)


@pytest.fixture(autouse=True)
def no_saved_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A token for Hugging Face on this host is none for the fleet."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield


def client_of(gateway: GatewayProcess, model: str) -> InferenceClient:
    return InferenceClient(model=f"{gateway.url}/tei/{model}", timeout=120)


# Hugging Face's client.


@pytest.mark.parametrize("path", [MODEL, f"{MODEL}/embed", f"{MODEL}/"])
def test_feature_extraction_equals_sentence_transformers(gateway: GatewayProcess, expected: Any, path: str) -> None:
    client = client_of(gateway, path)
    assert np.abs(client.feature_extraction(TEXTS) - expected).max() < 1e-5
    one = client.feature_extraction(TEXTS[0], normalize=True, truncate=True, truncation_direction="right")
    assert one.shape == (1, 384)
    assert np.abs(one[0] - expected[0]).max() < 1e-5


def test_openai_s_client_at_the_address_of_a_model(gateway: GatewayProcess, expected: Any) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/tei/{MODEL}/v1", api_key="none", timeout=120) as client:
        found = client.embeddings.create(model="tei", input=TEXTS)
        with pytest.raises(openai.NotFoundError, match="nosuch"):
            client.with_options(base_url=f"{gateway.url}/tei/nosuch/v1").embeddings.create(model="tei", input=TEXTS)
        with pytest.raises(openai.UnprocessableEntityError, match="dimensions is 9999"):
            client.embeddings.create(model="tei", input=TEXTS, dimensions=9999)
    assert np.abs(np.array([each.embedding for each in found.data]) - expected).max() < 1e-5
    assert found.model == MODEL
    response, body = gateway.call("POST", f"/tei/{MODEL}/v1/embeddings", {"input": "x"})
    assert response.status == 200, "the path names the model"
    response, body = gateway.call("GET", f"/tei/{MODEL}/v1/embeddings")
    assert (response.status, response.getheader("allow")) == (405, "POST"), body
    response, body = gateway.call("GET", f"/tei/{MODEL}/v1/models")
    assert (response.status, body["error_type"]) == (404, "Validation"), body


def test_dimensions_cut_and_normalise(gateway: GatewayProcess, expected: Any) -> None:
    found = client_of(gateway, MODEL).feature_extraction(TEXTS, dimensions=64)
    cut = expected[:, :64]
    assert np.abs(found - cut / np.linalg.norm(cut, axis=1, keepdims=True)).max() < 1e-5


def test_a_model_without_normalisation_is_normalised_unless_the_request_says_no(
    gateway: GatewayProcess, plain: Path
) -> None:
    raw = sentence_transformers.SentenceTransformer(str(plain), device="cpu").encode(TEXTS)
    client = client_of(gateway, "plain")
    assert np.abs(client.feature_extraction(TEXTS, normalize=False) - raw).max() < 1e-4
    assert np.abs(client.feature_extraction(TEXTS, normalize=False, dimensions=5) - raw[:, :5]).max() < 1e-4
    assert np.linalg.norm(client.feature_extraction(TEXTS), axis=1) == pytest.approx(1.0, abs=1e-5)


def test_sentence_similarity_is_the_cosine(gateway: GatewayProcess, expected: Any) -> None:
    wanted = pytest.approx([float(expected[0] @ row) for row in expected[1:]], abs=1e-5)
    assert client_of(gateway, MODEL).sentence_similarity(TEXTS[0], TEXTS[1:]) == wanted
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}, "parameters": {"truncate": True}}
    assert gateway.call("POST", f"/tei/{MODEL}/similarity", body)[1] == wanted


def classes(folder: Path, text: str) -> list[tuple[str, float]]:
    """What transformers' pipeline says."""
    model = transformers.pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    found: Any = model([text])
    return [(each["label"], each["score"]) for each in found[0]]


def test_text_classification_equals_transformers(gateway: GatewayProcess, sorter: Path) -> None:
    client = client_of(gateway, "sorter")
    found = [(each.label, each.score) for each in client.text_classification(TEXTS[0])]
    wanted = classes(sorter, TEXTS[0])
    assert [label for label, _ in found] == [label for label, _ in wanted]
    assert [score for _, score in found] == pytest.approx([score for _, score in wanted], abs=1e-4)
    assert len(client.text_classification(TEXTS[0], top_k=2)) == 2
    with pytest.raises(HfHubHTTPError, match="function_to_apply"):
        client.text_classification(TEXTS[0], function_to_apply="none")


def test_the_clients_errors_say_what_to_do(gateway: GatewayProcess) -> None:
    client = client_of(gateway, MODEL)
    options: list[Any] = [
        {"normalize": False}, {"prompt_name": "query"}, {"truncate": False}, {"truncation_direction": "left"},
        {"dimensions": 1000}, {"dimensions": 0},
    ]  # fmt: skip
    for option in options:
        with pytest.raises(HfHubHTTPError, match=next(iter(option))) as caught:
            client.feature_extraction(TEXTS, **option)
        assert caught.value.response.status_code == 422
        assert caught.value.response.json()["error_type"] == "Validation"


# Plain HTTP.


def test_embed_at_the_root_takes_the_header_or_the_default(gateway: GatewayProcess, expected: Any) -> None:
    for path, headers in (
        ("/embed", {"X-Multigpu-Model": MODEL}),
        ("/", {"X-Multigpu-Model": MODEL}),
        ("/tei/plain/embed", {"X-Multigpu-Model": MODEL}),
    ):
        response, found = gateway.call("POST", path, {"inputs": TEXTS}, headers)
        assert response.status == 200, found
        assert np.abs(np.array(found) - expected).max() < 1e-5
    response, found = gateway.call("POST", "/embed", {"inputs": TEXTS[0]})
    assert (response.status, len(found)) == (200, 1)


def test_headers_count_characters_tokens_and_time(gateway: GatewayProcess, reference: Any) -> None:
    response, _ = gateway.call("POST", f"/tei/{MODEL}/embed", {"inputs": TEXTS})
    assert response.getheader("x-compute-characters") == str(sum(map(len, TEXTS)))
    assert response.getheader("x-compute-tokens") == str(
        sum(len(ids) for ids in reference.tokenizer(TEXTS)["input_ids"])
    )
    assert 0 <= int(response.getheader("x-total-time") or -1) < 60_000
    assert response.getheader("x-compute-time") == response.getheader("x-total-time")


def test_embed_takes_token_ids_and_long_lists(gateway: GatewayProcess, reference: Any, expected: Any) -> None:
    ids = reference.tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    _, found = gateway.call("POST", f"/tei/{MODEL}/embed", {"inputs": ids})
    assert np.abs(np.array(found) - expected).max() < 1e-5
    _, found = gateway.call("POST", f"/tei/{MODEL}/embed", {"inputs": ids[1]})
    assert np.abs(np.array(found) - expected[1:2]).max() < 1e-5
    texts = [f"{TEXTS[number % 3]} {number}" for number in range(100)]
    _, found = gateway.call("POST", f"/tei/{MODEL}/embed", {"inputs": texts})
    assert np.abs(np.array(found) - reference.encode(texts, normalize_embeddings=True)).max() < 1e-5


@pytest.mark.parametrize("path", ["/tei/judge", "/tei/judge/rerank", "/rerank", "/"])
def test_rerank_equals_a_cross_encoder(gateway: GatewayProcess, judge: Path, path: str) -> None:
    texts = [f"{text} {number}" for number in range(15) for text in TEXTS]
    headers = {"X-Multigpu-Model": "judge"} if path in ("/rerank", "/") else {}
    response, rows = gateway.call("POST", path, {"query": "What is fast?", "texts": texts}, headers)
    assert response.status == 200, rows
    scores = sentence_transformers.CrossEncoder(str(judge), device="cpu").predict([("What is fast?", t) for t in texts])
    assert sorted(row["index"] for row in rows) == list(range(len(texts)))
    assert [row["score"] for row in rows] == pytest.approx([float(scores[row["index"]]) for row in rows], abs=1e-5)
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    assert all(set(row) == {"index", "score"} for row in rows)
    assert response.getheader("x-compute-characters") == str(13 * len(texts) + sum(map(len, texts)))
    assert int(response.getheader("x-compute-tokens") or 0) > len(texts)


def test_rerank_returns_logits_and_texts_if_asked_for(gateway: GatewayProcess) -> None:
    body = {"query": "What is fast?", "texts": TEXTS, "return_text": True}
    _, sigmoids = gateway.call("POST", "/tei/judge/rerank", body)
    _, logits = gateway.call("POST", "/tei/judge/rerank", body | {"raw_scores": True})
    assert all(row["text"] == TEXTS[row["index"]] for row in sigmoids)
    found = [1 / (1 + np.exp(-row["score"])) for row in logits]
    assert found == pytest.approx([row["score"] for row in sigmoids], abs=1e-5)


def test_predict_takes_a_text_and_a_batch(gateway: GatewayProcess, sorter: Path) -> None:
    wanted = [dict(classes(sorter, text)) for text in TEXTS]
    response, one = gateway.call("POST", "/tei/sorter/predict", {"inputs": TEXTS[0]})
    assert {each["label"]: each["score"] for each in one} == pytest.approx(wanted[0], abs=1e-4)
    assert response.getheader("x-compute-characters") == str(len(TEXTS[0]))
    assert response.getheader("x-compute-tokens") is None
    assert gateway.call("POST", "/predict", {"inputs": [TEXTS[0]]}, {"X-Multigpu-Model": "sorter"})[1] == one
    _, batch = gateway.call("POST", "/tei/sorter/predict", {"inputs": [[text] for text in TEXTS]})
    for row, labels in zip(batch, wanted, strict=True):
        assert {each["label"]: each["score"] for each in row} == pytest.approx(labels, abs=1e-4)
        assert [each["label"] for each in row] == sorted(labels, key=lambda label: -labels[label])


@pytest.mark.parametrize(
    ("model", "kind"),
    [(MODEL, "embedding"), ("plain", "embedding"), ("judge", "reranker"), ("sorter", "classifier")],
)
def test_info_has_the_models_type(gateway: GatewayProcess, model: str, kind: str) -> None:
    for path, headers in ((f"/tei/{model}/info", {}), ("/info", {"X-Multigpu-Model": model})):
        response, info = gateway.call("GET", path, headers=headers)
        assert response.status == 200, info
        assert (info["model_id"], list(info["model_type"])) == (model, [kind])
        assert (info["max_client_batch_size"], info["auto_truncate"]) == (10_000, True)


def test_info_needs_a_name_if_there_are_several_models(gateway: GatewayProcess) -> None:
    response, body = gateway.call("GET", "/info")
    assert response.status == 422
    assert "the fleet has 2 models to embed: name one in X-Multigpu-Model" in body["error"]


def test_health_is_that_of_the_model(gateway: GatewayProcess, tmp_path: Path) -> None:
    for path in ("/health", f"/tei/{MODEL}/health", f"/tei/{MODEL}", "/tei/judge/health"):
        response, body = gateway.call("GET", path)
        assert (response.status, body) == (200, {"status": "ok"})
    response, body = gateway.call("GET", "/tei/nobody/health")
    assert (response.status, body["error_type"]) == (404, "Validation")
    assert "there is no model 'nobody'" in body["error"]
    with GatewayProcess(tmp_path, "127.0.0.1:1") as alone:
        response, body = alone.call("GET", f"/tei/{MODEL}/health")
        assert (response.status, body["error_type"]) == (503, "Unhealthy")


PROMPT = {"prompt_name": "query"}
SENTENCES: dict[str, Any] = {"source_sentence": "x", "sentences": ["y"]}


@pytest.mark.parametrize(
    ("path", "body", "status", "type_", "says"),
    [
        (f"/tei/{MODEL}/embed", {"inputs": []}, 400, "Empty", "`inputs` cannot be empty"),
        (f"/tei/{MODEL}/embed", {"inputs": ""}, 400, "Empty", "`inputs` cannot be empty"),
        (f"/tei/{MODEL}/embed", {"inputs": ["x", ""]}, 400, "Empty", "`inputs` cannot be empty"),
        (f"/tei/{MODEL}/embed", {"inputs": [[5], []]}, 400, "Empty", "`inputs` cannot be empty"),
        (f"/tei/{MODEL}/embed", {"inputs": ["x"] * 10_001}, 422, "Validation", "batch size 10001 > maximum allowed"),
        (f"/tei/{MODEL}/embed", {"inputs": ["x", [5]]}, 422, "Validation", "inputs is to be a text, a list of texts"),
        (f"/tei/{MODEL}/embed", {"inputs": [-1]}, 422, "Validation", "inputs: "),
        (f"/tei/{MODEL}/embed", {"inputs": [999_999]}, 422, "Validation", "the model's vocabulary"),
        (f"/tei/{MODEL}/embed", {"inputs": 5}, 422, "Validation", "inputs: Expected"),
        (f"/tei/{MODEL}/embed", {}, 422, "Validation", "missing required field `inputs`"),
        (f"/tei/{MODEL}/embed", b"{", 422, "Validation", "not valid JSON"),
        (f"/tei/{MODEL}", b"{", 422, "Validation", "not valid JSON"),
        (f"/tei/{MODEL}/embed", {"inputs": "x", "truncation_direction": "Left"}, 422, "Validation", "only Right"),
        (f"/tei/{MODEL}/similarity", {"inputs": SENTENCES | {"sentences": []}}, 400, "Empty", "inputs.sentences"),
        (f"/tei/{MODEL}/similarity", {"inputs": SENTENCES, "parameters": PROMPT}, 422, "Validation", "prompt_name"),
        ("/tei/judge/rerank", {"query": "q", "texts": []}, 400, "Empty", "`texts` cannot be empty"),
        ("/tei/judge/rerank", {"query": "q", "texts": ["x"] * 10_001}, 422, "Validation", "batch size 10001"),
        ("/tei/judge/rerank", {"query": "q", "texts": ["x"], "truncate": False}, 422, "Validation", "is false"),
        ("/tei/sorter/predict", {"inputs": ["a", "b"]}, 422, "Validation", "send pairs to /rerank"),
        ("/tei/sorter/predict", {"inputs": [["a"], ["b", "c"]]}, 422, "Validation", "send pairs to /rerank"),
        ("/tei/sorter/predict", {"inputs": [["a"], "b"]}, 422, "Validation", "in the form [[text], [text]"),
        ("/tei/sorter/predict", {"inputs": [["a", "b", "c"]]}, 422, "Validation", "in the form [[text], [text]"),
        ("/tei/sorter/predict", {"inputs": []}, 400, "Empty", "`inputs` cannot be empty"),
        ("/tei/sorter/predict", {"inputs": "a", "raw_scores": True}, 422, "Validation", "raw_scores is true"),
        ("/tei/sorter/predict", {"inputs": "a", "parameters": {"top_k": 0}}, 422, "Validation", "top_k is 0"),
        # Another kind, and no such model.
        (f"/tei/{MODEL}/predict", {"inputs": "x"}, 424, "Backend", "serves embed, not classify"),
        ("/tei/judge/embed", {"inputs": "x"}, 424, "Backend", "serves rerank, not embed"),
        ("/tei/sorter/rerank", {"query": "q", "texts": ["x"]}, 424, "Backend", "serves classify, not rerank"),
        ("/tei/nobody/embed", {"inputs": "x"}, 404, "Validation", "no worker has model 'nobody'"),
        ("/tei/nobody", {"inputs": "x"}, 404, "Validation", "there is no model 'nobody'"),
        # What TEI has, and the gateway has not.
        *(
            (f"{model}/embed_sparse", {"inputs": "x"}, 404, "Validation", "of TEI's API there are /embed, /embed_all")
            for model in ("", f"/tei/{MODEL}")
        ),
        ("/tei", {"inputs": "x"}, 404, "Validation", "name a model in the path"),
    ],
)  # fmt: skip
def test_errors_are_those_of_tei(
    gateway: GatewayProcess, path: str, body: Any, status: int, type_: str, says: str
) -> None:
    response, found = gateway.call("POST", path, body)
    assert (response.status, found["error_type"]) == (status, type_), found
    assert says in found["error"]
    assert set(found) == {"error", "error_type"}


def test_methods_are_those_of_tei(gateway: GatewayProcess) -> None:
    for method, path in (("GET", "/embed"), ("GET", "/tei/x/embed"), ("POST", "/tei/x/info"), ("POST", "/info")):
        response, body = gateway.call(method, path)
        assert response.status == 405
        assert f"not {method}" in body["error"]


def test_a_full_queue_is_overloaded(gateway: GatewayProcess, fleet: Fleet) -> None:
    with multigpu.AdminClient(fleet.address) as admin, fleet.client() as own:
        admin.pause_queue("small")
        admin.set_queue_limits("small", tasks_max=1)
        handle = own.submit("echo", b"", queue="small")
        response, body = gateway.call("POST", f"/tei/{MODEL}", {"inputs": "x"}, {"X-Multigpu-Queue": "small"})
        handle.cancel()
    assert (response.status, body["error_type"]) == (429, "Overloaded")
    assert int(response.getheader("retry-after") or 0) >= 1


def test_a_retry_with_the_same_key_runs_once(gateway: GatewayProcess, fleet: Fleet) -> None:
    headers = {"Idempotency-Key": "tei-1"}
    first, second = (gateway.call("POST", f"/tei/{MODEL}", {"inputs": "x"}, headers)[1] for _ in range(2))
    assert first == second
    with fleet.client() as own:
        assert own.get("tei-1").attempts == 1
    response, body = gateway.call("POST", f"/tei/{MODEL}", {"inputs": "y"}, headers)
    assert (response.status, body["error_type"]) == (409, "Validation")


@pytest.mark.parametrize(
    ("path", "body", "tasks"),
    [
        (f"/tei/{MODEL}", {"inputs": "x"}, 1),
        ("/tei/sorter", {"inputs": [["x"], ["y"]]}, 2),
        ("/tei/judge/rerank", {"query": "q", "texts": ["x"] * 65}, 3),
    ],
)
def test_a_call_that_is_left_cancels_its_tasks(
    gateway: GatewayProcess, fleet: Fleet, path: str, body: Any, tasks: int
) -> None:
    with multigpu.AdminClient(fleet.address) as admin, fleet.client() as own:
        admin.pause_queue("left")
        until(lambda: not own.count().queued, 20)
        connection = gateway.connect()
        connection.request("POST", path, json.dumps(body), {"X-Multigpu-Queue": "left"})
        until(lambda: own.count().queued == tasks, 20)
        connection.close()
        until(lambda: not own.count().queued, 10)


def test_a_name_may_have_slashes_and_a_version(gateway: GatewayProcess) -> None:
    body = {"query": "What is fast?", "texts": TEXTS}
    wanted = gateway.call("POST", "/tei/judge/rerank", body)[1]
    for path in ("/tei/acme/ranker", "/tei/acme/ranker/rerank", "/tei/acme/ranker:1", "/tei/acme/ranker:1/rerank"):
        response, rows = gateway.call("POST", path, body)
        assert (response.status, rows) == (200, wanted)
    assert gateway.call("GET", "/tei/acme/ranker:1/info")[1]["model_id"] == "acme/ranker:1"
    assert gateway.call("GET", "/tei/acme/ranker:1/health")[0].status == 200
    for path in ("/tei/acme/ranker:2", "/tei/acme"):
        response, found = gateway.call("POST", path, body)
        assert (response.status, found["error_type"]) == (404, "Validation")


def test_the_answer_is_plain_json(gateway: GatewayProcess) -> None:
    """curl's view: floats in lists, no envelope."""
    response, found = gateway.call("POST", f"/tei/{MODEL}/embed", json.dumps({"inputs": "x"}).encode())
    assert response.getheader("content-type") == "application/json"
    assert isinstance(found[0][0], float)
