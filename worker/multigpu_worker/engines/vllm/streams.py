"""Runs sequences on vLLM's server: it gets the tokens of a prompt, and streams back those of the answer.

What tasks get is made as by our own engine (generate/sequence.py): text, chunks, stop strings, log probabilities, and
an answer that goes on from the tokens that an earlier attempt has sent.
"""

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import httpx2 as httpx
from multigpu.v1 import generate_pb2 as pb

from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.generate.sample import Choice
from multigpu_worker.engines.generate.sequence import Sequence
from multigpu_worker.engines.vllm.server import ANSWERED_TIMEOUT_S, GONE_TIMEOUT_S, VllmServer

# How often a task looks whether it was cancelled while no token comes.
POLL_S = 0.1
ERROR_CHARS_MAX = 500
TOKEN = "token_id:"  # noqa: S105  of vLLM's names for tokens
FINISHED = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
Event = dict[str, Any] | BaseException | None


class VllmError(RuntimeError):
    """vLLM's server has failed a request, and goes on."""


class Streams:
    """One connection for each running sequence, all on one thread with an event loop."""

    def __init__(self, server: VllmServer, model: str, eos_ids: frozenset[int], sequences_max: int) -> None:
        self._server = server
        self._model = model
        self._stop_ids = sorted(eos_ids)
        self._loop = asyncio.new_event_loop()
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=server.socket, limits=httpx.Limits(max_connections=sequences_max + 1)
            ),
            base_url="http://vllm",
            timeout=None,  # a prompt may wait long for its first token; tasks have a run_timeout
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-streams", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def run(self, sequence: Sequence) -> None:
        """Returns when the sequence has ended, or its task was cancelled. Raises BadInputError, VllmError."""
        reporter, item = sequence.reporter, sequence.item
        reporter.begin(item)
        known = list(sequence.generated) if sequence.request.json_schema else []
        events: queue.Queue[Event] = queue.Queue()
        running = asyncio.run_coroutine_threadsafe(self._pass_on(self._body(sequence, known), events), self._loop)
        ended = False  # by vLLM
        try:
            while sequence.finish_reason is None:
                try:
                    event = events.get(timeout=POLL_S)
                except queue.Empty:
                    event = {}
                if reporter.cancelled(item):
                    return
                if event is None or isinstance(event, BaseException):
                    raise self._explained(event, partial(reporter.cancelled, item))
                if event:
                    reporter.beat()
                    ended = _take(sequence, event, known)
        finally:
            if not ended:
                running.cancel()  # closes the connection, and vLLM frees the sequence
        sequence.succeed()

    def _body(self, sequence: Sequence, known: list[int]) -> dict[str, Any]:
        """The request. An answer goes on after its last token. With a JSON schema it can't: it begins again, and its
        `known` tokens are not taken again.
        """
        request, sampling = sequence.request, sequence.request.sampling
        body: dict[str, Any] = {
            "model": sequence.adapter or self._model, "prompt": request.prompt_ids if known else sequence.ids,
            "max_tokens": request.max_tokens - (0 if known else len(sequence.generated)),
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1,
            "repetition_penalty": sampling.repetition_penalty, "seed": sampling.seed >> 1,
            "stop_token_ids": self._stop_ids, "stream": True, "return_token_ids": True,
            "return_tokens_as_token_ids": True, "skip_special_tokens": False,
        }  # fmt: skip
        if sampling.logprobs is not None:
            body["logprobs"] = sampling.logprobs
        if request.json_schema:
            schema = {"name": "answer", "schema": json.loads(request.json_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    def _explained(self, event: BaseException | None, cancelled: Callable[[], bool]) -> Exception:
        if isinstance(event, BadInputError):
            return event
        if isinstance(event, VllmError):  # when its engine has died, the server answers so before it ends
            self._server.wait_gone(cancelled, ANSWERED_TIMEOUT_S)
            return event
        self._server.wait_gone(cancelled, GONE_TIMEOUT_S)
        return VllmError(
            "vLLM ended the answer before its end" if event is None else f"{type(event).__name__}: {event}"
        )

    async def _pass_on(self, body: dict[str, Any], events: "queue.Queue[Event]") -> None:
        try:
            async for event in self._events(body):
                events.put(event)
            events.put(None)
        except Exception as error:  # noqa: BLE001  it is raised in the thread that waits
            events.put(error)

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                text = (await answer.aread()).decode("utf-8", "replace")[:ERROR_CHARS_MAX]
                if answer.status_code == httpx.codes.BAD_REQUEST:
                    raise BadInputError(f"vLLM rejects the task: {text}")
                raise VllmError(f"vLLM answers with {answer.status_code}: {text}")
            async for line in answer.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise VllmError(str(event["error"])[:ERROR_CHARS_MAX])
                    # Such as "abort", when vLLM is being ended: the answer isn't complete.
                    if unknown := {choice["finish_reason"] for choice in event["choices"]} - {None, *FINISHED}:
                        raise VllmError(f"vLLM ended the answer before its end: {unknown.pop()}")
                    yield event


def _take(sequence: Sequence, event: dict[str, Any], known: list[int]) -> bool:
    """Takes the tokens of an event. Returns whether it is the last one. Raises VllmError, BadInputError."""
    reason = None
    for choice in event["choices"]:
        reason = choice["finish_reason"]
        for at, token in enumerate(choice["token_ids"]):
            if sequence.finish_reason is not None:
                break
            if known:
                if known.pop(0) != token:
                    raise VllmError("vLLM gave another answer than before the interruption")
                continue
            sequence.take(Choice(token, _logprobs(sequence, choice.get("logprobs"), at, token)))
        if reason and sequence.finish_reason is None:
            sequence.end(FINISHED[reason])
    return reason is not None


def _logprobs(sequence: Sequence, found: dict[str, Any] | None, at: int, token: int) -> tuple[tuple[int, float], ...]:
    wanted = sequence.request.sampling.logprobs
    if found is None or wanted is None:
        return ()
    top = [(int(name.removeprefix(TOKEN)), float(value)) for name, value in (found["top_logprobs"][at] or {}).items()]
    top.sort(key=lambda pair: -pair[1])
    return ((token, float(found["token_logprobs"][at])), *top[:wanted])
