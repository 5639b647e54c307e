"""POST /embed_all, /tokenize and /decode."""

from typing import Any

import msgspec
import numpy as np
from multigpu.v1 import embed_pb2

from multigpu_gateway.openai.embeddings import texts_or_tokens
from multigpu_gateway.openai.requests import Input
from multigpu_gateway.tei.call import Answer, Call
from multigpu_gateway.tei.embedding import Embedded, check_prompt, inputs_of, run_embed
from multigpu_gateway.tei.errors import empty


class EmbedAllRequest(Embedded, kw_only=True):
    inputs: Input


class TokenizeRequest(msgspec.Struct):
    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeRequest(msgspec.Struct):
    # Token ids of one text, or a list of them for each text.
    ids: list[int | list[int]]
    skip_special_tokens: bool = True


async def embed_all(call: Call, body: EmbedAllRequest) -> Answer:
    """Returns the vector of each token of each input, without pooling: list[list[list[float]]]."""
    body.check()
    inputs = inputs_of(body.inputs)
    # One task for each input, because its result may have megabytes.
    results = await run_embed(call, inputs, "inputs", task_inputs=1, output=embed_pb2.EMBED_OUTPUT_TOKEN_VECTORS)
    rows = [np.frombuffer(each.values, "<f4").reshape(-1, each.dimension).tolist() for each in results]
    return Answer(rows, characters=sum(map(len, inputs)), tokens=sum(each.tokens for each in results))


async def tokenize(call: Call, body: TokenizeRequest) -> Answer:
    """Returns the tokens of each input: list[list[{id, text, special, start, stop}]]."""
    check_prompt(body.prompt_name)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    fields = {"output": embed_pb2.EMBED_OUTPUT_TOKENS, "special_tokens": body.add_special_tokens}
    # One task for each input, because the limit of characters applies to a task.
    results = await run_embed(call, texts, "inputs", task_inputs=1, **fields)
    return Answer([[_token(each) for each in text.tokens] for result in results for text in result.tokenised])


def _token(token: embed_pb2.TextToken) -> dict[str, Any]:
    place = (None, None) if token.special else (token.start, token.stop)
    return {"id": token.id, "text": token.text, "special": token.special, "start": place[0], "stop": place[1]}


async def decode(call: Call, body: DecodeRequest) -> Answer:
    """Returns the text of each list of token ids: list[str]."""
    if not body.ids:
        raise empty("ids")
    fields = {"output": embed_pb2.EMBED_OUTPUT_TEXTS, "special_tokens": not body.skip_special_tokens}
    results = await run_embed(call, texts_or_tokens(list(body.ids), "ids"), "ids", **fields)
    return Answer([text for result in results for text in result.texts])
