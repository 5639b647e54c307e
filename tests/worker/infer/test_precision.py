"""Engine and precision: the model overrides the worker, and the device decides the rest."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common import precision
from multigpu_worker.engines.common.precision import PrecisionError, Variant, auto_precision, choose
from multigpu_worker.repository.model import ModelFolderError, ModelSpec

Names = dict[str, str]


def spec(**values: str) -> ModelSpec:
    return ModelSpec(name="m", folder=Path("/m"), **values)  # type: ignore[arg-type]  # all are strings here


def settings(**values: str) -> EngineSettings:
    return EngineSettings(slots=1, threads=1, **{"device": "cpu", **values})  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(
    ("model", "worker", "expected"),
    [
        ({}, {}, ["torch", "fp32"]),
        ({}, {"engine": "onnx", "precision": "int8"}, ["onnx", "int8"]),
        ({"engine": "torch", "precision": "bf16"}, {"engine": "onnx", "precision": "int8"}, ["torch", "bf16"]),
        ({"engine": "auto"}, {"engine": "onnx"}, ["onnx", "fp32"]),
        ({"source": "onnx"}, {}, ["onnx", "fp32"]),
        ({"source": "tensorrt-plan"}, {}, ["tensorrt", "fp32"]),
    ],
)
def test_model_overrides_worker(model: Names, worker: Names, expected: list[str]) -> None:
    chosen = choose(spec(**model), settings(**worker))
    assert [chosen.engine, chosen.precision] == expected


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(None, "fp32"), ((6, 1), "fp32"), ((7, 0), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")],
)
def test_auto_precision_follows_the_tensor_cores(capability: tuple[int, int] | None, expected: str) -> None:
    assert auto_precision(capability) == expected
    assert auto_precision((9, 0), "onnx") == "fp16"


def test_capability_comes_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    queried_devices = []

    def fake_capability(device: str) -> tuple[int, int]:
        queried_devices.append(device)
        return 7, 5

    monkeypatch.setattr(precision, "compute_capability", fake_capability)
    assert choose(spec(), settings(device="cuda:1")).precision == "fp16"
    # Exported files keep their precision.
    assert choose(spec(source="torch-export"), settings(device="cuda:1", precision="bf16")).precision == "fp32"
    assert choose(spec(source="onnx"), settings(device="cuda:1", precision="bf16")).precision == "fp32"
    assert choose(spec(source="torch-export", precision="fp16"), settings(device="cuda:1")).precision == "fp16"
    with pytest.raises(PrecisionError, match="cuda:1 has no tf32"):
        choose(spec(precision="tf32"), settings(device="cuda:1"))
    assert queried_devices == ["cuda:1", "cuda:1"]


@pytest.mark.gpu
def test_driver_and_torch_agree_on_the_capability() -> None:
    torch = pytest.importorskip("torch", reason="the extra `worker` is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    assert precision.compute_capability("cuda:0") == torch.cuda.get_device_capability(0)


def test_the_capability_of_an_amd_gpu_comes_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    version, cuda = SimpleNamespace(hip="7.0"), SimpleNamespace(get_device_capability=lambda device: (9, 4))
    monkeypatch.setattr("ctypes.CDLL", no_library)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=version, cuda=cuda, __spec__="a spec"))
    assert precision.compute_capability("cuda:0") == (9, 4)
    version.hip = None
    with pytest.raises(ModelFolderError, match=r"cuda:0 can't be asked .*libcuda.* install NVIDIA's driver"):
        precision.compute_capability("cuda:0")


@pytest.mark.parametrize(
    ("engine", "device", "capability", "words"),
    [
        ("onnx", "cpu", None, "engine onnx on cpu has no fp8: .* use int8, or fp32"),
        ("tensorrt", "cuda:0", (8, 6), r"of compute capability 8\.6 has no fp8: .* 8\.9 or more .* use bf16 or fp16"),
        ("torch", "cuda:0", (9, 0), "engine torch on cuda:0 .* has no fp8: that needs engine tensorrt"),
        ("tensorrt", "cuda:0", (8, 9), ""),
        ("tensorrt", "cuda:0", (12, 0), ""),
    ],
)
def test_fp8_needs_tensorrt_and_ada(
    monkeypatch: pytest.MonkeyPatch, engine: str, device: str, capability: tuple[int, int] | None, words: str
) -> None:
    monkeypatch.setattr(precision, "compute_capability", lambda _: capability)
    model = spec(engine=engine, precision="fp8")
    if words:
        with pytest.raises(PrecisionError, match=words):
            choose(model, settings(device=device))
    else:
        assert choose(model, settings(device=device)) == Variant(engine=engine, precision="fp8")
