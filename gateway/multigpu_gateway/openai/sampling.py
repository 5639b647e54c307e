"""Converts chat and completion requests to the payloads of tasks of kind "generate"."""

import json
from typing import Any

from multigpu.v1 import generate_pb2

from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.openai.embeddings import texts_or_tokens
from multigpu_gateway.openai.requests import ChatRequest, CompletionRequest, Message, Sampled
from multigpu_gateway.tasks import check_copies

CHOICES_MAX = 128
TOP_LOGPROBS_MAX = 20
# OpenAI's defaults. Without a limit, a completion has 16 tokens, and a chat message may fill the model's context.
TEMPERATURE, COMPLETION_TOKENS = 1.0, 16
TO_THE_END = 2**32 - 1
_SEEDS = 2**64


def _reject(param: str, why: str) -> HttpError:
    return HttpError(BAD_REQUEST, f"{param}: {why}", param=param)


def chat_payloads(body: ChatRequest) -> list[bytes]:
    """Returns the payload of each choice. Raises HttpError if a field is invalid, or asks for something unsupported."""
    for name in ("tools", "functions"):
        if getattr(body, name):
            raise _reject(name, "no model of this fleet calls tools: leave it out")
    if body.tool_choice not in (None, "none", "auto"):
        raise _reject("tool_choice", "no model of this fleet calls tools: leave it out")
    if body.modalities not in (None, ["text"]):
        raise _reject("modalities", "models of this fleet write text: leave it out")
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    message = _payload(body, TO_THE_END if given is None else given)
    if not body.messages:
        raise _reject("messages", "there are none: send at least one")
    message.messages.extend(_chat_message(each) for each in body.messages)
    if body.top_logprobs is not None and not body.logprobs:
        raise _reject("top_logprobs", "it needs logprobs=true")
    if body.logprobs:
        message.logprobs = _logprobs(body.top_logprobs or 0, "top_logprobs")
    if body.response_format is not None and body.response_format.type != "text":
        message.json_schema = _schema(body)
    return _serialize_choices(body, [message])


def completion_payloads(body: CompletionRequest) -> list[bytes]:
    """Returns the payload of each choice, prompt by prompt. Raises HttpError as chat_payloads does."""
    if body.echo:
        raise _reject("echo", "answers don't repeat the prompt: leave it out")
    if body.suffix:
        raise _reject("suffix", "no model of this fleet fills a gap: leave it out")
    if body.best_of not in (None, body.n or 1):
        raise _reject("best_of", "choices are not ranked: leave it out, or make it equal to n")
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    messages = []
    for prompt in texts_or_tokens(body.prompt, "prompt"):
        message = _payload(body, max_tokens)
        if not prompt:
            raise _reject("prompt", "it is empty: a model needs something to go on from")
        try:
            if isinstance(prompt, str):
                message.prompt = prompt
            else:
                message.prompt_ids.extend(prompt)
        except ValueError as error:
            raise _reject("prompt", str(error)) from None
        if body.logprobs is not None:
            message.logprobs = _logprobs(body.logprobs, "logprobs")
        messages.append(message)
    return _serialize_choices(body, messages)


def _payload(body: Sampled, max_tokens: int) -> generate_pb2.GeneratePayload:
    for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
        if getattr(body, name):
            raise _reject(name, "this server does not have it: leave it out, or use repetition_penalty")
    if max_tokens < 1:
        raise _reject("max_tokens", f"{max_tokens} is too small: at least 1")
    if body.top_p == 0:
        raise _reject("top_p", "it is to be more than 0 and at most 1; for the likeliest tokens set temperature to 0")
    temperature = TEMPERATURE if body.temperature is None else body.temperature
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    try:
        message = generate_pb2.GeneratePayload(
            max_tokens=max_tokens, temperature=temperature, stop=[word for word in stop if word],
            top_p=body.top_p or 0, top_k=max(0, body.top_k or 0), repetition_penalty=body.repetition_penalty or 0,
        )  # fmt: skip
    except ValueError as error:
        raise HttpError(BAD_REQUEST, str(error)) from None
    return message


def _serialize_choices(body: Sampled, messages: list[generate_pb2.GeneratePayload]) -> list[bytes]:
    """Returns `n` payloads for each message. If the request has a seed, choice I of a message has SEED + I: with one
    seed, all choices would be equal.
    """
    n = 1 if body.n is None else body.n
    if not 1 <= n * len(messages) <= CHOICES_MAX:
        raise _reject("n", f"a request has 1 to {CHOICES_MAX} answers, and this one {n * len(messages)}")
    check_copies("n", sum(message.ByteSize() for message in messages), n)
    payloads = []
    for message in messages:
        for number in range(n):
            if body.seed is not None:
                message.seed = (body.seed + number) % _SEEDS
            payloads.append(message.SerializeToString())
    return payloads


def _chat_message(message: Message) -> generate_pb2.ChatMessage:
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if content is None:
        raise _reject("messages", f"a message of the role {message.role!r} has no content")
    if isinstance(content, list):
        if wrong := [part.type for part in content if part.type != "text"]:
            raise _reject("messages", f"a part of type {wrong[0]!r} can't be read: models of this fleet take text")
        content = "".join(part.text or "" for part in content)
    try:
        return generate_pb2.ChatMessage(role=role, content=content)
    except ValueError as error:
        raise _reject("messages", str(error)) from None


def _logprobs(count: int, param: str) -> int:
    if not 0 <= count <= TOP_LOGPROBS_MAX:
        raise _reject(param, f"{count} is not 0 to {TOP_LOGPROBS_MAX}")
    return count


def _schema(body: ChatRequest) -> str:
    assert body.response_format is not None
    schema: dict[str, Any] | None = {"type": "object"}
    if body.response_format.type == "json_schema":
        schema = body.response_format.json_schema.schema if body.response_format.json_schema else None
        if schema is None:
            raise _reject("response_format", "json_schema.schema is missing")
    return json.dumps(schema)
