"""Runs a plan: from arrays to arrays.

Each profile of a plan (profiles.py) has its own execution context, so alternating shapes switch nothing. All contexts
run on one stream, one after the other, and share scratch memory and the buffers of inputs and outputs. The buffers
grow to the largest size needed.
"""

import functools
import importlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from multigpu_worker.engines.common.tensors import Arrays, TensorSpec
from multigpu_worker.engines.tensorrt.device_memory import DeviceMemory
from multigpu_worker.engines.tensorrt.module import is_out_of_memory, make_logger
from multigpu_worker.engines.tensorrt.profiles import ShapeRange, choose
from multigpu_worker.repository.folders import ModelFolderError

# Alignment of a context's scratch memory.
ALIGNMENT_BYTES = 256


class PlanRunner:
    """A plan on the GPU. Any thread may call it; calls wait for each other."""

    def __init__(self, plan: Path, module: str, memory: DeviceMemory) -> None:
        """Load a plan. Raises ModelFolderError if it isn't one for this library and GPU; MemoryError."""
        self._trt = importlib.import_module(module)
        self._memory = memory
        self._lock = threading.Lock()
        self._logger = make_logger(self._trt)
        self._buffers: dict[str, tuple[int, Any]] = {}
        with memory.current():
            self._runtime = self._trt.Runtime(self._logger)
            self._engine = self._runtime.deserialize_cuda_engine(plan.read_bytes())
            if self._engine is None:
                raise self._error(f"{plan} can't be loaded by {module} {self._trt.__version__}", ModelFolderError)
            self.inputs, self.outputs = self._describe(plan)
            self.profiles = self._read_profiles()
            self._contexts = [self._open_context(index) for index in range(len(self.profiles))]

    def __call__(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """All outputs. ValueError: no profile takes these shapes. MemoryError."""
        return self.begin(inputs)()

    def begin(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Callable[[], Arrays]:
        """Start on inputs, and return a function that waits for the outputs.

        More inputs may be started before that: on the one stream, each copy and run waits for those before it, so the
        buffers are free when they are written again.
        """
        shapes = {spec.name: inputs[spec.name].shape for spec in self.inputs}
        profile = choose(self.profiles, shapes)
        if profile is None:
            raise ValueError(f"the plan takes no inputs of the shapes {shapes}: it takes {self.profiles}")
        with self._lock, self._memory.current():
            answers = self._start(self._contexts[profile], inputs)
            wait = self._memory.mark()
        return functools.partial(self._finish, wait, answers)

    def _finish(self, wait: Callable[[], None], answers: Arrays) -> Arrays:
        """Wait for the outputs. A bound method: it keeps the engine alive until the device is done with it."""
        wait()
        return answers

    def _start(self, context: Any, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Start the run and the copies of the outputs."""
        for spec in self.inputs:
            array = np.ascontiguousarray(inputs[spec.name], dtype=spec.dtype)
            if not context.set_input_shape(spec.name, array.shape):
                raise self._error(f"the plan rejected {spec.name} of shape {array.shape}")
            self._memory.upload(array, self._bind(context, spec.name, array.nbytes))
        if unknown := context.infer_shapes():
            raise self._error(f"the shapes of {', '.join(unknown)} are not known")
        shapes = {spec.name: tuple(context.get_tensor_shape(spec.name)) for spec in self.outputs}
        for spec in self.outputs:
            if -1 in shapes[spec.name]:
                raise ModelFolderError(f"the shape of {spec.name} depends on the data: use engine onnx for this model")
            size = int(np.prod(shapes[spec.name], dtype=np.int64)) * np.dtype(spec.dtype).itemsize
            self._bind(context, spec.name, size)
        if not context.execute_async_v3(self._memory.stream):
            raise self._error("the plan failed to run")
        return {
            spec.name: self._memory.download(self._buffers[spec.name][1], shapes[spec.name], spec.dtype)
            for spec in self.outputs
        }

    def _bind(self, context: Any, name: str, size_bytes: int) -> Any:
        """Give the context a buffer for the tensor that is large enough, and return it."""
        capacity, buffer = self._buffers.get(name, (-1, None))
        if capacity < size_bytes:
            self._buffers.pop(name, None)
            capacity, buffer = size_bytes, self._memory.empty(max(size_bytes, 1))
            self._buffers[name] = capacity, buffer
        if not context.set_tensor_address(name, self._memory.address(buffer)):
            raise self._error(f"the plan rejected a buffer for {name}")
        return buffer

    def _describe(self, plan: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        inputs: list[TensorSpec] = []
        outputs: list[TensorSpec] = []
        for index in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(index)
            if self._engine.is_shape_inference_io(name):
                raise ModelFolderError(f"{plan} takes a shape as the tensor {name}: use engine onnx for this model")
            kind = self._engine.get_tensor_dtype(name)
            try:
                dtype = np.dtype(self._trt.nptype(kind))
            except TypeError as error:
                raise ModelFolderError(
                    f"{plan} has {name} of type {kind}, which NumPy has not: cast it to float32 in the model"
                ) from error
            sizes = tuple(None if size == -1 else int(size) for size in self._engine.get_tensor_shape(name))
            spec = TensorSpec(name=name, dtype=dtype.name, shape=sizes)
            is_input = self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT
            (inputs if is_input else outputs).append(spec)
        return tuple(inputs), tuple(outputs)

    def _read_profiles(self) -> list[dict[str, ShapeRange]]:
        """The shapes of each profile. A plan without open dimensions has one profile too."""
        profiles = []
        for index in range(self._engine.num_optimization_profiles):
            ranges: dict[str, ShapeRange] = {}
            for spec in self.inputs:
                least, _, most = self._engine.get_tensor_profile_shape(spec.name, index)
                ranges[spec.name] = tuple(least), tuple(most)
            profiles.append(ranges)
        return profiles

    def _open_context(self, profile: int) -> Any:
        context = self._engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise self._error("the plan gave no execution context")
        if not context.set_optimization_profile_async(profile, self._memory.stream):
            raise self._error(f"the plan rejected its profile {profile}")
        self._memory.mark()()
        size_bytes = max(
            self._engine.get_device_memory_size_for_profile_v2(index)
            for index in range(self._engine.num_optimization_profiles)
        )
        if "" not in self._buffers:  # not the name of a tensor
            self._buffers[""] = size_bytes, self._memory.empty(size_bytes + ALIGNMENT_BYTES)
        address = self._memory.address(self._buffers[""][1])
        context.set_device_memory(-(-address // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, size_bytes)
        return context

    def _error(self, what: str, kind: type[Exception] = RuntimeError) -> Exception:
        """An exception with the library's error messages, which its failed calls do not return."""
        message = self._logger.take()
        return (MemoryError if is_out_of_memory(message) else kind)(f"{what}: {message}")
