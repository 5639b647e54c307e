"""Payloads, chunks and results of tasks of kind "generate".

All messages are those of protos/multigpu/v1/generate.proto, or in protobuf's JSON form. Chunks and result have the form
of the payload.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from multigpu.v1 import generate_pb2 as pb

from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.common.payloads import JSON, check_content_type
from multigpu_worker.engines.embed.text import CHARACTERS_PER_TOKEN_MAX
from multigpu_worker.engines.generate.sample import Sampling

MAX_TOKENS = 256
# max_tokens: what the context leaves.
TO_THE_END = 2**32 - 1
TEMPERATURE_MAX = 2.0
STOP_MAX = 16
STOP_BYTES_MAX = 256
LOGPROBS_MAX = 20
SCHEMA_BYTES_MAX = 256 << 10
ROLES = ("system", "user", "assistant")

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The checked input of one task."""

    prompt_ids: list[int]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    # Empty: none.
    json_schema: str = ""
    # The payload has no seed, so the first chunk tells it.
    seed_drawn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What the chunks of earlier attempts contain."""

    token_ids: list[int]
    text: str
    seed_sent: bool
    # One for each token, or none.
    logprobs: list[pb.TokenLogprob]


def encode(message: Message, content_type: str) -> bytes:
    """Write a message in the caller's form."""
    if content_type == JSON:
        return json_format.MessageToJson(message, preserving_proto_field_name=True, indent=None).encode()
    return message.SerializeToString(deterministic=True)


def decode(cls: type[M], data: bytes, content_type: str) -> M:
    """Parse a message. Raises BadInputError."""
    check_content_type(content_type)
    try:
        return json_format.Parse(data, cls()) if content_type == JSON else cls.FromString(data)
    except (DecodeError, json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise BadInputError(
            f"the payload is no multigpu.v1.{cls.__name__} ({error}): send one, or its fields as JSON with content "
            f"type {JSON}"
        ) from error


def read_before(partials: tuple[bytes, ...], content_type: str) -> Before:
    """Parse the chunks of earlier attempts."""
    chunks = [decode(pb.GenerateChunk, data, content_type) for data in partials]
    return Before(
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        text="".join(chunk.text for chunk in chunks),
        seed_sent=any(chunk.HasField("seed") for chunk in chunks),
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
    )


def read_request(payload: bytes, content_type: str, tokenizer: Any, context: int, task_id: int) -> Request:
    """Parse and check a payload. `context`: the most tokens of a sequence. Raises BadInputError."""
    message = decode(pb.GeneratePayload, payload, content_type)
    check(message)
    prompt_ids = _prompt_ids(message, tokenizer, context)
    if not prompt_ids:
        raise BadInputError("the prompt has no tokens: write something that the model can go on from")
    room = context - len(prompt_ids)
    max_tokens = room if message.max_tokens == TO_THE_END else message.max_tokens or min(MAX_TOKENS, room)
    if room < 1 or max_tokens > room:
        asked = f" and {max_tokens} to generate" if message.max_tokens else ""
        raise BadInputError(
            f"the prompt has {len(prompt_ids)} tokens{asked}, and the model's context is {context} tokens: "
            "shorten the prompt or lower max_tokens"
        )
    drawn = message.temperature > 0 and not message.HasField("seed")
    seed = message.seed if message.HasField("seed") else seed_of(task_id, payload) if drawn else 0
    sampling = Sampling(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        repetition_penalty=message.repetition_penalty or 1.0,
        seed=seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )
    return Request(
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=tuple(message.stop),
        json_schema=message.json_schema,
        seed_drawn=drawn,
    )


def seed_of(task_id: int, payload: bytes) -> int:
    """The seed of a task without one: different for each task, the same for all attempts of a task."""
    digest = hashlib.blake2b(task_id.to_bytes(8, "little", signed=True) + payload, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def check(message: pb.GeneratePayload) -> None:
    """Raises BadInputError."""
    if not 0 <= message.temperature <= TEMPERATURE_MAX:
        raise BadInputError(f"temperature is {message.temperature:g}: it must be 0 (greedy) to {TEMPERATURE_MAX:g}")
    if not 0 <= message.top_p <= 1:
        raise BadInputError(f"top_p is {message.top_p:g}: it must be more than 0 and at most 1")
    if message.repetition_penalty and not 0.01 <= message.repetition_penalty <= 100:
        raise BadInputError(f"repetition_penalty is {message.repetition_penalty:g}: it must be 0.01 to 100")
    if len(message.stop) > STOP_MAX:
        raise BadInputError(f"there are {len(message.stop)} stop strings: give at most {STOP_MAX}")
    for word in message.stop:
        if not 0 < len(word.encode()) <= STOP_BYTES_MAX:
            raise BadInputError(f"a stop string has {len(word.encode())} bytes: it must have 1 to {STOP_BYTES_MAX}")
    if message.logprobs > LOGPROBS_MAX:
        raise BadInputError(f"logprobs is {message.logprobs}: it must be 0 to {LOGPROBS_MAX}")
    if message.json_schema:
        _check_schema(message.json_schema)
    if sum(map(bool, (message.prompt, message.messages, message.prompt_ids))) != 1:
        raise BadInputError("give exactly one of prompt, messages and prompt_ids")
    for said in message.messages:
        if said.role not in ROLES:
            raise BadInputError(f"role {said.role!r} is none of {', '.join(ROLES)}")


def _check_schema(text: str) -> None:
    if len(text.encode()) > SCHEMA_BYTES_MAX:
        raise BadInputError(f"json_schema has {len(text.encode())} bytes: it must have at most {SCHEMA_BYTES_MAX}")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"json_schema is no JSON ({error}): send the schema as JSON") from error
    if not isinstance(schema, dict):
        raise BadInputError('json_schema is no schema: send a JSON object such as {"type": "object"}')


def _prompt_ids(message: pb.GeneratePayload, tokenizer: Any, context: int) -> list[int]:
    if message.prompt_ids:
        return list(message.prompt_ids)
    text = _chat(message, tokenizer) if message.messages else message.prompt
    if len(text) > CHARACTERS_PER_TOKEN_MAX * context:
        # The tokenizer would hold a hundred bytes and more for each character.
        raise BadInputError(
            f"the prompt has {len(text)} characters, and the model's context is {context} tokens, for which at most "
            f"{CHARACTERS_PER_TOKEN_MAX * context} characters are accepted: shorten the prompt"
        )
    # A chat template adds the special tokens.
    return [int(token) for token in tokenizer(text, add_special_tokens=not message.messages)["input_ids"]]


def _chat(message: pb.GeneratePayload, tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise BadInputError("the model has no chat template: send a prompt in place of messages")
    said = [{"role": each.role, "content": each.content} for each in message.messages]
    try:
        text: str = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    except Exception as error:
        # The template is a program that comes with the model and may raise anything.
        raise BadInputError(f"the model's chat template rejects these messages: {error}") from error
    return text
