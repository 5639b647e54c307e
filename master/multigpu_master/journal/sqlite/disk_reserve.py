"""Room on the disk that is kept for the time when there is no other.

Deleting takes room, too: the log grows first, and the database with what is copied from it. So a file of the journal's
directory holds some, which is given up when the disk is full, for a transaction that empties the journal or a new
master's start, and taken again after it. When all of it can be taken there is room for tasks.
"""

import errno
import os
from pathlib import Path

NAME = "reserve"
# Of the journal's limit and of the file system, within bounds.
_SHARE = 16
BYTES_MIN, BYTES_MAX = 64 << 10, 16 << 20
_PART_BYTES_MIN = 16 << 10  # less would not help
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class Reserve:
    """See the module. For one thread at a time."""

    def __init__(self, data_dir: Path, size_max_bytes: int) -> None:
        self._path = data_dir / NAME
        self._size_max_bytes = size_max_bytes
        self.size_bytes = 0  # as far as it is taken

    @property
    def wanted_bytes(self) -> int:
        """The size of all of it."""
        disk = os.statvfs(self._path.parent)
        share_bytes = min(self._size_max_bytes, disk.f_blocks * disk.f_frsize) // _SHARE
        return min(max(share_bytes, BYTES_MIN), BYTES_MAX)

    def room_bytes(self) -> int:
        """What the reserve holds, and what is free beside it. From any thread."""
        disk = os.statvfs(self._path.parent)
        try:
            taken_bytes = self._path.stat().st_blocks * 512
        except FileNotFoundError:
            taken_bytes = 0
        return taken_bytes + disk.f_bavail * disk.f_frsize

    def make(self) -> None:
        """Takes the room, or as much as there is. OSError: there isn't all of it."""
        wanted_bytes = size_bytes = self.wanted_bytes
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size == wanted_bytes:
                self.size_bytes = wanted_bytes
                return
            while True:
                os.ftruncate(fd, 0)
                try:
                    os.posix_fallocate(fd, 0, size_bytes)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or size_bytes <= _PART_BYTES_MIN:
                        os.ftruncate(fd, 0)
                        raise
                    size_bytes //= 2
        finally:
            os.close(fd)
        self.size_bytes = size_bytes
        if size_bytes < wanted_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def give_up(self) -> bool:
        """Returns the room to the disk; whether there was any."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:  # room is not what is missing
                return False
            self.size_bytes = 0
            if error.errno == errno.ENOENT:
                return False
            raise
        self.size_bytes = 0
        try:
            taken = os.fstat(fd).st_size > 0
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
        return taken
