"""ONNX Runtime, set up for a worker: one graph that is loaded, on a CPU or a GPU.

What was measured on a CPU with MiniLM and real sentences, and is set here:
- The kernel of SkipLayerNormalization takes ten times as long as an addition and a LayerNormalization: without that
  fusion the model is 15 % faster.
- Threads that spin while they wait take the cores from other workers, and gain nothing.
- Plans of memory are made for a shape, and here every batch has another; the arena keeps what the longest batch took.
  Without both the speed is the same and the memory less.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as errors

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.models.folders import ModelFolderError

Arrays = dict[str, npt.NDArray[Any]]
# Fusions that cost more than they gain on a CPU.
CPU_OPTIMIZERS_OFF = ["SkipLayerNormFusion"]
LOAD_ERRORS = (
    errors.Fail,
    errors.InvalidArgument,
    errors.InvalidGraph,
    errors.InvalidProtobuf,
    errors.NoSuchFile,
    errors.NotImplemented,
)
# How ONNX Runtime and CUDA's libraries say that memory ran out: there is no exception for it.
MEMORY_ERRORS = ("bad_alloc", "Failed to allocate", "out of memory", "ALLOC_FAILED", "smaller than requested bytes")


def check_precision(precision: str, device: str) -> None:
    """Raises PrecisionError unless ONNX Runtime has kernels for it on that kind of device."""
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
    """How many threads compute on a CPU: those that were set, or all cores that this process may use."""
    return settings.threads or len(os.sched_getaffinity(0))


class Session:
    """A graph that is loaded. Calls may come from several threads."""

    def __init__(self, path: Path, device: str, threads: int, *, tf32: bool = False, fused: bool = True) -> None:
        """Load `path` onto "cpu" or "cuda:N". Raises ModelFolderError, MemoryError; ImportError: no GPU support.

        Without `fused` each quantise and dequantise operation is computed as it stands. Fusions are for int8 among
        float32: they break graphs of fp8, and give wrong numbers where the rest is fp16 (1.31.1).
        """
        self.device = device
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.enable_mem_pattern = False
        # Warnings are about how graphs are optimised: nothing for people who run models. 3: errors.
        options.log_severity_level = 3
        if not fused:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        more: dict[str, Any] = {}
        if device == "cpu":
            options.enable_cpu_mem_arena = False
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            more = {"providers": ["CPUExecutionProvider"], "disabled_optimizers": CPU_OPTIMIZERS_OFF}
        else:
            more = {"providers": [("CUDAExecutionProvider", _cuda_options(device, tf32=tf32)), "CPUExecutionProvider"]}
        try:
            with _memory_errors():
                self._session = onnxruntime.InferenceSession(str(path), options, **more)
        except LOAD_ERRORS as error:
            raise ModelFolderError(f"{path} can't be loaded by ONNX Runtime: {error}; copy it again") from error
        # Without its libraries the provider is left out, with no more than a line in the log.
        if device != "cpu" and "CUDAExecutionProvider" not in self._session.get_providers():
            raise ImportError("ONNX Runtime can't use CUDA here: it needs another CUDA or cuDNN than is installed")

    @property
    def inputs(self) -> list[Any]:
        """Of each its `name`, `type` such as tensor(int64), and `shape`."""
        return list(self._session.get_inputs())

    @property
    def outputs(self) -> list[Any]:
        """As `inputs`."""
        return list(self._session.get_outputs())

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """All outputs by name. Raises MemoryError, on any device, if memory runs out."""
        names = [output.name for output in self.outputs]
        with _memory_errors():
            values = self._session.run(names, dict(inputs)) if self.device == "cpu" else self._run_bound(inputs, names)
        return dict(zip(names, values, strict=True))

    def _run_bound(self, inputs: Mapping[str, npt.NDArray[Any]], names: list[str]) -> list[npt.NDArray[Any]]:
        """On a GPU: each way one copy, and nothing in between comes back to the host."""
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


def _cuda_options(device: str, *, tf32: bool) -> dict[str, str]:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise ImportError(
            "this ONNX Runtime has no CUDA: exchange the package onnxruntime for onnxruntime-gpu, or use engine torch"
        )
    # Those that came as Python packages are found by nobody else here: torch isn't imported.
    onnxruntime.preload_dlls()
    # tf32 is this provider's own choice unless told otherwise, and it is not fp32.
    return {
        "device_id": device.partition(":")[2] or "0",
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
