"""The artifact cache: plans, exports and quantised models, shared by the workers of a host (decision 12).

An artifact is a folder of files and a few facts, named by the hash of its key: everything that it was made from and
with. Its manifest holds the key, the facts, and the SHA-256 of each file. All of that is compared when the artifact is
read; one that differs is deleted and made again.

One process makes an artifact under a lock on its name (the kernel's flock, which ends with its process), the others
wait. It is made in a temporary folder that is then renamed, so it appears complete or not at all.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import structlog

MANIFEST = "manifest.json"
MAKING = ".making."
# Artifacts that were asked for since are not evicted: a process may be reading them.
RECENT_S = 3600.0

# Fills an empty folder and returns facts.
Build = Callable[[Path], Mapping[str, str]]

log = structlog.get_logger(__name__)


class ArtifactError(OSError):
    """The folder of artifacts cannot be written. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """Its files stay for RECENT_S, and as long as they are open."""

    folder: Path
    facts: dict[str, str]


class Artifacts:
    """A folder of artifacts, limited in bytes; the least recently used are evicted. Any thread may call it."""

    def __init__(self, root: Path, bytes_max: int) -> None:
        """Touches nothing: the folder is created with the first artifact."""
        assert bytes_max > 0
        self._root = root
        self._bytes_max = bytes_max

    def find(self, kind: str, key: Mapping[str, str]) -> Artifact | None:
        """Return the artifact of `key`. None: there is none yet, or it can't be read."""
        folder, identity = self._place(kind, key)
        facts = _read(folder, identity) if os.path.lexists(folder) else None
        return None if facts is None else Artifact(folder, facts)

    def get(self, kind: str, key: Mapping[str, str], build: Build) -> Artifact:
        """Return the artifact of `key`, made by `build` if it isn't there. Raises what `build` raises.

        ArtifactError: it isn't there, and the folder cannot be written, or has no room.
        """
        folder, identity = self._place(kind, key)
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self._open_lock(folder.name)
        except OSError as error:
            if (found := self.find(kind, key)) is not None:  # in a folder that others fill
                return found
            raise ArtifactError(f"no artifacts can be kept in {self._root}: set artifacts_dir ({error})") from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            facts = _read(folder, identity) if os.path.lexists(folder) else None
            if facts is not None:
                os.utime(folder)
                return Artifact(folder, facts)
            try:
                artifact = self._build(folder, identity, build)
            except OSError as error:
                if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                    raise
                raise ArtifactError(f"no room in {self._root}: free some, or set artifacts_dir ({error})") from error
        self._evict()
        return artifact

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Only one process of those that share the folder is in a block of this name."""
        with self._open_lock(name) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _place(self, kind: str, key: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
        """The folder of an artifact, and what its name is made of."""
        assert re.fullmatch(r"[a-z0-9-]+", kind), kind
        identity = {"kind": kind, "key": dict(key)}
        return self._root / f"{kind}-{_hash_of(identity)}", identity

    def _build(self, folder: Path, identity: dict[str, Any], build: Build) -> Artifact:
        for left in self._root.glob(f"{folder.name}{MAKING}*"):
            _delete(left)
        # A random name: a child of a builder that was killed may still write to the folder of that builder.
        making = Path(tempfile.mkdtemp(prefix=f"{folder.name}{MAKING}", dir=self._root))
        try:
            facts = dict(build(making))
            assert not (making / MANIFEST).exists(), f"{MANIFEST} is the cache's own"
            (making / MANIFEST).write_text(json.dumps(_manifest(making, identity, facts), indent=1), "utf-8")
            making.rename(folder)
        except BaseException:
            _delete(making)
            raise
        return Artifact(folder, facts)

    def _evict(self) -> None:
        """Enforce the limit. Artifacts asked for of late, and those that are being made, stay."""
        entries = [path for path in self._root.iterdir() if path.is_dir() and (not path.suffix or MAKING in path.name)]
        usage = {entry: _usage(entry) for entry in entries}
        total = sum(size for _, size in usage.values())
        for entry, (_, size) in sorted(usage.items(), key=lambda item: item[1]):
            if total <= self._bytes_max:
                return
            with self._open_lock(entry.name.partition(".")[0]) as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - _usage(entry)[0] > RECENT_S:
                    _delete(entry)
                    total -= size
        if total > self._bytes_max:
            log.warning(
                "artifacts of the last hour take more than artifacts_bytes_max: raise it",
                folder=str(self._root),
                bytes=total,
                bytes_max=self._bytes_max,
            )

    def _open_lock(self, name: str) -> TextIO:
        return (self._root / f"{name}.lock").open("a")


def _read(folder: Path, identity: dict[str, Any]) -> dict[str, str] | None:
    """The facts of an intact artifact. None: it was damaged, and is deleted."""
    problem = "its key, facts or files are not as they were written"
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest == _manifest(folder, identity, manifest["facts"]):
            return dict(manifest["facts"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem = f"its manifest can't be read: {error}"
    log.warning("an artifact is damaged: it is made again", artifact=folder.name, problem=problem)
    _delete(folder)
    return None


def _manifest(folder: Path, identity: dict[str, Any], facts: dict[str, str]) -> dict[str, Any]:
    """What the manifest of a folder with these files says."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and path != folder / MANIFEST:
            with path.open("rb") as file:
                files[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    body = {**identity, "facts": facts, "files": files}
    return body | {"sha256": _hash_of(body)}


def _hash_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _usage(folder: Path) -> tuple[float, int]:
    """Time of the last use, in seconds since 1970, and bytes; zeros if another process deletes it meanwhile."""
    try:
        return folder.stat().st_mtime, sum(path.lstat().st_size for path in folder.rglob("*"))
    except FileNotFoundError:
        return 0.0, 0


def _delete(path: Path) -> None:
    """Delete a file or folder. Errors are left to the next attempt."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
