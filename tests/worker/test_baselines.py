"""Baseline loops give what the libraries do by themselves, whatever the order and the size of their batches."""

import functools
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")

from multigpu._kinds.inference import arrays_of, input_of
from multigpu.v1 import embed_pb2
from multigpu_worker.baselines.loading import load_model
from multigpu_worker.baselines.loops import BATCHES, EngineLoop, Loop
from multigpu_worker.engines.base import Batch, EngineSettings, Reporter
from multigpu_worker.repository.folders import packaged_model
from multigpu_worker.repository.model import ModelSpec, Remote

from tests.worker.graphs import small_graphs

SETTINGS = EngineSettings(device="cpu", slots=1, threads=1)


def test_texts_get_the_same_vectors_in_any_order() -> None:
    folder = packaged_model()
    if folder is None:
        pytest.skip("the extra `minilm` is not installed")
    loop = load_model("embed", ModelSpec(name="m", folder=folder), SETTINGS)
    texts = [f"{'a rather long sentence of words ' * (n % 5)}number {n}." for n in range(20)]
    examples = loop.read([embed_pb2.EmbedPayload(texts=texts).SerializeToString()])
    loop.warm_up(examples)
    assert loop.batch in (16, 32, 64)
    rows = loop.run(examples)
    alone = np.concatenate([loop.run([text]) for text in texts])
    np.testing.assert_allclose(rows, alone, atol=1e-5)


def test_the_engine_of_a_model_is_called(tmp_path: Path) -> None:
    small_graphs.save_double(tmp_path)
    spec = ModelSpec(name="m", folder=tmp_path, kind="infer", source="onnx", file="double.onnx")
    loop = load_model("infer", spec, SETTINGS)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    results = loop.run(loop.read([input_of({"x": x}, ())[0]] * 3))
    assert len(results) == 3
    np.testing.assert_array_equal(arrays_of(results[2])["y"], 2 * x)


def test_the_engine_of_a_remote_model_is_called(tmp_path: Path) -> None:
    spec = ModelSpec(name="m", folder=tmp_path, engine="remote", remote=Remote(url="http://127.0.0.1:1"))
    assert isinstance(load_model("embed", spec, SETTINGS), EngineLoop)


def test_wrong_kinds_are_rejected(tmp_path: Path) -> None:
    spec = ModelSpec(name="m", folder=tmp_path, kind="generate", source="huggingface")
    with pytest.raises(ValueError, match="is a model for generate, not for embed"):
        load_model("embed", spec, SETTINGS)


class Upper:
    """An engine that takes several tasks at a time, and none that is empty."""

    one_by_one: ClassVar[bool] = False

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def prepare(self, batch: Batch) -> object:
        return [item.payload.upper() for item in batch.items]

    def run(self, batch: Batch, prepared: Any, reporter: Reporter) -> None:
        self.sizes.append(len(batch.items))
        for item, answer in zip(batch.items, prepared, strict=True):
            if answer:
                reporter.succeed(item, answer)
            else:
                reporter.fail(item, "BadInput", "it is empty", retryable=False)


def test_engine_loop_uses_the_fastest_batch_size_and_raises_errors() -> None:
    engine = Upper()
    loop = EngineLoop(engine, functools.partial(Batch, "my.kind", "", {}, ""))
    examples = loop.read([b"a", b"b", b"c"] * 20)
    loop.warm_up(examples)
    assert loop.batch in BATCHES
    engine.sizes.clear()
    assert loop.run(examples) == [b"A", b"B", b"C"] * 20
    assert (engine.sizes[0], sum(engine.sizes)) == (loop.batch, 60)
    with pytest.raises(RuntimeError, match="BadInput: it is empty"):
        loop.run(loop.read([b"a", b""]))


class Small(Loop):
    """Lacks memory for batches of this size and more."""

    def __init__(self, lacks: int) -> None:
        super().__init__((1, 8, 32))
        self._lacks = lacks
        self.sizes: list[int] = []

    def run(self, examples: Any) -> None:
        del examples
        self.sizes.append(self.batch)
        if self.batch >= self._lacks:
            raise MemoryError("full")


def test_batch_sizes_that_lack_memory_are_not_chosen() -> None:
    """The largest one ended the baseline."""
    loop = Small(lacks=8)
    loop.warm_up([])
    assert loop.batch == 1
    assert loop.sizes == [1, 8, 32, 1]
    with pytest.raises(MemoryError, match="full"):
        Small(lacks=1).warm_up([])
