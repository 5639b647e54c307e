"""The tensors of requests and responses. All travel as bytes: the elements in row-major order, little-endian; those of
BYTES with their length before each, as four bytes.
"""

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from multigpu._kinds.inference import DTYPES
from multigpu.v1 import infer_pb2

from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.kserve import open_inference_pb2 as pb

# The protocol's name of a type -> NumPy's.
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
# The field of InferTensorContents for a type, and the type of its elements. FP16 and BF16 travel as bytes alone.
_FIELDS = {
    "BOOL": ("bool_contents", "bool"),
    **{f"INT{bits}": ("int_contents", "int32") for bits in (8, 16, 32)},
    "INT64": ("int64_contents", "int64"),
    **{f"UINT{bits}": ("uint_contents", "uint32") for bits in (8, 16, 32)},
    "UINT64": ("uint64_contents", "uint64"),
    "FP32": ("fp32_contents", "float32"),
    "FP64": ("fp64_contents", "float64"),
}
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """An input or output."""

    name: str
    # The protocol's name of the type.
    datatype: str
    shape: tuple[int, ...]
    data: bytes

    def message(self) -> infer_pb2.Tensor:
        """For a task of the kind infer. Not of BYTES."""
        return infer_pb2.Tensor(name=self.name, dtype=NUMPY_NAMES[self.datatype], shape=self.shape, data=self.data)

    def elements(self) -> list[bytes]:
        """The elements of BYTES. HttpError: the lengths do not fit."""
        found, at, end = [], 0, len(self.data)
        while at < end:
            begin = at + _LENGTH.size
            at = begin + _LENGTH.unpack_from(self.data, at)[0] if begin <= end else end + 1
            if at > end:
                raise wrong(self.name, "its bytes end within an element: each is its length as 4 bytes, and so many")
            found.append(self.data[begin:at])
        if len(found) != math.prod(self.shape):
            raise wrong(self.name, f"it has {len(found)} elements, and the shape {list(self.shape)}")
        return found


def wrong(name: str, why: str) -> HttpError:
    """The error of an input or output that can't be served."""
    return HttpError(BAD_REQUEST, f"the tensor {name!r}: {why}", param=name)


def bytes_of(elements: Iterable[bytes]) -> bytes:
    """The data of a tensor of BYTES."""
    return b"".join(part for element in elements for part in (_LENGTH.pack(len(element)), element))


def inputs_of(request: pb.ModelInferRequest) -> dict[str, NamedTensor]:
    """The inputs by name. HttpError: one contradicts itself."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        message = f"there are {len(request.inputs)} inputs and {len(raw)} raw_input_contents: send one for each"
        raise HttpError(BAD_REQUEST, message, param="raw_input_contents")
    found: dict[str, NamedTensor] = {}
    for index, given in enumerate(request.inputs):
        _reject_parameters(given.name, given.parameters)
        if given.name in found:
            raise wrong(given.name, "it is there twice")
        if raw and given.HasField("contents"):
            raise wrong(given.name, "it has contents, and there are raw_input_contents: send either")
        if given.datatype != BYTES and given.datatype not in NUMPY_NAMES:
            raise wrong(given.name, f"no type {given.datatype!r}: known are {', '.join((*NUMPY_NAMES, BYTES))}")
        shape = tuple(given.shape)
        if min(shape, default=0) < 0:
            raise wrong(given.name, f"{list(shape)} is no shape")
        data = raw[index] if raw else _data_of(given)
        if given.datatype != BYTES and len(data) != (size := math.prod(shape) * DTYPES[NUMPY_NAMES[given.datatype]]):
            raise wrong(given.name, f"{given.datatype} {list(shape)} takes {size} bytes, and {len(data)} came")
        found[given.name] = NamedTensor(name=given.name, datatype=given.datatype, shape=shape, data=data)
    return found


def outputs_of(request: pb.ModelInferRequest) -> list[str]:
    """The names of the outputs that are asked for; none: all. HttpError: in a form that is not served."""
    for asked in request.outputs:
        _reject_parameters(asked.name, asked.parameters)
    return list(dict.fromkeys(asked.name for asked in request.outputs))


def _reject_parameters(name: str, parameters: Iterable[str]) -> None:
    # binary_data is for HTTP, and says how bytes are written there.
    if unknown := [each for each in parameters if each not in ("binary_data", "binary_data_size")]:
        raise wrong(name, f"the parameter {unknown[0]!r} is not served: leave it out")


def _data_of(given: pb.ModelInferRequest.InferInputTensor) -> bytes:
    """The contents of an input as bytes. HttpError: they are of another type, or too many."""
    contents = given.contents
    count = math.prod(given.shape)
    if given.datatype == BYTES:
        field, element = "bytes_contents", ""
    elif given.datatype in _FIELDS:
        field, element = _FIELDS[given.datatype]
    else:
        raise wrong(given.name, f"{given.datatype} is to be sent as raw_input_contents")
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
    """The response with these outputs."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=request.model_version, id=request.id)
    for output in outputs:
        response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        response.raw_output_contents.append(output.data)
    return response
