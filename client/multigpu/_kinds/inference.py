"""Tasks of kind "infer": arrays as tensors and back, for the clients and the workers' engines.

A tensor travels as its elements in C order, little-endian, with NumPy's name of their type. NumPy has no bfloat16: such
a tensor becomes float32, which represents every bfloat16 exactly; the package ml_dtypes makes arrays of that type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError, EncodeError

from multigpu.errors import INVALID_ARGUMENT, InvalidTaskError, TransportError
from multigpu.options import Input
from multigpu.outcome import Outcome
from multigpu.v1 import infer_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    Arrays = dict[str, NDArray[Any]]

KIND = "infer"
BFLOAT16 = "bfloat16"
# Element type -> its size in bytes.
DTYPES = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    BFLOAT16: 2,
    "float32": 4,
    "float64": 8,
}
# The limit of protobuf.
_MESSAGE_BYTES_MAX = (1 << 31) - 1


def tensor_of(name: str, array: ArrayLike) -> infer_pb2.Tensor:
    """An array, or anything that numpy.asarray takes, as a tensor. ValueError: its type is not supported."""
    import numpy as np  # noqa: PLC0415  a client that sends no arrays needs no numpy

    try:
        values = np.asarray(array)
    except ValueError as error:
        raise ValueError(f"the tensor {name!r} is no array: {error}") from error
    dtype = values.dtype.name
    if dtype not in DTYPES:
        raise ValueError(f"the tensor {name!r} has elements of type {dtype}: make them one of {', '.join(DTYPES)}")
    if values.nbytes > _MESSAGE_BYTES_MAX:
        raise ValueError(f"the tensor {name!r} has {values.nbytes:,} bytes, more than any task can hold: split it")
    little = values if dtype == BFLOAT16 else values.astype(values.dtype.newbyteorder("<"), copy=False)
    return infer_pb2.Tensor(name=name, dtype=dtype, shape=values.shape, data=little.tobytes())


def array_of(tensor: infer_pb2.Tensor) -> NDArray[Any]:
    """The array of a tensor: read-only, a view of its bytes where it can be. ValueError: it contradicts itself."""
    import numpy as np  # noqa: PLC0415  as above

    dtype, shape, size = tensor.dtype, tuple(tensor.shape), len(tensor.data)
    if dtype not in DTYPES:
        raise ValueError(f"the tensor {tensor.name!r} has elements of type {dtype!r}: known are {', '.join(DTYPES)}")
    if min(shape, default=0) < 0 or math.prod(shape) * DTYPES[dtype] != size:
        raise ValueError(f"the tensor {tensor.name!r} of {dtype} has the shape {list(shape)} and {size} bytes")
    if dtype == BFLOAT16:
        bits = np.frombuffer(tensor.data, "<u2").astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).reshape(shape)
    return np.frombuffer(tensor.data, np.dtype(dtype).newbyteorder("<")).reshape(shape)


def input_of(inputs: Mapping[str, ArrayLike], outputs: Sequence[str]) -> tuple[bytes, int]:
    """The payload of a task, and how many examples it holds. InvalidTaskError: no model could take it."""
    if not isinstance(inputs, Mapping):
        raise TypeError(f"infer takes a dict of arrays by the names of the model's inputs, not {type(inputs).__name__}")
    if isinstance(outputs, str):
        raise TypeError("outputs is a sequence of names; for one output pass [name]")
    if not inputs:
        raise InvalidTaskError(INVALID_ARGUMENT, "infer needs at least one input")
    try:
        tensors = [tensor_of(name, array) for name, array in inputs.items()]
        payload = infer_pb2.InferPayload(inputs=tensors, outputs=outputs).SerializeToString()
    except (ValueError, DecodeError) as error:
        raise InvalidTaskError(INVALID_ARGUMENT, str(error)) from error
    except EncodeError as error:
        raise InvalidTaskError(INVALID_ARGUMENT, "the inputs are more than any task can hold: split them") from error
    examples = {tensor.shape[0] if tensor.shape else 1 for tensor in tensors}
    return payload, max(1, examples.pop()) if len(examples) == 1 else 1


def task_of(inputs: Mapping[str, ArrayLike], outputs: Sequence[str]) -> Input:
    """As input_of, for a map."""
    payload, examples = input_of(inputs, outputs)
    return Input(payload=payload, units=examples)


def arrays_of(result: bytes) -> Arrays:
    """The arrays in a task's result, by name."""
    try:
        tensors = infer_pb2.InferResult.FromString(result).outputs
        return {tensor.name: array_of(tensor) for tensor in tensors}
    except (TypeError, DecodeError, ValueError) as error:
        raise TransportError(
            f"a result of infer can't be read ({error}): its worker speaks another protocol"
        ) from error


def read(outcome: Outcome) -> Arrays:
    """As arrays_of, of an outcome. Raises its TaskError."""
    return arrays_of(outcome.value())
