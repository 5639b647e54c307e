"""POST /embed and /similarity."""

from typing import Any

import msgspec
import numpy as np
from multigpu.v1 import embed_pb2
from numpy.typing import NDArray

from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.openai.embeddings import KIND, normalised, payloads_of, shortened, texts_or_tokens
from multigpu_gateway.openai.requests import Input
from multigpu_gateway.tei.call import TASK_INPUTS, Answer, Call, Truncated, check_count
from multigpu_gateway.tei.errors import empty

# Vectors of this length, within the tolerance, were normalised by the model itself.
_UNIT, _UNIT_TOLERANCE = 1.0, 1e-3


def check_prompt(name: str | None) -> None:
    """Raises HttpError if a prompt is named."""
    if name is not None:
        message = "prompt_name is not served: put the prompt before the texts, or set it in the model's folder"
        raise HttpError(BAD_REQUEST, message, param="prompt_name")


class Embedded(Truncated, kw_only=True):
    prompt_name: str | None = None

    def check(self) -> None:
        Truncated.check(self)
        check_prompt(self.prompt_name)


class EmbedRequest(Embedded, kw_only=True):
    inputs: Input
    normalize: bool | None = None
    dimensions: int | None = None


class SimilarityInput(msgspec.Struct):
    source_sentence: str
    sentences: list[str]


class SimilarityRequest(msgspec.Struct):
    inputs: SimilarityInput
    parameters: Embedded | None = None


async def embed(call: Call, body: EmbedRequest) -> Answer:
    """Returns a vector for each input: list[list[float]]."""
    body.check()
    inputs = inputs_of(body.inputs)
    vectors, tokens = await _vectors(call, inputs, "inputs")
    if body.normalize is False and np.allclose(np.linalg.norm(vectors, axis=1), _UNIT, atol=_UNIT_TOLERANCE):
        message = "normalize is false, and the model's own configuration normalises its vectors: leave normalize out"
        raise HttpError(BAD_REQUEST, message, param="normalize")
    if body.dimensions is not None:
        vectors = shortened(vectors, body.dimensions)
    if body.normalize is not False:
        vectors = normalised(vectors)
    return Answer(vectors.tolist(), characters=sum(map(len, inputs)), tokens=tokens)


def inputs_of(given: Input) -> list[Any]:
    """Returns a list of texts, or of each text's token ids (list[int]). Raises HttpError if it is empty or mixed, or if
    an input is empty.
    """
    if not given or (isinstance(given, list) and not all(each or each == 0 for each in given)):
        raise empty("inputs")
    return texts_or_tokens(given, "inputs")


async def similarity(call: Call, body: SimilarityRequest) -> Answer:
    """Returns the cosine similarity of each sentence and the source sentence: list[float]."""
    if body.parameters is not None:
        body.parameters.check()
    if not body.inputs.sentences:
        raise empty("inputs.sentences")
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    vectors, tokens = await _vectors(call, texts, "inputs")
    vectors = normalised(vectors)
    cosines = vectors[1:] @ vectors[0]
    return Answer(cosines.tolist(), characters=sum(map(len, texts)), tokens=tokens)


async def _vectors(call: Call, inputs: list[Any], param: str) -> tuple[NDArray[np.float32], int]:
    """Returns the vectors [inputs, dimension] of texts or of lists of token ids, and the number of tokens."""
    if not all(inputs):
        raise empty(param)
    results = await run_embed(call, inputs, param, count_tokens=True)
    rows = [np.frombuffer(result.values, "<f4").reshape(-1, result.dimension) for result in results]
    return np.concatenate(rows), sum(result.tokens for result in results)


async def run_embed(
    call: Call, inputs: list[Any], param: str, *, task_inputs: int = TASK_INPUTS, **fields: Any
) -> list[embed_pb2.EmbedResult]:
    """Runs tasks on texts or on lists of token ids. Returns their results in order. `fields`: of the payload."""
    check_count(len(inputs), param)
    payloads = payloads_of(inputs, param, task_inputs, **fields)
    return [embed_pb2.EmbedResult.FromString(result) for result in await call.run(KIND, payloads)]
