"""Lines of text from files and standard input, read as they are needed."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from multigpu.cli.failures import Failure, WrongUsage

# Standard input, or standard output, as the name of a file.
DASH = "-"
READ_BYTES = 1 << 20


def count_lines(paths: Sequence[str]) -> int | None:
    """Lines in all files together; None if one of them can be read only once. Raises Failure."""
    if paths.count(DASH) > 1:
        raise _read_twice()
    total: int | None = 0
    for path in paths:
        if path == DASH or Path(path).is_fifo() or Path(path).is_char_device():
            total = None
            continue
        with open_input(path) as file:
            last = b"\n"
            while total is not None and (data := file.read(READ_BYTES)):
                total += data.count(b"\n")
                last = data[-1:]
            if total is not None:
                total += last != b"\n"
    return total


def read_lines(paths: Sequence[str]) -> Iterator[str]:
    """The lines of all files, in order, without their line ends; blank ones too. Raises Failure for broken UTF-8."""
    for path in paths:
        name = "standard input" if path == DASH else path
        with open_input(path) as file:
            for number, data in enumerate(file, 1):
                if number == 1:
                    data = data.removeprefix(b"\xef\xbb\xbf")  # noqa: PLW2901  the byte order mark
                try:
                    text = data.decode()
                except UnicodeDecodeError as error:
                    found = f"byte 0x{data[error.start]:02x} at position {error.start}"
                    raise Failure(
                        f"{name}, line {number}: not UTF-8 ({found}); convert it first: iconv -t utf-8"
                    ) from error
                yield text.removesuffix("\n").removesuffix("\r")


def open_input(path: str) -> BinaryIO:
    """A file, or standard input for "-"."""
    if path == DASH:
        if sys.stdin.buffer.closed:
            raise _read_twice()
        return sys.stdin.buffer
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise Failure(f"can't read {path}: {error.strerror}") from error


def _read_twice() -> WrongUsage:
    return WrongUsage("standard input (-) can be read once: name it once")
