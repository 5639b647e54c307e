"""Which engine and precision a model runs with: as its model.toml says, else as the worker's configuration does.

What is still "auto" is resolved here; models/catalog.py has replaced it by the engine vllm, or by a trial of engines,
where these apply. The engine follows from the model's files. The precision is the lowest that costs almost
no accuracy and that the device computes faster than float32: bf16 or fp16 if it has tensor cores for them, else fp32.
int8 and fp8 have to be asked for, and pass the accuracy gate (docs/precision.md).

The compute capability comes from the driver's library, which engines without torch can call too. On AMD GPUs, which
only torch uses, it comes from torch: 9.4 is gfx942.
"""

import ctypes
import importlib
import importlib.util
from dataclasses import dataclass

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.repository.model import ModelFolderError, ModelSpec

# Engines by source. All other sources are run by torch.
ENGINE_BY_SOURCE = {"onnx": "onnx", "tensorrt-plan": "tensorrt"}
NUMBER_BYTES = {"bf16": 2, "fp16": 2}  # of a precision; of others 4
# Lowest compute capabilities whose tensor cores take a type (CUDA C++ Programming Guide).
BF16_CAPABILITY, FP16_CAPABILITY = (8, 0), (7, 0)
TF32_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)
# Engines and sources that run at the precision of the file, whatever the worker's default.
FIXED = (("torch", "torch-export"), ("onnx", "onnx"), ("tensorrt", "tensorrt-plan"))
# Attribute numbers of the compute capability in cuda.h.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


class PrecisionError(ModelFolderError):
    """The engine or device does not support that precision. The message says which it supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """An engine and a precision, neither of them "auto"."""

    engine: str
    precision: str


def choose(spec: ModelSpec, settings: EngineSettings) -> Variant:
    """The variant of a model whose engine is one of ENGINES. Raises PrecisionError if the device lacks it."""
    engine = settings.engine if spec.engine == "auto" else spec.engine
    if engine == "auto":
        engine = ENGINE_BY_SOURCE.get(spec.source, "torch")
    precision = spec.precision
    if precision == "auto":
        precision = "fp32" if (engine, spec.source) in FIXED else settings.precision
    return Variant(engine=engine, precision=resolve_precision(precision, settings.device, engine))


def choose_for_torch(spec: ModelSpec, settings: EngineSettings) -> str:
    """The precision of a model whose kind runs on torch only. Raises ModelFolderError; PrecisionError as `choose`."""
    variant = choose(spec, settings)
    if variant.engine != "torch":
        raise ModelFolderError(
            f'{spec.kind} runs on engine torch only, not on {variant.engine}: set engine = "torch" in model.toml'
        )
    return variant.precision


def resolve_precision(precision: str, device: str, engine: str) -> str:
    """Resolve "auto" for a device. Raises PrecisionError if the device does not support the precision."""
    if precision == "auto":
        return auto_precision(None if device == "cpu" else compute_capability(device), engine)
    if precision == "tf32" and (device == "cpu" or compute_capability(device) < TF32_CAPABILITY):
        raise PrecisionError(f"{device} has no tf32: that needs a GPU of compute capability 8.0; use fp32")
    if precision == "fp8":
        _require_fp8(device, engine)
    return precision


def _require_fp8(device: str, engine: str) -> None:
    """Raises PrecisionError where fp8 would be emulated or is not available."""
    capability = None if device == "cpu" else compute_capability(device)
    if engine == "tensorrt" and capability is not None and capability >= FP8_CAPABILITY:
        return
    told = "" if capability is None else f" of compute capability {capability[0]}.{capability[1]}"
    other = "use int8, or fp32" if capability is None else "use bf16 or fp16, or int8 with engine tensorrt"
    raise PrecisionError(
        f"engine {engine} on {device}{told} has no fp8: that needs engine tensorrt, a GPU of compute capability 8.9 or "
        f"more (Ada, Hopper, Blackwell), and data for the accuracy gate (docs/precision.md); {other}"
    )


def auto_precision(capability: tuple[int, int] | None, engine: str = "torch") -> str:
    """The precision that "auto" means for a GPU's compute capability; None: a CPU."""
    if capability is None or capability < FP16_CAPABILITY:
        return "fp32"
    # ONNX Runtime implements few operations in bf16.
    return "bf16" if capability >= BF16_CAPABILITY and engine != "onnx" else "fp16"


def compute_capability(device: str) -> tuple[int, int]:
    """The compute capability of "cuda:N", as the driver numbers devices for this process. Raises ModelFolderError."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
        if torch is not None and torch.version.hip:
            return torch.cuda.get_device_capability(device)  # type: ignore[no-any-return]  # torch is not imported above
        raise ModelFolderError(f"{device} can't be asked what it is ({error}): install NVIDIA's driver") from error
    handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    ordinal = int(device.partition(":")[2] or 0)
    for call, *arguments in (
        (driver.cuInit, 0),
        (driver.cuDeviceGet, ctypes.byref(handle), ordinal),
        (driver.cuDeviceGetAttribute, ctypes.byref(major), _CAPABILITY_MAJOR, handle),
        (driver.cuDeviceGetAttribute, ctypes.byref(minor), _CAPABILITY_MINOR, handle),
    ):
        if status := call(*arguments):
            raise ModelFolderError(f"{device} can't be asked what it is (CUDA error {status}): see mgpuctl doctor")
    return major.value, minor.value
