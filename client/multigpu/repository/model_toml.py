"""`model.toml`: its keys, their types and ranges, and errors that name the remedy.

Reading gives only what was written; the defaults come from the model's files (scan.py) and from ModelSpec.
"""

import difflib
import math
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from multigpu.repository.model import ENGINES, KINDS, PRECISIONS, SOURCES, BatchRules, Gate, ModelFolderError

FILE_NAME = "model.toml"
FILE_BYTES_MAX = 4 << 20

Check = Callable[[Any], Any]


class WrongValueError(Exception):
    """A value is of another type or out of range. The words fit behind the key."""


def read_toml(folder: Path) -> dict[str, Any]:
    """What a folder's model.toml says, as values for ModelSpec, and `versions`. Empty: there is none.

    Raises ModelFolderError.
    """
    path = folder / FILE_NAME
    if path.exists() and not path.is_file():
        raise ModelFolderError(f"{path} is no file")
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelFolderError(f"{path} can't be read: {error.strerror}") from error
    if len(text) > FILE_BYTES_MAX:
        raise ModelFolderError(f"{path} is larger than {FILE_BYTES_MAX >> 20} MiB: it should hold settings alone")
    return parse(text, str(path))


def parse(text: bytes, where: str) -> dict[str, Any]:
    """As read_toml, of text. `where`: how errors call it."""
    try:
        table = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ModelFolderError(f"{where} is not TOML: {error}") from error
    values = _read(table, _TOP, where)
    for name, made, fields in (("batch", BatchRules, _BATCH), ("gate", Gate, _GATE)):
        if name in values:
            values[name] = made(**_read(values[name], fields, f"{where}, section [{name}]"))
    return values


def check_inside(name: str) -> str:
    """The path of a file in the model's folder. WrongValueError: it leads out of it, or is none."""
    parts = name.replace("\\", "/").split("/")
    if not name or "\0" in name or name.startswith(("/", "\\")) or ".." in parts or "" in parts or ":" in parts[0]:
        raise WrongValueError(f"{name!r} is no path of a file in the model's folder")
    return name


def _read(table: dict[str, Any], known: dict[str, Check], where: str) -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ModelFolderError(f"{where}: unknown key {key}; {remedy}")
        try:
            values[key] = known[key](value)
        except WrongValueError as error:
            raise ModelFolderError(f"{where}: {key}: {error}") from error
    return values


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise WrongValueError(f'{value!r} is not a text: "…"')
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise WrongValueError(f"{value!r} is not true or false")
    return value


def _whole(minimum: int, maximum: int) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not minimum <= value <= maximum:
            raise WrongValueError(f"{value!r} is not a whole number from {minimum} to {maximum}")
        return value

    return check


def _number(minimum: float, maximum: float) -> Check:
    def check(value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value) or not minimum <= value <= maximum:
            raise WrongValueError(f"{value!r} is not a number from {minimum:g} to {maximum:g}")
        return float(value)

    return check


def _one_of(choices: Iterable[str]) -> Check:
    def check(value: Any) -> str:
        if value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise WrongValueError(f"{value!r} is none of {', '.join(choices)}{hint}")
        return str(value)

    return check


def _engine(value: Any) -> str:
    module, colon, name = _text(value).partition(":")
    if colon and name.isidentifier() and all(part.isidentifier() for part in module.split(".")):
        return str(value)
    try:
        return str(_one_of(ENGINES)(value))
    except WrongValueError as error:
        raise WrongValueError(f'{error}, nor a class of your own: "module:Class"') from None


def _file(value: Any) -> str:
    return check_inside(_text(value))


def _files(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise WrongValueError(f'{value!r} is not a list of files: ["…"]')
    return tuple(_file(name) for name in value)


def _versions(value: Any) -> str | tuple[int, ...]:
    if value in ("latest", "all"):
        return str(value)
    if isinstance(value, list) and value and all(type(v) is int and v > 0 for v in value):
        return tuple(value)
    raise WrongValueError(f'{value!r} is not "latest", "all" or a list of numbers: [1, 3]')


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongValueError(f"{value!r} is not a table: write a section")
    return value


def _texts(value: Any) -> dict[str, str]:
    """Numbers and flags are fine: they are handed on as they would be written."""
    texts = {}
    for key, entry in _table(value).items():
        if not isinstance(entry, str | int | float):
            raise WrongValueError(f"{key} = {entry!r} is neither a text nor a number nor true or false")
        texts[key] = str(entry).lower() if isinstance(entry, bool) else str(entry)
    return texts


def _hashes(value: Any) -> dict[str, str]:
    hashes = {}
    for name, entry in _table(value).items():
        if not isinstance(entry, str) or len(entry) != 64 or set(entry.lower()) - set("0123456789abcdef"):
            raise WrongValueError(
                f"{name} = {entry!r} is no SHA-256 in hex: `mgpuctl models verify --write` records them"
            )
        hashes[check_inside(name)] = entry.lower()
    return hashes


def _preferred(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise WrongValueError(f"{value!r} is not a list of numbers of tasks: [8, 16]")
    return tuple(_whole(1, 65_536)(size) for size in value)


_TOP: dict[str, Check] = {
    "kind": _one_of(KINDS),
    "source": _one_of(SOURCES),
    "file": _file,
    "engine": _engine,
    "precision": _one_of(PRECISIONS),
    "versions": _versions,
    "warm_up": _flag,
    "instances": _whole(1, 64),
    "concurrency": _whole(0, 1024),
    "labels": _texts,
    "parameters": _texts,
    "allow_pickle": _files,
    "batch": _table,
    "gate": _table,
    "hashes": _hashes,
}
_BATCH: dict[str, Check] = {
    "tasks_max": _whole(1, 65_536),
    "tokens_max": _whole(1, 1 << 40),
    "delay_s": _number(0, 10),
    "preferred": _preferred,
}
_GATE: dict[str, Check] = {
    "calibration": _file,
    "held_out": _file,
    "metric": _one_of(("cosine", "spearman", "agreement")),
    "threshold": _number(0, 100),
}
