"""POST /rerank and /predict."""

import math
from typing import Any

import msgspec
from multigpu.v1 import classify_pb2, rerank_pb2

from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.tasks import check_copies
from multigpu_gateway.tei.call import TASK_INPUTS, Answer, Call, Truncated, check_count
from multigpu_gateway.tei.errors import backend_error

RERANK, CLASSIFY = "rerank", "classify"
# The largest top_k of a task of kind classify. Also the default, to get all classes.
CLASSES_MAX = 10_000


class RerankRequest(Truncated, kw_only=True):
    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False


class PredictParameters(msgspec.Struct):
    """Parameters of Hugging Face's inference API, which InferenceClient sends. TEI ignores them."""

    top_k: int | None = None
    function_to_apply: str | None = None


class PredictRequest(Truncated, kw_only=True):
    # A text; [text]; [text, text]: a pair; or a batch: [[text], …].
    inputs: str | list[str | list[str]]
    raw_scores: bool = False
    parameters: PredictParameters | None = None


async def rerank(call: Call, body: RerankRequest) -> Answer:
    """Returns the score of each text for the query, the best first: [{index, score, text?}]."""
    body.check()
    check_count(len(body.texts), "texts")
    parts = [body.texts[at : at + TASK_INPUTS] for at in range(0, len(body.texts), TASK_INPUTS)]
    check_copies("query", len(body.query.encode()), len(parts))
    fixed: dict[str, Any] = {"query": body.query, "raw_scores": body.raw_scores, "count_tokens": True}
    payloads = [(rerank_pb2.RerankPayload(documents=part, **fixed).SerializeToString(), len(part)) for part in parts]
    results = [rerank_pb2.RerankResult.FromString(result) for result in await call.run(RERANK, payloads)]
    scores = [_number(score) for result in results for score in result.scores]
    rows: list[dict[str, Any]] = []
    for index in sorted(range(len(scores)), key=lambda index: -scores[index]):
        text = {"text": body.texts[index]} if body.return_text else {}
        rows.append({"index": index, **text, "score": scores[index]})
    characters = len(body.query) * len(body.texts) + sum(map(len, body.texts))
    return Answer(rows, characters=characters, tokens=sum(result.tokens for result in results))


async def predict(call: Call, body: PredictRequest) -> Answer:
    """Returns the scores of the classes, the best first: [{score, label}] for one text, a list of these for a batch.

    A request with `parameters` gets a list of lists even for one text, as from Hugging Face's inference API:
    InferenceClient takes the first element.
    """
    body.check()
    texts, single = _texts(body.inputs)
    check_count(len(texts), "inputs")
    if body.raw_scores:
        message = "raw_scores is true, and the kind classify has probabilities only: leave raw_scores out"
        raise HttpError(BAD_REQUEST, message, param="raw_scores")
    parameters = body.parameters or PredictParameters()
    if parameters.function_to_apply is not None:
        message = "function_to_apply is not served: the model's configuration says it; leave function_to_apply out"
        raise HttpError(BAD_REQUEST, message, param="function_to_apply")
    top_k = CLASSES_MAX if parameters.top_k is None else parameters.top_k
    if not 1 <= top_k <= CLASSES_MAX:
        raise HttpError(BAD_REQUEST, f"top_k is {top_k}: send 1 to {CLASSES_MAX:,}", param="top_k")
    payloads = [(classify_pb2.ClassifyPayload(text=text, top_k=top_k).SerializeToString(), 1) for text in texts]
    rows = [_classes(result) for result in await call.run(CLASSIFY, payloads)]
    value = rows[0] if single and body.parameters is None else rows
    return Answer(value, characters=sum(map(len, texts)))


def _classes(result: bytes) -> list[dict[str, Any]]:
    """Returns the classes of one text, for /predict. A class without a name gets its name in transformers (LABEL_0)."""
    found = classify_pb2.ClassifyResult.FromString(result).classes
    return [{"score": _number(each.score), "label": each.label or f"LABEL_{each.index}"} for each in found]


def _texts(inputs: str | list[str | list[str]]) -> tuple[list[str], bool]:
    """Returns the texts, and whether there is a single one, outside a batch. Raises HttpError for pairs of texts, or if
    `inputs` has another shape.
    """
    if isinstance(inputs, str):
        return [inputs], True
    single = bool(inputs) and isinstance(inputs[0], str)
    batch: list[Any] = [inputs] if single else inputs
    texts: list[str] = []
    for each in batch:
        if not isinstance(each, list) or not all(isinstance(text, str) for text in each) or len(each) not in (1, 2):
            message = "inputs is to be a text, or a batch in the form [[text], [text], …]"
            raise HttpError(BAD_REQUEST, message, param="inputs")
        if len(each) == 2:
            message = "inputs has a pair of texts, and the kind classify takes one: send pairs to /rerank"
            raise HttpError(BAD_REQUEST, message, param="inputs")
        texts += each
    return texts, single


def _number(score: float) -> float:
    """Returns the score. Raises HttpError if it is NaN, because the model's numbers overflowed."""
    if math.isnan(score):
        raise backend_error("score is NaN")
    return score
