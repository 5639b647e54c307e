"""Copies of a journal, also while a master runs on it, and what can be saved of a damaged one.

A backup is a directory that a master can start from: the database as of one instant, by SQLite's online backup, and the
segments that its rows refer to. A segment may be deleted while the database is copied, so all of them are copied first,
and those that have grown or are new are copied once more after it.
"""

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from multigpu.payloads import NAME

from multigpu_master import journal_log, journal_schema, journal_segments, payloads
from multigpu_master.journal import JournalError
from multigpu_master.journal_reads import JournalReads
from multigpu_master.journal_schema import DATABASE_NAME

_REFERENCES = """
SELECT payload FROM task WHERE typeof(payload) = 'text' UNION ALL
SELECT payload FROM dead_letter WHERE typeof(payload) = 'text' UNION ALL
SELECT body FROM outcome WHERE typeof(body) = 'text'"""


def backup(data_dir: Path, target: Path) -> list[str]:
    """Copies the journal of `data_dir` to `target`, which must be empty or new, down to the disk. Returns what the copy
    lacks: results that expired meanwhile, and what was lost before. OSError, sqlite3.Error, JournalError: no copy.
    """
    if not (data_dir / DATABASE_NAME).exists():
        raise JournalError(f"There is no journal in {data_dir}. Give the master's --data-dir.")
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise JournalError(f"{target} is not empty. Give a new directory for each backup.")
    for name in _segments(data_dir):
        _copy(data_dir / name, target / name)
    part = target / f"{DATABASE_NAME}.part"
    os.close(os.open(part, os.O_CREAT | os.O_EXCL, 0o600))
    source = journal_schema.connect_reader(data_dir / DATABASE_NAME)
    with contextlib.closing(source), contextlib.closing(sqlite3.connect(part)) as copy:
        source.backup(copy)
        wanted = {_segment_of(reference) for (reference,) in copy.execute(_REFERENCES)}
    for name in sorted(wanted):
        _copy(data_dir / name, target / name)
    for name in _segments(target) - wanted:
        (target / name).unlink()
    _sync(part)
    for directory in (journal_segments.DIRECTORY_NAME, payloads.DIRECTORY_NAME):
        if (target / directory).exists():
            journal_segments.sync_directory(target / directory)
    part.rename(target / DATABASE_NAME)
    journal_segments.sync_directory(target)
    lost = [what for _, _, what in _lost(target)]
    for suffix in ("-shm", "-wal"):  # made by looking
        (target / f"{DATABASE_NAME}{suffix}").unlink(missing_ok=True)
    return lost


def salvage(data_dir: Path) -> Iterator[str]:
    """Makes a damaged journal one that a master can start from, and says what is gone: transactions behind damage of
    the log, tasks and dead letters without their payload, and results. Those results stay lost; nothing else is kept.
    """
    path, log = data_dir / DATABASE_NAME, data_dir / f"{DATABASE_NAME}-wal"
    if not path.exists():
        raise JournalError(f"There is no journal in {data_dir}. Give the master's --data-dir.")
    lock = journal_schema.DirectoryLock(data_dir, "")
    try:
        journal_schema.check_header(path)
        if what := _log_damage(path, log):
            kept = log.with_name(f"{log.name}.damaged")
            shutil.copyfile(log, kept)
            _sync(kept)
            journal_segments.sync_directory(data_dir)
            yield f"{what}; the log is kept as {kept}"
        with contextlib.closing(journal_schema.connect_writer(path)) as writer:
            journal_schema.migrate(writer)
            journal_schema.empty_log(writer)
            for table, key, what in list(_lost(data_dir)):
                if table != "outcome":
                    writer.execute(f"DELETE FROM {table} WHERE task_id = ?", (key,))  # noqa: S608  # one of ours
                yield what
    finally:
        lock.release()


def _lost(data_dir: Path) -> list[tuple[str, int, str]]:
    reads = JournalReads(data_dir)
    try:
        return list(reads.lost())
    finally:
        reads.close_readers()


def _log_damage(path: Path, log: Path) -> str:
    if not log.exists():
        return ""
    with contextlib.closing(journal_schema.connect_reader(path)) as reader:
        reader.execute("SELECT count(*) FROM sqlite_master").fetchall()
        return journal_log.damage(log, path.with_name(f"{DATABASE_NAME}-shm"), journal_schema.PAGE_BYTES)


def _segments(data_dir: Path) -> set[str]:
    """The files that rows may refer to, as they are called below the directory."""
    own = (data_dir / journal_segments.DIRECTORY_NAME).glob("[0-9a-f]" * 8)
    shared = [path for path in (data_dir / payloads.DIRECTORY_NAME).glob("*") if NAME.fullmatch(path.name)]
    return {str(path.relative_to(data_dir)) for path in (*own, *shared)}


def _segment_of(reference: str) -> str:
    directory = payloads.DIRECTORY_NAME if payloads.is_shared(reference) else journal_segments.DIRECTORY_NAME
    return f"{directory}/{reference.partition(':')[0]}"


def _copy(source: Path, target: Path) -> None:
    """Copies a segment that is not there yet, or has grown. One that is gone has no use any more."""
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if not target.exists() or target.stat().st_size < source.stat().st_size:
            shutil.copyfile(source, target)
            target.chmod(0o600)
            _sync(target)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
