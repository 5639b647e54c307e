"""Payloads of tasks of kind "embed".

Payload and result are `EmbedPayload` and `EmbedResult` (protos/multigpu/v1/embed.proto), or as JSON a list of strings
(or one string) and a list of lists of numbers. Token ids, counts and other outputs than vectors need protobuf.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from multigpu.v1 import embed_pb2

from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.common.payloads import JSON, check_content_type, parse_message
from multigpu_worker.engines.embed.text import Text

TEXTS_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedInput:
    """What one task asks for."""

    # All of them strings, or all of them token ids.
    texts: Sequence[Text]
    count_tokens: bool = False
    output: embed_pb2.EmbedOutput = embed_pb2.EMBED_OUTPUT_UNSPECIFIED
    special_tokens: bool = False


def parse_texts(payload: bytes, content_type: str) -> EmbedInput:
    """The texts of one payload: at least one, at most TEXTS_MAX. Raises BadInputError.

    Token ids are not checked here, because that takes the model (TextInput.check_ids).
    """
    check_content_type(content_type)
    parsed = EmbedInput(texts=_from_json(payload)) if content_type == JSON else _from_message(payload)
    if not parsed.texts:
        raise BadInputError("the payload has no texts: send at least one")
    if len(parsed.texts) > TEXTS_MAX:
        raise BadInputError(f"the payload has {len(parsed.texts)} texts: send at most {TEXTS_MAX} in one task")
    return parsed


def _from_message(payload: bytes) -> EmbedInput:
    message = parse_message(embed_pb2.EmbedPayload, payload)
    if message.texts and message.tokens:
        raise BadInputError("the payload has both texts and tokens: send only one of them")
    if message.output not in embed_pb2.EmbedOutput.values():
        raise BadInputError(f"output is {message.output}: this worker does not know it")
    for output, unfit in ((embed_pb2.EMBED_OUTPUT_TOKENS, "tokens"), (embed_pb2.EMBED_OUTPUT_TEXTS, "texts")):
        if message.output == output and getattr(message, unfit):
            raise BadInputError(f"{embed_pb2.EmbedOutput.Name(output)} is not the output of {unfit}: send the other")
    texts: Sequence[Text] = list(message.texts) if message.texts else [list(text.ids) for text in message.tokens]
    return EmbedInput(
        texts=texts,
        count_tokens=message.count_tokens,
        output=message.output,
        special_tokens=message.special_tokens,
    )


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
