"""Tasks of kind "generate": prompts, and text that arrives in pieces.

The master and the engine deliver the pieces without gap or repetition, whatever workers die; the end of the iterator
checks them against the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from multigpu._calls.streaming import Part, StreamBase
from multigpu.errors import INVALID_ARGUMENT, InvalidTaskError, TransportError
from multigpu.options import CallOptions
from multigpu.v1 import generate_pb2

if TYPE_CHECKING:
    from multigpu.outcome import Outcome

KIND = "generate"
_REASONS = {generate_pb2.FINISH_REASON_STOP: "stop", generate_pb2.FINISH_REASON_LENGTH: "length"}

# A text to continue, or a conversation: {"role": "user", "content": "…"}, the oldest first.
Prompt = str | Sequence[Mapping[str, str]]


class GenerateOptions(CallOptions, total=False):
    """How text is generated, beside the options of the task. Every one is optional.

    Attributes:
        max_tokens: the most tokens to generate. Default: 256, or what the model's context leaves if that is less.
        temperature: 0 (the default): always the most likely token. At most 2.
        top_p: draw from the most likely tokens with this total probability. Default 1: from all.
        top_k: draw from this many of the most likely tokens. Default 0: from all.
        repetition_penalty: makes earlier tokens less likely. Default 1: it doesn't.
        stop: strings that end the answer, which excludes them.
        seed: the same seed, prompt and settings give the same text. Default: one is drawn.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    stop: Sequence[str]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """An answer that has ended."""

    # Without the prompt and without the stop string.
    text: str
    token_ids: tuple[int, ...]
    # "stop": the model ended, or a stop string came. "length": max_tokens, or the end of the context, was reached.
    finish_reason: str
    prompt_tokens: int
    # The worker of the last attempt.
    worker_id: str


def task_of(prompt: Prompt, options: GenerateOptions) -> tuple[bytes, dict[str, Any]]:
    """The payload of a task, and its options. Raises InvalidTaskError, TypeError."""
    rest: dict[str, Any] = dict(options)
    fields = {name: rest.pop(name) for name in GenerateOptions.__annotations__ if name in rest and name in _FIELDS}
    if isinstance(fields.get("stop"), str):
        raise TypeError("stop takes a list of strings; for one pass [stop]")
    if isinstance(prompt, str):
        fields["prompt"] = prompt
    else:
        if not all(isinstance(message, Mapping) for message in prompt):
            raise TypeError('a message is a dict such as {"role": "user", "content": "…"}')
        fields["messages"] = [dict(message) for message in prompt]
    if not prompt:
        raise InvalidTaskError(INVALID_ARGUMENT, "the prompt is empty: generate needs something to go on from")
    try:
        return generate_pb2.GeneratePayload(**fields).SerializeToString(), rest
    except (TypeError, ValueError) as error:
        raise InvalidTaskError(INVALID_ARGUMENT, f"generate can't take this: {error}") from error


_FIELDS = generate_pb2.GeneratePayload.DESCRIPTOR.fields_by_name


def text_of(outcome: Outcome) -> str:
    """The text in the outcome of a task. Raises its TaskError."""
    if not outcome.succeeded:
        raise outcome.to_error()
    return str(_parse(generate_pb2.GenerateResult, outcome.result).text)


class GenerationBase(StreamBase[str]):
    """What both iterators over a text do with a chunk, and with the result."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self._result: Generated | None = None
        self._token_ids: list[int] = []
        self._text: list[str] = []

    @property
    def result(self) -> Generated:
        """The whole answer. RuntimeError: it has not been read to its end yet."""
        if self._result is None:
            raise RuntimeError("the answer has not ended: read the iterator to its end first")
        return self._result

    def _read(self, part: Part) -> str:
        chunk = _parse(generate_pb2.GenerateChunk, part.data)
        self._token_ids += chunk.token_ids
        self._text.append(chunk.text)
        return str(chunk.text)

    def _finish(self, outcome: Outcome) -> None:
        result = _parse(generate_pb2.GenerateResult, outcome.result)
        if result.text != "".join(self._text) or list(result.token_ids) != self._token_ids:
            raise TransportError(
                f"the pieces of task {outcome.task_id} don't make up its result: its worker speaks another protocol"
            )
        self._result = Generated(
            text=result.text,
            token_ids=tuple(result.token_ids),
            finish_reason=_REASONS.get(result.finish_reason, ""),
            prompt_tokens=result.prompt_tokens,
            worker_id=outcome.worker_id,
        )
        super()._finish(outcome)


def _parse(cls: Any, data: bytes) -> Any:
    try:
        return cls.FromString(data)
    except DecodeError as error:
        raise TransportError(
            f"what generate returned can't be read ({error}): its worker speaks another protocol"
        ) from error
