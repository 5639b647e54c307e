"""As much of TensorRT as runs a plan, in the host's memory: for the parts around it that can be tried without a GPU.

Its "plan" is JSON: an ONNX file, which ONNX Runtime computes, and profiles. Inputs and outputs are read and written at
the addresses that it was told. test_tensorrt_run.py compares what is called here with the real module.
"""

import ctypes
import enum
import json
from typing import Any

import numpy as np
import onnxruntime

__version__ = "11.0"
DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
# Widths of one row at which it fails, as the library does: with a word in the log, and False.
FAILS = {13: "CUDA out of memory", 14: "an illegal instruction"}


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = range(3)


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


def nptype(kind: Any) -> Any:
    return kind


class Runtime:
    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, plan: bytes) -> "Engine | None":
        try:
            values = json.loads(plan)
        except ValueError:
            self.logger.log(ILogger.Severity.ERROR, "it is malformed")
            return None
        if values.pop("host_code", False) and not self.engine_host_code_allowed:
            self.logger.log(ILogger.Severity.ERROR, "it has host code, which is not allowed")
            return None
        return Engine(self.logger, **values)


class Engine:
    def __init__(self, logger: Any, graph: str, profiles: list[dict[str, list[int]]]) -> None:
        self.logger, self.profiles = logger, profiles
        self.session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        self.inputs: list[str] = [tensor.name for tensor in self.session.get_inputs()]
        self.tensors: dict[str, Any] = {
            tensor.name: tensor for tensor in [*self.session.get_inputs(), *self.session.get_outputs()]
        }
        self.num_io_tensors = len(self.tensors)
        self.num_optimization_profiles = len(profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def is_shape_inference_io(self, name: str) -> bool:
        return False

    def get_tensor_dtype(self, name: str) -> Any:
        return DTYPES[self.tensors[name].type]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in self.tensors[name].shape)

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        ranges, shape = self.profiles[index], self.get_tensor_shape(name)
        return [
            tuple(
                ranges["rows" if axis == 0 else "width"][which] if size == -1 else size
                for axis, size in enumerate(shape)
            )
            for which in range(3)
        ]

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return 1000 * (index + 1)

    def create_execution_context(self, strategy: Any) -> "Context":
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        return Context(self)


class Context:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.profile: int | None = None
        self.scratch_bytes = 0

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0
        ctypes.memset(memory, 0, size)
        self.scratch_bytes = size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        self.shapes[name] = shape
        return all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.inputs if name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Of outputs: open dimensions are the first input's."""
        first = self.shapes[self.engine.inputs[0]]
        return tuple(first[i] if size == -1 else size for i, size in enumerate(self.engine.get_tensor_shape(name)))

    def execute_async_v3(self, stream: int) -> bool:
        assert self.scratch_bytes >= 1000 * self.engine.num_optimization_profiles
        first = self.shapes[self.engine.inputs[0]]
        if first[0] == 1 and first[1] in FAILS:
            self.engine.logger.log(ILogger.Severity.ERROR, FAILS[first[1]])
            return False
        inputs = {name: self._at(name, self.shapes[name]).copy() for name in self.engine.inputs}
        names = [name for name in self.engine.tensors if name not in self.engine.inputs]
        for name, answer in zip(names, self.engine.session.run(names, inputs), strict=True):
            self._at(name, self.get_tensor_shape(name))[...] = answer
        return True

    def _at(self, name: str, shape: tuple[int, ...]) -> Any:
        dtype = np.dtype(self.engine.get_tensor_dtype(name))
        memory = (ctypes.c_uint8 * (int(np.prod(shape)) * dtype.itemsize)).from_address(self.addresses[name])
        return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)
