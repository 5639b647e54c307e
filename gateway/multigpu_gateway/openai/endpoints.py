"""The endpoints that the lines of a batch may use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from multigpu.outcome import Outcome

from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.openai import embeddings, generating
from multigpu_gateway.openai.requests import ChatRequest, CompletionRequest, EmbeddingsRequest


@dataclass(frozen=True, slots=True)
class Endpoint:
    kind: str
    decoder: msgspec.json.Decoder[Any]
    # Returns the payload and the units of each task of a request. Raises HttpError if a field is invalid.
    payloads: Callable[[Any], Sequence[tuple[bytes, int]]]
    # Returns the response body for a request. Raises the error of a task that did not succeed.
    answer: Callable[[Any, Sequence[Outcome]], dict[str, Any]]

    def task(self, body: bytes) -> tuple[str, bytes, int]:
        """Returns the model, payload and units of a request's only task. Raises HttpError if the request is invalid, or
        needs several tasks.
        """
        parsed = self.parse(body)
        if getattr(parsed, "stream", None):
            raise HttpError(BAD_REQUEST, "stream: a batch has whole answers", param="stream")
        payloads = self.payloads(parsed)
        if len(payloads) != 1:
            raise HttpError(BAD_REQUEST, "a line of a batch has one answer: make a line for each prompt, and n 1")
        return (parsed.model, *payloads[0])

    def parse(self, body: bytes) -> Any:
        try:
            return self.decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise HttpError(BAD_REQUEST, f"body: {error}") from None


ENDPOINTS = {
    "/v1/embeddings": Endpoint(
        embeddings.KIND, msgspec.json.Decoder(EmbeddingsRequest), embeddings.one_payload, embeddings.answer
    ),
    "/v1/completions": Endpoint(
        generating.KIND, msgspec.json.Decoder(CompletionRequest), generating.payloads, generating.answer
    ),
    "/v1/chat/completions": Endpoint(
        generating.KIND, msgspec.json.Decoder(ChatRequest), generating.payloads, generating.answer
    ),
}
