"""Protobuf messages as plain values for --json."""

import base64
import json
from typing import Any

from multigpu import Outcome, Task
from multigpu.cli.text import seconds_of


def as_dict(found: Any) -> dict[str, Any]:
    """A dataclass of multigpu.fleet, a Task or an Outcome, for json.dumps, in a shape that scripts can rely on.

    Fields keep their names. Numbers stay numbers (ids are below 2^53), times are RFC 3339 strings, durations seconds,
    enum values short names. A field with presence is omitted when it is absent; every other field is always there.
    Bytes are text where they are UTF-8; else the field is called NAME_base64. A result whose content_type says JSON is
    the value itself.
    """
    return _as_dict(found.message if isinstance(found, Task | Outcome) else found.proto)


def _as_dict(message: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        content = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            out[field.name] = dict(content)
            continue
        name = field.name
        contents = content if field.is_repeated else [content]
        values = [_value(field, message, each) for each in contents]
        if any(isinstance(each, bytes) for each in values):
            name += "_base64"
            values = [base64.b64encode(each).decode() for each in contents]
        out[name] = values if field.is_repeated else values[0]
    return out


def _value(field: Any, message: Any, content: Any) -> Any:
    """One value of a field; bytes only where they are not UTF-8."""
    if field.enum_type is not None:
        if not field.is_repeated:
            return enum_name(message, field.name)
        return field.enum_type.values_by_number[content].name
    if field.message_type is not None:
        if field.message_type.full_name == "google.protobuf.Timestamp":
            return content.ToJsonString()
        if field.message_type.full_name == "google.protobuf.Duration":
            return seconds_of(content)
        return _as_dict(content)
    if isinstance(content, bytes):
        return decoded(content, getattr(message, "content_type", ""))
    return content


def decoded(data: bytes, content_type: str) -> Any:
    """A result or payload by its content type: a JSON value, or text, or the bytes if they are neither."""
    try:
        text = data.decode()
        return json.loads(text) if content_type == "application/json" and text else text
    except (ValueError, RecursionError):
        return data


def enum_name(message: Any, field: str) -> str:
    """An enum field's value without the prefix that all its values share: TASK_STATE_QUEUED is "QUEUED"."""
    kind = message.DESCRIPTOR.fields_by_name[field].enum_type
    number = getattr(message, field)
    known = kind.values_by_number.get(number)
    if known is None:
        return str(number)
    zero: str = kind.values_by_number[0].name
    return str(known.name).removeprefix(zero.removesuffix("UNSPECIFIED"))
