"""Where multigpu.train keeps checkpoints: a folder, or a URL that fsspec knows.

Each checkpoint has a folder of its own, and counts once it has the file COMMITTED: torch.distributed.checkpoint renames
its metadata file without a sync of the folder, so a loss of power could leave it without its data.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

COMMITTED = "COMMITTED"


class Store(Protocol):
    """Only rank 0 calls it."""

    def new(self, step: int) -> str:
        """The place of a checkpoint to be written. OSError."""

    def commit(self, place: str, step: int) -> None:
        """Makes a checkpoint count, whose files are written and synced. OSError."""

    def committed(self) -> list[tuple[int, str]]:
        """Step and place of each checkpoint that counts, in the order of their commits. An earlier run of the script
        may have left higher steps.
        """

    def remove(self, place: str) -> None:
        """What can't be removed stays."""

    def remove_unfinished(self) -> None:
        """Removes what was never committed."""


def store_of(where: str) -> Store:
    return UrlStore(where) if "://" in where else FolderStore(Path(where))


def _name(step: int) -> str:
    return f"step-{step:010}-{os.urandom(4).hex()}"


def _mark(step: int, found: list[tuple[int, int, str]]) -> bytes:
    """`found`: those committed before. It has a number: the clocks of a job's hosts may differ."""
    return json.dumps({"step": step, "number": 1 + max((number for number, _, _ in found), default=0)}).encode()


def _read(mark: bytes, place: str) -> list[tuple[int, int, str]]:
    """Number, step and place of a checkpoint with this mark; empty: it is no mark of ours."""
    try:
        fields = json.loads(mark)
        return [(int(fields["number"]), int(fields["step"]), place)]
    except (ValueError, KeyError, TypeError):
        return []


def _ordered(found: list[tuple[int, int, str]]) -> list[tuple[int, str]]:
    return [(step, place) for _, step, place in sorted(found)]


class FolderStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def new(self, step: int) -> str:
        folder = self._folder / _name(step)
        folder.mkdir(parents=True)
        return str(folder)

    def commit(self, place: str, step: int) -> None:
        folder = Path(place)
        fresh = folder / f"{COMMITTED}.new"
        fresh.write_bytes(_mark(step, self._found()))
        for path in (folder / ".metadata", fresh, folder):
            sync(path)
        fresh.replace(folder / COMMITTED)
        sync(folder)
        sync(folder.parent)

    def committed(self) -> list[tuple[int, str]]:
        return _ordered(self._found())

    def _found(self) -> list[tuple[int, int, str]]:
        found = []
        for mark in self._folder.glob(f"step-*/{COMMITTED}"):
            with contextlib.suppress(FileNotFoundError):  # it is being removed
                found += _read(mark.read_bytes(), str(mark.parent))
        return found

    def remove(self, place: str) -> None:
        (Path(place) / COMMITTED).unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)

    def remove_unfinished(self) -> None:
        whole = {place for _, place in self.committed()}
        for folder in self._folder.glob("step-*"):
            if str(folder) not in whole:
                shutil.rmtree(folder, ignore_errors=True)


class UrlStore:
    """Relies on the storage for what it has acknowledged: there is no sync."""

    def __init__(self, url: str) -> None:
        """ImportError, ValueError: fsspec can't use it."""
        self._core: Any = importlib.import_module("fsspec.core")
        self._fs, self._path = self._core.url_to_fs(url)

    def new(self, step: int) -> str:
        return str(self._fs.unstrip_protocol(f"{self._path.rstrip('/')}/{_name(step)}"))

    def commit(self, place: str, step: int) -> None:
        self._fs.pipe_file(f"{self._path_of(place)}/{COMMITTED}", _mark(step, self._found()))

    def committed(self) -> list[tuple[int, str]]:
        return _ordered(self._found())

    def _found(self) -> list[tuple[int, int, str]]:
        found = []
        for folder in self._folders():
            with contextlib.suppress(FileNotFoundError):
                mark = self._fs.cat_file(f"{folder}/{COMMITTED}")
                found += _read(mark, str(self._fs.unstrip_protocol(folder)))
        return found

    def remove(self, place: str) -> None:
        folder = self._path_of(place)
        for path in (f"{folder}/{COMMITTED}", folder):
            try:
                self._fs.rm(path, recursive=True)
            except OSError:  # it is gone, or stays
                continue

    def remove_unfinished(self) -> None:
        whole = {self._path_of(place) for _, place in self.committed()}
        for folder in self._folders():
            if folder not in whole:
                self.remove(folder)

    def _path_of(self, place: str) -> str:
        return str(self._core.url_to_fs(place)[1])

    def _folders(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return [path for path in paths if path.rstrip("/").rpartition("/")[2].startswith("step-")]


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
