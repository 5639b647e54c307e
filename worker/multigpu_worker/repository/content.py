"""Hashes the content of a model's folder, for keys of the embedding cache and of exports."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from multigpu_worker.repository.folders import ModelFolderError, read_layout


@dataclass(frozen=True, slots=True)
class ModelContent:
    """The hash of everything in a model's folder."""

    folder: Path
    digest: bytes
    # Of each file: path, inode, size, mtime, and the later one of mtime and ctime.
    stamp: tuple[tuple[str, int, int, int, int], ...]

    @staticmethod
    def read(folder: Path) -> "ModelContent":
        """Read all files: about a second per gigabyte. Raises ModelFolderError."""
        stamp = _file_stamps(folder)
        content = hashlib.sha256()
        try:
            for name, *_ in stamp:
                with Path(name).open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").digest()
                content.update(os.path.relpath(name, folder).encode("utf-8", "surrogateescape") + b"\0" + digest)
        except OSError as error:
            raise _unreadable(folder, error) from error
        return ModelContent(folder, content.digest(), stamp)

    def check(self) -> None:
        """Raises ModelFolderError if a file has changed since `read`: files of two versions may have been loaded."""
        if _file_stamps(self.folder) != self.stamp:
            raise ModelFolderError(
                f"{self.folder} was changed while it was being loaded: try again when it is complete"
            )


def _file_stamps(folder: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    layout = read_layout(folder)
    roots = {folder, layout.transformer, *(path for _, path in layout.steps or ())}
    found = {}
    try:
        for path in {path for root in roots for path in _files(root, set())}:
            status = path.stat()
            changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
            found[str(path)] = status.st_ino, status.st_size, status.st_mtime_ns, changed_ns
    except OSError as error:
        raise _unreadable(folder, error) from error
    return tuple((path, *found[path]) for path in sorted(found))


def _files(folder: Path, seen: set[str]) -> Iterator[Path]:
    """All files below the folder, also through links. Hidden files are left out, because nothing reads them."""
    if not folder.is_dir() or (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files(path, seen)
        else:
            yield path


def _unreadable(folder: Path, error: OSError) -> ModelFolderError:
    return ModelFolderError(f"{folder} can't be read ({error}): copy the model folder again")
