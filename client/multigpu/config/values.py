"""How the values of settings are written and read: in TOML, where types show; in text, as flags and variables are; and
the checks that a type alone can't make.

Every function raises ValueError with a message that fits behind the place that the value came from.
"""

import re
import typing
from pathlib import Path
from typing import Any

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_SIZE_UNITS = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1024 * GIB}
_SIZE_PATTERN = re.compile(r"([0-9][0-9_]*)\s*([A-Za-z]*)")
_ADDRESS_PATTERN = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/]+):([0-9]{1,5})")
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_WANTED = {
    str: 'a string: "…"',
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: 'a path: "…"',
    tuple: 'a list of strings: ["…"]',
    dict: 'a table of strings: { key = "…" }',
}


def format_value(field_name: str, value: Any) -> str:
    """A value as it would be written in the environment or in a flag."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and is_size(field_name):
        for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
            if value and value % size == 0:
                return f"{value // size}{unit}"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return ",".join(f"{key}={entry}" for key, entry in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def from_text(text: str, hint: Any, name: str) -> Any:
    """A value from the environment or a flag."""
    kind = typing.get_origin(hint) or hint
    if kind is str:
        return text
    if kind is bool:
        return boolean(text)
    if kind is Path:
        if not text:
            raise ValueError("a path can't be empty")
        return Path(text).expanduser()
    if kind is int and is_size(name):
        return _size(text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is not {_WANTED[kind]}") from None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if kind is tuple:
        return tuple(parts)
    pairs = [part.partition("=") for part in parts]
    if bad := [key + mark for key, mark, _ in pairs if not key or not mark]:
        raise ValueError(f"{bad[0]!r} is not of the form KEY=VALUE")
    return {key: value for key, _, value in pairs}


def from_toml(value: Any, hint: Any, name: str) -> Any:
    """A value from a TOML file."""
    kind = typing.get_origin(hint) or hint
    if type(value) is str and (kind is Path or (kind is int and is_size(name))):
        return from_text(value, hint, name)
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind is tuple and type(value) is list:
        items = typing.get_args(hint)[0]
        return tuple(from_toml(item, items, name) for item in value)
    if kind is dict and type(value) is dict and all(isinstance(entry, str) for entry in value.values()):
        return value
    if kind in (str, int, bool) and type(value) is kind:
        return value
    size = ' or a size: "64MiB"' if kind is int and is_size(name) else ""
    raise ValueError(f"{value!r} is not {_WANTED[kind]}{size}")


def is_size(field_name: str) -> bool:
    """Whether a field counts bytes, and so may be written as "64MiB"."""
    return field_name.endswith(("_bytes", "_bytes_max"))


def boolean(text: str) -> bool:
    """True or false."""
    if text.lower() not in _BOOLEANS:
        raise ValueError(f"{text!r} is not a yes or no: write true or false")
    return _BOOLEANS[text.lower()]


def _size(text: str) -> int:
    match = _SIZE_PATTERN.fullmatch(text.strip())
    unit = _SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size: write bytes, or a number with KiB, MiB, GiB or TiB")
    return int(match[1]) * unit


def check_address(value: str) -> None:
    """HOST:PORT, [IPV6]:PORT or unix:PATH."""
    if value.startswith("unix:") and len(value) > len("unix:"):
        return
    match = _ADDRESS_PATTERN.fullmatch(value)
    if match is None or int(match[2]) > 65535:
        raise ValueError("not an address: write HOST:PORT, [IPV6]:PORT or unix:PATH")


def check_tcp_address(value: str) -> None:
    """HOST:PORT or [IPV6]:PORT."""
    if value.startswith("unix:"):
        raise ValueError("not an address: write HOST:PORT")
    check_address(value)


def check_tcp_address_or_off(value: str) -> None:
    """HOST:PORT, or empty."""
    if value.startswith("unix:"):
        raise ValueError("not an address: write HOST:PORT, or leave it empty for off")
    if value:
        check_address(value)


def check_device(value: str) -> None:
    """auto, cpu, cuda:N, rocm:N, or a UUID of the driver's; several GPUs with commas between them."""
    gpu = r"(cuda|rocm):[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+"
    if not re.fullmatch(rf"auto|cpu|({gpu})(,({gpu}))*", value):
        raise ValueError(
            'not a device: write "auto", "cpu", "cuda:N", "rocm:N" or a UUID from `nvidia-smi -L`, or several GPUs as '
            '"cuda:0,cuda:1"'
        )


def check_models(value: tuple[str, ...]) -> None:
    """Each entry is NAME=PATH."""
    for entry in value:
        name, _, path = entry.partition("=")
        if not name or not path:
            raise ValueError(f"{entry!r} is not NAME=PATH")


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT as host and port; an IPv6 host without its brackets."""
    match = _ADDRESS_PATTERN.fullmatch(address)
    if match is None:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return match[1].strip("[]"), int(match[2])
