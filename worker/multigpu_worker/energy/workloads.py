"""What runs during a measurement: a server that is asked, or a model that is loaded here (torch_model.py)."""

import concurrent.futures
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from multigpu_worker.energy.config import BenchmarkConfig

TIMEOUT_S = 300.0
ERROR_CHARS_MAX = 500


class WorkloadError(Exception):
    """The model can't be loaded, or the server not be asked; the message says why."""


@dataclass(slots=True, kw_only=True)
class Request:
    """A prompt and its answer. Times in seconds, by the clock that the workload was given."""

    begin_s: float
    end_s: float = 0.0
    # None: not known.
    first_token_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    # Empty: it succeeded.
    error: str = ""


class Workload(Protocol):
    def load(self) -> None:
        """Raises WorkloadError."""

    def run(self, prompts: Sequence[str]) -> list[Request]:
        """Runs prompts at the same time."""

    def facts(self) -> dict[str, Any]:
        """The earlier system's facts of a backend, once it is loaded."""


class Server:
    """A server with OpenAI's API: vLLM's, or mgpu-gateway. Prompts of one call are sent at the same time."""

    def __init__(self, config: BenchmarkConfig, now_s: Callable[[], float]) -> None:
        self._backend, self._scenario = config.backend, config.scenario
        self._now_s = now_s
        self._url = config.backend.endpoint.rstrip("/").removesuffix("/v1") + "/v1"
        self._callers = concurrent.futures.ThreadPoolExecutor(config.scenario.input_shapes.batch_size)

    def load(self) -> None:
        """Asks for the server's models."""
        try:
            with self._open("/models") as answer:
                names = [each["id"] for each in json.load(answer)["data"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WorkloadError(f"{self._url} can't be asked for its models: {error}") from error
        if self._backend.model not in names:
            raise WorkloadError(f"{self._url} has no model {self._backend.model}; it has {', '.join(names) or 'none'}")

    def run(self, prompts: Sequence[str]) -> list[Request]:
        return list(self._callers.map(self._ask, prompts))

    def facts(self) -> dict[str, Any]:
        return {"endpoint": self._url, "healthy": True, "validated": True}

    def _ask(self, prompt: str) -> Request:
        request = Request(begin_s=self._now_s())
        generate = self._scenario.generate_kwargs
        body = {
            "model": self._backend.model, "messages": [{"role": "user", "content": prompt}], "stream": True,
            "stream_options": {"include_usage": True}, "max_tokens": generate.max_new_tokens,
            "temperature": generate.temperature if generate.do_sample else 0, "top_p": generate.top_p,
        }  # fmt: skip
        try:
            with self._open("/chat/completions", body) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        self._read(request, json.loads(line[6:]))
        except urllib.error.HTTPError as error:
            request.error = f"{error.code} {error.reason}: {error.read(ERROR_CHARS_MAX).decode('utf-8', 'replace')}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            request.error = str(error)[:ERROR_CHARS_MAX] or repr(error)
        request.end_s = self._now_s()
        if not request.error and not request.completion_tokens:
            request.error = "the answer has no tokens, or the server did not count them (stream_options.include_usage)"
        return request

    def _read(self, request: Request, event: dict[str, Any]) -> None:
        if "error" in event:
            request.error = str(event["error"])[:ERROR_CHARS_MAX]
        if request.first_token_s is None and any(each["delta"].get("content") for each in event.get("choices", ())):
            request.first_token_s = self._now_s()
        if usage := event.get("usage"):
            request.prompt_tokens, request.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"content-type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)  # noqa: S310  the configuration has a URL
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)  # noqa: S310
