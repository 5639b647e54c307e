"""Model sizes measured by earlier worker processes, shared by all workers of a host.

One small file for each model. Its name is the hash of everything that the size depends on: the model and its version,
size and time of its files, how it is run, and on which kind of device. Files are replaced atomically. A damaged file or
an unusable folder is ignored: the next load then begins with an estimate.
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
# Past it the files written longest ago are deleted.
KEPT_MAX = 2000
FILE_BYTES_MAX = 4096
BYTES_MAX = 1 << 50
LOAD_S_MAX = 86_400.0
# Fields of ModelSpec that do not affect the size.
_LEFT_OUT = ("folder", "labels")

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Device memory and loading time of a model."""

    memory_bytes: int = 0
    load_s: float = 0.0
    # False: estimated.
    measured: bool = False


class MeasuredSizes:
    """`made_with`: the settings that all sizes depend on. Any thread may call it."""

    def __init__(self, artifacts: Path, made_with: Mapping[str, str]) -> None:
        # Created when the first size is kept.
        self._folder = artifacts / FOLDER
        self._made_with = dict(made_with)

    def find(self, spec: ModelSpec) -> ModelSize | None:
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

    def keep(self, spec: ModelSpec, size: ModelSize) -> None:
        """Replace the size of a model. An I/O error is only logged."""
        key = self._key(spec)
        path = self._path(key)
        making = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        values = {"key": key, "model": spec.id, "memory_bytes": size.memory_bytes, "load_s": size.load_s}
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with making.open("wb") as file:
                file.write(json.dumps(values).encode())
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
        # Includes unfinished files of killed workers.
        paths = [self._folder / name for name in names]
        for path in sorted(paths, key=_mtime_ns)[: len(paths) - KEPT_MAX]:
            with contextlib.suppress(FileNotFoundError):  # deleted by another worker
                path.unlink()

    def _key(self, spec: ModelSpec) -> str:
        values = {name: value for name, value in spec.plain().items() if name not in _LEFT_OUT}
        text = json.dumps([FORMAT, self._made_with, values], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def _parse(data: bytes, key: str) -> ModelSize:
    """Raises ValueError for a damaged file."""
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"it has more than {FILE_BYTES_MAX} bytes")
    values: Any = json.loads(data)
    if not isinstance(values, dict) or values.get("key") != key:
        raise ValueError("it belongs to another model, or is damaged")
    memory_bytes, load_s = values.get("memory_bytes"), values.get("load_s")
    if type(memory_bytes) is not int or not 0 < memory_bytes < BYTES_MAX:
        raise ValueError(f"memory_bytes is {memory_bytes!r}")
    if not isinstance(load_s, int | float) or not 0 <= load_s <= LOAD_S_MAX:
        raise ValueError(f"load_s is {load_s!r}")
    return ModelSize(memory_bytes=memory_bytes, load_s=float(load_s), measured=True)


def _mtime_ns(path: Path) -> int:
    """0: the file does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
