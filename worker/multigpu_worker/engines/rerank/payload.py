"""Payloads and results of tasks of kind "rerank". Nothing here imports torch."""

import json
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError
from multigpu.v1 import rerank_pb2

from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.common.payloads import JSON, check_content_type, not_a_message

DOCUMENTS_MAX = 10_000
FIELDS = {"query", "documents", "raw_scores", "count_tokens"}


def parse(payload: bytes, content_type: str) -> rerank_pb2.RerankPayload:
    """Parse a payload with a query and 1 to DOCUMENTS_MAX documents. Raises BadInputError.

    As JSON it is an object with the fields of RerankPayload.
    """
    check_content_type(content_type)
    try:
        if content_type == JSON:
            parsed = _from_json(json.loads(payload))
        else:
            parsed = rerank_pb2.RerankPayload.FromString(payload)
    except BadInputError:
        raise
    except (DecodeError, RecursionError, TypeError, ValueError) as error:
        raise not_a_message(rerank_pb2.RerankPayload, error) from error
    if not parsed.documents:
        raise BadInputError("the payload has no documents: send at least one")
    if len(parsed.documents) > DOCUMENTS_MAX:
        raise BadInputError(
            f"the payload has {len(parsed.documents)} documents: send at most {DOCUMENTS_MAX} in one task"
        )
    return parsed


def _from_json(value: Any) -> rerank_pb2.RerankPayload:
    if not isinstance(value, dict) or not {"query", "documents"} <= set(value) <= FIELDS:
        raise BadInputError(
            "the payload must be a JSON object with query and documents, and perhaps raw_scores and count_tokens"
        )
    if not isinstance(value["documents"], list):
        raise BadInputError("documents must be a JSON list of strings")
    return rerank_pb2.RerankPayload(**value)


def result(scores: Sequence[float], tokens: int, content_type: str) -> bytes:
    """Write a task's result. `tokens`: 0 if the task does not ask for their number."""
    if content_type == JSON:
        return json.dumps({"scores": list(scores)} | ({"tokens": tokens} if tokens else {})).encode()
    return rerank_pb2.RerankResult(scores=scores, tokens=tokens).SerializeToString()
