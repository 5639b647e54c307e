"""POST /v1/rerank and /v2/rerank: what Jina's and Cohere's APIs have in common.

https://api.jina.ai/redoc#tag/rerank and https://docs.cohere.com/reference/rerank.
"""

import uuid
from typing import Any

import msgspec
from multigpu.v1 import rerank_pb2

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.http import Request
from multigpu_gateway.openai.errors import error_body
from multigpu_gateway.routes import Operation, Route
from multigpu_gateway.tasks import TASK_HEADERS, TaskSettings, check_copies, gather_or_cancel

KIND = "rerank"
# Limits of documents: of a request, and of each of its tasks, so that several workers share a long list.
DOCUMENTS_MAX, TASK_DOCUMENTS = 10_000, 32


class Document(msgspec.Struct):
    text: str


class RerankRequest(msgspec.Struct):
    model: str
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    # Rejected unless null.
    max_tokens_per_doc: int | None = None


_request = msgspec.json.Decoder(RerankRequest)


async def _rerank(request: Request, pair: ClientPair) -> None:
    """Scores documents for a query, and lists them with the best first."""
    body = await request.json(_request)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    if not 1 <= len(texts) <= DOCUMENTS_MAX:
        message = f"there are {len(texts):,} documents: send 1 to {DOCUMENTS_MAX:,}"
        raise HttpError(BAD_REQUEST, message, param="documents")
    if body.max_tokens_per_doc is not None:
        message = "max_tokens_per_doc: the model's own limit cuts long documents; leave it out"
        raise HttpError(BAD_REQUEST, message, param="max_tokens_per_doc")
    if body.top_n is not None and body.top_n < 1:
        raise HttpError(BAD_REQUEST, f"top_n is {body.top_n}: at least 1", param="top_n")
    options = TaskSettings(request, body.model).options_of_tasks()
    run = pair.client.run
    parts = [texts[at : at + TASK_DOCUMENTS] for at in range(0, len(texts), TASK_DOCUMENTS)]
    check_copies("query", len(body.query.encode()), len(parts))
    payloads = [_payload(body.query, part) for part in parts]
    each = zip(parts, payloads, options, strict=False)
    async with request.while_connected():
        results = await gather_or_cancel(run(KIND, payload, units=len(part), **own) for part, payload, own in each)
    found = [rerank_pb2.RerankResult.FromString(result) for result in results]
    scores = [score for result in found for score in result.scores]
    tokens = sum(result.tokens for result in found)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    rows: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if body.return_documents:
        for row in rows:
            row["document"] = {"text": texts[row["index"]]}
    answer = {
        "id": str(uuid.uuid4()), "model": body.model, "results": rows, "usage": {"total_tokens": tokens},
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
    }  # fmt: skip
    await request.respond(200, msgspec.json.encode(answer))


def _payload(query: str, documents: list[str]) -> bytes:
    return rerank_pb2.RerankPayload(query=query, documents=documents, count_tokens=True).SerializeToString()


_operation = Operation(_rerank, body=RerankRequest, headers=TASK_HEADERS)
ROUTES = {path: Route({"POST": _operation}, error_body) for path in ("/v1/rerank", "/v2/rerank")}
