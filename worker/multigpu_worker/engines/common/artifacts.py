"""The artifact cache: plans, exports and quantised models, shared by the workers of a host (decision 12).

An artifact is a folder of files and a few facts, named by the hash of its key: everything that it was made from and
with. Its manifest holds the full key, the facts, and size and SHA-256 of each file. A reader compares all of that;
whatever is damaged, incomplete or foreign is deleted and made again.

One process makes an artifact under a lock on its name, the others wait. It is made in a temporary folder, synced, and
renamed, so it appears complete or not at all. Users hold a shared lock on the manifest, which prevents eviction. All
locks are the kernel's (flock) and end with their process.

If the cache cannot be written, the artifact is made in a private folder that is deleted with its user.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES_MAX = 4 << 20
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# Fills an empty folder and returns facts.
Build = Callable[[Path], Mapping[str, str]]

log = structlog.get_logger(__name__)


class ArtifactError(OSError):
    """There is no room for an artifact anywhere. The message says what to change."""


class _DamagedError(Exception):
    """The folder does not hold what was written."""


class Artifact:
    """Files that stay as long as this object lives, or until `close`."""

    def __init__(self, folder: Path, facts: dict[str, str], release: Callable[..., object], *args: object) -> None:
        self.folder = folder
        self.facts = facts
        self.close = weakref.finalize(self, release, *args)


class Artifacts:
    """A folder of artifacts, limited in bytes; the least recently used are evicted. Any thread may call it."""

    def __init__(self, root: Path, bytes_max: int) -> None:
        """Touches nothing: the folder is created with the first artifact."""
        assert bytes_max > 0
        self._root = root
        self._bytes_max = bytes_max
        # The stat of each file whose hash was checked: a process hashes a file once while nobody writes to it.
        self._verified: dict[Path, tuple[int, ...]] = {}

    def get(self, kind: str, key: Mapping[str, str], build: Build) -> Artifact:
        """Return the artifact of `key`, made by `build` if it isn't there. Raises what `build` raises.

        ArtifactError: there is no room for it anywhere.
        """
        assert re.fullmatch(r"[a-z0-9-]+", kind), kind
        identity = {"kind": kind, "key": dict(key)}
        name = f"{kind}-{_hash_of(identity)}"
        try:
            lock = self._lock(name, wait=True)
        except OSError as error:
            return self._build_privately(build, error)
        assert lock is not None
        with _closing(lock):
            return self._find(name, identity) or self._build(name, identity, build)

    def _find(self, name: str, identity: dict[str, Any]) -> Artifact | None:
        folder = self._root / name
        try:
            fd = os.open(folder / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if os.path.lexists(folder):
                self._discard(folder, f"its manifest can't be read: {error}")
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            facts = self._check(folder, fd, identity)
            self._mark_used(folder)
        except (_DamagedError, OSError) as error:
            os.close(fd)
            self._discard(folder, str(error))
            return None
        return Artifact(folder, facts, os.close, fd)

    def _check(self, folder: Path, fd: int, identity: dict[str, Any]) -> dict[str, str]:
        """Return the facts of an intact artifact. Raises _DamagedError."""
        for path in (folder, folder / MANIFEST):
            owner = path.lstat()
            if owner.st_uid not in {os.geteuid(), 0} or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise _DamagedError(f"{path} may have been written by others")
        manifest = _read_manifest(fd)
        if (manifest["kind"], manifest["key"]) != (identity["kind"], identity["key"]):
            raise _DamagedError("it is another key's")
        present = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
        if different := set(present) ^ set(manifest["files"]):
            raise _DamagedError(f"its files are not those of its manifest: {sorted(different)}")
        for relative, path in present.items():
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != manifest["files"][relative]["bytes"]:
                raise _DamagedError(f"{relative} has not the size that it was written with")
            seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if self._verified.get(path) != seen:
                if _hash_file(path) != manifest["files"][relative]["sha256"]:
                    raise _DamagedError(f"{relative} has not the content that it was written with")
                self._verified[path] = seen
        return dict(manifest["facts"])

    def _discard(self, folder: Path, problem: str) -> None:
        log.warning("an artifact is damaged: it is made again", artifact=folder.name, problem=problem)
        _delete(folder)

    def _build(self, name: str, identity: dict[str, Any], build: Build) -> Artifact:
        for left in self._root.glob(f"{name}.making.*"):
            _delete(left)
        # A random name: a child of a builder that was killed may still write to the folder of that builder.
        making = self._root / f"{name}.making.{secrets.token_hex(8)}"
        built = False
        try:
            making.mkdir(mode=0o700)
            facts = dict(build(making))
            built = True
            artifact = self._publish(making, self._root / name, identity, facts)
        except BaseException as error:
            started = making.exists()
            _delete(making)
            unwritable = isinstance(error, OSError) and (built or not started)
            if isinstance(error, Exception) and (unwritable or _is_full(error)):
                return self._build_privately(build, error)
            raise
        self._evict(name)
        return artifact

    def _build_privately(self, build: Build, problem: BaseException) -> Artifact:
        log.warning(
            "an artifact can't be kept: it is made in a temporary folder; free some room, or set artifacts_dir",
            folder=str(self._root),
            problem=str(problem),
        )
        folder = Path(tempfile.mkdtemp(prefix="multigpu-artifact-"))
        artifact = Artifact(folder, {}, _delete, folder)
        try:
            artifact.facts.update(build(folder))
        except Exception as error:
            artifact.close()
            if _is_full(error):
                raise ArtifactError(
                    f"no room in {folder.parent}, nor for artifacts in {self._root}: free some, or set artifacts_dir "
                    f"({error})"
                ) from error
            raise
        return artifact

    def _publish(self, making: Path, folder: Path, identity: dict[str, Any], facts: dict[str, str]) -> Artifact:
        files = {}
        for path in _files(making):
            relative = path.relative_to(making).as_posix()
            assert relative != MANIFEST, f"{MANIFEST} is the cache's own"
            files[relative] = {"bytes": path.stat().st_size, "sha256": _hash_file(path)}
            _sync(path)
        body = {"format": FORMAT, **identity, "facts": facts, "files": files}
        manifest = making / MANIFEST
        manifest.write_text(json.dumps(body | {"sha256": _hash_of(body)}, indent=1), "utf-8")
        manifest.chmod(0o600)
        for path in [manifest, *(path for path in making.rglob("*") if path.is_dir()), making]:
            _sync(path)
        fd = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            making.rename(folder)
            _sync(self._root)
            self._mark_used(folder)
        except BaseException:
            os.close(fd)
            raise
        return Artifact(folder, facts, os.close, fd)

    def _mark_used(self, folder: Path) -> None:
        """Set a time later than that of all others, even if the clock was set back."""
        newest = max((_mtime_ns(entry) for entry in self._entries()), default=0)
        now = max(time.time_ns(), newest + 1)
        with contextlib.suppress(OSError):  # another user's artifact
            os.utime(folder, ns=(now, now))

    def _entries(self) -> list[Path]:
        """Folders of published artifacts."""
        return [path for path in self._root.iterdir() if path.suffix == "" and path.is_dir()]

    def _evict(self, ours: str) -> None:
        """Enforce the limit, and delete what killed builders left. Artifacts in use or being made stay."""
        for path in self._root.glob("*.making.*"):
            name = path.name.partition(".")[0]
            if name != ours and (lock := self._lock(name, wait=False)) is not None:
                with _closing(lock):
                    _delete(path)
        sizes = {entry: _size(entry) for entry in self._entries()}
        total = sum(sizes.values())
        for entry in sorted(sizes, key=_mtime_ns):
            if total <= self._bytes_max:
                return
            if entry.name != ours and self._evict_one(entry):
                total -= sizes[entry]
        if total > self._bytes_max:
            log.warning(
                "artifacts in use take more than artifacts_bytes_max: raise it",
                folder=str(self._root),
                bytes=total,
                bytes_max=self._bytes_max,
            )

    def _evict_one(self, entry: Path) -> bool:
        lock = self._lock(entry.name, wait=False)
        if lock is None:
            return False
        with _closing(lock):
            if _in_use(entry):
                return False
            _delete(entry)
            self._lock_path(entry.name).unlink(missing_ok=True)
        return not os.path.lexists(entry)

    def _lock_path(self, name: str) -> Path:
        return self._root / f"{name}.lock"

    def _lock(self, name: str, *, wait: bool) -> int | None:
        """Lock a name, and return the descriptor to close. None: already locked, without `wait`. Raises OSError."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            fd = os.open(self._lock_path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Eviction deletes the lock file too: lock the new one if that happened meanwhile.
                if os.path.samestat(os.fstat(fd), self._lock_path(name).stat()):
                    return fd
            except FileNotFoundError:
                pass
            except BlockingIOError:
                os.close(fd)
                return None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def _read_manifest(fd: int) -> dict[str, Any]:
    try:
        manifest = json.loads(os.pread(fd, MANIFEST_BYTES_MAX, 0))
        claimed = manifest.pop("sha256")
        if claimed != _hash_of(manifest):
            raise _DamagedError("its manifest is not as it was written")
        if manifest["format"] != FORMAT:
            raise _DamagedError(f"its format is {manifest['format']}, this version's is {FORMAT}")
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise _DamagedError(f"its manifest can't be read: {type(error).__name__}: {error}") from error
    return dict(manifest)


def _hash_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    """Everything in a folder except folders and the manifest."""
    return (
        path
        for path in sorted(folder.rglob("*"))
        if path != folder / MANIFEST and (path.is_symlink() or not path.is_dir())
    )


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lstat(path: Path) -> os.stat_result | None:
    """None: deleted meanwhile."""
    try:
        return path.lstat()
    except OSError:
        return None


def _size(folder: Path) -> int:
    return sum(status.st_size for path in folder.rglob("*") if (status := _lstat(path)) is not None)


def _mtime_ns(path: Path) -> int:
    status = _lstat(path)
    return 0 if status is None else status.st_mtime_ns


def _in_use(entry: Path) -> bool:
    try:
        fd = os.open(entry / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    with _closing(fd):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _delete(path: Path) -> None:
    """Delete a file or folder. Errors are left to the next attempt."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _is_full(error: BaseException | None) -> bool:
    """Whether the error or one of its causes says that the disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)
