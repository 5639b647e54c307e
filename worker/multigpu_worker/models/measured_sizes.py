"""What models took when they were last loaded here: kept over restarts, for all workers of a host.

A small file for each, in a folder beside the artifacts. Its name is the hash of everything that the figures hang on:
the model and its version, what its files are by size and time, how it is to be run, and on which sort of device. A file
is written whole or not at all. One that is damaged is ignored, and so is a folder that can't be used: then the next
loading begins with an estimate, as the first one did.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
from multigpu.repository.model import ModelSpec

FOLDER = "models.measured"
FORMAT = 1
# Of more models those measured longest ago are forgotten.
KEPT_MAX = 2000
FILE_BYTES_MAX = 4096
BYTES_MAX = 1 << 50
LOAD_S_MAX = 86_400.0
# Of a model's specification: where it lies and what people call it changes nothing.
_LEFT_OUT = ("folder", "labels")

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What a model took of the device's memory, and how long its loading did."""

    memory_bytes: int
    load_s: float


class Figures:
    """`made_with`: what the figures of every model hang on. Any thread may call it."""

    def __init__(self, artifacts: Path, made_with: Mapping[str, str]) -> None:
        """Nothing is touched yet: the folder is made when the first figure is kept."""
        self._folder = artifacts / FOLDER
        self._made_with = dict(made_with)

    def find(self, spec: ModelSpec) -> Figure | None:
        """What is known of a model; None: nothing."""
        key = self._key(spec)
        path = self._path(key)
        try:
            with path.open("rb") as file:
                return _parse(file.read(FILE_BYTES_MAX + 1), key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            log.warning("what a model took before can't be read", model=spec.id, file=str(path), error=str(error))
            return None

    def keep(self, spec: ModelSpec, figure: Figure) -> None:
        """Write down what was measured, in place of what was before. A disk that fails costs a warning."""
        key = self._key(spec)
        path = self._path(key)
        making = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with making.open("wb") as file:
                file.write(json.dumps({"key": key, "model": spec.id, **dataclasses.asdict(figure)}).encode())
                file.flush()
                os.fsync(file.fileno())
            making.replace(path)
            self._forget_oldest()
        except OSError as error:
            with contextlib.suppress(OSError):
                making.unlink()
            log.warning("what a model takes can't be kept", model=spec.id, file=str(path), error=str(error))

    def _forget_oldest(self) -> None:
        with os.scandir(self._folder) as entries:
            names = [entry.name for entry in entries]
        if len(names) <= KEPT_MAX:
            return
        # Those that a killed worker had not finished are among them.
        paths = [self._folder / name for name in names]
        for path in sorted(paths, key=_mtime_ns)[: len(paths) - KEPT_MAX]:
            with contextlib.suppress(FileNotFoundError):  # another worker was faster
                path.unlink()

    def _key(self, spec: ModelSpec) -> str:
        values = {name: value for name, value in spec.plain().items() if name not in _LEFT_OUT}
        text = json.dumps([FORMAT, self._made_with, values], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def _parse(data: bytes, key: str) -> Figure:
    """ValueError: it is not what was written."""
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"it has more than {FILE_BYTES_MAX} bytes")
    values: Any = json.loads(data)
    if not isinstance(values, dict) or values.get("key") != key:
        raise ValueError("it is another model's, or damaged")
    memory_bytes, load_s = values.get("memory_bytes"), values.get("load_s")
    if type(memory_bytes) is not int or not 0 < memory_bytes < BYTES_MAX:
        raise ValueError(f"memory_bytes is {memory_bytes!r}")
    if not isinstance(load_s, int | float) or not 0 <= load_s <= LOAD_S_MAX:
        raise ValueError(f"load_s is {load_s!r}")
    return Figure(memory_bytes=memory_bytes, load_s=float(load_s))


def _mtime_ns(path: Path) -> int:
    """0: it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
