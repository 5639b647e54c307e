"""Copies of a journal, also while it is written to, and what can be saved of a damaged one."""

import errno
import gc
import os
import resource
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from multigpu_master.errors import JournalError
from multigpu_master.ids import first_id
from multigpu_master.journal.protocol import Entry
from multigpu_master.journal.sqlite import backup as journal_backup
from multigpu_master.journal.sqlite import connections
from multigpu_master.journal.sqlite.backup import backup, salvage
from multigpu_master.journal.sqlite.schema import DATABASE_NAME, PAGE_BYTES
from multigpu_master.journal.sqlite.segments import LARGE_BYTES
from multigpu_master.main import main

from tests.disk.test_log_damage import commits_of, tasks_of, write
from tests.master.journal.journals import CHECKS, dead, opened, settle, submit


def test_a_backup_goes_into_a_directory_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "data", 3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for source, target, words in (("data", "full", "not empty"), ("absent", "copy", "no journal in")):
        with pytest.raises(JournalError, match=words):
            backup(tmp_path / source, tmp_path / target, CHECKS)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("file", "can't be made or used: File exists.* Give a new directory"),
        ("file/copy", "can't be made or used: Not a directory.* Give a new directory"),
        ("loop/copy", "can't be made or used: .*Give a new directory"),
        ("data", "is in the data directory"),
        ("data/copy", "is in the data directory"),
        ("link/copy", "is in the data directory"),
    ],
)
def test_a_target_that_is_no_good_is_rejected_in_words(target: str, words: str, tmp_path: Path) -> None:
    write(tmp_path / "data", 1)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(JournalError, match=words):
        backup(tmp_path / "data", tmp_path / target, CHECKS)
    assert not (tmp_path / "data" / "copy").exists()


def run(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["--data-dir", str(folder / "data"), *words])


def lay_large(data_dir: Path) -> None:
    """Leaves a journal with a large payload."""
    with opened(data_dir) as (journal, _):
        journal.append(Entry(submits=[submit(1, os.urandom(LARGE_BYTES)), submit(2)]))


def test_a_copy_that_cannot_be_ended_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_source: int, target: Path) -> None:
        target.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    lay_large(tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(journal_backup, "copy_file", full)
        done = run(tmp_path, "backup", str(tmp_path / "copy"))
    assert (done.exit_code, "No space left" in done.output, "To restore" in done.output) == (3, True, False)
    assert not list((tmp_path / "copy").iterdir())
    assert backup(tmp_path / "data", tmp_path / "copy", CHECKS) == []


def test_no_master_starts_from_a_backup_that_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_large(tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(journal_backup, "_clear", lambda _: None)  # as if it was killed
        patch.setattr(journal_backup, "copy_file", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backup(tmp_path / "data", tmp_path / "copy", CHECKS)
    with pytest.raises(JournalError, match="an incomplete backup"):
        tasks_of(tmp_path / "copy")


def test_a_backup_says_which_limit_of_files_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_large(tmp_path / "data")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 60))
    with pytest.raises(JournalError, match=r"takes 65 descriptors, and this process may have 60\..*ulimit -Hn"):
        backup(tmp_path / "data", tmp_path / "copy", CHECKS)


def test_a_backup_raises_its_own_limit_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_large(tmp_path / "data")
    raised = list[object]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 70))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert backup(tmp_path / "data", tmp_path / "copy", CHECKS) == []
    assert raised == [(65, 70)]


def test_what_was_lost_before_a_backup_is_listed_and_the_copy_is_kept(tmp_path: Path) -> None:
    lay_large(tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "segments")
    done = run(tmp_path, "backup", str(tmp_path / "copy"))
    assert done.exit_code == 4
    assert "not in the copy: task 1 (request_id 'request-1')" in done.output
    assert f"--data-dir {tmp_path / 'copy'} salvage" in done.output
    assert "To restore it" not in done.output
    assert len(list(salvage(tmp_path / "copy", CHECKS))) == 1
    assert tasks_of(tmp_path / "copy") == [2]


def test_a_journal_without_its_segments_is_salvaged_and_lost_payloads_are_reported(tmp_path: Path) -> None:
    large = os.urandom(LARGE_BYTES)
    data_dir = tmp_path / "data"
    with opened(data_dir) as (journal, _):
        letters = replace(dead(5, large), body=b"out"), dead(6, b"in")
        journal.append(
            Entry(submits=[submit(1, large), submit(2)]), Entry(settles=[settle(3, large, 1e10), settle(4), *letters])
        )
    shutil.rmtree(data_dir / "segments")
    with pytest.raises(JournalError, match=r"The payload of task 1 is missing.* salvage"):
        tasks_of(data_dir)
    gone = list(salvage(data_dir, CHECKS))
    assert [line.partition(":")[0] for line in gone] == [
        "task 1 (request_id 'request-1')",
        "dead letter 5 (request_id 'request-5')",
        "the outcome of task 3 (request_id 'request-3')",
    ]
    assert tasks_of(data_dir) == [2]
    assert list(salvage(data_dir, CHECKS)) == gone[2:], "a lost result stays one"
    with opened(data_dir) as (journal, _):
        assert [letter.task_id for letter in journal.list_dead_letters(queue="", before_task_id=0, limit=9)] == [6]
        assert (lost := journal.get_outcome(3)) is not None and lost.lost


