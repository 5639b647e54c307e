"""What runs during a measurement: a model that is loaded here, or a server that is asked."""

import concurrent.futures
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from multigpu_worker.energy.config import BackendConfig, BenchmarkConfig

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


def workload_of(config: BenchmarkConfig, now_s: Callable[[], float]) -> Workload:
    return (TorchModel if config.backend.type == "pytorch" else Server)(config, now_s)


class TorchModel:
    """A causal language model of transformers. Prompts of one call are padded and run as a batch."""

    def __init__(self, config: BenchmarkConfig, now_s: Callable[[], float]) -> None:
        self._config = config
        self._now_s = now_s

    def load(self) -> None:
        backend = self._config.backend
        if backend.device == "cuda":  # before torch is imported
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, backend.device_ids))
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        self._torch = torch
        if backend.device == "cuda" and torch.cuda.device_count() < len(backend.device_ids):
            raise WorkloadError(
                f"torch finds {torch.cuda.device_count()} of the {len(backend.device_ids)} GPUs in device_ids; for the "
                "CPU: --set backend.device=cpu"
            )
        model: Any
        tokenizer: Any
        try:
            tokenizer = AutoTokenizer.from_pretrained(backend.model, padding_side="left")
            model = AutoModelForCausalLM.from_pretrained(
                backend.model, dtype=backend.torch_dtype, **_placement(backend)
            )
        except Exception as error:  # transformers and its hub raise errors of many kinds
            raise WorkloadError(f"the model {backend.model} can't be loaded: {error}") from error
        self._model = model.to("cuda:0") if backend.device == "cuda" and len(backend.device_ids) == 1 else model
        self._model.eval()
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token_id = backend.pad_token_id if backend.pad_token_id >= 0 else tokenizer.eos_token_id
        self._tokenizer = tokenizer

    def run(self, prompts: Sequence[str]) -> list[Request]:
        torch, scenario = self._torch, self._config.scenario
        begin_s = self._now_s()
        first: list[float] = []

        def step(ids: Any, _scores: Any, **_: Any) -> Any:
            if not first:
                if ids.is_cuda:
                    torch.cuda.synchronize(ids.device)
                first.append(self._now_s())
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        generate = scenario.generate_kwargs
        sampled = generate.do_sample and generate.temperature > 0
        how = {"temperature": generate.temperature, "top_p": generate.top_p, "top_k": generate.top_k} if sampled else {}
        try:
            limit = {"truncation": True, "max_length": self._limit()} if scenario.truncation else {}
            inputs = self._tokenizer(list(prompts), padding=True, return_tensors="pt", **limit).to(self._model.device)
            with torch.inference_mode():
                ids = self._model.generate(
                    **inputs, max_new_tokens=generate.max_new_tokens, min_new_tokens=generate.min_new_tokens,
                    do_sample=sampled, stopping_criteria=[step], pad_token_id=self._tokenizer.pad_token_id, **how,
                )  # fmt: skip
            made = ids[:, inputs["input_ids"].shape[1] :]
            prompt_tokens = inputs["attention_mask"].sum(dim=1).tolist()
            counts = [self._length(row) for row in made.tolist()]
        except Exception as error:  # noqa: BLE001  of a model: the request has failed
            end_s = self._now_s()
            return [Request(begin_s=begin_s, end_s=end_s, error=str(error)[:ERROR_CHARS_MAX]) for _ in prompts]
        end_s = self._now_s()
        return [
            Request(begin_s=begin_s, end_s=end_s, first_token_s=first[0], prompt_tokens=before, completion_tokens=after)
            for before, after in zip(prompt_tokens, counts, strict=True)
        ]

    def _limit(self) -> int:
        """The longest prompt that leaves room for the answer."""
        longest: int = getattr(self._model.config, "max_position_embeddings", None) or self._tokenizer.model_max_length
        return max(1, min(longest, 1 << 20) - self._config.scenario.generate_kwargs.max_new_tokens)

    def _length(self, row: list[int]) -> int:
        """Tokens up to the end token; behind it, the rest of the batch is padded."""
        end = self._model.generation_config.eos_token_id
        ends = {*end} if isinstance(end, list) else {end}
        return next((n + 1 for n, token in enumerate(row) if token in ends), len(row))


def _placement(backend: BackendConfig) -> dict[str, Any]:
    """How weights are spread over several GPUs. torch numbers those that it sees from 0."""
    if backend.device == "cpu" or len(backend.device_ids) == 1:
        return {}
    limits = backend.memory_limits_bytes()
    memory: dict[int | str, int] = {n: limits[gpu] for n, gpu in enumerate(backend.device_ids) if gpu in limits}
    return {"device_map": backend.device_map} | ({"max_memory": memory} if memory else {})


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
            request.error = f"{error.code}: {error.read(ERROR_CHARS_MAX).decode('utf-8', 'replace')}"
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
