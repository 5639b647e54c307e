"""Which engine runs a model, and at which precision: what the task asks for, else the model, else the worker.

"auto" is decided here and nowhere else. The engine is the one that the model's files are for. The precision is the
lowest that costs next to nothing in accuracy and that the device computes faster than float32: bf16 or fp16 where it
has tensor cores for them, else fp32. int8 and fp8 are never chosen by themselves: they have to prove themselves first
(docs/precision.md).

The GPU is asked through the driver's own library, which is there wherever a GPU is, so that an engine without torch
can ask too.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from multigpu.repository.model import ENGINES, PRECISIONS, ModelSpec

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.models.folders import ModelFolderError, resolve_name

# The engine of files that are made for one; all others are torch's.
ENGINE_BY_SOURCE = {"onnx": "onnx", "tensorrt-plan": "tensorrt"}
# Compute capabilities from which tensor cores take numbers of a type (CUDA C++ Programming Guide).
BF16_CAPABILITY, FP16_CAPABILITY = (8, 0), (7, 0)
TF32_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)
# Engines and files that are computed at the precision they were made at: "auto" is what they are, whatever the worker's
# models are computed at by default.
FIXED = (("torch", "torch-export"), ("onnx", "onnx"), ("tensorrt", "tensorrt-plan"))
# Attributes of a device in cuda.h: the two parts of its compute capability.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
PARAMETERS = ("engine", "precision")


class PrecisionError(ModelFolderError):
    """The engine or the device can't compute at that precision. The message says what can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a model. Nothing in it is "auto"."""

    engine: str
    precision: str


def spec_of(models: Mapping[str, ModelSpec], name: str) -> ModelSpec:
    """The model that a task means, by id or by name; empty: the first. Raises UnknownModelError."""
    for spec in models.values():
        if name in {"", spec.name, spec.id}:
            return spec
    return models[resolve_name(models, name)]


def choose(spec: ModelSpec, settings: EngineSettings, parameters: Mapping[str, str]) -> Variant:
    """What a task's parameters mean for a model on this worker. Raises ValueError; PrecisionError for the device's."""
    for name in parameters:
        if name not in PARAMETERS:
            raise ValueError(f"{spec.kind} has no parameter {name!r}: it has {' and '.join(PARAMETERS)}")
    engine = _first(parameters.get("engine", ""), spec.engine, settings.engine, known=ENGINES, what="engine")
    if engine == "auto":
        engine = ENGINE_BY_SOURCE.get(spec.source, "torch")
    fixed = (engine, spec.source) in FIXED
    worker = "auto" if fixed else settings.precision
    precision = _first(parameters.get("precision", ""), spec.precision, worker, known=PRECISIONS, what="precision")
    if precision == "auto" and fixed:
        precision = "fp32"
    return Variant(engine=engine, precision=resolve_precision(precision, settings.device, engine))


def _first(*wishes: str, known: tuple[str, ...], what: str) -> str:
    """The first wish that is one. A class of the user's own stands for itself, and wishes nothing here."""
    for wish in wishes:
        if wish not in known and wish and ":" not in wish:
            raise ValueError(f"{what} {wish!r} is none of {', '.join(known)}")
        if wish in known and wish != "auto":
            return wish
    return "auto"


def resolve_precision(precision: str, device: str, engine: str) -> str:
    """The precision that is meant on a device. Raises PrecisionError if the device has none such."""
    if precision == "auto":
        return auto_precision(None if device == "cpu" else compute_capability(device), engine)
    if precision == "tf32" and (device == "cpu" or compute_capability(device) < TF32_CAPABILITY):
        raise PrecisionError(f"{device} has no tf32: that needs a GPU of compute capability 8.0; use fp32")
    if precision == "fp8":
        _require_fp8(device, engine)
    return precision


def _require_fp8(device: str, engine: str) -> None:
    """Raises PrecisionError: it would be computed by emulation, or not at all."""
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
    """The precision for a GPU of that compute capability; None: a CPU."""
    if capability is None or capability < FP16_CAPABILITY:
        return "fp32"
    # ONNX Runtime has bf16 for few operations.
    return "bf16" if capability >= BF16_CAPABILITY and engine != "onnx" else "fp16"


def compute_capability(device: str) -> tuple[int, int]:
    """Of "cuda:N", as the driver counts devices for this process. Raises ModelFolderError: there is no such GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
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
