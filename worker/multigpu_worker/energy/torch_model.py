"""A causal language model of transformers, loaded in this process."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from multigpu_worker.energy.config import BackendConfig, BenchmarkConfig
from multigpu_worker.energy.workloads import ERROR_CHARS_MAX, Request, WorkloadError


class TorchModel:
    """A causal language model of transformers. Prompts of one call are padded and run as a batch."""

    def __init__(self, config: BenchmarkConfig, now_s: Callable[[], float]) -> None:
        self._config = config
        self._now_s = now_s

    def load(self) -> None:
        backend = self._config.backend
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
        scenario = self._config.scenario
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
            texts = [self._text(prompt) for prompt in prompts]
            inputs = self._tokenizer(texts, padding=True, return_tensors="pt", **limit).to(self._model.device)
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

    def _text(self, prompt: str) -> str:
        """What the model reads: a conversation, if it has a form for one."""
        if not self._tokenizer.chat_template:
            return prompt
        said = [{"role": "user", "content": prompt}]
        text: str = self._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        return text

    def facts(self) -> dict[str, Any]:
        backend = self._config.backend
        return {
            "device": backend.device, "device_ids": list(backend.device_ids), "torch_dtype": backend.torch_dtype,
            "device_map": backend.device_map, "initialized": True, "healthy": True,
        }  # fmt: skip

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
