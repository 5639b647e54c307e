"""POST /v1/embeddings."""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from multigpu.outcome import Outcome
from multigpu.v1 import embed_pb2
from numpy.typing import NDArray

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.http import Request
from multigpu_gateway.openai.requests import EmbeddingsRequest, Input
from multigpu_gateway.tasks import TaskSettings, gather_or_cancel

KIND = "embed"
# Limits of inputs: of a request, and of each of its tasks, so that several workers share a long list.
INPUTS_MAX, TASK_INPUTS = 10_000, 32
_request = msgspec.json.Decoder(EmbeddingsRequest)


async def embeddings(request: Request, pair: ClientPair) -> None:
    """Returns a vector for each input."""
    await embed(request, pair, await request.json(_request))


async def embed(request: Request, pair: ClientPair, body: EmbeddingsRequest) -> None:
    payloads = _payloads(texts_or_tokens(body.input, "input"))
    options = TaskSettings(request, body.model).options_of_tasks()
    run = pair.client.run_outcome
    async with request.while_connected():
        if len(payloads) == 1:
            outcomes = [await run(KIND, payloads[0][0], units=payloads[0][1], **next(options))]
        else:
            each = zip(payloads, options, strict=False)
            outcomes = await gather_or_cancel(run(KIND, payload, units=units, **own) for (payload, units), own in each)
    await request.respond(200, msgspec.json.encode(answer(body, outcomes)))


def answer(body: EmbeddingsRequest, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the response body with the vectors of all tasks. Raises the error of a task that did not succeed."""
    rows, tokens = [], 0
    for outcome in outcomes:
        vectors, counted = _read(outcome)
        tokens += counted
        if body.dimensions is not None:
            vectors = normalised(shortened(vectors, body.dimensions))
        rows += [_written(row, body.encoding_format) for row in vectors]
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


def one_payload(body: EmbeddingsRequest) -> list[tuple[bytes, int]]:
    """Returns the payload and the number of inputs of a single task for all inputs."""
    return _payloads(texts_or_tokens(body.input, "input"), INPUTS_MAX)


def texts_or_tokens(given: Input, param: str) -> list[Any]:
    """Returns a list of texts, or of each text's token ids (list[int]). Raises HttpError if it is empty or mixed."""
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
    """Returns the payload and the number of inputs of each task. Raises HttpError if there are too many inputs."""
    if len(inputs) > INPUTS_MAX:
        message = f"there are {len(inputs):,} inputs: send at most {INPUTS_MAX:,} in one request"
        raise HttpError(BAD_REQUEST, message, param="input")
    return payloads_of(inputs, "input", task_inputs, count_tokens=True)


def payloads_of(inputs: list[Any], param: str, task_inputs: int, **fields: Any) -> list[tuple[bytes, int]]:
    """Returns the payload and the number of inputs of each task. `inputs`: texts, or lists of token ids. `fields`:
    other fields of the payload. Raises HttpError, which names `param`, if an input is invalid.
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
        except ValueError as error:  # half of a surrogate pair, or a token id that is no uint32
            raise HttpError(BAD_REQUEST, f"{param}: {error}", param=param) from None
        found.append((payload.SerializeToString(), len(part)))
    return found


def _read(outcome: Outcome) -> tuple[NDArray[np.float32], int]:
    """Returns the vectors, [inputs, dimension], and the number of tokens. Raises the task's error if it failed."""
    if not outcome.succeeded:
        raise outcome.to_error()
    result = embed_pb2.EmbedResult.FromString(outcome.result)
    return np.frombuffer(result.values, "<f4").reshape(-1, result.dimension), result.tokens


def shortened(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Returns the first components of each vector (Matryoshka models). Raises HttpError for invalid `dimensions`."""
    if not 1 <= dimensions <= vectors.shape[1]:
        message = f"dimensions is {dimensions}: the model's vectors have {vectors.shape[1]} components"
        raise HttpError(BAD_REQUEST, message, param="dimensions")
    return vectors[:, :dimensions]


def normalised(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the vectors scaled to length 1. Zero vectors stay as they are."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    found: NDArray[np.float32] = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return found


def _written(row: NDArray[np.float32], encoding_format: str | None) -> str | list[float]:
    if encoding_format == "base64":
        return base64.b64encode(row.astype("<f4", copy=False).tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers
