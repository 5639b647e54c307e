"""Baseline loops: one process that runs a model with nothing around it.

A loop gets the payloads of the fleet's tasks; reading them is not timed.

- Texts to embed are tokenised together, sorted by length and cut into batches of one size, the fastest of three.
- Every other engine is called as it is, with the number of tasks at a time that is fastest.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from multigpu.v1 import embed_pb2

from multigpu_worker.engines.base import Batch, Engine, Item
from multigpu_worker.engines.embed.text import Inputs, TextInput

TEXT_BATCHES = {"cpu": (16, 32, 64), "cuda": (64, 128, 256)}
# Tasks at a time.
BATCHES = (1, 8, 32)

Rows = npt.NDArray[np.float32]
# From texts to a model's inputs, and from these to vectors.
TextModel = tuple[TextInput, Callable[[Inputs], Rows]]


class Loop:
    """A loop with the fastest of several batch sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self.batch = sizes[0]

    def read(self, payloads: Sequence[bytes]) -> Any:
        """Prepare the argument of `run`."""
        raise NotImplementedError

    def run(self, examples: Any) -> Any:
        """Return the results."""
        raise NotImplementedError

    def warm_up(self, examples: Any) -> None:
        """Run until the speed is stable, and choose the batch size. MemoryError: the smallest size lacks memory."""
        seconds: dict[int, float] = {}
        too_large: set[int] = set()
        for size in (*self._sizes, *self._sizes):  # the second time counts
            if size in too_large:
                continue
            self.batch = size
            began = time.perf_counter()
            try:
                self.run(examples)
            except MemoryError:
                if size == min(self._sizes):
                    raise
                too_large.add(size)
                seconds.pop(size, None)
            else:
                seconds[size] = time.perf_counter() - began
        self.batch = min(seconds, key=seconds.__getitem__)


class TextLoop(Loop):
    def __init__(self, model: TextModel, device: str) -> None:
        super().__init__(TEXT_BATCHES[device.partition(":")[0]])
        self._text, self._forward = model

    def read(self, payloads: Sequence[bytes]) -> list[str]:
        return [text for payload in payloads for text in embed_pb2.EmbedPayload.FromString(payload).texts]

    def run(self, examples: list[str]) -> Rows:
        tokens = self._text.tokenise(examples)
        order = np.argsort(-tokens.lengths(), kind="stable")
        rows: Rows | None = None
        for start in range(0, len(order), self.batch):
            places = order[start : start + self.batch]
            vectors = self._forward(self._text.pad(tokens, places.tolist()))
            if rows is None:
                rows = np.empty((len(examples), vectors.shape[1]), np.float32)
            rows[places] = vectors
        assert rows is not None
        return rows


class EngineLoop(Loop):
    """An engine: prepare, run, and the next batch."""

    def __init__(self, engine: Engine, batch: Callable[[list[Item]], Batch]) -> None:
        super().__init__(BATCHES[:1] if engine.one_by_one else BATCHES)
        self._engine = engine
        self._batch_of = batch

    def read(self, payloads: Sequence[bytes]) -> list[Item]:
        return [
            Item(lease_id=n, task_id=n, attempt=1, payload=payload, units=1, checkpoint=b"", partials_received=0)
            for n, payload in enumerate(payloads, 1)
        ]

    def run(self, examples: list[Item]) -> list[bytes]:
        reporter = Results()
        for start in range(0, len(examples), self.batch):
            together = self._batch_of(examples[start : start + self.batch])
            self._engine.run(together, self._engine.prepare(together), reporter)
        if missing := [item for item in examples if item.lease_id not in reporter.results]:
            raise RuntimeError(reporter.errors.get(missing[0].lease_id, "the engine reported nothing about a task"))
        return [reporter.results[item.lease_id] for item in examples]


class Results:
    """A Reporter that keeps results and errors."""

    def __init__(self) -> None:
        self.results: dict[int, bytes] = {}
        self.errors: dict[int, str] = {}
        self.begin = self.partial = self.progress = self.log = self.checkpoint = self.beat = lambda *_, **__: None

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        del content_type
        self.results[item.lease_id] = result

    def fail(self, item: Item, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        del retryable, traceback
        self.errors[item.lease_id] = f"{error_type}: {message}"

    def cancelled(self, item: Item) -> bool:
        del item
        return False
