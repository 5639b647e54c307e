"""int8 and fp8 ONNX models of kind infer: quantised, measured by the accuracy gate, rejected below its threshold."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
pytest.importorskip("onnx", reason="the extra `onnx` is not installed")

import onnx
from multigpu_worker.engines.base import Batch, EngineSettings, Item
from multigpu_worker.engines.common.accuracy_gate import AccuracyGateError
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.engines.infer import onnx_backend as infer_onnx
from multigpu_worker.engines.infer.engine import InferEngine
from multigpu_worker.engines.onnx import artifacts as onnx_artifacts
from multigpu_worker.engines.onnx.export import MODEL_FILE
from multigpu_worker.engines.onnx.session import Session
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import Gate, ModelSpec
from onnx import TensorProto, helper

from tests.worker.embed.test_embed import run
from tests.worker.graphs import small_graphs


def pictures(count: int, seed: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((count, 3, 8, 8))).astype(np.float32)


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    return EngineSettings(device="cpu", slots=1, threads=1, artifacts=str(tmp_path / "artifacts"))


def model(folder: Path, *, rows: int | str = "rows", calibration_scale: float = 1.0, **gate: Any) -> ModelSpec:
    """A small image classifier, with calibration data and held-out data."""
    path = small_graphs.save_classifier(folder, rows=rows)
    np.savez(folder / "calibration.npz", x=pictures(32, 1, calibration_scale))
    np.savez(folder / "held_out.npz", x=pictures(100, 2))
    values: dict[str, Any] = {"calibration": "calibration.npz", "held_out": "held_out.npz", "threshold": 0.98} | gate
    return ModelSpec(name="m", folder=folder, kind="infer", source="onnx", file=path.name, gate=Gate(**values))


def test_model_that_passes_is_served_with_its_figure(tmp_path: Path, settings: EngineSettings) -> None:
    spec = model(tmp_path / "model")
    int8_spec = dataclasses.replace(spec, precision="int8")
    engine = InferEngine(dataclasses.replace(settings, models={int8_spec.id: int8_spec}))
    facts = engine.load()
    assert (facts["engine"], facts["precision"], facts["recipe"]) == ("onnx", "int8", "static")
    assert re.match(r"mean cosine to fp32 (0\.99|1\.00)", facts["accuracy"])
    assert "on 100 held-out examples, 0.98 at least" in facts["accuracy"]
    exact, _ = infer_onnx.load(spec, settings, "fp32")
    rounded, _ = infer_onnx.load(spec, settings, "int8")
    assert rounded.per_example is exact.per_example is True
    x = pictures(5, 3)
    difference = np.abs(rounded({"x": x})["y"] - exact({"x": x})["y"]).max()
    assert 0 < difference < 0.1 * np.abs(exact({"x": x})["y"]).max()
    payload = b'{"inputs": {"x": ' + str(x[:1].tolist()).encode() + b"}}"
    recorder = run(engine, Batch("infer", "m", {}, "application/json", [Item(0, 0, 1, payload, 1, b"", 0)]))
    assert recorder.outcomes[0][1].startswith(b'{"outputs": {"y": [[')


def test_new_threshold_rejects_later(tmp_path: Path, settings: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = model(tmp_path / "model", metric="agreement", threshold=0.9)
    facts = onnx_artifacts.quantised(spec, settings, "int8", "onnx").facts
    assert "share of fp32's likeliest class" in facts["accuracy"]
    monkeypatch.setattr(onnx_artifacts, "quantise_infer", None)
    (spec.folder / "model.toml").write_text("[gate]\nthreshold = 1.1")  # not part of the artifact's key
    stricter = dataclasses.replace(spec, gate=dataclasses.replace(spec.gate, threshold=1.1))
    with pytest.raises(AccuracyGateError, match=r"likeliest class (1\.0|0\.9)\d+ on 100 held-out .* 1\.1 at least"):
        infer_onnx.load(stricter, settings, "int8")
    np.savez(spec.folder / "held_out.npz", x=pictures(50, 4))
    with pytest.raises(TypeError):  # other data is: it quantises again, with None
        infer_onnx.load(spec, settings, "int8")


def test_calibration_on_other_data_is_rejected(tmp_path: Path, settings: EngineSettings) -> None:
    spec = model(tmp_path / "model", calibration_scale=0.01)
    with pytest.raises(AccuracyGateError, match=r"m at int8 is rejected .* mean cosine to fp32 0\.[0-9]{4} on 100"):
        infer_onnx.load(spec, settings, "int8")


def test_model_with_a_fixed_batch_size(tmp_path: Path, settings: EngineSettings) -> None:
    """It is measured in batches of 7; the 2 examples that remain of 100 are dropped."""
    rounded, facts = infer_onnx.load(model(tmp_path / "model", rows=7), settings, "int8")
    assert "held-out examples" in facts["accuracy"]
    assert rounded({"x": pictures(7, 3)})["y"].shape == (7, 5)


def test_dynamic_recipe_quantises_only_products(tmp_path: Path, settings: EngineSettings) -> None:
    folder = tmp_path / "model"
    small_graphs.save(folder)
    rows = np.random.default_rng(1).standard_normal((64, 4, small_graphs.FEATURES)).astype(np.float32)
    np.savez(folder / "calibration.npz", x=rows[:32])
    np.savez(folder / "held_out.npz", x=rows[32:])
    # The accuracy depends on the CPU: without VNNI, int8 products saturate. So the threshold is low.
    gate = Gate(calibration="calibration.npz", held_out="held_out.npz", threshold=0.9)
    spec = ModelSpec(name="m", folder=folder, kind="infer", source="onnx", file="model.onnx", gate=gate)
    _, facts = infer_onnx.load(dataclasses.replace(spec, parameters={"int8_recipe": "dynamic"}), settings, "int8")
    assert facts["recipe"] == "dynamic"
    with pytest.raises(ModelFolderError, match=r"'selective' in model.toml, .* for infer: known are static, dynamic"):
        infer_onnx.load(dataclasses.replace(spec, parameters={"int8_recipe": "selective"}), settings, "int8")


def test_int8_needs_data_that_fits_the_model(tmp_path: Path, settings: EngineSettings) -> None:
    spec = model(tmp_path / "model")
    np.savez(spec.folder / "held_out.npz", pixels=pictures(10, 1))
    with pytest.raises(ModelFolderError, match=r"has \['pixels'\], and the inputs are \['x'\]"):
        infer_onnx.load(spec, settings, "int8")
    with pytest.raises(ModelFolderError, match="no held_out data for int8: name files of numpy"):
        infer_onnx.load(dataclasses.replace(spec, gate=Gate(calibration="calibration.npz")), settings, "int8")
    with pytest.raises(ModelFolderError, match="metric 'spearman': infer has cosine, agreement"):
        wrong = dataclasses.replace(spec.gate, metric="spearman")
        infer_onnx.load(dataclasses.replace(spec, gate=wrong), settings, "int8")


def test_quantised_models_and_gpus_without_tensorrt_are_rejected_at_int8(
    tmp_path: Path, settings: EngineSettings
) -> None:
    spec = model(tmp_path / "model")
    rounded = onnx_artifacts.quantised(spec, settings, "int8", "onnx")
    shutil.copyfile(rounded.folder / MODEL_FILE, spec.folder / spec.file)
    with pytest.raises(ModelFolderError, match="m is quantised already: leave its precision out"):
        infer_onnx.load(spec, settings, "int8")
    infer_onnx.load(spec, settings, "fp32")
    with pytest.raises(PrecisionError, match=r"int8 on a CPU alone, not on cuda:0.*take engine tensorrt"):
        infer_onnx.load(spec, dataclasses.replace(settings, device="cuda:0"), "int8")


def test_fp8_rounds_as_torch_does(tmp_path: Path) -> None:
    """The gate measures fp8 on a CPU. It rounds exactly as E4M3: ties to even, subnormal numbers, saturation."""
    torch = pytest.importorskip("torch", reason="the extra `worker` is not installed")
    x = np.concatenate([2.0 ** np.random.default_rng(3).uniform(-12, 10, 4000), [0, 448, 464, 1e9, 2**-9, 2**-10]])
    x = np.concatenate([x, -x]).astype(np.float32)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    tensors = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [1.0]),
        helper.make_tensor("zero", TensorProto.FLOAT8E4M3FN, [], [0.0]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    path = small_graphs.save_graph(graph, tmp_path / "model.onnx")
    found = Session(path, "cpu", 1, fused=False).run({"x": x})["y"]
    wanted = torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_fp8_is_measured_and_its_plan_is_built(tmp_path: Path, settings: EngineSettings) -> None:
    pytest.importorskip("modelopt.onnx.quantization", reason="the extra `int8` is not installed")
    spec = model(tmp_path / "model")
    made = onnx_artifacts.quantised(spec, settings, "fp8", "tensorrt")
    assert made.facts["recipe"] == "max"
    assert re.match(r"mean cosine to fp32 (0\.99|1\.00)", made.facts["accuracy"])
    graph = onnx.load(made.folder / MODEL_FILE).graph
    assert TensorProto.FLOAT8E4M3FN in {each.data_type for each in graph.initializer}
    inputs = {each.name: each.type.tensor_type.elem_type for each in [*graph.input, *graph.output]}
    assert inputs == {"x": TensorProto.FLOAT, "y": TensorProto.FLOAT}
    strict = dataclasses.replace(spec, gate=dataclasses.replace(spec.gate, threshold=1.1))
    with pytest.raises(AccuracyGateError, match=r"m at fp8 is rejected .* 1\.1 at least\. Take more calibration data"):
        onnx_artifacts.quantised(strict, settings, "fp8", "tensorrt")
    pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    from multigpu_worker.engines.tensorrt.build import PlanOrder, artifacts_of, get_plan
    from multigpu_worker.engines.tensorrt.module import Gpu, installed
    from multigpu_worker.engines.tensorrt.profiles import Limits, profiles_for

    def plan(capability: tuple[int, int]) -> dict[str, str]:
        order = PlanOrder(
            graph=made.folder / MODEL_FILE,
            precision="fp8",
            profiles=profiles_for(Limits(rows_max=16, width_max=1, tokens_max=16)),
            library=installed(),
            gpu=Gpu(name="any", capability=capability),
            accuracy=made.facts["accuracy"],
        )
        return get_plan(order, artifacts_of(settings)).facts

    assert plan((8, 9))["accuracy"] == made.facts["accuracy"]
    # The worker rejects fp8 on such a GPU before this call (precision.py). The library rejects it too.
    with pytest.raises(ModelFolderError, match="fp8"):
        plan((8, 6))
