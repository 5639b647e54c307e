"""Settings as fields of a dataclass: a field's metadata has its help text and the allowed values.

Used for the settings of the programs and of model.toml. Functions raise ValueError for a wrong value.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar

from multigpu.config.values import format_value, from_toml
from multigpu.errors import ConfigError

Field = dataclasses.Field[Any]


def setting(
    default: Any,
    text: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Collection[str] = (),
    check: Callable[[Any], object] | None = None,
    default_text: str = "",
    also: tuple[str, ...] = (),
) -> Any:
    """A field. `default`: a value, or a function that returns one. `check` raises ValueError for a wrong value.
    `default_text`: the default in help texts, if it is computed. `also`: further environment variables, of lower
    precedence.
    """
    metadata = {"help": text, "minimum": minimum, "maximum": maximum, "choices": choices, "check": check}
    metadata |= {"default_text": default_text, "also": also}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def fields_of(cls: Any) -> dict[str, Field]:
    """The fields of a dataclass that are settings, by name."""
    return {field.name: field for field in dataclasses.fields(cls) if field.metadata}


def check(field: Field, value: Any) -> None:
    """Raises ValueError if the value has the wrong type, is out of range or otherwise not allowed."""
    limits = field.metadata
    kind = {str: "a string", int: "a whole number"}.get(type(field.default))
    if kind is not None and not isinstance(value, type(field.default)):
        raise ValueError(f"{value!r} is not {kind}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if limits["minimum"] is not None and value < limits["minimum"]:
        raise ValueError(f"{value} is too small: at least {format_value(field.name, limits['minimum'])}")
    if limits["maximum"] is not None and value > limits["maximum"]:
        raise ValueError(f"{value} is too large: at most {format_value(field.name, limits['maximum'])}")
    if limits["choices"] and value not in limits["choices"]:
        nearest = difflib.get_close_matches(str(value), limits["choices"], n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"{value!r} is none of {', '.join(limits['choices'])}{hint}")
    if limits["check"] is not None:
        try:
            limits["check"](value)
        except ValueError as error:
            raise ValueError(f"{format_value(field.name, value)!r}: {error}") from error


def convert(cls: Any, name: str, value: Any, converter: Callable[[Any, Any, str], Any]) -> Any:
    """The value of a field, converted from text or TOML by `converter`, and checked. ValueError: it is wrong."""
    hint: Any = typing.get_type_hints(cls)[name]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is not a table: write a section")
        return hint(**read_table(hint, value))
    try:
        converted = converter(value, hint, name)
    except OverflowError as error:
        raise ValueError(str(error)) from error
    check(fields_of(cls)[name], converted)
    return converted


def read_table(cls: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a TOML table for the fields of a dataclass. ValueError: a key is unknown, or a value wrong."""
    reject_unknown(table, fields_of(cls), "key")
    values = {}
    for name, value in table.items():
        try:
            values[name] = convert(cls, name, value, from_toml)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return values


def reject_unknown(given: Iterable[str], known: Collection[str], what: str, render: Callable[[str], str] = str) -> None:
    """Raises ValueError for the first unknown name. The message suggests the nearest known one."""
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {render(nearest[0])}?" if nearest else f"known: {', '.join(map(render, known))}"
            raise ValueError(f"unknown {what}: {render(name)}; {remedy}")


class Checked:
    """Base of dataclasses of settings: the constructor raises ConfigError for a wrong value."""

    __slots__ = ()
    section: ClassVar[str]

    def __post_init__(self) -> None:
        for name, field in fields_of(self).items():
            try:
                check(field, getattr(self, name))
            except ValueError as error:
                raise ConfigError(f"{type(self).__name__}.{name}: {error}") from error
