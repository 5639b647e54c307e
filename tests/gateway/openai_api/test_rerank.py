"""Reranking, in the form that Jina's and Cohere's clients send and read."""

from typing import Any

import pytest
import sentence_transformers

from tests.gateway.conftest import GatewayProcess
from tests.worker.rerank.test_rerank import DOCUMENTS

QUERY = "What is fast?"


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_come_by_their_scores(gateway: GatewayProcess, judge: Any, path: str) -> None:
    documents = [*DOCUMENTS, *(f"{text} {n}" for n in range(20) for text in DOCUMENTS[:3])]
    body = {"model": "judge", "query": QUERY, "documents": documents, "top_n": 5}
    response, answer = gateway.call("POST", path, body)
    assert response.status == 200, answer
    scores = sentence_transformers.CrossEncoder(str(judge), device="cpu").predict([(QUERY, text) for text in documents])
    best = sorted(range(len(documents)), key=lambda index: -scores[index])[:5]
    found = [row["relevance_score"] for row in answer["results"]]
    assert found == pytest.approx([float(scores[index]) for index in best], abs=1e-5)
    assert found == sorted(found, reverse=True)
    assert answer["usage"]["total_tokens"] > len(documents)
    assert all("document" not in row for row in answer["results"])


def test_documents_are_returned_if_asked_for(gateway: GatewayProcess) -> None:
    body = {"model": "judge", "query": QUERY, "documents": [{"text": "a"}, "b"], "return_documents": True}
    _, answer = gateway.call("POST", "/v1/rerank", body)
    assert sorted(row["document"]["text"] for row in answer["results"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("changed", "status", "says"),
    [
        ({"documents": []}, 400, "send 1 to 10,000"),
        ({"documents": ["x"] * 10_001}, 400, "send 1 to 10,000"),
        ({"documents": "x"}, 400, "documents: Expected `array`, got `str`"),
        ({"top_n": 0}, 400, "top_n is 0: at least 1"),
        ({"max_tokens_per_doc": 5}, 400, "max_tokens_per_doc"),
        ({"model": "nobody"}, 404, "no worker has model 'nobody'"),
        ({"query": "x" * (1 << 20), "documents": ["x"] * 10_000}, 413, "query: its 1,048,576 bytes go to each of 313"),
    ],
)
def test_wrong_requests_are_rejected(gateway: GatewayProcess, changed: dict[str, Any], status: int, says: str) -> None:
    response, answer = gateway.call(
        "POST", "/v1/rerank", {"model": "judge", "query": QUERY, "documents": ["x"]} | changed
    )
    assert response.status == status
    assert says in answer["error"]["message"]
