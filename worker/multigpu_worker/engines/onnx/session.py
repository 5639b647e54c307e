"""ONNX Runtime sessions, on a CPU or a GPU.

Settings for CPUs, measured with MiniLM on real sentences, on an Intel core:
- The SkipLayerNormalization kernel takes five times as long as an addition and a LayerNormalization: without that
  fusion the model is 13 to 15 % faster.
- Threads that spin while they wait take cores from other workers and gain nothing.
- The arena keeps the memory of the largest batch: after 64 texts of 256 tokens in one pass, a process kept 1,114 MiB,
  and 201 MiB without the arena. Memory plans are made for a shape, but many batches have a new one. Without both the
  speed is the same within 2 %.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as errors

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.engines.common.tensors import Arrays, TensorSpec
from multigpu_worker.repository.folders import ModelFolderError

CPU_OPTIMIZERS_OFF = ["SkipLayerNormFusion"]
# log_severity_level: errors only. Warnings are about graph optimisation.
LOG_ERRORS = 3
LOAD_ERRORS = (
    errors.Fail,
    errors.InvalidArgument,
    errors.InvalidGraph,
    errors.InvalidProtobuf,
    errors.NoSuchFile,
    errors.NotImplemented,
)
# Out-of-memory messages of ONNX Runtime and the CUDA libraries: there is no exception for it.
MEMORY_ERRORS = ("bad_alloc", "Failed to allocate", "out of memory", "ALLOC_FAILED", "smaller than requested bytes")
# ONNX types whose NumPy name differs, and the NumPy types of tensors that tasks may send.
TYPES = {"tensor(float)": "float32", "tensor(double)": "float64"}
DTYPES = {"float16", "float32", "float64", "bool", *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64))}


def check_precision(precision: str, device: str) -> None:
    """Raises PrecisionError unless ONNX Runtime has kernels for the precision on that kind of device."""
    known = ("fp32", "fp16", "int8") if device == "cpu" else ("fp32", "tf32", "fp16")
    if precision == "int8" and device != "cpu":
        raise PrecisionError(
            f"the engine onnx computes int8 on a CPU alone, not on {device}, where ONNX Runtime would send most of it "
            f"to the CPU: take engine tensorrt, or {', '.join(known)}"
        )
    if precision not in known:
        other = "tensorrt" if precision == "fp8" else "torch"
        raise PrecisionError(
            f"the engine onnx computes {', '.join(known)} on {device}, not {precision}: take engine {other} on a GPU"
        )


def threads_of(settings: EngineSettings) -> int:
    """The number of threads on a CPU: as configured, or all cores that this process may use."""
    return settings.threads or len(os.sched_getaffinity(0))


class Session:
    """A loaded graph. Any thread may call it."""

    def __init__(self, path: Path, device: str, threads: int, *, tf32: bool = False, fused: bool = True) -> None:
        """Load `path` onto "cpu" or "cuda:N". Raises ModelFolderError, MemoryError; ImportError without GPU support.

        `fused`: fuse quantise and dequantise operations with others. That is for int8 with float32: it breaks fp8
        graphs, and computes wrong numbers where the rest is fp16 (1.31.1).
        """
        self.device = device
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.enable_mem_pattern = False
        options.log_severity_level = LOG_ERRORS
        if not fused:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        if device == "cpu":
            options.enable_cpu_mem_arena = False
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            more: dict[str, Any] = {"providers": ["CPUExecutionProvider"], "disabled_optimizers": CPU_OPTIMIZERS_OFF}
        else:
            more = {"providers": [("CUDAExecutionProvider", _cuda_options(device, tf32=tf32)), "CPUExecutionProvider"]}
        try:
            with _memory_errors():
                self._session = onnxruntime.InferenceSession(str(path), options, **more)
        except LOAD_ERRORS as error:
            raise ModelFolderError(f"{path} can't be loaded by ONNX Runtime: {error}; copy it again") from error
        # ONNX Runtime only logs a line if the provider's libraries are missing.
        if device != "cpu" and "CUDAExecutionProvider" not in self._session.get_providers():
            raise ImportError("ONNX Runtime can't use CUDA here: it needs another CUDA or cuDNN than is installed")

    @property
    def inputs(self) -> list[Any]:
        """Objects with `name`, `type` such as tensor(int64), and `shape`."""
        return list(self._session.get_inputs())

    @property
    def outputs(self) -> list[Any]:
        """As `inputs`."""
        return list(self._session.get_outputs())

    def run(self, inputs: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str] = ()) -> Arrays:
        """Return these outputs, or all, by name. Raises MemoryError, on any device."""
        names = list(outputs) or [output.name for output in self.outputs]
        with _memory_errors():
            values = self._session.run(names, dict(inputs)) if self.device == "cpu" else self._run_bound(inputs, names)
        return dict(zip(names, values, strict=True))

    def _run_bound(self, inputs: Mapping[str, npt.NDArray[Any]], names: list[str]) -> list[npt.NDArray[Any]]:
        """Run on a GPU with one copy in each direction."""
        kind, _, number = self.device.partition(":")
        binding = self._session.io_binding()
        for name, array in inputs.items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), kind, int(number or 0))
            binding.bind_ortvalue_input(name, value)
        for name in names:
            binding.bind_output(name, kind, int(number or 0))
        self._session.run_with_iobinding(binding)
        outputs: list[npt.NDArray[Any]] = binding.copy_outputs_to_cpu()
        return outputs


def tensor_spec(path: Path, node: Any) -> TensorSpec:
    """Convert ONNX Runtime's description of an input or output. Raises ModelFolderError for non-numeric types."""
    dtype = TYPES.get(node.type, node.type.removeprefix("tensor(").removesuffix(")"))
    if dtype not in DTYPES:
        raise ModelFolderError(f"{path} has {node.name} of type {node.type}: export it with tensors of numbers alone")
    sizes = tuple(size if isinstance(size, int) else None for size in node.shape)
    return TensorSpec(name=node.name, dtype=dtype, shape=sizes)


def _cuda_options(device: str, *, tf32: bool) -> dict[str, str]:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise ImportError(
            "this ONNX Runtime has no CUDA: exchange the package onnxruntime for onnxruntime-gpu, or use engine torch"
        )
    # CUDA libraries that are Python packages are not found otherwise, because torch isn't imported.
    onnxruntime.preload_dlls()
    return {
        "device_id": device.partition(":")[2] or "0",
        # The provider's default is tf32.
        "use_tf32": "1" if tf32 else "0",
        "arena_extend_strategy": "kSameAsRequested",
    }


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (errors.RuntimeException, errors.Fail, errors.EPFail) as error:
        if any(words in str(error) for words in MEMORY_ERRORS):
            raise MemoryError(str(error)) from error
        raise
