"""Helpers for tests of the generate engine: a recording reporter, and tasks that run concurrently."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multigpu.v1 import generate_pb2 as pb
from multigpu_worker.engines.base import Batch, EngineSettings, Item
from multigpu_worker.engines.generate.engine import GenerateEngine
from multigpu_worker.repository.model import ModelSpec

# No answer takes longer than this, even on a busy machine.
PATIENCE_S = 300.0


@dataclass
class Recorder:
    """Records the engine's reports of one item, and cancels it after `cancel_after` chunks."""

    cancel_after: int | None = None
    begun: int = 0
    beats: int = 0
    chunks: list[bytes] = field(default_factory=list)
    # ("ok", result, content type) or (error type, message, retryable).
    outcome: tuple[Any, Any, Any] | None = None

    def begin(self, item: Item) -> None:
        self.begun += 1

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        assert self.outcome is None, "settled twice"
        self.outcome = ("ok", result, content_type)

    def fail(self, item: Item, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        assert self.outcome is None, "settled twice"
        self.outcome = (error_type, message, retryable)

    def partial(self, item: Item, data: bytes, content_type: str = "") -> None:
        assert self.outcome is None, "an output after the end"
        self.chunks.append(data)

    def never(self, *_: Any, **__: Any) -> None:
        raise AssertionError("generate tells no progress and needs no checkpoints")

    progress = log = checkpoint = never

    def cancelled(self, item: Item) -> bool:
        return self.cancel_after is not None and len(self.chunks) >= self.cancel_after

    def beat(self) -> None:
        self.beats += 1

    @property
    def result(self) -> pb.GenerateResult:
        assert self.outcome is not None, "not settled"
        assert self.outcome[0] == "ok", self.outcome
        return pb.GenerateResult.FromString(self.outcome[1])

    def parsed_chunks(self) -> list[pb.GenerateChunk]:
        return [pb.GenerateChunk.FromString(data) for data in self.chunks]


@dataclass
class Ask:
    """A task for the engine, with what earlier attempts have handed out."""

    payload: bytes
    partials: tuple[bytes, ...] = ()
    content_type: str = ""
    # 0: its place among the tasks, from 1.
    task_id: int = 0
    recorder: Recorder = field(default_factory=Recorder)


def ask(prompt: str = "", **fields: Any) -> Ask:
    return Ask(pb.GeneratePayload(prompt=prompt, **fields).SerializeToString())


def settings_of(folder: Path, *, slots: int = 4, artifacts: str = "", **spec: Any) -> EngineSettings:
    spec = {"source": "huggingface", "kind": "generate", "name": "tiny", "folder": folder, **spec}
    model = ModelSpec(**spec)
    return EngineSettings(device="cpu", slots=slots, threads=1, models={model.id: model}, artifacts=artifacts)


def run_all(engine: GenerateEngine, asks: Sequence[Ask]) -> list[Recorder]:
    """Run tasks at the same time, each in a thread of its own, as slots do. Raises what `run` raised."""
    errors: list[BaseException] = []

    def run(at: int, each: Ask) -> None:
        batch = Batch("generate", "", {}, each.content_type, [_item(at, each)])
        try:
            engine.run(batch, prepared[at], each.recorder)
        except BaseException as error:
            errors.append(error)

    # Prepared by one thread, as the runtime does.
    prepared = [engine.prepare(Batch("generate", "", {}, a.content_type, [_item(at, a)])) for at, a in enumerate(asks)]
    threads = [threading.Thread(target=run, args=(at, each)) for at, each in enumerate(asks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the engine never came to an end"
    if errors:
        raise errors[0]
    return [each.recorder for each in asks]


def _item(at: int, each: Ask) -> Item:
    return Item(at + 1, each.task_id or at + 1, 1, each.payload, 1, b"", len(each.partials), each.partials)


class Plain:
    """Plain transformers on the same folder: the truth."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> "Plain":
        import torch
        import transformers

        kind: Any = transformers.AutoModelForCausalLM
        model = kind.from_pretrained(folder, dtype=torch.float32)
        return cls(model, transformers.AutoTokenizer.from_pretrained(folder))

    def greedy(self, prompt: str, max_tokens: int, **options: Any) -> list[int]:
        import torch

        ids = torch.tensor([self.tokenizer(prompt)["input_ids"]])
        options |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_tokens}
        answer = self.model.generate(ids, do_sample=False, **options)
        tokens: list[int] = answer[0, ids.shape[1] :].tolist()
        return tokens
