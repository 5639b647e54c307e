"""Detects damage of the write-ahead log. SQLite takes it for the log's end, and would silently drop what follows.

SQLite reads the log up to the first frame with a wrong checksum or salt. After a loss of power that is correct: the
newest transaction may be torn, and was never acknowledged. Frames after that end may be left from torn transactions of
earlier masters, so they alone prove nothing.

But each commit is synced before the next transaction writes its first frame. So suppose that after the end that SQLite
sees, a frame ends a transaction, and the checksum of the next frame continues the checksum of that frame. Then this
transaction was on the disk and acknowledged, and it or an earlier one was damaged later. Checksums are cumulative, so
the checksum of one writer's frame does not continue that of another writer's.

Damage of the newest transaction alone, or of the last frame before it, cannot be told from a torn write. A log that was
cut shows by the index that the last master left beside it, unless the host lost power or the log's header is gone too.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

_MAGIC_BIG_ENDIAN = 0x377F0683
_HEADER, _FRAME = struct.Struct(">8I"), struct.Struct(">6I")
# Offset of the number of frames that SQLite reads (mxFrame) in the -shm file, its index of the log.
_INDEX_FRAMES_AT = 16
_INDEX_HEADER_BYTES = 48  # of which there are two copies; the log's salts are at 32

Sums = tuple[int, int]


class _Log:
    """The frames of a log, numbered from 0."""

    def __init__(self, data: bytes, page_bytes: int) -> None:
        magic, *_, salt1, salt2, sum1, sum2 = _HEADER.unpack_from(data)
        self._data, self._page_bytes = data, page_bytes
        self._frame_bytes = _FRAME.size + page_bytes
        self._order = ">" if magic == _MAGIC_BIG_ENDIAN else "<"
        self._header_sums = sum1, sum2
        self.count = (len(data) - _HEADER.size) // self._frame_bytes
        self._salts: tuple[int, ...] = salt1, salt2
        if self.count and self._sums((0, 0), data[: _HEADER.size - 8]) != (sum1, sum2):
            # The header is damaged, so SQLite reads no frame. If a loss of power tore it, its salts differ from those
            # of the frames; if a bit flipped, they differ in one bit at most.
            self._order = "<" if sys.byteorder == "little" else ">"
            salts = self._frame(0)[2:4]
            flipped = sum((mine ^ its).bit_count() for mine, its in zip(self._salts, salts, strict=True))
            self._salts = salts if flipped <= 1 else (-1, -1)

    def _frame(self, number: int) -> tuple[int, ...]:
        """Page, pages of the database if the frame ends a transaction (else 0), two salts, two checksums."""
        return _FRAME.unpack_from(self._data, _HEADER.size + number * self._frame_bytes)

    def _sums(self, sums: Sums, data: bytes) -> Sums:
        """Continue the checksums `sums` over `data`, as SQLite computes them."""
        first, second = sums
        words = struct.unpack(f"{self._order}{len(data) // 4}I", data)
        for even, odd in zip(words[::2], words[1::2], strict=True):
            first = (first + even + second) & 0xFFFFFFFF
            second = (second + odd + first) & 0xFFFFFFFF
        return first, second

    def _made(self, sums: Sums, number: int) -> Sums:
        """The checksums that a frame should have if those of the frame before it are `sums`."""
        at = _HEADER.size + number * self._frame_bytes
        page = self._data[at + _FRAME.size : at + self._frame_bytes]
        return self._sums(sums, self._data[at : at + 8] + page)

    def _stored(self, number: int) -> Sums:
        """The checksums stored in a frame; for -1, in the log's header."""
        if number < 0:
            return self._header_sums
        return self._frame(number)[4], self._frame(number)[5]

    def _is_whole(self, number: int) -> bool:
        """Whether a frame is undamaged, even if the checksums stored in the frame before it are damaged."""
        before = self._stored(number - 1)
        if self._made(before, number) == self._stored(number):
            return True
        made = self._made(self._stored(number - 2), number - 1) if number else self._sums((0, 0), self._data[:24])
        return self._made(made, number) == self._stored(number)

    def commits_after(self, frames_read: int) -> Iterator[int]:
        """The frames from `frames_read` on that end a synced transaction. Damaged frames are not counted: the flipped
        bit may be in the field that marks the end of a transaction.
        """
        for number in range(frames_read, self.count - 1):
            ends = self._frame(number)[1] > 0 and self._frame(number + 1)[2:4] == self._salts
            follows = ends and self._made(self._stored(number), number + 1) == self._stored(number + 1)
            if follows and self._is_whole(number):
                yield number


def cut(log: Path, index: Path, page_bytes: int) -> str:
    """As `damage`, of a log that is shorter than its index. Call it before SQLite opens them and makes the index anew.
    SQLite writes the index after it has synced the log, so the index is never ahead of an undamaged log.
    """
    if not (log.exists() and index.exists()):
        return ""
    with log.open("rb") as log_file, index.open("rb") as index_file:
        header, state = log_file.read(_HEADER.size), index_file.read(2 * _INDEX_HEADER_BYTES)
    copies = state[:_INDEX_HEADER_BYTES], state[_INDEX_HEADER_BYTES:]
    if len(header) < _HEADER.size or copies[0] != copies[1] or state[32:40] != header[16:24]:
        return ""
    (frames,) = struct.unpack_from("=I", state, _INDEX_FRAMES_AT)
    missing = frames - (log.stat().st_size - _HEADER.size) // (_FRAME.size + page_bytes)
    return f"its log {log.name} was cut: the last {missing} frames are missing" if missing > 0 else ""


def damage(log: Path, index: Path, page_bytes: int) -> str:
    """A description of the acknowledged transactions of a log that can't be read; "": there are none. A connection must
    be open and have read from the database, so that SQLite's index of the log exists.
    """
    data = log.read_bytes()
    if len(data) <= _HEADER.size:
        return ""
    (frames_read,) = struct.unpack_from("=I", index.read_bytes(), _INDEX_FRAMES_AT)
    whole = _Log(data, page_bytes)
    commits = list(whole.commits_after(frames_read))
    if not commits:
        return ""
    return (
        f"in its log {log.name} frame {frames_read + 1} or one just behind it is not what was written, and "
        f"{len(commits)} or more acknowledged transactions from there on can't be read"
    )
