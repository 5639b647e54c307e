"""Records file hashes in a model.toml: replaces its section [hashes], and keeps every other setting.

A section ends at the next header, so comments between its last entry and that header are deleted with it.
"""

import contextlib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from multigpu.repository.model import ModelFolderError
from multigpu.repository.model_toml import FILE_NAME

HEADER = re.compile(r"^[ \t]*\[[ \t]*hashes[ \t]*\][ \t]*(#.*)?$")
ANY_HEADER = re.compile(r"^[ \t]*\[")


def write_hashes(folder: Path, hashes: Mapping[str, str]) -> None:
    """Write the hashes to the folder's model.toml atomically, in place of earlier ones.

    `hashes`: by the file's path in the folder. Raises ModelFolderError.
    """
    path = folder / FILE_NAME
    part = path.with_name(f".{FILE_NAME}.{os.getpid()}")
    try:
        before = path.read_text("utf-8") if path.exists() else ""
        after = with_hashes(before, hashes, str(path))
        with part.open("w", encoding="utf-8") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            part.chmod(path.stat().st_mode)
        part.replace(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{path} can't be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def with_hashes(text: str, hashes: Mapping[str, str], where: str) -> str:
    """The text of a model.toml with these hashes. ModelFolderError: replacing the section would change other settings.

    `where`: the file's name in the error message.
    """
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if HEADER.match(line)), None)
    section = ["[hashes]", *(f'"{_escaped(name)}" = "{value}"' for name, value in sorted(hashes.items()))]
    if start is None:
        made = [*lines, *([""] if lines and lines[-1] else []), *section]
    else:
        end = next((n for n in range(start + 1, len(lines)) if ANY_HEADER.match(lines[n])), len(lines))
        made = [*lines[:start], *section, *([""] if lines[end:] else []), *lines[end:]]
    after = "\n".join(made) + "\n"
    try:
        kept = tomllib.loads(text)
        kept["hashes"] = dict(hashes)
        right = tomllib.loads(after) == kept
    except tomllib.TOMLDecodeError:
        right = False
    if not right:
        raise ModelFolderError(f"{where}: its hashes can't be replaced: write them as a section [hashes] of its own")
    return after


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"')
