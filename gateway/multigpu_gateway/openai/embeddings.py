"""POST /v1/embeddings."""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from multigpu.outcome import Outcome
from multigpu.v1 import embed_pb2
from numpy.typing import NDArray

from multigpu_gateway.clients import Connected
from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.http import Request
from multigpu_gateway.openai.requests import EmbeddingsRequest, Input
from multigpu_gateway.tasks import TaskSettings, all_of

KIND = "embed"
# Inputs of one request, and of one of its tasks: a long list is spread over the workers.
INPUTS_MAX, TASK_INPUTS = 10_000, 32
_request = msgspec.json.Decoder(EmbeddingsRequest)


async def embeddings(request: Request, connected: Connected) -> None:
    """Answers with a vector for each input."""
    await embed(request, connected, await request.json(_request))


async def embed(request: Request, connected: Connected, asked: EmbeddingsRequest) -> None:
    payloads = _payloads(texts_or_tokens(asked.input, "input"))
    options = TaskSettings(request, asked.model).each()
    run = connected.client.run_outcome
    async with request.while_connected():
        if len(payloads) == 1:
            outcomes = [await run(KIND, payloads[0][0], units=payloads[0][1], **next(options))]
        else:
            each = zip(payloads, options, strict=False)
            outcomes = await all_of(run(KIND, payload, units=units, **own) for (payload, units), own in each)
    await request.respond(200, msgspec.json.encode(answer(asked, outcomes)))


def answer(asked: EmbeddingsRequest, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The vectors of all tasks. Raises the error of one that did not succeed."""
    rows, tokens = [], 0
    for outcome in outcomes:
        vectors, counted = _read(outcome)
        tokens += counted
        if asked.dimensions is not None:
            vectors = normalised(shortened(vectors, asked.dimensions))
        rows += [_written(row, asked.encoding_format) for row in vectors]
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": asked.model, "usage": usage}


def one_payload(asked: EmbeddingsRequest) -> list[tuple[bytes, int]]:
    """All inputs as one task."""
    return _payloads(texts_or_tokens(asked.input, "input"), INPUTS_MAX)


def texts_or_tokens(given: Input, param: str) -> list[Any]:
    """The texts, or the token ids (list[int]) of each text. HttpError: there are none, or of both kinds."""
    if isinstance(given, str):
        return [given]
    if all(isinstance(each, str) for each in given) and given:
        return given
    if all(isinstance(each, int) for each in given) and given:
        return [given]
    if all(isinstance(each, list) and each for each in given) and given:
        return given
    message = f"{param} is to be a text, a list of texts, or lists of token ids; it may not be empty"
    raise HttpError(BAD_REQUEST, message, param=param)


def _payloads(inputs: list[Any], task_inputs: int = TASK_INPUTS) -> list[tuple[bytes, int]]:
    """The payload and the number of inputs of each task."""
    if len(inputs) > INPUTS_MAX:
        message = f"there are {len(inputs):,} inputs: send at most {INPUTS_MAX:,} in one request"
        raise HttpError(BAD_REQUEST, message, param="input")
    return payloads_of(inputs, "input", task_inputs, count_tokens=True)


def payloads_of(inputs: list[Any], param: str, task_inputs: int, **fields: Any) -> list[tuple[bytes, int]]:
    """The payload and the number of inputs of each task on texts or on lists of token ids. `fields`: others of the
    payload. HttpError: an input can't be one.
    """
    found = []
    for at in range(0, len(inputs), task_inputs):
        part = inputs[at : at + task_inputs]
        payload = embed_pb2.EmbedPayload(**fields)
        try:
            if isinstance(part[0], str):
                payload.texts.extend(part)
            else:
                payload.tokens.extend(embed_pb2.TokenIds(ids=ids) for ids in part)
        except ValueError as error:  # half of a surrogate pair; an id that no token has
            raise HttpError(BAD_REQUEST, f"{param}: {error}", param=param) from None
        found.append((payload.SerializeToString(), len(part)))
    return found


def _read(outcome: Outcome) -> tuple[NDArray[np.float32], int]:
    """The vectors, [inputs, dimension], and the number of tokens. Raises the task's error."""
    if not outcome.succeeded:
        raise outcome.to_error()
    result = embed_pb2.EmbedResult.FromString(outcome.result)
    return np.frombuffer(result.values, "<f4").reshape(-1, result.dimension), result.tokens


def shortened(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """The first components, as models of nested vectors (Matryoshka) are used. HttpError: there are fewer."""
    if not 1 <= dimensions <= vectors.shape[1]:
        message = f"dimensions is {dimensions}: the model's vectors have {vectors.shape[1]} components"
        raise HttpError(BAD_REQUEST, message, param="dimensions")
    return vectors[:, :dimensions]


def normalised(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """The vectors with the length 1; zeros stay."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    found: NDArray[np.float32] = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return found


def _written(row: NDArray[np.float32], encoding_format: str | None) -> str | list[float]:
    if encoding_format == "base64":
        return base64.b64encode(row.astype("<f4", copy=False).tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers
