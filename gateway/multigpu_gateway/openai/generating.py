"""POST /v1/completions and /v1/chat/completions: a task of kind "generate" for each choice."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from multigpu import AsyncClient
from multigpu.outcome import Outcome
from multigpu.v1 import generate_pb2 as pb

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.events import event, send_events
from multigpu_gateway.http import Request
from multigpu_gateway.openai.errors import error_event
from multigpu_gateway.openai.requests import ChatRequest, CompletionRequest, Sampled
from multigpu_gateway.openai.sampling import chat_payloads, completion_payloads
from multigpu_gateway.tasks import TaskSettings, gather_or_cancel

# The payload and the options of the task of each choice.
Tasks = list[tuple[bytes, dict[str, Any]]]

KIND = "generate"
DONE = b"data: [DONE]\n\n"
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
# Chunks that are buffered while the client reads too slowly.
_AHEAD = 64
_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)


class ResponseBuilder(ABC):
    """Builds the response in the format of its route, and as the request asks for it."""

    def __init__(self, body: Sampled, prefix: str, type_: str) -> None:
        self.stream = bool(body.stream)
        # Whether a stream ends with the usage.
        self.with_usage = bool(body.stream_options and body.stream_options.include_usage)
        # The number of choices for each prompt.
        self.choices = body.n or 1
        self.head: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}", "object": type_, "created": int(time.time()), "model": body.model
        }  # fmt: skip

    @abstractmethod
    def first(self, index: int) -> bytes:
        """Returns the first event of a choice in a stream; empty: none."""

    @abstractmethod
    def piece(self, index: int, chunk: pb.GenerateChunk) -> dict[str, Any]:
        """Returns the `choices` entry for a chunk."""

    @abstractmethod
    def last(self, index: int, reason: str) -> dict[str, Any]:
        """Returns the last `choices` entry of a choice in a stream."""

    @abstractmethod
    def whole(self, index: int, result: pb.GenerateResult) -> dict[str, Any]:
        """Returns the `choices` entry of a response that is no stream."""

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self.head, "choices": choices, **more})


class ChatResponseBuilder(ResponseBuilder):
    def __init__(self, body: ChatRequest) -> None:
        super().__init__(body, "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion")

    def first(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def piece(self, index: int, chunk: pb.GenerateChunk) -> dict[str, Any]:
        logprobs = _chat_logprobs(chunk.logprobs)
        return {"index": index, "delta": {"content": chunk.text}, "logprobs": logprobs, "finish_reason": None}

    def last(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def whole(self, index: int, result: pb.GenerateResult) -> dict[str, Any]:
        message = {"role": "assistant", "content": result.text, "refusal": None}
        reason = _REASONS.get(result.finish_reason, "stop")
        return {
            "index": index,
            "message": message,
            "logprobs": _chat_logprobs(result.logprobs),
            "finish_reason": reason,
        }


class CompletionResponseBuilder(ResponseBuilder):
    def __init__(self, body: CompletionRequest) -> None:
        super().__init__(body, "cmpl", "text_completion")
        # For each choice, by index: the number of characters so far, which is the offset of the next token.
        self._offsets: dict[int, int] = {}

    def first(self, index: int) -> bytes:
        return b""

    def piece(self, index: int, chunk: pb.GenerateChunk) -> dict[str, Any]:
        logprobs = self._logprobs(index, chunk.logprobs)
        return {"index": index, "text": chunk.text, "logprobs": logprobs, "finish_reason": None}

    def last(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def whole(self, index: int, result: pb.GenerateResult) -> dict[str, Any]:
        reason = _REASONS.get(result.finish_reason, "stop")
        logprobs = self._logprobs(index, result.logprobs)
        return {"index": index, "text": result.text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, found: Any) -> dict[str, Any] | None:
        if not found:
            return None
        tokens, offsets = [], []
        for each in found:
            tokens.append(_text(each))
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [{_text(other): other.logprob for other in each.top} for each in found],
            "text_offset": offsets,
        }


def _text(token: Any) -> str:
    """Returns a token as text. Bytes that are no whole character become U+FFFD."""
    text: str = token.token.decode(errors="replace")
    return text


def _chat_logprobs(found: Any) -> dict[str, Any] | None:
    if not found:
        return None

    def written(each: Any) -> dict[str, Any]:
        return {"token": _text(each), "logprob": each.logprob, "bytes": list(each.token)}

    return {"content": [written(each) | {"top_logprobs": [written(o) for o in each.top]} for each in found]}


async def chat_completions(request: Request, pair: ClientPair) -> None:
    """Generates the next message of a conversation."""
    body = await request.json(_chat)
    builder, tasks = ChatResponseBuilder(body), _tasks(request, body.model, chat_payloads(body))
    del body  # frees its texts, of which the payloads have copies: a task may wait long
    await _respond(request, pair, builder, tasks)


async def completions(request: Request, pair: ClientPair) -> None:
    """Continues the text of each prompt."""
    body = await request.json(_completion)
    builder, tasks = CompletionResponseBuilder(body), _tasks(request, body.model, completion_payloads(body))
    del body  # as above
    await _respond(request, pair, builder, tasks)


def _tasks(request: Request, model: str, payloads: list[bytes]) -> Tasks:
    return list(zip(payloads, TaskSettings(request, model).options_of_tasks(), strict=False))


async def _respond(request: Request, pair: ClientPair, builder: ResponseBuilder, tasks: Tasks) -> None:
    client = pair.client
    if builder.stream:
        await send_events(request, _events(client, tasks, builder), error_event, DONE)
        return
    async with request.while_connected():
        outcomes = await gather_or_cancel(client.run_outcome(KIND, payload, **own) for payload, own in tasks)
    await request.respond(200, msgspec.json.encode(_whole(builder, outcomes)))


def payloads(body: ChatRequest | CompletionRequest) -> list[tuple[bytes, int]]:
    """Returns the payload and the units of each choice. Raises HttpError if a field is invalid."""
    found = chat_payloads(body) if isinstance(body, ChatRequest) else completion_payloads(body)
    return [(payload, 1) for payload in found]


def answer(body: ChatRequest | CompletionRequest, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the response body. Raises the error of a task that did not succeed."""
    return _whole(
        ChatResponseBuilder(body) if isinstance(body, ChatRequest) else CompletionResponseBuilder(body), outcomes
    )


