"""Payloads of tasks of kind "embed".

Payload and result are `EmbedPayload` and `EmbedResult` (protos/multigpu/v1/embed.proto), or with content type
"application/json" a list of strings (or one string) and a list of lists of numbers.
"""

import json

from google.protobuf.message import DecodeError
from multigpu.v1 import embed_pb2

from multigpu_worker.engines.common.failures import BadInputError

TEXTS_MAX = 10_000
JSON = "application/json"


def parse_texts(payload: bytes, content_type: str) -> list[str]:
    """The texts of one payload: at least one, at most TEXTS_MAX. Raises BadInputError."""
    if content_type == JSON:
        try:
            value = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise BadInputError(f"the payload is no JSON ({error}): send a list of strings") from error
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise BadInputError("the payload must be a JSON list of strings, or one string")
        if not all(map(_is_unicode, texts)):
            raise BadInputError("a text has half of a surrogate pair: send well-formed Unicode")
    elif content_type == "":
        try:
            texts = list(embed_pb2.EmbedPayload.FromString(payload).texts)
        except DecodeError as error:
            raise BadInputError(
                f"the payload is no multigpu.v1.EmbedPayload ({error}): send one, or JSON with content type {JSON}"
            ) from error
    else:
        raise BadInputError(f'content type {content_type!r} is not supported: leave it empty or use "{JSON}"')
    if not texts:
        raise BadInputError("the payload has no texts: send at least one")
    if len(texts) > TEXTS_MAX:
        raise BadInputError(f"the payload has {len(texts)} texts: send at most {TEXTS_MAX} in one task")
    return texts


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
