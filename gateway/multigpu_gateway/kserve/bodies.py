"""Request and response bodies of the protocol over HTTP: JSON, and, if the header Inference-Header-Content-Length says
where the JSON ends, the bytes of tensors after it.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import Message

from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.http import decode
from multigpu_gateway.kserve import open_inference_pb2 as pb
from multigpu_gateway.kserve.tensors import (
    BYTES,
    NUMPY_NAMES,
    TYPED,
    NamedTensor,
    data_of,
    set_contents,
    set_parameters,
    wrong,
)

Values = dict[str, bool | int | float | str]


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: Values = {}
    data: list[Any] | None = None


class _Output(msgspec.Struct):
    name: str
    parameters: Values = {}


class _Infer(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    parameters: Values = {}
    outputs: list[_Output] = []


_infer = msgspec.json.Decoder(_Infer)


def json_value(message: Message) -> dict[str, Any]:
    """Returns a message as a JSON value. 64-bit integers are numbers, as Triton's clients expect, not strings."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None:
            found[field.name] = [json_value(each) for each in value] if field.is_repeated else json_value(value)
        elif field.enum_type is not None:
            found[field.name] = field.enum_type.values_by_number[value].name
        else:
            found[field.name] = list(value) if field.is_repeated else value
    return found


def read_infer(name: str, version: str, body: bytes, json_length: str) -> tuple[pb.ModelInferRequest, list[bytes]]:
    """Returns the request, and the bytes of each input that is not in shared memory. `json_length`: the value of the
    header Inference-Header-Content-Length; "": the whole body is JSON. Raises HttpError if the body is invalid.
    """
    if json_length and not (json_length.isdecimal() and len(json_length) < 20 and int(json_length) <= len(body)):
        message = f"Inference-Header-Content-Length is {json_length!r}: make it the size of the JSON, in bytes"
        raise HttpError(BAD_REQUEST, message)
    at = int(json_length) if json_length else len(body)
    parsed = decode(_infer, body[:at])
    request = pb.ModelInferRequest(model_name=name, model_version=version, id=parsed.id)
    raw = []
    try:
        set_parameters(request.parameters, parsed.parameters)
        for output in parsed.outputs:
            set_parameters(request.outputs.add(name=output.name).parameters, output.parameters)
        for each in parsed.inputs:
            given = request.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
            size = each.parameters.pop("binary_data_size", None)
            set_parameters(given.parameters, each.parameters)
            if size is None and each.data is None and "shared_memory_region" in each.parameters:
                continue
            if size is None:
                set_contents(given, _flat(each, len(each.shape)))
                raw.append(data_of(given))
                given.ClearField("contents")
            elif isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(body) - at:
                raise wrong(each.name, f"its binary_data_size is {size!r}, and {len(body) - at} bytes are left")
            elif each.data is not None:
                raise wrong(each.name, "it has data and binary_data_size: send either")
            else:
                raw.append(body[at : at + size])
                at += size
    except ValueError as error:  # an integer of more than 64 bits
        raise HttpError(BAD_REQUEST, str(error)) from None
    if at < len(body):
        raise HttpError(BAD_REQUEST, f"{len(body) - at} bytes are of no input: binary_data_size says how many one has")
    return request, raw


def _flat(given: _Input, rank: int) -> list[Any]:
    """Returns the elements of an input, whose data are flat or nested as its shape is. Raises HttpError if they are
    missing or nested otherwise.
    """
    data = given.data
    if data is None:
        raise wrong(given.name, "it has neither data nor binary_data_size")
    for _ in range(rank - 1):
        if not any(isinstance(each, list) for each in data):
            break
        if not all(isinstance(each, list) for each in data):
            raise wrong(given.name, "some of its data are nested deeper than others")
        data = list(chain.from_iterable(data))
    return data


def write_infer(request: pb.ModelInferRequest, outputs: Sequence[NamedTensor]) -> tuple[bytes, int]:
    """Returns the body of a response, and the size of its JSON in bytes, 0 if the body is only JSON. Raises HttpError
    if an output can't be written as JSON and was not requested as bytes (binary_data).
    """
    requested = {each.name: each.parameters for each in request.outputs}
    rows: list[dict[str, Any]] = []
    parts = []
    for output in outputs:
        row: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        rows.append(row)
        if output.parameters:
            # In shared memory. Not repeated here: Triton's C++ client rejects parameters without a binary_data_size.
            continue
        if _is_binary(requested.get(output.name, {}), request.parameters):
            parts.append(output.data)
            row["parameters"] = {"binary_data_size": len(output.data)}
        else:
            row["data"] = _json_of(output)
    answer = {"id": request.id} if request.id else {}
    answer |= {"model_name": request.model_name, "model_version": request.model_version}
    head = msgspec.json.encode(answer | {"outputs": rows})
    return (b"".join((head, *parts)), len(head)) if parts else (head, 0)


def _is_binary(own: Mapping[str, pb.InferParameter], of_all: Mapping[str, pb.InferParameter]) -> bool:
    if "binary_data" in own:
        return own["binary_data"].bool_param
    return "binary_data_output" in of_all and of_all["binary_data_output"].bool_param


def _json_of(output: NamedTensor) -> Iterable[Any]:
    if output.datatype == BYTES:
        return [each.decode() for each in output.elements()]
    if output.datatype not in TYPED:
        raise wrong(output.name, f"{output.datatype} has no form in JSON: ask for it with binary_data")
    array = np.frombuffer(output.data, np.dtype(NUMPY_NAMES[output.datatype]).newbyteorder("<"))
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise wrong(
            output.name, "it has numbers that are not finite, which JSON can't hold: ask for it with binary_data"
        )
    found: list[Any] = array.tolist()
    return found