def _whole(builder: ResponseBuilder, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    results = [_result(outcome) for outcome in outcomes]
    choices = [builder.whole(index, result) for index, result in enumerate(results)]
    return {**builder.head, "choices": choices, "usage": _usage(builder, results)}


def _result(outcome: Outcome) -> pb.GenerateResult:
    if not outcome.succeeded:
        raise outcome.to_error()
    return pb.GenerateResult.FromString(outcome.result)


def _usage(builder: ResponseBuilder, results: list[pb.GenerateResult]) -> dict[str, int]:
    """Returns the numbers of tokens. A prompt counts once, not for each of its choices."""
    prompts = sum(result.prompt_tokens for result in results[:: builder.choices])
    generated = sum(result.completion_tokens or len(result.token_ids) for result in results)
    return {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}


def _events(client: AsyncClient, tasks: Tasks, builder: ResponseBuilder) -> AsyncGenerator[bytes, None]:
    """Returns a generator of the events of all choices, in the order of their arrival."""
    results: dict[int, pb.GenerateResult] = {}
    choices = [_choice(client, tasks, index, builder, results) for index in range(len(tasks))]
    return choices[0] if len(choices) == 1 else _merge(choices)


async def _merge(choices: list[AsyncGenerator[bytes, None]]) -> AsyncGenerator[bytes, None]:
    ready: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(_AHEAD)

    async def forward(choice: AsyncGenerator[bytes, None]) -> None:
        try:
            async with aclosing(choice) as events:
                async for data in events:
                    await ready.put(data)
        except Exception as error:  # noqa: BLE001  the reader of the queue raises it
            await ready.put(error)
        else:
            await ready.put(None)

    runs = [asyncio.create_task(forward(choice)) for choice in choices]
    try:
        left = len(runs)
        while left:
            item = await ready.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


async def _choice(
    client: AsyncClient, tasks: Tasks, index: int, builder: ResponseBuilder, results: dict[int, pb.GenerateResult]
) -> AsyncGenerator[bytes, None]:
    """Yields the events of one choice; if it is the last choice to end, also the event with the usage. `results` has
    the results of all choices that have ended, by index.
    """
    payload, options = tasks[index]
    begun = False
    async with client.stream(KIND, payload, **options) as parts:
        async for data in parts:
            if not begun:
                begun = True
                if first := builder.first(index):
                    yield first
            chunk = pb.GenerateChunk.FromString(data)
            if chunk.text or chunk.logprobs:
                yield builder.chunk([builder.piece(index, chunk)])
        result = _result(parts.outcome)
    if not begun and (first := builder.first(index)):
        yield first
    yield builder.chunk([builder.last(index, _REASONS.get(result.finish_reason, "stop"))])
    results[index] = result  # only now, so that the usage follows the last event of every choice
    if builder.with_usage and len(results) == len(tasks):
        yield builder.chunk([], usage=_usage(builder, [results[each] for each in range(len(tasks))]))
