"""Files that are replaced as a whole: secrets, and positions that outlive a process."""

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Replaces a file atomically. Owner and mode of an existing file stay; a new one gets `mode`."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            old = path.stat()
            mode = old.st_mode & 0o777
            if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(temporary, old.st_uid, old.st_gid)
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
