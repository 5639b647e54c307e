"""The cache of what is expensive to make: plans, exports, quantised models, figures. Shared by the workers of a host.

An artifact is a folder of files and a few facts. It is found by its key: everything that it was made from, and with.
The folder's name is the key's hash, and the manifest in it holds the key in full, the facts, and size and SHA-256 of
each file. Nothing is believed before it was compared with that: what is damaged, cut short or foreign is deleted and
made again.

One process makes an artifact, under a lock on the key; the others wait and then find it. It is made in a folder of
another name, synced, and renamed: it is there as a whole or not at all. The locks are the kernel's (flock), so that
they die with their holder. Who uses an artifact holds a shared lock on its manifest: what is in use is not evicted.

A cache that can't be written to is a reason to warn, and to make the artifact in a private folder that goes with its
user; never a reason to fail while there is another way.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

FORMAT = 1
MANIFEST = "manifest.json"
# No sane manifest is longer.
MANIFEST_BYTES_MAX = 4 << 20
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# Fills an empty folder; the answer is facts for people and for whoever uses the artifact.
Build = Callable[[Path], Mapping[str, str]]

log = structlog.get_logger(__name__)


class ArtifactError(OSError):
    """An artifact can't be kept anywhere. The message says why, and what to change."""


class _DamagedError(Exception):
    """What lies there is not what was written."""


