"""Payloads and results of tasks of kind "infer".

A payload is an `InferPayload` (protos/multigpu/v1/infer.proto), or as JSON an object with `inputs` (names to nested
lists) and perhaps `outputs` (names). The result has the same form.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from multigpu._kinds.inference import array_of, tensor_of
from multigpu.v1 import infer_pb2

from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.common.payloads import JSON, check_content_type, parse_message
from multigpu_worker.engines.common.tensors import Arrays, TensorSpec
from multigpu_worker.engines.infer.backend import Forward

# Limit of the product of the other dimensions of an array without elements: its payload does not limit them.
EMPTY_ARRAY_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The checked input of one task."""

    inputs: Arrays
    # Empty: all.
    outputs: tuple[str, ...]
    # The size of the first dimension of all inputs. 0: they have none, or differ, or no input has elements.
    examples: int

    @property
    def form(self) -> tuple[tuple[str, str, int], ...]:
        """Requests of equal form have outputs of equal names and numbers of dimensions."""
        return tuple((name, array.dtype.name, array.ndim) for name, array in sorted(self.inputs.items()))

    @property
    def signature(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Examples of requests of equal signature can go through a model together."""
        return tuple((name, array.dtype.name, array.shape[1:]) for name, array in sorted(self.inputs.items()))


def parse(payload: bytes, content_type: str, forward: Forward) -> Request:
    """Parse a task's input. Raises BadInputError, which lists what the model takes."""
    check_content_type(content_type)
    try:
        inputs, outputs = (_from_json if content_type == JSON else _from_proto)(payload, forward)
        _check(inputs, outputs, forward)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        takes = "; ".join(map(str, forward.inputs))
        raise BadInputError(f"{error}. The model takes {takes}") from error
    sizes = {array.shape[0] if array.ndim else 0 for array in inputs.values()}
    counted = len(sizes) == 1 and any(array.size for array in inputs.values())
    return Request(inputs=inputs, outputs=outputs, examples=sizes.pop() if counted else 0)


def _from_proto(payload: bytes, forward: Forward) -> tuple[Arrays, tuple[str, ...]]:
    del forward
    message = parse_message(infer_pb2.InferPayload, payload)
    inputs = {tensor.name: array_of(tensor) for tensor in message.inputs}
    if len(inputs) != len(message.inputs):
        raise ValueError("the payload has an input twice")
    return inputs, tuple(message.outputs)


def _from_json(payload: bytes, forward: Forward) -> tuple[Arrays, tuple[str, ...]]:
    value = json.loads(payload)
    if not isinstance(value, dict) or not isinstance(value.get("inputs"), dict) or set(value) - {"inputs", "outputs"}:
        raise ValueError('the payload must be a JSON object with "inputs" (an object) and perhaps "outputs" (a list)')
    outputs = value.get("outputs", [])
    if not isinstance(outputs, list) or not all(isinstance(name, str) for name in outputs):
        raise ValueError('"outputs" must be a list of names')
    dtypes = {spec.name: spec.dtype for spec in forward.inputs}
    inputs = {}
    for name, rows in value["inputs"].items():
        array = np.asarray(rows)
        wanted = dtypes.get(name) or ("float32" if array.dtype.kind == "f" else array.dtype.name)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"the input {name!r} is no list of numbers, or of lists of the same length")
        if array.dtype.kind == "f" and np.dtype(wanted).kind != "f":
            raise ValueError(f"the input {name!r} has fractions, and must be {wanted}")
        # astype wraps numbers that the type cannot hold.
        inputs[name] = array.astype(wanted)
        if array.dtype.kind != "f" and not np.array_equal(inputs[name], array):
            raise ValueError(f"the input {name!r} has numbers that {wanted} can't hold")
    return inputs, tuple(outputs)


def _check(inputs: Arrays, outputs: tuple[str, ...], forward: Forward) -> None:
    specs = {spec.name: spec for spec in forward.inputs}
    if unknown := [name for name in inputs if name not in specs]:
        raise ValueError(f"the model has no input {unknown[0]!r}")
    if missing := [name for name, spec in specs.items() if spec.required and name not in inputs]:
        raise ValueError(f"the input {missing[0]!r} is missing")
    for name, array in inputs.items():
        if not array.size and math.prod(size for size in array.shape if size) > EMPTY_ARRAY_MAX:
            why = f"the product of its other dimensions is more than {EMPTY_ARRAY_MAX:,}"
            raise ValueError(f"the input {name!r} has no elements and the shape {list(array.shape)}: {why}")
        wanted = specs[name].dtype
        if array.dtype.kind in "iu" and wanted.startswith("float"):
            with np.errstate(invalid="ignore", over="ignore"):
                floats = array.astype(wanted)
                if np.array_equal(floats.astype(array.dtype), array):
                    inputs[name] = array = floats  # noqa: PLW2901  the same numbers
        if not _fits(array, specs[name]):
            raise ValueError(f"the input {name!r} has type {array.dtype.name} and shape {list(array.shape)}")
    given = {spec.name for spec in forward.outputs}
    if given and (unknown := [name for name in outputs if name not in given]):
        raise ValueError(f"the model has no output {unknown[0]!r}: it has {', '.join(sorted(given))}")


def _fits(array: Any, spec: TensorSpec) -> bool:
    if spec.dtype and array.dtype.name != spec.dtype:
        return False
    if spec.shape is None:
        return True
    return len(spec.shape) == array.ndim and all(
        size is None or size == found for size, found in zip(spec.shape, array.shape, strict=True)
    )


def result(outputs: Arrays, wanted: tuple[str, ...], content_type: str) -> bytes:
    """Write a task's result. Raises BadInputError for an output that the model does not have."""
    if unknown := [name for name in wanted if name not in outputs]:
        raise BadInputError(f"the model has no output {unknown[0]!r}: it has {', '.join(outputs)}")
    chosen = {name: outputs[name] for name in wanted or outputs}
    if content_type == JSON:
        return json.dumps({"outputs": {name: array.tolist() for name, array in chosen.items()}}).encode()
    tensors = [tensor_of(name, array) for name, array in chosen.items()]
    return infer_pb2.InferResult(outputs=tensors).SerializeToString()
