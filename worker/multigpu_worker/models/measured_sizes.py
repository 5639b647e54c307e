"""Model sizes measured by earlier worker processes, shared by all workers of a host.

Each model has a small file, whose name is the hash of everything that the size depends on: the model and its version,
size and time of its files, how it is run, and the type of device. Files are replaced atomically. A damaged file or
an unusable folder is ignored: the next load then begins with an estimate.
"""

import contextlib
import dataclasses
import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path

import structlog

from multigpu_worker.repository.model import ModelSpec
from multigpu_worker.repository.signature import UNKNOWN, Signature

FOLDER = "models.measured"
FORMAT = 1
# Above this number of files, the oldest are deleted.
KEPT_MAX = 2000
BYTES_MAX = 1 << 50
LOAD_S_MAX = 86_400.0
# Fields of ModelSpec that do not affect the size.
_LEFT_OUT = ("folder", "labels")

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Device memory and loading time of a model, and what else is only known once it has been loaded."""

    memory_bytes: int = 0
    load_s: float = 0.0
    # False: estimated.
    measured: bool = False
    signature: Signature = UNKNOWN


class MeasuredSizes:
    """`made_with`: the settings that all sizes depend on. Methods may be called from any thread."""

    def __init__(self, artifacts: Path, made_with: Mapping[str, str]) -> None:
        # Created when the first size is kept.
        self._folder = artifacts / FOLDER
        self._made_with = dict(made_with)

    def find(self, spec: ModelSpec) -> ModelSize | None:
        path = self._path(spec)
        try:
            values = json.loads(path.read_bytes())
            memory_bytes, load_s = int(values["memory_bytes"]), float(values["load_s"])
            signature = Signature.of(values.get("signature", ((), ())))
            error = "" if 0 < memory_bytes < BYTES_MAX and 0 <= load_s <= LOAD_S_MAX else "its values make no sense"
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as raised:
            error = str(raised) or type(raised).__name__
        if error:
            log.warning("what a model took before can't be read", model=spec.id, file=str(path), error=error)
            return None
        return ModelSize(memory_bytes=memory_bytes, load_s=load_s, measured=True, signature=signature)

    def keep(self, spec: ModelSpec, size: ModelSize) -> None:
        """Replace the size of a model. An I/O error is only logged."""
        path = self._path(spec)
        making = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            values = {"model": spec.id, "memory_bytes": size.memory_bytes, "load_s": size.load_s}
            making.write_text(json.dumps(values | {"signature": size.signature.plain()}))
            making.replace(path)
            self._forget_oldest()
        except OSError as error:
            with contextlib.suppress(OSError):
                making.unlink()
            log.warning("what a model takes can't be kept", model=spec.id, file=str(path), error=str(error))

    def _forget_oldest(self) -> None:
        paths = list(self._folder.iterdir())  # includes unfinished files of killed workers
        if len(paths) > KEPT_MAX:
            for path in sorted(paths, key=_mtime_ns)[: len(paths) - KEPT_MAX]:
                path.unlink(missing_ok=True)  # other workers delete, too

    def _path(self, spec: ModelSpec) -> Path:
        values = {name: value for name, value in spec.plain().items() if name not in _LEFT_OUT}
        text = json.dumps([FORMAT, self._made_with, values], sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()}.json"


def _mtime_ns(path: Path) -> int:
    """0: the file does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
