"""Detects damage of the write-ahead log. SQLite reports none: it assumes that the log ends before a damaged frame.

SQLite reads the log up to the first frame with a wrong checksum or salt. After a loss of power that is correct: the
newest transaction may be torn, and was never acknowledged. Frames after the end that SQLite assumes may be left from
torn transactions of earlier masters, so the existence of such frames is no evidence of damage.

Evidence of damage: after the end that SQLite assumes, an undamaged frame N ends a transaction, and frame N + 1's
checksum continues the checksum of frame N. A transaction is synced before the next one writes its first frame. So the
transaction of frame N was on the disk and acknowledged, and was readable until it, or an earlier transaction, was
damaged. Checksums are cumulative, so a frame of one writer never continues the checksum of another writer's frame.

Damage of only the newest transaction, or of the last frame before it, can't be distinguished from a torn write. If the
log was cut, the index (-shm) that the last master left beside it records more frames than the log has. A cut is not
detected if the host has lost power since the last master ran, or if the cut removed the log's header too.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

_MAGIC_BIG_ENDIAN = 0x377F0683
# The formats of the log's header, whose last two words are checksums of its other words, and of a frame's header.
_HEADER, _FRAME = struct.Struct(">8I"), struct.Struct(">6I")
_SUMMED_BYTES = _HEADER.size - 8
_SALTS = slice(16, 24)  # in the log's header
# The -shm file is SQLite's index of the log. It begins with two copies of a header of this size.
_INDEX_HEADER_BYTES = 48
_INDEX_FRAMES_AT = 16  # offset of the number of frames that SQLite reads (mxFrame)
_INDEX_SALTS = slice(32, 40)  # a copy of the log's salts

Sums = tuple[int, int]


class _Log:
    """The frames of a log, numbered from 0."""

    def __init__(self, data: bytes, page_bytes: int) -> None:
        magic, *_, salt1, salt2, sum1, sum2 = _HEADER.unpack_from(data)
        self._data = data
        self._frame_bytes = _FRAME.size + page_bytes
        self._order = ">" if magic == _MAGIC_BIG_ENDIAN else "<"
        self._header_sums = sum1, sum2
        self.count = (len(data) - _HEADER.size) // self._frame_bytes
        self._salts: tuple[int, ...] = salt1, salt2
        if self.count and self._sums((0, 0), data[:_SUMMED_BYTES]) != (sum1, sum2):
            # SQLite reads no frame after a wrong header. If its salts differ from those of the first frame in at most
            # one bit, a bit of the header flipped: use the frame's salts. If they differ in more bits, a loss of power
            # tore the header, which is no damage: (-1, -1) equals no frame's salts, so no damage is reported.
            self._order = "<" if sys.byteorder == "little" else ">"
            salts = self._frame(0)[2:4]
            flipped = sum((one ^ other).bit_count() for one, other in zip(self._salts, salts, strict=True))
            self._salts = salts if flipped <= 1 else (-1, -1)

    def _frame(self, number: int) -> tuple[int, ...]:
        """Returns the header of a frame: page number, size of the database in pages if the frame ends a transaction
        (else 0), two salts, two checksums.
        """
        return _FRAME.unpack_from(self._data, _HEADER.size + number * self._frame_bytes)

    def _sums(self, sums: Sums, data: bytes) -> Sums:
        """Returns SQLite's cumulative checksums after `data`, if `sums` are the checksums before it."""
        first, second = sums
        words = struct.unpack(f"{self._order}{len(data) // 4}I", data)
        for even, odd in zip(words[::2], words[1::2], strict=True):
            first = (first + even + second) & 0xFFFFFFFF
            second = (second + odd + first) & 0xFFFFFFFF
        return first, second

    def _expected(self, sums: Sums, number: int) -> Sums:
        """Returns the checksums that a frame should have if `sums` are the checksums of the frame before it."""
        at = _HEADER.size + number * self._frame_bytes
        page = self._data[at + _FRAME.size : at + self._frame_bytes]
        return self._sums(sums, self._data[at : at + 8] + page)

    def _stored(self, number: int) -> Sums:
        """Returns the checksums stored in a frame, or in the header of the log if `number` is -1."""
        if number < 0:
            return self._header_sums
        return self._frame(number)[4], self._frame(number)[5]

    def _is_whole(self, number: int) -> bool:
        """Returns whether a frame is undamaged. The checksums stored in the frame before it may be damaged."""
        if self._continues(number):
            return True
        # Compute the checksums of the preceding frame (or header) instead of using the stored ones.
        if number:
            before = self._expected(self._stored(number - 2), number - 1)
        else:
            before = self._sums((0, 0), self._data[:_SUMMED_BYTES])
        return self._expected(before, number) == self._stored(number)

    def _continues(self, number: int) -> bool:
        """Returns whether a frame's stored checksums match its content and the checksums stored in the frame before."""
        return self._expected(self._stored(number - 1), number) == self._stored(number)

    def commits_after(self, frames_read: int) -> Iterator[int]:
        """Yields the numbers, from `frames_read` on, of undamaged frames that end a synced transaction. A damaged
        frame proves nothing: the damage may be in the field that marks the end of a transaction.
        """
        for number in range(frames_read, self.count - 1):
            is_commit = self._frame(number)[1] > 0
            same_salts = self._frame(number + 1)[2:4] == self._salts
            if is_commit and same_salts and self._continues(number + 1) and self._is_whole(number):
                yield number


def describe_cut(log: Path, index: Path, page_bytes: int) -> str:
    """Returns a text that describes the frames that the index records and the log lacks, or "" if none are known to be
    missing. Call it before SQLite opens the files, because SQLite then overwrites the index. SQLite writes the index
    after it has synced the log, so the index of an undamaged log never records frames that the log lacks.
    """
    if not (log.exists() and index.exists()):
        return ""
    with log.open("rb") as log_file, index.open("rb") as index_file:
        header, state = log_file.read(_HEADER.size), index_file.read(2 * _INDEX_HEADER_BYTES)
    copies = state[:_INDEX_HEADER_BYTES], state[_INDEX_HEADER_BYTES:]
    if len(header) < _HEADER.size or copies[0] != copies[1] or state[_INDEX_SALTS] != header[_SALTS]:
        return ""
    (frames,) = struct.unpack_from("=I", state, _INDEX_FRAMES_AT)
    missing = frames - (log.stat().st_size - _HEADER.size) // (_FRAME.size + page_bytes)
    return f"its log {log.name} was cut: the last {missing} frames are missing" if missing > 0 else ""


def describe_damage(log: Path, index: Path, page_bytes: int) -> str:
    """Returns a text that describes the acknowledged transactions that SQLite can't read from the log, or "" if there
    is no evidence of any. A connection must be open and have read from the database, so that the index exists.
    """
    data = log.read_bytes()
    if len(data) <= _HEADER.size:
        return ""
    (frames_read,) = struct.unpack_from("=I", index.read_bytes(), _INDEX_FRAMES_AT)
    commits = list(_Log(data, page_bytes).commits_after(frames_read))
    if not commits:
        return ""
    return (
        f"in its log {log.name}, frame {frames_read + 1} (counted from 1) or a frame shortly after it is not as it was "
        f"written, and {len(commits)} or more acknowledged transactions from there on can't be read"
    )
