"""Sync of files and directories to the disk, and durable copies."""

import os
from pathlib import Path

_READ_BYTES = 1 << 20


def sync(path: Path) -> None:
    """Makes a file durable, or the creations, renames and deletions of files in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def copy_file(source: int, target: Path) -> None:
    """Copies the file that is open as `source` to `target`, and syncs the copy. Only its owner can access the copy."""
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        at = 0
        while data := os.pread(source, _READ_BYTES, at):
            at += os.pwrite(fd, data, at)
        os.fsync(fd)
    finally:
        os.close(fd)
