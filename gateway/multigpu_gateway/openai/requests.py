"""The requests of OpenAI's API: https://platform.openai.com/docs/api-reference. As in other servers, fields that are
not here are ignored. Some fields are here only to be rejected, because ignoring them would change the response.
"""

from typing import Any, Literal

import msgspec

# Texts, or token ids of one text or of several.
Input = str | list[str | int | list[int]]


class EmbeddingsRequest(msgspec.Struct):
    input: Input
    model: str
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class JsonSchema(msgspec.Struct):
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampled(msgspec.Struct):
    """The fields that chat and completion requests share. None: not given."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions of vLLM and other servers.
    top_k: int | None = None
    repetition_penalty: float | None = None
    # Rejected unless null, zero or empty.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class CompletionRequest(Sampled, kw_only=True):
    prompt: Input
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None


class ChatRequest(Sampled, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Any = None
    modalities: list[str] | None = None
