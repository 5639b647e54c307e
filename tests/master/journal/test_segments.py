"""The journal's own segments, when a file can't be made or is gone."""

import contextlib
import errno
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from multigpu_master.journal.downtimes import Downtimes
from multigpu_master.journal.payload_files import Payloads
from multigpu_master.journal.sqlite import schema, segments
from multigpu_master.journal.sqlite.segments import LARGE_BYTES, Segments


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Segments]:
    """Each of these segments is closed once it has a payload."""
    made = Segments(tmp_path, Payloads(tmp_path, lambda _name: False), LARGE_BYTES)
    yield made
    made.close()


@pytest.fixture
def writer() -> Iterator[sqlite3.Connection]:
    """A database without rows."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.executescript(schema.SCHEMA)
        yield connection


def test_a_segment_is_deleted_though_the_next_one_could_not_be_made(
    own: Segments, writer: sqlite3.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as open as long as the disk was full."""
    own.put_payload(bytes(LARGE_BYTES))
    own.flush()

    def full(_directory: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(segments, "sync", full)
    with pytest.raises(OSError, match="full"):
        own.put_payload(bytes(LARGE_BYTES))
    own.abandon()
    while own.delete_unused(writer):
        pass
    assert list((tmp_path / segments.DIRECTORY_NAME).iterdir()) == []


def test_a_time_that_could_not_be_written_is_not_saved() -> None:
    downtimes = Downtimes(lambda: 1000.0)

    def full(_value: bytes) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(sqlite3.OperationalError):
        downtimes.save(0, full)
    assert downtimes.save_due()
    downtimes.save(0, lambda _value: None)
    assert not downtimes.save_due()
