"""The inputs and outputs of models of each kind as tensors, and the tasks that run the models.

- infer: the model's own inputs and outputs.
- embed: `text` BYTES [-1] in, `embedding` FP32 [-1, -1] out.
- generate, as Triton's back end for vLLM: `text_input` BYTES [1] in, `text_output` BYTES [1] out, which begins with
  the input unless it is streamed or `exclude_input_in_output` BOOL [1] is true. Sampling: `sampling_parameters` BYTES
  [1], a JSON object, or, without it, the parameters of the request. `stream` BOOL [1]: false in ModelStreamInfer gives
  one response.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from multigpu.fleet import Model
from multigpu.outcome import Outcome
from multigpu.v1 import embed_pb2, generate_pb2, infer_pb2

from multigpu_gateway.errors import BAD_REQUEST, UNAVAILABLE, HttpError
from multigpu_gateway.kserve import open_inference_pb2 as pb
from multigpu_gateway.kserve.tensors import (
    BYTES,
    DATATYPES,
    NamedTensor,
    bytes_of,
    inputs_of,
    outputs_of,
    values_of,
    wrong,
)
from multigpu_gateway.openai.requests import CompletionRequest
from multigpu_gateway.openai.sampling import completion_payloads

EMBED, GENERATE, INFER = "embed", "generate", "infer"
KINDS = (EMBED, GENERATE, INFER)
TEXTS_MAX = 10_000
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "stop", "seed", "frequency_penalty",
             "presence_penalty")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """An input or output of a model. `shape`: -1 for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceTask:
    """The task of a request."""

    kind: str
    payload: bytes
    # The number of examples.
    units: int
    read: Callable[[Outcome], list[NamedTensor]]
    # Returns the outputs for a part of a streamed result, none if it has no text. None: the result is not streamed.
    read_chunk: Callable[[bytes], list[NamedTensor]] | None = None


Tensors = tuple[Sequence[TensorInfo], Sequence[TensorInfo]]
_TEXTS: dict[str, Tensors] = {
    EMBED: (
        [TensorInfo(name="text", datatype=BYTES, shape=(-1,))],
        [TensorInfo(name="embedding", datatype="FP32", shape=(-1, -1))],
    ),
    GENERATE: (
        [
            TensorInfo(name="text_input", datatype=BYTES, shape=(1,)),
            TensorInfo(name="sampling_parameters", datatype=BYTES, shape=(1,), optional=True),
            TensorInfo(name="exclude_input_in_output", datatype="BOOL", shape=(1,), optional=True),
            TensorInfo(name="stream", datatype="BOOL", shape=(1,), optional=True),
        ],
        [TensorInfo(name="text_output", datatype=BYTES, shape=(1,))],
    ),
}


def tensors_of(model: Model) -> Tensors:
    """Returns the inputs and outputs of a model. Raises HttpError if they are not known yet."""
    if model.kind in _TEXTS:
        return _TEXTS[model.kind]
    if not model.inputs:
        message = f"the inputs of {model.name} are known once it has been loaded: load it first (RepositoryModelLoad)"
        raise HttpError(UNAVAILABLE, message, code="model_not_loaded")
    inputs, outputs = (
        [
            TensorInfo(name=each.name, datatype=DATATYPES.get(each.dtype, ""), shape=each.shape, optional=each.optional)
            for each in side
        ]
        for side in (model.inputs, model.outputs)
    )
    return inputs, outputs


def task_of(request: pb.ModelInferRequest, raw: Sequence[bytes], *, stream: bool = False) -> InferenceTask:
    """Returns the task for a request. Its inputs tell the kind: only embed and generate have inputs of BYTES. `raw`:
    see inputs_of. `stream`: stream generated text. Raises HttpError if an input or output is invalid.
    """
    if not request.model_name:
        raise HttpError(BAD_REQUEST, "model_name is missing", param="model_name")
    inputs = inputs_of(request, raw)
    outputs = outputs_of(request)
    if not inputs:
        raise HttpError(BAD_REQUEST, "the request has no inputs", param="inputs")
    if not any(each.datatype == BYTES for each in inputs.values()):
        return _infer(inputs, outputs)
    kind = EMBED if "text" in inputs else GENERATE
    _check(inputs, outputs, *_TEXTS[kind])
    return _embed(inputs) if kind == EMBED else _generate(request, inputs, stream=stream)


