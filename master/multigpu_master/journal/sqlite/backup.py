"""Backups of a journal, also while a master runs on it, and salvage of a damaged one.

A backup is a directory that a master can start from: the database at one instant, by SQLite's online backup, and the
segments to which its rows refer. During the copy the master may delete segments, because tasks end. So all segments are
opened first, and can be read after their names are gone. Shared locks keep the master from reusing segments with shared
payloads.
"""

import contextlib
import os
import re
import resource
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from multigpu._transport.payloads import NAME, Directory, Segment

from multigpu_master.errors import PARSE_ERRORS, JournalDamagedError, JournalError
from multigpu_master.journal import payload_files as payloads
from multigpu_master.journal.protocol import Checks
from multigpu_master.journal.sqlite import connections, directory, failures, schema
from multigpu_master.journal.sqlite import segments as journal_segments
from multigpu_master.journal.sqlite import wal as journal_log
from multigpu_master.journal.sqlite.files import copy_file, sync
from multigpu_master.journal.sqlite.reads import JournalReads
from multigpu_master.journal.sqlite.schema import DATABASE_NAME, PART_NAME

# The first part of each reference is the segment's name. SQLite finds references by small indexes.
_SEGMENTS = " UNION ".join(
    f"SELECT substr({column}, 1, instr({column}, ':') - 1) FROM {table} WHERE typeof({column}) = 'text'"  # noqa: S608
    for table, column in journal_segments.LARGE_COLUMNS
)
_SEGMENT_NAME = re.compile("[0-9a-f]{8}")
_TRIES = 20  # to hold all segments of one instant; a try takes some milliseconds
_DESCRIPTORS = 64  # file descriptors for everything except segments


def backup(data_dir: Path, target: Path, checks: Checks) -> list[str]:
    """Copies the journal of `data_dir` to `target`, which must be empty or new. Returns descriptions of data that
    the journal had lost before. Raises JournalError if no backup was made; then no part of it is left in `target`.
    """
    if not (data_dir / DATABASE_NAME).exists():
        raise JournalError(f"There is no journal in {data_dir}. Give the master's --data-dir.")
    _prepare_target(data_dir, target)
    try:
        return _fill(data_dir, target, checks)
    except BaseException as error:
        _clear(target)
        if isinstance(error, OSError | sqlite3.Error | JournalDamagedError):
            what = str(error).partition(". ")[0]
            raise JournalError(f"No backup was made in {target}, and nothing is left there: {what}.") from error
        raise


def _prepare_target(data_dir: Path, target: Path) -> None:
    try:
        if target.resolve().is_relative_to(data_dir.resolve()):
            raise JournalError(
                f"{target} is in the data directory {data_dir}. Give a directory elsewhere, best on another disk."
            )
        directory.make_directory(target)
        empty = not any(target.iterdir())
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        raise JournalError(
            f"{target} can't be made or used: {getattr(error, 'strerror', None) or error}. Give a new directory for "
            "the backup, whose parent exists and can be written to by this user."
        ) from error
    if not empty:
        raise JournalError(f"{target} is not empty. Give a new directory for each backup.")


def _fill(data_dir: Path, target: Path, checks: Checks) -> list[str]:
    part = target / PART_NAME
    os.close(os.open(part, os.O_CREAT | os.O_EXCL, 0o600))
    source = connections.connect_reader(data_dir / DATABASE_NAME)
    with contextlib.closing(source), contextlib.closing(sqlite3.connect(part, isolation_level=None)) as copy:
        held = _hold_segments(source, data_dir)
        source.backup(copy)  # in the transaction of _hold_segments: its rows refer to `held`
        schema.clear_open_flag(copy)
    for name in sorted(held):
        segment = held.pop(name)  # closed after its copy, so that its space can be freed
        (target / name).parent.mkdir(mode=0o700, exist_ok=True)
        copy_file(segment.fd, target / name)
        del segment
    lost = [what for *_, what in _lost_rows(target, checks, PART_NAME)]
    with contextlib.closing(connections.connect_reader(part)) as reader:
        lost += _damaged_settings(reader, checks).values()
    for suffix in ("-shm", "-wal"):  # made by _lost_rows
        (target / f"{PART_NAME}{suffix}").unlink(missing_ok=True)
    sync(part)
    for name in (journal_segments.DIRECTORY_NAME, payloads.DIRECTORY_NAME):
        if (target / name).exists():
            sync(target / name)
    sync(target)
    part.rename(target / DATABASE_NAME)
    sync(target)
    return lost


