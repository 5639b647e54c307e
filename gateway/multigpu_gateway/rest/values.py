"""Protobuf messages as JSON values, with the fields of `mgpuctl --json`; ids are strings.

Times are RFC 3339 strings, durations seconds, enum values short names. A field with presence is omitted when it is
absent; every other field is always there. Bytes are a JSON value if that is their content type, text if they have no
content type. If they have another one, or can't be decoded, the field is called NAME_base64.
"""

import base64
from typing import Any

import msgspec
from multigpu import Outcome, Task

JSON = "application/json"
_decode = msgspec.json.decode


def as_dict(found: Any) -> dict[str, Any]:
    """Returns the message of a Task, or of a dataclass of multigpu.fleet."""
    return _message(found.message if isinstance(found, Task) else found.proto)


def outcome_dict(outcome: Outcome) -> dict[str, Any]:
    """Returns an Outcome. It contains the result even if the message only refers to it (result_place)."""
    value = _message(outcome.message)
    if value.pop("result_place", None) is not None:
        value.pop("result", None)
        value |= data_fields("result", [outcome.result], [outcome.content_type], repeated=False)
    return value


def data_fields(name: str, contents: Any, types: Any, *, repeated: bool) -> dict[str, Any]:
    """Returns the field for payloads, results or partial outputs: `name`, or NAME_base64 if one stays bytes."""
    values = [data_value(*each) for each in zip(contents, types, strict=True)]
    if any(isinstance(each, bytes) for each in values):
        name += "_base64"
        values = [base64.b64encode(each).decode() for each in contents]
    return {name: values if repeated else values[0]}


def data_value(data: bytes, content_type: str) -> Any:
    """Returns a JSON value, or text if there is no content type; `data` if it has another type, or is invalid."""
    try:
        if content_type == JSON and data:
            return _decode(data)
        return data.decode() if content_type in ("", JSON) else data
    except (ValueError, RecursionError):
        return data


def _message(message: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        content = getattr(message, field.name)
        contents = content if field.is_repeated else [content]
        if field.type == field.TYPE_BYTES:
            types = list(getattr(message, "partial_content_types", ())) if field.name == "partials" else None
            types = types or [getattr(message, "content_type", "") if types is None else ""] * len(contents)
            out |= data_fields(field.name, contents, types, repeated=field.is_repeated)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            out[field.name] = dict(content)
        else:
            values = [_value(field, each) for each in contents]
            out[field.name] = values if field.is_repeated else values[0]
    return out


def _value(field: Any, content: Any) -> Any:
    """Returns one value of a field that does not hold bytes."""
    if field.enum_type is not None:
        known = field.enum_type.values_by_number
        zero: str = known[0].name
        name = known[content].name if content in known else str(content)
        return name.removeprefix(zero.removesuffix("UNSPECIFIED"))
    if field.message_type is not None:
        if field.message_type.full_name == "google.protobuf.Timestamp":
            return content.ToJsonString()
        if field.message_type.full_name == "google.protobuf.Duration":
            return float(content.seconds + content.nanos / 1e9)
        return _message(content)
    return str(content) if is_id(field) else content


def is_id(field: Any) -> bool:
    """Whether a field holds ids. They are strings in JSON, because other languages would round such large numbers."""
    return field.type == field.TYPE_UINT64 and bool(field.name.endswith(("_id", "_ids")))
