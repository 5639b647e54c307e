"""Starts of a journal whose write-ahead log was deleted."""

import errno
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
from multigpu_master.errors import JournalDamagedError, JournalError
from multigpu_master.journal.sqlite import directory
from multigpu_master.journal.sqlite import schema as journal_schema
from multigpu_master.journal.sqlite.backup import backup, salvage

from tests.master.journal.journals import CHECKS, opened
from tests.master.journal.test_journal_faults import snapshot


def leave_open(data_dir: Path) -> None:
    """A master writes two tasks and is killed."""
    code = (
        "import os, sys, time; from pathlib import Path; from tests.master.journal.journals import *\n"
        "j = SqliteJournal(Path(sys.argv[1]), size_max_bytes=1 << 30)\n"
        "list(j.open(lambda *_: os._exit(0)).tasks)\n"
        "j.append(Entry(submits=[submit(1), submit(2)]))\n"
        "time.sleep(30)"
    )
    subprocess.run([sys.executable, "-c", code, data_dir], check=True, timeout=400)


def test_a_deleted_log_is_reported_and_salvage_goes_on_without_it(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    leave_open(data_dir)
    (data_dir / "journal.sqlite3-wal").unlink()
    (data_dir / "journal.sqlite3-shm").unlink()
    before = snapshot(data_dir)
    for _ in range(2):
        with pytest.raises(JournalDamagedError, match=r"journal\.sqlite3-wal is missing.*salvage"), opened(data_dir):
            pass
        assert snapshot(data_dir) == before
    (line,) = salvage(data_dir, CHECKS)
    assert "newest transactions" in line
    with opened(data_dir) as (journal, _):
        assert list(journal.recover_tasks()) == []
    assert not list(salvage(data_dir, CHECKS))


@pytest.mark.parametrize("kept", ["header", "all but a byte"])
def test_a_log_that_was_cut_is_reported_and_salvage_goes_on_without_the_rest(tmp_path: Path, kept: str) -> None:
    """At the end of a transaction as well, where SQLite finds nothing wrong."""
    data_dir = tmp_path / "data"
    leave_open(data_dir)
    log = data_dir / "journal.sqlite3-wal"
    os.truncate(log, 32 if kept == "header" else log.stat().st_size - 1)
    before = snapshot(data_dir)
    with pytest.raises(JournalDamagedError, match=r"journal\.sqlite3-wal was cut: .*frames.*salvage"), opened(data_dir):
        pass
    assert snapshot(data_dir) == before
    (line,) = salvage(data_dir, CHECKS)
    assert "was cut" in line
    with opened(data_dir) as (journal, _):
        assert list(journal.recover_tasks()) == []


def test_a_journal_without_a_log_that_lacks_nothing_starts(tmp_path: Path) -> None:
    """One that was closed, a backup, and one that an older release has opened and closed since."""
    data_dir = tmp_path / "data"
    leave_open(data_dir)
    assert backup(data_dir, tmp_path / "copy", CHECKS) == []
    assert not (tmp_path / "copy" / "journal.sqlite3-wal").exists()
    with opened(tmp_path / "copy") as (journal, _):
        assert len(list(journal.recover_tasks())) == 2
    with opened(data_dir) as (journal, _):
        assert len(list(journal.recover_tasks())) == 2
    assert not (data_dir / "journal.sqlite3-wal").exists()
    with opened(data_dir):
        pass
    leave_open(data_dir)
    with closing(sqlite3.connect(data_dir / "journal.sqlite3", isolation_level=None)) as older_release:
        older_release.execute("INSERT INTO incarnation SELECT max(first_id) + 1, 'older', 1 FROM incarnation")
    assert not (data_dir / "journal.sqlite3-wal").exists()
    with opened(data_dir) as (journal, _):
        assert len(list(journal.recover_tasks())) == 2


def test_a_start_that_fails_keeps_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir = tmp_path / "data"
    leave_open(data_dir)
    with monkeypatch.context() as patch:
        patch.setattr(journal_schema, "begin_incarnation", mock.Mock(side_effect=OSError(errno.EIO, "broken")))
        with pytest.raises(JournalError), opened(data_dir):
            pass
    with opened(data_dir) as (journal, _):
        assert len(list(journal.recover_tasks())) == 2


def test_a_start_leaves_the_log_of_another_program_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup that opened the closed journal while a master checked it lost its log, and copied a torn database."""
    data_dir = tmp_path / "data"
    with opened(data_dir):
        pass
    with closing(sqlite3.connect(data_dir / "journal.sqlite3")) as other:

        def read_by_another(connection: sqlite3.Connection) -> bool:
            other.execute("SELECT count(*) FROM setting").fetchone()
            return left_open(connection)

        left_open = journal_schema.left_open
        monkeypatch.setattr(directory, "left_open", read_by_another)
        lock = directory.prepare(data_dir)
        assert (data_dir / "journal.sqlite3-wal").exists()
        assert (data_dir / "journal.sqlite3-shm").exists()
        lock.release()