def _hold_segments(source: sqlite3.Connection, data_dir: Path) -> dict[str, Segment]:
    """Begins a transaction, and opens the segments to which its rows refer, except segments lost before."""
    gone: set[str] = set()
    for _ in range(_TRIES):
        source.execute("BEGIN")
        wanted = {_segment_path(name) for (name,) in source.execute(_SEGMENTS)} - {""}
        _allow_descriptors(len(wanted) + _DESCRIPTORS)
        held: dict[str, Segment] = {}
        for name in wanted:
            with contextlib.suppress(FileNotFoundError):
                held[name] = _open_segment(data_dir / name)
        missing = wanted - held.keys()
        # The master deletes only segments to which no row refers. So a segment that was missing in an earlier try, and
        # to which a row of this transaction still refers, was lost before.
        if missing <= gone:
            return held
        gone |= missing
        source.execute("ROLLBACK")
    raise JournalError(
        f"Segments of {data_dir} were deleted faster than they could be opened, {_TRIES} times. Try again when the "
        "master has less to do."
    )


def _allow_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if count > hard:
        raise JournalError(
            f"A backup holds all segments of the journal open: it takes {count} descriptors, and this process may have "
            f"{hard}. Raise that limit (ulimit -Hn), or stop the master and copy the directory."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))