def test_a_damaged_log_is_salvaged_up_to_the_damage(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    write(data_dir, 10)
    log = data_dir / f"{DATABASE_NAME}-wal"
    data = bytearray(log.read_bytes())
    data[commits_of(log)[-4] + 5000] ^= 8
    log.write_bytes(data)
    with pytest.raises(JournalError, match="salvage"):
        tasks_of(data_dir)
    (gone,) = salvage(data_dir, CHECKS)
    assert "or more acknowledged transactions" in gone
    assert (data_dir / f"{DATABASE_NAME}-wal.damaged").read_bytes() == data
    assert (data_dir / f"{DATABASE_NAME}-wal.damaged").stat().st_mode & 0o777 == 0o600
    kept = tasks_of(data_dir)
    assert kept == list(range(1, kept[-1] + 1))
    assert 0 < kept[-1] < 10
    write(data_dir, 3)
    assert tasks_of(data_dir) == list(range(1, kept[-1] + 4)), "and it is no damage any more"


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        ("UPDATE outcome SET settle_time_s = 1e11 WHERE task_id = 4", "the outcome of task 4"),
        ("UPDATE outcome SET settle_time_s = -1.0 WHERE task_id = 4", "the outcome of task 4"),
        ("UPDATE outcome SET settle_time_s = 'yesterday' WHERE task_id = 3", "the outcome of task 3"),
        ("UPDATE outcome SET state = 77 WHERE task_id = 3", "the outcome of task 3"),
        ("UPDATE outcome SET submit_time_s = 'yesterday' WHERE task_id = 4", "the outcome of task 4"),
        ("UPDATE task SET submit_time_s = 9e10 WHERE task_id = 2", "task 2"),
    ],
)
def test_rows_that_make_no_sense_are_salvaged_away_and_named(damage: str, lost: str, tmp_path: Path) -> None:
    with opened(tmp_path / "data") as (journal, _):
        journal.append(Entry(submits=[submit(1), submit(2)]), Entry(settles=[settle(3), settle(4)]))
    with closing(sqlite3.connect(tmp_path / "data" / DATABASE_NAME, isolation_level=None)) as writer:
        writer.execute(damage)
    done = run(tmp_path, "salvage")
    assert (done.exit_code, "losses: 1" in done.output) == (0, True)
    assert f"gone: {lost} (request_id 'request-{lost[-1]}')" in done.output
    with opened(tmp_path / "data") as (journal, _):
        kept = [f"task {task.task_id}" for task in journal.recover_tasks()]
        kept += [f"the outcome of task {each.task_id}" for each in journal.read_outcomes(0, 9, 1 << 20)]
    assert {*kept, lost} == {"task 1", "task 2", "the outcome of task 3", "the outcome of task 4"}
    assert len(kept) == 3
    assert list(salvage(tmp_path / "data", CHECKS)) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"worker/w1", b"{"), (b"worker/w1", b"[" * 100_000), (b"queue/x", b"[]"), (b"breaker", b"9"),
        (b"token/zz", b"{}"), (b"worker/\xff", b"{}"), (b"strategy", b"\xff"), (b"journal.time", b"yesterday"),
        (b"journal.lease_key", b"short"), (b"journal.epoch", b"new"), (b"journal.removed", b"all"),
        (b"journal.epoch", b"%d" % (1 << 62)), (b"strategy", "a text"), (b"journal.epoch", None),
    ],
)  # fmt: skip
def test_settings_that_no_master_can_use_are_salvaged_away_and_named(key: bytes, value: Any, tmp_path: Path) -> None:
    """Salvage said that a master can start, and none did. None: the setting is missing."""
    with opened(tmp_path / "data") as (journal, _):
        journal.append(Entry(submits=[submit(1)]))
    with closing(sqlite3.connect(tmp_path / "data" / DATABASE_NAME, isolation_level=None)) as writer:
        if value is None:
            writer.execute("DELETE FROM setting WHERE key = CAST(? AS TEXT)", (key,))
        else:
            writer.execute("INSERT OR REPLACE INTO setting VALUES (CAST(? AS TEXT), ?)", (key, value))
    assert any(key.decode(errors="replace") in line for line in backup(tmp_path / "data", tmp_path / "copy", CHECKS))
    done = run(tmp_path, "salvage")
    assert (done.exit_code, "losses: 1" in done.output) == (0, True), done.output
    assert f"gone: the setting {key.decode(errors='replace')!r}: " in done.output
    assert "losses: 0" in run(tmp_path, "salvage").output
    assert tasks_of(tmp_path / "data") == [1]


def test_what_only_a_master_can_parse_is_salvaged_away_and_named(tmp_path: Path) -> None:
    """A spec that could not be parsed kept the master from starting, also after salvage; a backup did not tell."""
    with opened(tmp_path / "data") as (journal, _):
        journal.append(Entry(submits=[submit(1), submit(2, spec=b"\xff\xff")]))
        journal.append(
            Entry(settles=[replace(dead(3, b""), dead=submit(3, spec=b"\xff\xff")), settle(4, b"\xff\xff", 1e12)])
        )
    copied = run(tmp_path, "backup", str(tmp_path / "copy"))
    done = run(tmp_path, "salvage")
    for output, mark in ((copied.output, "not in the copy"), (done.output, "gone")):
        for what in ("task 2", "dead letter 3", "the outcome of task 4"):
            assert f"{mark}: {what} (request_id 'request-{what[-1]}'): " in output
    assert (copied.exit_code, done.exit_code) == (4, 0)
    assert tasks_of(tmp_path / "data") == [1]


def test_salvage_without_the_database_names_what_is_left(tmp_path: Path) -> None:
    lay_large(tmp_path / "data")
    (tmp_path / "data" / DATABASE_NAME).unlink()
    done = run(tmp_path, "salvage")
    assert (done.exit_code, "is gone, but" in done.output) == (3, True), done.output


def test_salvage_puts_the_epoch_and_the_removed_cursor_beyond_what_is_in_use(tmp_path: Path) -> None:
    newest = first_id(7, 0.0) + 5
    with opened(tmp_path / "data") as (journal, _):
        journal.append(Entry(settles=[settle(1), settle(newest)]))
    with closing(sqlite3.connect(tmp_path / "data" / DATABASE_NAME, isolation_level=None)) as writer:
        writer.execute("DELETE FROM incarnation")
        writer.execute("INSERT OR REPLACE INTO setting VALUES ('journal.epoch', 'x'), ('journal.removed', 'x')")
        assert len(list(salvage(tmp_path / "data", CHECKS))) == 2
        assert writer.execute("SELECT key, value FROM setting WHERE value IN (2, 7) ORDER BY key").fetchall() == [
            ("journal.epoch", 7), ("journal.removed", 2),
        ]  # fmt: skip


def test_the_log_stays_if_no_reader_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite copied it into the database and deleted it, once the last reference to the writer was gone."""

    def none_left(_path: Path) -> sqlite3.Connection:
        raise sqlite3.OperationalError("no file descriptor is left")

    monkeypatch.setattr(connections, "connect_reader", none_left)
    monkeypatch.setattr(connections, "_left_open", left := list[sqlite3.Connection]())
    writer = connections.connect_writer(tmp_path / DATABASE_NAME)
    writer.execute("CREATE TABLE t (x)")
    connections.close_keeping_log(tmp_path / DATABASE_NAME, writer)
    del writer
    gc.collect()
    assert (tmp_path / f"{DATABASE_NAME}-wal").stat().st_size
    left.pop().close()


def test_salvage_does_not_claim_that_a_master_can_start_without_a_table(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as (journal, _):
        journal.append(Entry(submits=[submit(1)]))
    with closing(sqlite3.connect(tmp_path / "data" / DATABASE_NAME, isolation_level=None)) as writer:
        writer.execute("DROP TABLE setting")
    done = run(tmp_path, "salvage")
    assert (done.exit_code, "is damaged (no such table: setting)" in done.output) == (3, True), done.output


def test_salvage_does_not_claim_to_have_repaired_damaged_pages(tmp_path: Path) -> None:
    path = tmp_path / "data" / DATABASE_NAME
    with opened(tmp_path / "data") as (journal, _):
        journal.append(Entry(settles=[settle(i) for i in range(1, 9)]))
    with closing(sqlite3.connect(path)) as reader:
        ((page,),) = reader.execute("SELECT rootpage FROM sqlite_master WHERE name = 'outcome_task'").fetchall()
    data = bytearray(path.read_bytes())
    data[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = os.urandom(PAGE_BYTES)
    path.write_bytes(data)
    done = run(tmp_path, "salvage")
    assert (done.exit_code, f"sqlite3 {path} .recover" in done.output) == (3, True)
    assert "a master can start" not in done.output
    assert path.read_bytes() == data
    with pytest.raises(JournalError, match=r"is damaged .*\.recover"):
        tasks_of(tmp_path / "data")


def test_no_journal_is_salvaged_under_a_running_master(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(JournalError, match="held by another master"):
        list(salvage(tmp_path, CHECKS))


def test_the_commands(tmp_path: Path) -> None:
    write(tmp_path / "data", 4)
    done = run(tmp_path, "backup", str(tmp_path / "copy"))
    assert (done.exit_code, "To restore it" in done.output) == (0, True)
    assert tasks_of(tmp_path / "copy") == [1, 2, 3, 4]
    again = run(tmp_path, "backup", str(tmp_path / "copy"))
    assert (again.exit_code, "not empty" in again.output) == (3, True)
    done = run(tmp_path, "salvage")
    assert (done.exit_code, "losses: 0" in done.output) == (0, True)
    assert tasks_of(tmp_path / "data") == [1, 2, 3, 4]
