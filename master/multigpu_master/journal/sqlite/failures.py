"""Converts errors of SQLite and of the file system to JournalErrors, whose messages give a remedy."""

import errno
import os
import sqlite3
import tempfile
from pathlib import Path

from multigpu_master.errors import PARSE_ERRORS, JournalDamagedError, JournalError, JournalFullError
from multigpu_master.journal.sqlite.schema import BUSY_TIMEOUT_S

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_DATABASE = "it is not an SQLite database"
# SQLite returns SQLITE_IOERR_SHMSIZE if there is no room for the log's index.
_FULL_CODES = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE})


def explain(error: Exception, path: Path) -> JournalError:
    """The JournalError for a failure of SQLite or of the file system."""
    if isinstance(error, JournalError):
        return error
    code = getattr(error, "sqlite_errorcode", 0)
    primary = code & 0xFF  # https://sqlite.org/rescode.html#primary_result_codes_versus_extended_result_codes
    if code in _FULL_CODES or getattr(error, "errno", None) in NO_ROOM:
        return full_error(path)
    if code == sqlite3.SQLITE_IOERR_WRITE and _has_no_room(path.parent):
        return full_error(path)
    no_descriptor = primary == sqlite3.SQLITE_CANTOPEN and _has_no_descriptor()
    if no_descriptor or getattr(error, "errno", None) in NO_DESCRIPTOR:
        return JournalFullError(
            f"The journal {path} can't be used now: no file descriptor is left ({error}). End connections to the "
            "master, or raise its limit (LimitNOFILE of its unit, or ulimit -n), or that of the host (fs.file-max)."
        )
    if isinstance(error, OSError) and error.errno is None:  # raised by read_at: a file is too short
        return damaged_error(path, str(error))
    if isinstance(error, OSError) and error.errno != errno.EIO:
        file = Path(error.filename) if isinstance(error.filename, str) else path.parent
        return JournalError(
            f"{file} can't be used: {error.strerror}. The journal needs a directory that this user may write to, and "
            "in which no other program deletes files."
        )
    # A table or a column is missing; or a text is not UTF-8, for which the module sqlite3 has no code.
    if code == sqlite3.SQLITE_ERROR or "decode to UTF-8" in str(error):
        return damaged_error(path, str(error))
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return damaged_error(path, NO_DATABASE if code == sqlite3.SQLITE_NOTADB else str(error))
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return JournalError(
            f"The journal {path} stayed locked by another program for {BUSY_TIMEOUT_S:.0f} s ({error}). End that "
            "program (fuser says which it is) and start the master again."
        )
    return JournalError(
        f"The journal {path} can't be read or written any more: {error} "
        f"({getattr(error, 'sqlite_errorname', type(error).__name__)}). Look at the disk (dmesg, df); what was "
        "acknowledged is safe, and starting the master again recovers it."
    )


def explain_open(error: Exception, path: Path) -> JournalError:
    """As explain, for opening the journal. That parses the journal's settings, so PARSE_ERRORS mean damage there."""
    if isinstance(error, PARSE_ERRORS):
        return salvageable_error(path, f"one of its own settings can't be parsed ({error!r})")
    return explain(error, path)


def _has_no_descriptor() -> bool:
    """Whether this process has no file descriptor left. SQLite only reports that it can't open the file."""
    try:
        os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in NO_DESCRIPTOR
    return False


def _has_no_room(folder: Path) -> bool:
    """Whether the disk has no room for a small file. If a quota is used up, SQLite only reports a failed write."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 16)
    except OSError as error:
        return error.errno in NO_ROOM
    return False


def full_error(path: Path) -> JournalFullError:
    return JournalFullError(
        f"The journal {path} is full: the disk has no room left. Free space on the disk (never delete files in "
        "data_dir), or remove tasks: `mgpuctl dead-letters delete`, `mgpuctl tasks cancel`."
    )


def limit_error(path: Path) -> JournalFullError:
    return JournalFullError(
        f"The journal {path} has reached its size limit (journal_bytes_max). Raise the limit, or remove tasks: "
        "`mgpuctl dead-letters delete`, `mgpuctl tasks cancel`."
    )


def gone_error(path: Path) -> JournalError:
    return JournalError(
        f"The journal {path} or its log was deleted, moved or replaced while this master used it: nothing more can be "
        "acknowledged. Bring the directory back, or restore a backup, before the next start, which begins an empty "
        "journal if nothing is left there."
    )


def damaged_error(path: Path, what: str) -> JournalDamagedError:
    return JournalDamagedError(
        f"The journal {path} is damaged ({what}); nothing in it was changed. Restore its directory from a backup, or "
        f"save what can be read with `sqlite3 {path} .recover`, or move the whole directory away to begin with an "
        "empty journal."
    )


def salvageable_error(path: Path, what: str) -> JournalDamagedError:
    return JournalDamagedError(
        f"The journal {path} is damaged: {what}. Nothing in it was changed. Restore its directory from a backup, or "
        f"run `mgpu-master --data-dir {path.parent} salvage`, which keeps what can be read and says what is gone."
    )


def missing_log_error(path: Path) -> JournalDamagedError:
    return JournalDamagedError(
        f"The log {path.name}-wal is missing in {path.parent}, and the last master did not close the journal: "
        "acknowledged transactions are lost, unless another program (such as sqlite3) has copied them into the "
        "database. Nothing was changed. Bring the file back, or restore the directory from a backup, or run "
        f"`mgpu-master --data-dir {path.parent} salvage` to go on with what the database holds."
    )
