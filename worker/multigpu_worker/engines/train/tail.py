"""Reads the lines that a process adds to a file."""

import os
import time
from pathlib import Path

_READ_BYTES = 1 << 16
# Seconds after which the beginning of a line is shown although its end is not written: a progress bar, a prompt.
OPEN_S = 5.0


class Tail:
    """`skips`: if more was added than it reads at once, only the last of it is read."""

    def __init__(self, path: Path, *, skips: bool = False) -> None:
        self.path = path
        self._skips = skips
        self._offset = 0
        self._rest = b""  # of a line whose end is not written yet
        self._shown_s = time.monotonic()  # when the last line was returned

    def lines(self, *, last: bool = False) -> list[str]:
        """The next lines, without their ends; none if the file is not there. Of a line that was overwritten by carriage
        returns, what is left. A tail that may skip also returns what there is of a line that stays open. `last`:
        nothing more will be written, so all that remains.
        """
        found: list[bytes] = []
        while data := self._read():
            *lines, self._rest = (self._rest + data).split(b"\n")
            found += lines
            if self._skips:
                self._rest = self._rest[-_READ_BYTES:]
            if not last:
                break
        now = time.monotonic()
        if self._rest and (last or (self._skips and now - self._shown_s >= OPEN_S)):
            found.append(self._rest)
            self._rest = b""
        if found:
            self._shown_s = now
        return [line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace") for line in found]

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                if self._skips:
                    start = file.seek(0, os.SEEK_END) - _READ_BYTES
                    if start > self._offset:
                        self._offset, self._rest = start, b""
                file.seek(self._offset)
                data = file.read(_READ_BYTES)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data
