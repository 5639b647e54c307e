"""JSON schemas of request and response bodies.

A shape describes a JSON value: a dict has the shapes of an object's fields, which are all required; a list has the
shape of its elements; a tuple has alternative shapes; a protobuf message class stands for the JSON value that
rest/values.py makes of such a message; everything else is a type for msgspec.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.rest.values import is_id
from multigpu_gateway.routes import ErrorBody

Schema = dict[str, Any]
_REF = "#/components/schemas/{name}"
_SPECIAL = {
    "google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
    "google.protobuf.Duration": {"type": "number"},
}


class Schemas:
    """The schemas of these shapes. `components`: the schemas to which others refer, by name."""

    def __init__(self, shapes: Iterable[Any]) -> None:
        types = list(dict.fromkeys(leaf for shape in shapes for leaf in _leaves(shape)))
        schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
        self._by_type: dict[Any, Schema] = dict(zip(types, schemas, strict=True))
        self.components: dict[str, Schema] = dict(components)

    def of(self, shape: Any) -> Schema:
        if isinstance(shape, dict):
            properties = {name: self.of(each) for name, each in shape.items()}
            return {"type": "object", "properties": properties, "required": list(shape)}
        if isinstance(shape, list):
            return {"type": "array", "items": self.of(shape[0])}
        if isinstance(shape, tuple):
            return {"anyOf": [self.of(each) for each in shape]}
        if hasattr(shape, "DESCRIPTOR"):
            return self._message(shape.DESCRIPTOR)
        return self._by_type[shape]

    def _message(self, descriptor: Any) -> Schema:
        name = descriptor.full_name
        if name not in self.components:
            self.components[name] = {}  # ends the recursion if a field has the message's own type
            properties: dict[str, Schema] = {}
            required = []
            for field in descriptor.fields:
                if field.type == field.TYPE_BYTES:  # a JSON value, or else base64
                    properties |= {field.name: {}, f"{field.name}_base64": {}}
                    continue
                properties[field.name] = self._field(field)
                if not field.has_presence:
                    required.append(field.name)
            self.components[name] = {"type": "object", "properties": properties, "required": required}
        return {"$ref": _REF.format(name=name)}

    def _field(self, field: Any) -> Schema:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return {"type": "object", "additionalProperties": self._value(field.message_type.fields_by_name["value"])}
        value = self._value(field)
        return {"type": "array", "items": value} if field.is_repeated else value

    def _value(self, field: Any) -> Schema:
        if field.message_type is not None:
            return _SPECIAL.get(field.message_type.full_name) or self._message(field.message_type)
        if field.enum_type is not None or is_id(field):
            return {"type": "string"}
        kinds = {field.CPPTYPE_STRING: "string", field.CPPTYPE_BOOL: "boolean"}
        kinds |= {field.CPPTYPE_FLOAT: "number", field.CPPTYPE_DOUBLE: "number"}
        return {"type": kinds.get(field.cpp_type, "integer")}


def error_schema(error_body: ErrorBody) -> Schema:
    """Returns the schema of a protocol's errors, derived from an error with all fields and one with the fewest."""
    full = HttpError(BAD_REQUEST, "message", code="code", param="param")
    return _of_samples(error_body(full), error_body(HttpError(BAD_REQUEST, "message")))


def _of_samples(full: Any, least: Any) -> Schema:
    if isinstance(full, dict):
        properties = {name: _of_samples(each, least.get(name, each)) for name, each in full.items()}
        return {"type": "object", "properties": properties, "required": [name for name in full if name in least]}
    return {"type": ["string", "null"] if least is None else "string"}


def _leaves(shape: Any) -> Iterator[Any]:
    """Yields the types in a shape that msgspec describes."""
    if isinstance(shape, dict | list | tuple):
        for each in shape.values() if isinstance(shape, dict) else shape:
            yield from _leaves(each)
    elif not hasattr(shape, "DESCRIPTOR"):
        yield shape
