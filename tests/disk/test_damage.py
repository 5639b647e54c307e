"""A bit of a large payload or body that turned on the disk, long after it was synced, is noticed and never served."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from multigpu_master.errors import JournalError
from multigpu_master.journal.protocol import Entry, SettleRecord, SubmitRecord
from multigpu_master.journal.sqlite import schema as journal_schema
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.journal.sqlite.segments import LARGE_BYTES

TASK, ENDED = 1, 2


@contextmanager
def opened(data_dir: Path) -> Iterator[SqliteJournal]:
    journal = SqliteJournal(data_dir, size_max_bytes=1 << 30)
    journal.open(lambda *_: None)
    try:
        yield journal
    finally:
        journal.close(20)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A journal with a task whose payload is large and an outcome whose body is, each in a segment of its own."""
    with opened(tmp_path / "data") as journal:
        journal.append(Entry(submits=[SubmitRecord(TASK, "", b"", b"in" * LARGE_BYTES, "", 1, 0.0)]))
        body = b"out" * LARGE_BYTES
        journal.append(Entry(settles=[SettleRecord(ENDED, "", 1, "", "", "", "", 0.0, 0.0, 1e12, body, None)]))
    return tmp_path / "data"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 100_000, -1])
def test_a_flipped_bit_is_noticed(data_dir: Path, at: int) -> None:
    for segment in (data_dir / "segments").iterdir():
        flip(segment, at)
    with opened(data_dir) as journal:
        with pytest.raises(JournalError, match=r"damaged: .*not those that were written.*Restore"):
            list(journal.recover_tasks())
        ended = journal.get_outcome(ENDED)
        assert ended is not None and ended.body is None
        assert "not those that were written" in ended.lost


def test_a_reference_to_other_bytes_is_noticed(data_dir: Path) -> None:
    with closing(sqlite3.connect(data_dir / journal_schema.DATABASE_NAME)) as database:
        database.execute("UPDATE outcome SET body = replace(body, ':0:', ':1:')")
        database.commit()
    with opened(data_dir) as journal:
        ended = journal.get_outcome(ENDED)
        assert ended is not None and "segment is too short" in ended.lost