def _open_segment(path: Path) -> Segment:
    """Opens a segment, so that it can be read after its name is gone, and locks it against reuse if it has shared
    payloads. Raises FileNotFoundError if the segment is gone.
    """
    if path.parent.name != payloads.DIRECTORY_NAME:
        return Segment(path.name, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    segment = Directory(path.parent, b"").pin(path.name)
    if path.stat().st_ino != os.fstat(segment.fd).st_ino:
        raise FileNotFoundError("the segment was given another name before it was locked")
    return segment


def _clear(target: Path) -> None:
    """Deletes an incomplete copy."""
    for path in (*target.glob(f"{PART_NAME}*"), target / DATABASE_NAME):
        path.unlink(missing_ok=True)
    for name in (journal_segments.DIRECTORY_NAME, payloads.DIRECTORY_NAME):
        shutil.rmtree(target / name, ignore_errors=True)


def salvage(data_dir: Path, checks: Checks) -> Iterator[str]:
    """Repairs a journal whose log is damaged, cut or missing, and deletes tasks, dead letters, outcomes and settings
    that can't be used, so that a master can start from it. Yields a description of each loss. An outcome whose
    result is lost stays. Raises JournalDamagedError if pages of the database are damaged, which it can't repair.
    """
    path, log = data_dir / DATABASE_NAME, data_dir / f"{DATABASE_NAME}-wal"
    if not path.exists():
        directory.check_remains(path)
        raise JournalError(f"There is no journal in {data_dir}. Give the master's --data-dir.")
    lock = directory.DirectoryLock(data_dir)
    try:
        directory.check_header(path)
        if _log_missing(path):
            yield f"the newest transactions, unless another program copied them to the database: {log} is missing"
        if what := _log_damage(path, log):
            kept = log.with_name(f"{log.name}.damaged")
            with log.open("rb") as file:
                copy_file(file.fileno(), kept)
            sync(data_dir)
            yield f"{what}; the log is kept as {kept}"
        yield from _delete_lost(path, checks)
    except (OSError, sqlite3.Error) as error:
        raise failures.explain(error, path) from error
    finally:
        lock.release()


def _delete_lost(path: Path, checks: Checks) -> list[str]:
    """Deletes the rows that can't be read, and empties the log. Changes nothing if pages of the database are damaged.
    Returns the descriptions of what is lost.
    """
    writer = connections.connect_writer(path)
    try:
        lost = _lost_rows(path.parent, checks)
        settings = _damaged_settings(writer, checks)
        _delete(path, writer, [(table, key) for table, key, stays, _ in lost if not stays], list(settings))
        connections.empty_log(writer)
    except BaseException:
        connections.close_keeping_log(path, writer)
        raise
    writer.close()
    return [*[what for *_, what in lost], *settings.values()]


def _damaged_settings(connection: sqlite3.Connection, checks: Checks) -> dict[bytes, str]:
    """Returns the keys of settings that can't be used, and why."""
    found: dict[bytes, str] = {}
    rows = connection.execute("SELECT CAST(key AS BLOB), CAST(value AS BLOB), typeof(value) FROM setting").fetchall()
    if schema.SETTING_EPOCH.encode() not in [key for key, *_ in rows]:
        found[schema.SETTING_EPOCH.encode()] = f"the setting {schema.SETTING_EPOCH!r}: it is missing"
    for key, value, kind in rows:
        try:
            schema.check_value(key.decode(), value, kind)
            damage = checks.setting(key.decode(), value)
        except PARSE_ERRORS as error:
            damage = repr(error)
        if damage:
            found[key] = f"the setting {key.decode(errors='replace')!r}: {damage}"
    return found


def _delete(path: Path, writer: sqlite3.Connection, rows: list[tuple[str, int]], settings: Iterable[bytes]) -> None:
    """Deletes the rows, repairs the settings, and notes that the journal is closed. Raises JournalDamagedError, and
    does not commit, if pages are damaged. The pages are checked last, because the check also reports columns without a
    value, whose rows are deleted first.
    """
    writer.execute("BEGIN IMMEDIATE")
    schema.clear_open_flag(writer)
    for table, key in rows:
        writer.execute(f"DELETE FROM {table} WHERE rowid = ?", (key,))  # noqa: S608  # `table`: of lost_rows()
    for setting in settings:
        schema.repair(writer, setting)
    ((verdict,),) = writer.execute("PRAGMA quick_check(1)").fetchall()
    if verdict != "ok":
        raise failures.damaged_error(path, verdict.replace("\n", " "))
    writer.execute("COMMIT")


def _lost_rows(data_dir: Path, checks: Checks, database: str = DATABASE_NAME) -> list[tuple[str, int, bool, str]]:
    reads = JournalReads(data_dir, database=database)
    try:
        return list(reads.lost_rows(checks))
    finally:
        reads.close_readers()


def _log_missing(path: Path) -> bool:
    if path.with_name(f"{path.name}-wal").exists():
        return False
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as reader:
        return schema.left_open(reader)


def _log_damage(path: Path, log: Path) -> str:
    index = path.with_name(f"{DATABASE_NAME}-shm")
    if not log.exists():
        return ""
    if what := journal_log.describe_cut(log, index, schema.PAGE_BYTES):
        return what
    with contextlib.closing(connections.connect_reader(path)) as reader:
        reader.execute("SELECT count(*) FROM sqlite_master").fetchall()
        return journal_log.describe_damage(log, index, schema.PAGE_BYTES)


def _segment_path(name: str) -> str:
    """Returns a segment's path relative to the data directory; "" if a damaged row has an invalid name."""
    if _SEGMENT_NAME.fullmatch(name):
        return f"{journal_segments.DIRECTORY_NAME}/{name}"
    return f"{payloads.DIRECTORY_NAME}/{name}" if NAME.fullmatch(name) else ""
