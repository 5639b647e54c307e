"""Reads `model.toml`. Its keys are fields of ModelSpec, and `versions`.

Only the keys in the file are returned; defaults come from the model's files (scan.py) and from ModelSpec.
"""

import tomllib
from pathlib import Path
from typing import Any

from multigpu.config.fields import fields_of, read_table, reject_unknown

from multigpu_worker.repository.model import ModelFolderError, ModelSpec

FILE_NAME = "model.toml"
FILE_BYTES_MAX = 4 << 20


def read_toml(folder: Path) -> dict[str, Any]:
    """The values in a folder's model.toml: fields of ModelSpec, and `versions`. Empty: there is no such file.

    Raises ModelFolderError.
    """
    path = folder / FILE_NAME
    if path.exists() and not path.is_file():
        raise ModelFolderError(f"{path} is no file")
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        if path.is_symlink():
            raise ModelFolderError(
                f"{path} is a link to {path.readlink()}, which is not there: remove or correct it"
            ) from None
        return {}
    except OSError as error:
        raise ModelFolderError(f"{path} can't be read: {error.strerror}") from error
    if len(text) > FILE_BYTES_MAX:
        raise ModelFolderError(f"{path} is larger than {FILE_BYTES_MAX >> 20} MiB: it should hold settings alone")
    return parse(text, str(path))


def parse(text: bytes, where: str) -> dict[str, Any]:
    """As read_toml, from the file's content. `where`: the file's name in error messages."""
    try:
        table = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ModelFolderError(f"{where} is not TOML: {error}") from error
    try:
        reject_unknown(table, [*fields_of(ModelSpec), "versions"], "key")
        versions = {"versions": _versions(table.pop("versions"))} if "versions" in table else {}
        for key in ("labels", "parameters"):
            if isinstance(table.get(key), dict):
                table[key] = {name: _text(f"{key}: {name}", value) for name, value in table[key].items()}
        values = read_table(ModelSpec, table)
    except ValueError as error:
        raise ModelFolderError(f"{where}: {error}") from error
    return values | versions


def _text(where: str, value: Any) -> str:
    """A label's or parameter's value as text; it may be written as a number or boolean."""
    if not isinstance(value, str | int | float):
        raise ValueError(f"{where} = {value!r} is neither a text nor a number nor true or false")  # noqa: TRY004
    return str(value).lower() if isinstance(value, bool) else str(value)


def _versions(value: Any) -> str | tuple[int, ...]:
    if value in ("latest", "all"):
        return str(value)
    if isinstance(value, list) and value and all(type(v) is int and v > 0 for v in value):
        return tuple(value)
    raise ValueError(f'versions: {value!r} is not "latest", "all" or a list of numbers: [1, 3]')
