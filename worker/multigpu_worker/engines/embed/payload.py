"""Payloads of tasks of kind "embed".

Payload and result are `EmbedPayload` and `EmbedResult` (protos/multigpu/v1/embed.proto), or as JSON a list of strings
(or one string) and a list of lists of numbers.
"""

import json

from multigpu.v1 import embed_pb2

from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.common.payloads import JSON, check_content_type, parse_message

TEXTS_MAX = 10_000


def parse_texts(payload: bytes, content_type: str) -> list[str]:
    """The texts of one payload: at least one, at most TEXTS_MAX. Raises BadInputError."""
    check_content_type(content_type)
    texts = _from_json(payload) if content_type == JSON else list(parse_message(embed_pb2.EmbedPayload, payload).texts)
    if not texts:
        raise BadInputError("the payload has no texts: send at least one")
    if len(texts) > TEXTS_MAX:
        raise BadInputError(f"the payload has {len(texts)} texts: send at most {TEXTS_MAX} in one task")
    return texts


def _from_json(payload: bytes) -> list[str]:
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"the payload is no JSON ({error}): send a list of strings") from error
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadInputError("the payload must be a JSON list of strings, or one string")
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        raise BadInputError("a text has half of a surrogate pair: send well-formed Unicode") from error
    return texts
