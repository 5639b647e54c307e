"""Vectors into a file, row after row, in bounded memory, whole or not at all.

Rows go to a file beside the wanted one, which takes its name when all are on disk. A .npy header tells how many rows
there are before the first of them: it gets a fixed length, and is written again at the end.
Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html (version 1.0).
"""

import os
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from multigpu.cli import show
from multigpu.cli.failures import Failure

NPY_MAGIC = b"\x93NUMPY\x01\x00"
NPY_HEADER_BYTES = 128

Rows = NDArray[np.float32]


class Sink(Protocol):
    """Where vectors go."""

    def add(self, rows: Rows) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def npy_header(rows: int, dimension: int) -> bytes:
    """The header of a C-ordered float32 array, NPY_HEADER_BYTES long whatever the shape."""
    text = repr({"descr": "<f4", "fortran_order": False, "shape": (rows, dimension)})
    room = NPY_HEADER_BYTES - len(NPY_MAGIC) - 2
    assert len(text) < room
    return NPY_MAGIC + room.to_bytes(2, "little") + text.ljust(room - 1).encode() + b"\n"


class File:
    """A file that appears under its name when everything in it is on disk; on an error it never does."""

    def __init__(self, path: Path) -> None:
        # A link stays one: what it points to is replaced.
        self.path = path = path.resolve()
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        if self.path.exists() and not self.path.is_file():
            raise Failure(f"can't write {self.path}: not a regular file")
        try:
            self._file = self._part.open("wb")
            self.begin()
        except OSError as error:
            raise Failure(f"can't write {self.path}: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._file is not None
        if kind is not None:
            self._file.close()
            self._part.unlink(missing_ok=True)
            return
        try:
            self.end()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.replace(self.path)
        except OSError as failure:
            self._part.unlink(missing_ok=True)
            raise Failure(f"can't write {self.path}: {failure.strerror}") from failure

    def write(self, data: bytes) -> None:
        assert self._file is not None
        try:
            self._file.write(data)
        except OSError as error:
            raise Failure(f"can't write {self.path}: {error.strerror}") from error

    def rewrite(self, data: bytes) -> None:
        """Writes over the beginning of the file."""
        assert self._file is not None
        self._file.seek(0)
        self._file.write(data)

    def begin(self) -> None:
        """Called when the file is open."""

    def end(self) -> None:
        """Called when all rows are in, and no error came."""


class NpyFile(File):
    """A float32 array [rows, dimension] as .npy. No rows: [0, 0]."""

    rows = 0
    dimension = 0

    def begin(self) -> None:
        self.write(npy_header(0, 0))

    def add(self, rows: Rows) -> None:
        if self.rows and rows.shape[1] != self.dimension:
            message = f"a worker answered with vectors of {rows.shape[1]} numbers, others with {self.dimension}"
            raise Failure(f"{message}; do they serve different models under one name?")
        self.rows += rows.shape[0]
        self.dimension = rows.shape[1]
        self.write(rows.astype("<f4", copy=False).tobytes())

    def end(self) -> None:
        self.rewrite(npy_header(self.rows, self.dimension))


def json_lines(rows: Rows) -> bytes:
    """One JSON array a row; nine digits give the same float32 again."""
    if not np.isfinite(rows).all():
        raise Failure("a vector holds a number that JSON has no word for (NaN or infinity); write .npy to see it")
    template = "[" + ", ".join(["%.9g"] * rows.shape[1]) + "]\n"
    return "".join(template % tuple(row) for row in rows.tolist()).encode()


class JsonLinesFile(File):
    """One JSON array a line."""

    def add(self, rows: Rows) -> None:
        self.write(json_lines(rows))


class JsonLinesStdout:
    """One JSON array a line, to stdout."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing to keep or to undo: what was printed was printed."""

    def add(self, rows: Rows) -> None:
        show.raw(json_lines(rows))
