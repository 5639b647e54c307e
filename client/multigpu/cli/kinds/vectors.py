"""Files of vectors, written row by row in bounded memory.

Rows go to FILE.part, which is renamed to FILE when all are on disk. It stays if the command ends early, also by
kill -9, and `--resume` continues after its last whole row. A .npy header contains the number of rows: it has a fixed
length, and is written again at the end.
Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html (version 1.0).
"""

import ast
import contextlib
import fcntl
import json
import os
from itertools import islice
from pathlib import Path
from typing import IO, Self

import numpy as np
from numpy.typing import NDArray

from multigpu.cli import show
from multigpu.cli.failures import Failure

NPY_MAGIC = b"\x93NUMPY\x01\x00"
NPY_HEADER_BYTES = 128

Rows = NDArray[np.float32]


def npy_header(rows: int, dimension: int) -> bytes:
    """The header of a C-ordered float32 array, always NPY_HEADER_BYTES long."""
    text = repr({"descr": "<f4", "fortran_order": False, "shape": (rows, dimension)})
    room = NPY_HEADER_BYTES - len(NPY_MAGIC) - 2
    assert len(text) < room
    return NPY_MAGIC + room.to_bytes(2, "little") + text.ljust(room - 1).encode() + b"\n"


class File:
    """A file that appears under its name once it is complete and on disk, and never after an error."""

    def __init__(self, path: Path) -> None:
        # A symbolic link stays: its target is replaced.
        self.path = path = path.resolve()
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        if self.path.exists() and not self.path.is_file():
            raise Failure(f"can't write {self.path}: not a regular file")
        try:
            self._file = self.open()
            self.begin()
        except OSError as error:
            raise Failure(f"can't write {self.path}: {error.strerror}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._file is not None
        if kind is not None:
            self.leave()
            return
        try:
            self.end()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.replace(self.path)
        except OSError as failure:
            self.leave()
            raise Failure(f"can't write {self.path}: {failure.strerror}") from failure

    def write(self, data: bytes) -> None:
        assert self._file is not None
        try:
            self._file.write(data)
        except OSError as error:
            raise Failure(f"can't write {self.path}: {error.strerror}") from error

    def open(self) -> IO[bytes]:
        return self._part.open("wb")

    def leave(self) -> None:
        """After an error."""
        assert self._file is not None
        with contextlib.suppress(OSError):
            self._file.close()
        self._part.unlink(missing_ok=True)

    def begin(self) -> None:
        """After opening."""

    def end(self) -> None:
        """After the last row, if there was no error."""


class RowFile(File):
    """A file of rows. `resume`: continue after the rows of an earlier run."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        super().__init__(path)
        self._part = self.path.with_name(f"{self.path.name}.part")
        self._resume = resume
        self.rows = self.dimension = 0

    def open(self) -> IO[bytes]:
        file = os.fdopen(os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise Failure(f"another process writes {self._part}; wait until it ends, or stop it") from error
        if not self._resume:
            file.truncate()
        self.rows, nbytes = self.recover(file)
        file.truncate(nbytes)
        file.seek(nbytes)
        return file

    def recover(self, file: IO[bytes]) -> tuple[int, int]:
        """The number of whole rows in the file, and where the last of them ends."""
        raise NotImplementedError

    def foreign(self) -> Failure:
        """The file has another format."""
        return Failure(
            f"{self._part} is not from an earlier run with this --format; give that --format, or delete the file"
        )

    def left(self) -> str:
        """For the message of a command that ends early: what is written, and how to continue."""
        return f"; {self.rows:,} are in {self._part}, and --resume continues after them" if self.rows else ""

    def leave(self) -> None:
        if not self.rows:
            super().leave()
            return
        assert self._file is not None
        with contextlib.suppress(OSError):  # the next run cuts off a torn row
            self._file.close()


class NpyFile(RowFile):
    """A float32 array [rows, dimension] as .npy. No rows: [0, 0]."""

    def recover(self, file: IO[bytes]) -> tuple[int, int]:
        header = file.read(NPY_HEADER_BYTES)
        if not header:
            return 0, 0
        if not header.startswith(NPY_MAGIC):
            raise self.foreign()
        try:
            self.dimension = ast.literal_eval(header[len(NPY_MAGIC) + 2 :].decode())["shape"][1]
        except (ValueError, SyntaxError, LookupError) as error:
            raise self.foreign() from error
        nbytes = 4 * self.dimension
        rows = (os.fstat(file.fileno()).st_size - NPY_HEADER_BYTES) // nbytes if nbytes else 0
        return rows, NPY_HEADER_BYTES + rows * nbytes

    def begin(self) -> None:
        if not self.rows:
            self.write_header(0)

    def row(self, number: int) -> NDArray[np.float32]:
        """A row of an earlier run, from 0."""
        nbytes = 4 * self.dimension
        return np.fromfile(self._part, "<f4", self.dimension, offset=NPY_HEADER_BYTES + number * nbytes)

    def add(self, rows: Rows) -> None:
        if self.rows and rows.shape[1] != self.dimension:
            message = f"a worker answered with vectors of {rows.shape[1]} numbers, others with {self.dimension}"
            raise Failure(f"{message}; do they serve different models under one name?")
        if not self.rows:
            self.dimension = rows.shape[1]
            self.write_header(0)
        self.write(rows.astype("<f4", copy=False).tobytes())
        self.rows += rows.shape[0]

    def write_header(self, rows: int) -> None:
        """Writes over the beginning of the file."""
        assert self._file is not None
        self._file.seek(0)
        self.write(npy_header(rows, self.dimension))

    def end(self) -> None:
        self.write_header(self.rows)


def json_lines(rows: Rows) -> bytes:
    """One JSON array a row; nine digits restore the same float32."""
    if not np.isfinite(rows).all():
        raise Failure("a vector holds NaN or infinity, which JSON has no word for; write .npy to see it")
    template = "[" + ", ".join(["%.9g"] * rows.shape[1]) + "]\n"
    return "".join(template % tuple(row) for row in rows.tolist()).encode()


class JsonLinesFile(RowFile):
    """One JSON array a line."""

    def recover(self, file: IO[bytes]) -> tuple[int, int]:
        rows = nbytes = 0
        for line in file:
            if not line.startswith(b"["):
                raise self.foreign()
            if line.endswith(b"\n"):
                rows, nbytes = rows + 1, nbytes + len(line)
        return rows, nbytes

    def row(self, number: int) -> NDArray[np.float32]:
        with self._part.open("rb") as file:
            return np.array(json.loads(next(islice(file, number, None))), np.float32)

    def add(self, rows: Rows) -> None:
        self.write(json_lines(rows))
        self.rows += rows.shape[0]


class JsonLinesStdout:
    """One JSON array a line, to stdout."""

    rows = dimension = 0

    def row(self, number: int) -> NDArray[np.float32]:
        raise AssertionError("nothing is resumed on stdout")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Printed rows stay."""

    def add(self, rows: Rows) -> None:
        show.raw(json_lines(rows))
        self.rows += rows.shape[0]

    def left(self) -> str:
        return f"; {self.rows:,} were printed"


# `rows`: includes those of an earlier run. `dimension`: 0 if it is not known.
Sink = NpyFile | JsonLinesFile | JsonLinesStdout