class _Hold:
    """What an artifact's user holds: let go of at `close`, or when nobody refers to it any more."""

    def __init__(self, release: Callable[..., object], *args: object) -> None:
        self.close = weakref.finalize(self, release, *args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Files that stay for as long as this object lives, or until `close`."""

    folder: Path
    facts: dict[str, str]
    _hold: _Hold = field(repr=False, compare=False)

    def close(self) -> None:
        """Let go of it: it may be evicted from here on."""
        self._hold.close()


class Artifacts:
    """A folder of artifacts, bounded in bytes: the ones that were used last stay. Any thread may call it."""

    def __init__(self, root: Path, bytes_max: int) -> None:
        """Nothing is touched yet: the folder is made when the first artifact is."""
        assert bytes_max > 0
        self._root = root
        self._bytes_max = bytes_max
        # Stats of files whose content was compared with the manifest, by path: hashed once in a process, as long as
        # the kernel says that nobody wrote to them.
        self._verified: dict[Path, tuple[int, ...]] = {}

    def get(self, kind: str, key: Mapping[str, str], build: Build) -> Artifact:
        """The artifact of `key`, made by `build` if it isn't there. Whatever `build` raises passes.

        ArtifactError: it was made, or could have been, and there is no room for it anywhere.
        """
        assert re.fullmatch(r"[a-z0-9-]+", kind), kind
        name = f"{kind}-{_hash_of({'kind': kind, 'key': dict(key)})}"
        try:
            lock = self._lock(name, wait=True)
        except OSError as error:
            return self._build_unkept(build, error)
        assert lock is not None
        with _closing(lock):
            found = self._find(name, kind, dict(key))
            return found or self._build(name, kind, dict(key), build)

    # What is there.

    def _find(self, name: str, kind: str, key: dict[str, str]) -> Artifact | None:
        folder = self._root / name
        try:
            fd = os.open(folder / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if _exists(folder):
                self._discard(folder, f"its manifest can't be read: {error}")
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            facts = self._check(folder, fd, kind, key)
            self._mark_used(folder)
        except (_DamagedError, OSError) as error:
            os.close(fd)
            self._discard(folder, str(error))
            return None
        return Artifact(folder=folder, facts=facts, _hold=_Hold(os.close, fd))

    def _check(self, folder: Path, fd: int, kind: str, key: dict[str, str]) -> dict[str, str]:
        """The facts of a sound artifact. Raises _DamagedError."""
        for path in (folder, folder / MANIFEST):
            owner = path.lstat()
            if owner.st_uid not in {os.geteuid(), 0} or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise _DamagedError(f"{path} may have been written by others")
        manifest = _read_manifest(fd)
        if (manifest["kind"], manifest["key"]) != (kind, key):
            raise _DamagedError("it is another key's")
        there = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
        if set(there) != set(manifest["files"]):
            raise _DamagedError(
                f"its files are not those of its manifest: {sorted(set(there) ^ set(manifest['files']))}"
            )
        for relative, path in there.items():
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

    # Making.

    def _build(self, name: str, kind: str, key: dict[str, str], build: Build) -> Artifact:
        # A builder that was killed may have left a child that still writes: so each gets a folder of its own.
        for left in self._root.glob(f"{name}.making.*"):
            _delete(left)
        making = self._root / f"{name}.making.{secrets.token_hex(8)}"
        built = False
        try:
            making.mkdir(mode=0o700)
        except OSError as error:
            return self._build_unkept(build, error)
        try:
            facts = dict(build(making))
            built = True
            artifact = self._publish(making, self._root / name, kind, key, facts)
        except Exception as error:
            _delete(making)
            if _is_full(error) or (built and isinstance(error, OSError)):
                return self._build_unkept(build, error)
            raise
        except BaseException:
            _delete(making)
            raise
        self._evict(name)
        return artifact

    def _build_unkept(self, build: Build, error: Exception) -> Artifact:
        log.warning(
            "an artifact can't be kept: it is made in a temporary folder; free some room, or set artifacts_dir",
            folder=str(self._root),
            problem=str(error),
        )
        return _build_privately(build, self._root)

    def _publish(self, making: Path, folder: Path, kind: str, key: dict[str, str], facts: dict[str, str]) -> Artifact:
        files = {}
        for path in _files(making):
            relative = path.relative_to(making).as_posix()
            assert relative != MANIFEST, f"{MANIFEST} is the cache's own"
            files[relative] = {"bytes": path.stat().st_size, "sha256": _hash_file(path)}
            _sync(path)
        body = {"format": FORMAT, "kind": kind, "key": key, "facts": facts, "files": files}
        manifest = making / MANIFEST
        manifest.write_text(json.dumps(body | {"sha256": _hash_of(body)}, indent=1), "utf-8")
        manifest.chmod(0o600)
        _sync(manifest)
        for path in [*(path for path in making.rglob("*") if path.is_dir()), making]:
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
        return Artifact(folder=folder, facts=facts, _hold=_Hold(os.close, fd))

    # Room.

    def _mark_used(self, folder: Path) -> None:
        """Make it the newest of all. By the clock alone a clock set back would make it the oldest."""
        newest = max((_mtime_ns(entry) for entry in self._entries()), default=0)
        now = max(time.time_ns(), newest + 1)
        with contextlib.suppress(OSError):  # another user's: its age is theirs
            os.utime(folder, ns=(now, now))

    def _entries(self) -> list[Path]:
        """Folders of artifacts that are published."""
        return [path for path in self._root.iterdir() if path.suffix == "" and path.is_dir()]

    def _evict(self, ours: str) -> None:
        """Keep to the limit, and clear away what killed builders left. What is in use, or being made, stays."""
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
            with contextlib.suppress(FileNotFoundError):
                self._lock_path(entry.name).unlink()
        return not _exists(entry)

    # Locks.

    def _lock_path(self, name: str) -> Path:
        return self._root / f"{name}.lock"

    def _lock(self, name: str, *, wait: bool) -> int | None:
        """Take the lock on a name: a descriptor to close. None: somebody has it, and we don't wait. Raises OSError."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            fd = os.open(self._lock_path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Who evicts an artifact deletes its lock too: ours may be one that nobody else can find any more.
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


def _build_privately(build: Build, root: Path) -> Artifact:
    """Make an artifact in a folder that goes with its user."""
    folder = Path(tempfile.mkdtemp(prefix="multigpu-artifact-"))
    hold = _Hold(_delete, folder)
    try:
        facts = dict(build(folder))
    except Exception as error:
        hold.close()
        if _is_full(error):
            raise ArtifactError(
                f"no room in {folder.parent}, nor for artifacts in {root}: free some, or set artifacts_dir ({error})"
            ) from error
        raise
    return Artifact(folder=folder, facts=facts, _hold=hold)


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
    """All that is in a folder and is no folder, but for its manifest."""
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


def _size(folder: Path) -> int:
    return sum(status.st_size for path in folder.rglob("*") if (status := _lstat(path)) is not None)


def _lstat(path: Path) -> os.stat_result | None:
    """None: it has gone meanwhile."""
    try:
        return path.lstat()
    except OSError:
        return None


def _mtime_ns(path: Path) -> int:
    status = _lstat(path)
    return 0 if status is None else status.st_mtime_ns


def _exists(path: Path) -> bool:
    return _lstat(path) is not None


def _in_use(entry: Path) -> bool:
    try:
        fd = os.open(entry / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _delete(path: Path) -> None:
    """Whatever it is. What can't be deleted is met again by the next that looks."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _is_full(error: BaseException | None) -> bool:
    """Whether it, or what it came from, says that the disk is full."""
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
