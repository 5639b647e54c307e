"""A journal of every released schema opens, holds what it held, and has the schema of a new one afterwards.

`released/schema_N.sql` is the dump of a journal on which a master of that schema was killed: settled tasks, a dead
letter, tasks of a paused queue, and a known worker.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from multigpu_master.journal.sqlite.schema import APPLICATION_ID, DATABASE_NAME, SCHEMA_VERSION

from tests.master.journal.test_journal import opened

RELEASED = Path(__file__).parent / "released"
VERSIONS = sorted(int(file.stem.removeprefix("schema_")) for file in RELEASED.glob("schema_*.sql"))


def restore(version: int, data_dir: Path) -> Path:
    data_dir.mkdir()
    database = data_dir / DATABASE_NAME
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA page_size = 8192")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.executescript((RELEASED / f"schema_{version}.sql").read_text())
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
    return database


def schema(database: Path) -> tuple[list[tuple[str, str, str]], int]:
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY type, name").fetchall()
        ((version,),) = connection.execute("PRAGMA user_version").fetchall()
    return rows, version


def test_there_is_a_journal_of_every_schema_before_this_one() -> None:
    assert list(range(1, SCHEMA_VERSION)) == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_journal_of_an_older_schema_opens_and_holds_what_it_held(version: int, tmp_path: Path) -> None:
    database = restore(version, tmp_path / "old")
    with opened(tmp_path / "old") as it:
        waiting = [(task.request_id, task.payload) for task in it.tasks]
        assert waiting == [("queued-0", b"queued 0"), ("queued-1", b"queued 1"), ("queued-2", b"queued 2")]
        assert {"queue/night", "worker/vm-cpu-0"} <= set(it.recovered.settings)
        (done,) = it.journal.read_settled([it.journal.find_requests(["done"])["done"]], 0)
        assert b"hello" in (done.body or b"")
        assert it.journal.newest_cursor() == 4
    with opened(tmp_path / "new"):
        pass
    assert schema(database) == schema(tmp_path / "new" / DATABASE_NAME)
