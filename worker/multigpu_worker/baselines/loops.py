"""Baseline loops: one process that runs a model or a handler with nothing around it.

A loop gets the payloads of the fleet's tasks; reading them is not timed.

- Texts are tokenised together, sorted by length and cut into batches of one size, the fastest of three.
- Arrays go through in batches as large as the fleet's tasks, pictures decoded and then in batches of the fastest size.
- A user's engine or handler is called as it is, with the number of tasks at a time that is fastest.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from multigpu._kinds.inference import array_of
from multigpu.v1 import infer_pb2

from multigpu_worker.engines.base import Batch, Engine, Item
from multigpu_worker.engines.classify import payload as classify_input
from multigpu_worker.engines.embed.text import Inputs, TextInput
from multigpu_worker.engines.infer import payload as infer_input

TEXT_BATCHES = {"cpu": (16, 32, 64), "cuda": (64, 128, 256)}
# Of pictures, and of tasks for a user's engine.
BATCHES = (1, 8, 32)

Rows = npt.NDArray[np.float32]
# From texts to a model's inputs, and from these to vectors.
TextModel = tuple[TextInput, Callable[[Inputs], Rows]]


class Loop(Protocol):
    """A model in a loop."""

    def read(self, payloads: Sequence[bytes]) -> Any:
        """Prepare the argument of `run`."""

    def warm_up(self, examples: Any) -> int:
        """Run until the speed is stable. Returns the chosen batch size."""

    def run(self, examples: Any) -> tuple[Any, int | None]:
        """Return results, and the number of tokens, for models that have them."""

    def answers(self, results: Any) -> Rows | list[bytes]:
        """Convert the results of `run`: to a row for each example, or a result for each task."""


class _Batched:
    """A loop whose `_run` takes a batch size: the fastest of several."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._batch = sizes[0]

    def warm_up(self, examples: Any) -> int:
        seconds = {}
        for size in (*self._sizes, *self._sizes):  # the second time counts
            began = time.perf_counter()
            self._run(examples, size)
            seconds[size] = time.perf_counter() - began
        self._batch = min(self._sizes, key=lambda size: seconds[size])
        return self._batch

    def run(self, examples: Any) -> tuple[Any, int | None]:
        return self._run(examples, self._batch)

    def answers(self, results: Any) -> Any:
        return results

    def _run(self, examples: Any, batch: int) -> tuple[Any, int | None]:
        raise NotImplementedError


class TextLoop(_Batched):
    def __init__(self, model: TextModel, texts_of: Callable[[bytes], Sequence[str]], device: str) -> None:
        super().__init__(TEXT_BATCHES[device.partition(":")[0]])
        self._text, self._forward = model
        self._texts_of = texts_of

    def read(self, payloads: Sequence[bytes]) -> list[str]:
        return [text for payload in payloads for text in self._texts_of(payload)]

    def _run(self, examples: list[str], batch: int) -> tuple[Rows, int]:
        tokens = self._text.tokenise(examples)
        lengths = tokens.lengths()
        order = np.argsort(-lengths, kind="stable")
        rows: Rows | None = None
        for start in range(0, len(order), batch):
            places = order[start : start + batch]
            vectors = self._forward(self._text.pad(tokens, places.tolist()))
            if rows is None:
                rows = np.empty((len(examples), vectors.shape[1]), np.float32)
            rows[places] = vectors
        assert rows is not None
        return rows, int(lengths.sum())


class ArrayLoop:
    def __init__(self, forward: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        self._forward = forward

    def read(self, payloads: Sequence[bytes]) -> list[dict[str, Any]]:
        # All tasks of a round have one payload, which is read once.
        read = {payload: infer_pb2.InferPayload.FromString(payload).inputs for payload in set(payloads)}
        arrays = {payload: {each.name: np.array(array_of(each)) for each in read[payload]} for payload in read}
        return [arrays[payload] for payload in payloads]

    def warm_up(self, examples: list[dict[str, Any]]) -> int:
        for _ in range(2):
            self.run(examples)
        return len(next(iter(examples[0].values())))

    def run(self, examples: list[dict[str, Any]]) -> tuple[Mapping[str, Any], None]:
        """Return the outputs of the last example: those of all might not fit into memory."""
        for inputs in examples:
            outputs = self._forward(inputs)
        return outputs, None

    def answers(self, results: Mapping[str, Any]) -> list[bytes]:
        return [infer_input.result(dict(results), (), "")]


class PictureLoop(_Batched):
    """`classifier`: a classify.model.Classifier of pictures."""

    def __init__(self, classifier: Any) -> None:
        super().__init__(BATCHES)
        self._classifier = classifier

    def read(self, payloads: Sequence[bytes]) -> list[Any]:
        return [classify_input.parse(payload, "") for payload in payloads]

    def _run(self, examples: list[Any], batch: int) -> tuple[Rows, None]:
        parts = []
        for start in range(0, len(examples), batch):
            features = [self._classifier.front.features(payload) for payload in examples[start : start + batch]]
            parts.append(self._classifier.probabilities(features))
        return np.concatenate(parts), None


class EngineLoop(_Batched):
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

    def _run(self, examples: list[Item], batch: int) -> tuple[list[bytes], None]:
        reporter = Results()
        for start in range(0, len(examples), batch):
            together = self._batch_of(examples[start : start + batch])
            self._engine.run(together, self._engine.prepare(together), reporter)
        if missing := [item for item in examples if item.lease_id not in reporter.results]:
            raise RuntimeError(reporter.errors.get(missing[0].lease_id, "the engine said nothing of a task"))
        return [reporter.results[item.lease_id] for item in examples], None


class Results:
    """A Reporter that keeps results and errors."""

    def __init__(self) -> None:
        self.results: dict[int, bytes] = {}
        self.errors: dict[int, str] = {}
        self.begin = self.partial = self.progress = self.checkpoint = self.beat = lambda *_, **__: None

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        del content_type
        self.results[item.lease_id] = result

    def fail(self, item: Item, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        del retryable, traceback
        self.errors[item.lease_id] = f"{error_type}: {message}"

    def cancelled(self, item: Item) -> bool:
        del item
        return False