def _check(
    inputs: Mapping[str, NamedTensor], outputs: Sequence[str], takes: Sequence[TensorInfo], gives: Sequence[TensorInfo]
) -> None:
    """Raises HttpError if the inputs or outputs are not those of the model's kind."""
    known = {each.name: each for each in takes}
    for name, given in inputs.items():
        if name not in known:
            raise wrong(name, f"the model has no such input: it takes {', '.join(known)}")
        wanted = known[name]
        fits = len(given.shape) == len(wanted.shape) and all(
            size in (-1, found) for size, found in zip(wanted.shape, given.shape, strict=True)
        )
        if given.datatype != wanted.datatype or not fits:
            takes_it = f"{wanted.datatype} {list(wanted.shape)}"
            raise wrong(name, f"it is {given.datatype} {list(given.shape)}, and the model takes {takes_it}")
    if missing := [each.name for each in takes if not each.optional and each.name not in inputs]:
        raise wrong(missing[0], "it is missing")
    if unknown := [name for name in outputs if name not in {each.name for each in gives}]:
        raise wrong(unknown[0], f"the model has no such output: it gives {', '.join(each.name for each in gives)}")


def _text(name: str, element: bytes) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise wrong(name, f"it is no UTF-8: {error}") from None


def _infer(inputs: Mapping[str, NamedTensor], outputs: Sequence[str]) -> InferenceTask:
    payload = infer_pb2.InferPayload(inputs=[each.message() for each in inputs.values()], outputs=outputs)
    examples = {each.shape[0] if each.shape else 1 for each in inputs.values()}
    units = max(1, examples.pop()) if len(examples) == 1 else 1
    return InferenceTask(kind=INFER, payload=payload.SerializeToString(), units=units, read=_tensors_in)


def _tensors_in(outcome: Outcome) -> list[NamedTensor]:
    found = infer_pb2.InferResult.FromString(outcome.result).outputs
    return [
        NamedTensor(name=each.name, datatype=DATATYPES[each.dtype], shape=tuple(each.shape), data=each.data)
        for each in found
    ]


def _embed(inputs: Mapping[str, NamedTensor]) -> InferenceTask:
    texts = [_text("text", element) for element in inputs["text"].elements()]
    if not 1 <= len(texts) <= TEXTS_MAX:
        raise wrong("text", f"it has {len(texts):,} texts: send 1 to {TEXTS_MAX:,}")
    payload = embed_pb2.EmbedPayload(texts=texts).SerializeToString()
    return InferenceTask(kind=EMBED, payload=payload, units=len(texts), read=_vectors_in)


def _vectors_in(outcome: Outcome) -> list[NamedTensor]:
    result = embed_pb2.EmbedResult.FromString(outcome.result)
    shape = (len(result.values) // (4 * result.dimension), result.dimension)
    return [NamedTensor(name="embedding", datatype="FP32", shape=shape, data=result.values)]


def _generate(request: pb.ModelInferRequest, inputs: Mapping[str, NamedTensor], *, stream: bool) -> InferenceTask:
    prompt = _text("text_input", inputs["text_input"].elements()[0])
    sampling = {"model": request.model_name, "prompt": prompt} | _sampling(request, inputs)
    try:
        parsed = msgspec.convert(sampling, CompletionRequest, strict=False)
    except msgspec.ValidationError as error:
        raise wrong("sampling_parameters", str(error)) from None
    (payload,) = completion_payloads(parsed)
    if "stream" in inputs:
        pieces = inputs["stream"].data != b"\0"
        if pieces and not stream:
            raise wrong("stream", "it is true, and ModelInfer has one response: use ModelStreamInfer")
        stream = pieces
    without = inputs.get("exclude_input_in_output")
    excluded = stream if without is None else without.data != b"\0"
    if stream and not excluded:
        raise wrong("exclude_input_in_output", "it is false, and a stream has the new text alone")
    begin = "" if excluded else prompt

    def read(outcome: Outcome) -> list[NamedTensor]:
        return text_output(begin + generate_pb2.GenerateResult.FromString(outcome.result).text)

    def read_chunk(data: bytes) -> list[NamedTensor]:
        text = generate_pb2.GenerateChunk.FromString(data).text
        return text_output(text) if text else []

    return InferenceTask(kind=GENERATE, payload=payload, units=1, read=read, read_chunk=read_chunk if stream else None)


def text_output(text: str) -> list[NamedTensor]:
    """Returns the output of kind "generate"."""
    return [NamedTensor(name="text_output", datatype=BYTES, shape=(1,), data=bytes_of([text.encode()]))]


def _sampling(request: pb.ModelInferRequest, inputs: Mapping[str, NamedTensor]) -> dict[str, Any]:
    """Returns the sampling parameters. Raises HttpError if the input sampling_parameters is invalid."""
    given = inputs.get("sampling_parameters")
    if given is None:
        return {name: value for name, value in values_of(request.parameters).items() if name in _SAMPLING}
    try:
        found = json.loads(given.elements()[0])
    except (ValueError, RecursionError) as error:
        raise wrong("sampling_parameters", f"it is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise wrong("sampling_parameters", "it is to be a JSON object")
    if unknown := [name for name in found if name not in _SAMPLING]:
        raise wrong("sampling_parameters", f"{unknown[0]!r} is not served: known are {', '.join(_SAMPLING)}")
    return found
