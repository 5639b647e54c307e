"""Baseline loops give what the libraries do by themselves, whatever the order and the size of their batches."""

import functools
import io
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("PIL", reason="the extra `vision` is not installed")
pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")

import torch
from multigpu._kinds.classification import payload_of
from multigpu._kinds.inference import arrays_of, input_of
from multigpu.repository.model import ModelSpec
from multigpu_worker.baselines.loading import load_handlers, load_loop
from multigpu_worker.baselines.loops import BATCHES, ArrayLoop, EngineLoop
from multigpu_worker.engines.base import Batch, EngineSettings, Reporter
from multigpu_worker.engines.common.precision import Variant
from multigpu_worker.engines.infer import tensorrt_backend as infer_tensorrt
from PIL import Image

from tests.worker.graphs import small_graphs
from tests.worker.graphs.test_tensorrt_backends import doubling, fake_gpu
from tests.worker.infer.test_classify import TEXTS, expected_texts, image, image_folder, text_folder

__all__ = ["fake_gpu", "image_folder", "text_folder"]
TORCH = Variant(engine="torch", precision="fp32")


def settings(**of: Any) -> EngineSettings:
    return EngineSettings(device="cpu", slots=1, threads=1, **of)


def spec_of(folder: Path, kind: str, **of: Any) -> ModelSpec:
    return ModelSpec(name="m", folder=folder, kind=kind, **({"source": "huggingface"} | of))


def test_texts_get_the_classes_of_transformers(text_folder: Path) -> None:
    loop = load_loop("classify", spec_of(text_folder, "classify"), settings(), TORCH)
    examples = loop.read([payload_of(text, 5) for text in TEXTS])
    loop.warm_up(examples)
    rows, tokens = loop.run(examples)
    np.testing.assert_allclose(rows, np.stack(expected_texts(text_folder)), atol=1e-5)
    assert tokens is not None
    assert tokens > len(TEXTS)
    with pytest.raises(ValueError, match="send a text"):
        loop.read([payload_of(b"a picture", 5)])


def test_pictures_get_the_classes_of_plain_transformers(image_folder: Path) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    pictures = [image((40 + n, 30), n) for n in range(3)]
    loop = load_loop("classify", spec_of(image_folder, "classify"), settings(), TORCH)
    examples = loop.read([payload_of(picture, 5) for picture in pictures])
    loop.warm_up(examples)
    rows, _ = loop.run(examples)
    processor: Any = AutoImageProcessor.from_pretrained(image_folder)  # type: ignore[no-untyped-call]
    model = AutoModelForImageClassification.from_pretrained(image_folder)
    with torch.inference_mode():
        inputs = [processor(Image.open(io.BytesIO(picture)), return_tensors="pt") for picture in pictures]
        wanted = [model(**one).logits.softmax(-1)[0] for one in inputs]
    np.testing.assert_allclose(rows, np.stack(wanted), atol=1e-5)


def test_each_task_of_arrays_runs_onnx_runtime_once(tmp_path: Path) -> None:
    small_graphs.save_double(tmp_path)
    spec = spec_of(tmp_path, "infer", source="onnx", file="double.onnx")
    loop = load_loop("infer", spec, settings(), Variant(engine="onnx", precision="fp32"))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    examples = loop.read([input_of({"x": x}, ())[0]] * 3)
    assert (len(examples), loop.warm_up(examples)) == (3, 2)
    (answer,) = loop.answers(loop.run(examples)[0])
    assert isinstance(answer, bytes)
    np.testing.assert_array_equal(arrays_of(answer)["y"], 2 * x)


@pytest.mark.parametrize("fails", [False, True])
def test_arrays_run_on_the_plan_only(
    tmp_path: Path, fake_gpu: threading.Event, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """On a fake GPU; tests/gpu has the real one."""
    spec, where = doubling(tmp_path)
    if fails:
        monkeypatch.setattr(infer_tensorrt, "DIFFERENCE_MAX", {"fp32": -1.0})  # no plan is as near as that
    fake_gpu.set()
    variant = Variant(engine="tensorrt", precision="fp32")
    if fails:
        with pytest.raises(LookupError, match=r"a tensorrt plan can't be had: .* use a wider precision"):
            load_loop("infer", spec, where, variant)
        return
    loop = load_loop("infer", spec, where, variant)
    assert isinstance(loop, ArrayLoop)
    assert isinstance(loop._forward, infer_tensorrt.PlanForward)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    outputs, _ = loop.run(loop.read([input_of({"x": x}, ())[0]]))
    np.testing.assert_array_equal(outputs["y"], 2 * x)


def test_wrong_kinds_are_rejected(text_folder: Path) -> None:
    with pytest.raises(ValueError, match="is a model for classify, not for embed"):
        load_loop("embed", spec_of(text_folder, "classify"), settings(), TORCH)
    with pytest.raises(ValueError, match="no baseline for generate"):
        load_loop("generate", spec_of(text_folder, "generate"), settings(), TORCH)
    with pytest.raises(ValueError, match="classify runs on torch alone"):
        variant = Variant(engine="onnx", precision="fp32")
        load_loop("classify", spec_of(text_folder, "classify"), settings(), variant)


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
    best = loop.warm_up(examples)
    assert best in BATCHES
    engine.sizes.clear()
    given, _ = loop.run(examples)
    assert loop.answers(given) == [b"A", b"B", b"C"] * 20
    assert (engine.sizes[0], sum(engine.sizes)) == (best, 60)
    with pytest.raises(RuntimeError, match="BadInput: it is empty"):
        loop.run(loop.read([b"a", b""]))


def test_kind_without_a_handler_is_rejected() -> None:
    assert load_handlers("echo", settings()).prepare is not None
    with pytest.raises(ValueError, match=r"no handler for my\.kind here, only for echo, .*: say --handlers MODULE"):
        load_handlers("my.kind", settings())
