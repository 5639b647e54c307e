"""The tensors of requests and responses. Here the data of a tensor are always bytes: the elements in row-major order,
little-endian. Before each element of BYTES are four bytes with its length.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from multigpu._kinds.inference import DTYPES
from multigpu.v1 import infer_pb2

from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.kserve import open_inference_pb2 as pb

# NumPy's name of each type of the protocol, but BYTES.
NUMPY_NAMES = {
    "BOOL": "bool",
    **{f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    "FP16": "float16",
    "BF16": "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
}
DATATYPES = {dtype: datatype for datatype, dtype in NUMPY_NAMES.items()}
BYTES = "BYTES"
# The field of InferTensorContents for a type, and NumPy's name of its elements' type. FP16 and BF16 have no such field.
TYPED = {
    "BOOL": ("bool_contents", "bool"),
    **{f"INT{bits}": ("int_contents", "int32") for bits in (8, 16, 32)},
    "INT64": ("int64_contents", "int64"),
    **{f"UINT{bits}": ("uint_contents", "uint32") for bits in (8, 16, 32)},
    "UINT64": ("uint64_contents", "uint64"),
    "FP32": ("fp32_contents", "float32"),
    "FP64": ("fp64_contents", "float64"),
}
# NumPy's limit.
DIMENSIONS_MAX = 64
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """An input or output."""

    name: str
    # The protocol's name of the type.
    datatype: str
    shape: tuple[int, ...]
    # Empty if the tensor is in shared memory: then `parameters` say where.
    data: bytes
    parameters: Mapping[str, str | int] = field(default_factory=dict)

    def message(self) -> infer_pb2.Tensor:
        """Returns the tensor for the payload of a task of kind "infer". Not for BYTES."""
        return infer_pb2.Tensor(name=self.name, dtype=NUMPY_NAMES[self.datatype], shape=self.shape, data=self.data)

    def elements(self) -> list[bytes]:
        """Returns the elements of a tensor of BYTES. Raises HttpError if their lengths or their number are wrong."""
        found, at, end = [], 0, len(self.data)
        while at < end:
            begin = at + _LENGTH.size
            at = begin + _LENGTH.unpack_from(self.data, at)[0] if begin <= end else end + 1
            if at > end:
                raise wrong(self.name, "its bytes end within an element: before each are 4 bytes with its length")
            found.append(self.data[begin:at])
        if len(found) != math.prod(self.shape):
            raise wrong(self.name, f"it has {len(found)} elements, and the shape {list(self.shape)}")
        return found


def wrong(name: str, why: str) -> HttpError:
    """Returns the error for an invalid input or output."""
    return HttpError(BAD_REQUEST, f"the tensor {name!r}: {why}", param=name)


def bytes_of(elements: Iterable[bytes]) -> bytes:
    """Returns the data of a tensor of BYTES."""
    return b"".join(part for element in elements for part in (_LENGTH.pack(len(element)), element))


def values_of(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """Returns the values of parameters by name, without parameters that have no value."""
    choices = {name: each.WhichOneof("parameter_choice") for name, each in parameters.items()}
    return {name: getattr(parameters[name], choice) for name, choice in choices.items() if choice}


def set_parameters(parameters: Any, values: Mapping[str, bool | int | float | str]) -> None:
    """Adds values to a map of InferParameter. Raises ValueError if an integer has more than 64 bits."""
    fields = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, value in values.items():
        field_name = "uint64_param" if type(value) is int and value >= 1 << 63 else fields[type(value)]
        setattr(parameters[name], field_name, value)


def inputs_of(request: pb.ModelInferRequest, raw: Sequence[bytes]) -> dict[str, NamedTensor]:
    """Returns the inputs by name. `raw`: the bytes of each input, in order; empty: the inputs have contents. Raises
    HttpError if an input is invalid, or if its data do not match its type and shape.
    """
    for given in request.inputs:
        _reject_parameters(given.name, given.parameters)
    if raw and len(raw) != len(request.inputs):
        message = f"there are {len(request.inputs)} inputs and {len(raw)} raw_input_contents: send one for each"
        raise HttpError(BAD_REQUEST, message, param="raw_input_contents")
    found: dict[str, NamedTensor] = {}
    for index, given in enumerate(request.inputs):
        if given.name in found:
            raise wrong(given.name, "it is there twice")
        if raw and given.HasField("contents"):
            raise wrong(given.name, "it has contents, and there are raw_input_contents: send either")
        _check(given)
        shape = tuple(given.shape)
        if min(shape, default=0) < 0:
            raise wrong(given.name, f"{list(shape)} is no shape")
        data = raw[index] if raw else data_of(given)
        if given.datatype != BYTES and len(data) != (size := math.prod(shape) * DTYPES[NUMPY_NAMES[given.datatype]]):
            raise wrong(given.name, f"{given.datatype} {list(shape)} takes {size} bytes, and {len(data)} came")
        found[given.name] = NamedTensor(name=given.name, datatype=given.datatype, shape=shape, data=data)
    return found


def outputs_of(request: pb.ModelInferRequest) -> list[str]:
    """Returns the names of the requested outputs; empty: all. Raises HttpError if one has an unsupported parameter."""
    for output in request.outputs:
        _reject_parameters(output.name, output.parameters)
    return list(dict.fromkeys(output.name for output in request.outputs))


def _reject_parameters(name: str, parameters: Iterable[str]) -> None:
    # These say how a tensor is written in a body of HTTP, and need no check.
    if unknown := [each for each in parameters if each not in ("binary_data", "binary_data_size")]:
        raise wrong(name, f"the parameter {unknown[0]!r} is not served: leave it out")


def _check(given: pb.ModelInferRequest.InferInputTensor) -> None:
    """Raises HttpError if the type is unknown, or if the product of too many dimensions would block the event loop."""
    if len(given.shape) > DIMENSIONS_MAX:
        raise wrong(given.name, f"it has {len(given.shape):,} dimensions: at most {DIMENSIONS_MAX}")
    if given.datatype != BYTES and given.datatype not in NUMPY_NAMES:
        raise wrong(given.name, f"no type {given.datatype!r}: known are {', '.join((*NUMPY_NAMES, BYTES))}")


def _field_of(given: pb.ModelInferRequest.InferInputTensor) -> tuple[str, str]:
    """Returns the entry of TYPED. Raises HttpError if the type has none."""
    _check(given)
    if given.datatype == BYTES:
        return "bytes_contents", ""
    if given.datatype not in TYPED:
        raise wrong(given.name, f"{given.datatype} is to be sent as bytes")
    return TYPED[given.datatype]


def set_contents(given: pb.ModelInferRequest.InferInputTensor, values: Sequence[Any]) -> None:
    """Sets the contents of an input to these elements; texts for BYTES. Raises HttpError if one has another type."""
    field, _ = _field_of(given)
    if given.datatype == BYTES:
        if not all(isinstance(each, str) for each in values):
            raise wrong(given.name, "its data are to be texts")
        values = [each.encode() for each in values]
    try:
        getattr(given.contents, field).extend(values)
    except (TypeError, ValueError) as error:
        raise wrong(given.name, f"it has an element that is no {given.datatype}: {error}") from None


def data_of(given: pb.ModelInferRequest.InferInputTensor) -> bytes:
    """Returns the contents of an input as bytes. Raises HttpError if they do not match its type and shape."""
    contents = given.contents
    field, element = _field_of(given)
    count = math.prod(given.shape)
    if others := [each.name for each, _ in contents.ListFields() if each.name != field]:
        raise wrong(given.name, f"{given.datatype} is to be in {field}, and not in {others[0]}")
    values = getattr(contents, field)
    if len(values) != count:
        raise wrong(given.name, f"it has {len(values)} elements, and the shape {list(given.shape)}")
    if given.datatype == BYTES:
        return bytes_of(values)
    array = np.fromiter(values, np.dtype(element), len(values))
    dtype = np.dtype(NUMPY_NAMES[given.datatype])
    narrow = array.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(narrow, array):
        raise wrong(given.name, f"it has numbers that {given.datatype} can't hold")
    return narrow.astype(dtype.newbyteorder("<"), copy=False).tobytes()


def response_of(request: pb.ModelInferRequest, outputs: Iterable[NamedTensor]) -> pb.ModelInferResponse:
    """Returns the response with these outputs."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=request.model_version, id=request.id)
    for output in outputs:
        added = response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        set_parameters(added.parameters, output.parameters)
        # Triton's C++ client needs an entry for each output, even for one in shared memory.
        response.raw_output_contents.append(output.data)
    return response
