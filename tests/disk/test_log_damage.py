"""A bit of the write-ahead log that turned after it was synced is noticed, unless it is among the newest."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from multigpu_master.errors import JournalDamagedError
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.journal.sqlite.schema import DATABASE_NAME, PAGE_BYTES

FRAME_BYTES, HEADER_BYTES = PAGE_BYTES + 24, 32
# Commits one task after the other, and ends as kill -9 does: the log is all there is of them.
WRITER = """
import os, sys, threading
from pathlib import Path
from multigpu.v1 import task_pb2
from multigpu_master.journal.protocol import Entry, SubmitRecord
from multigpu_master.journal.sqlite.journal import SqliteJournal
SPEC = task_pb2.TaskSpec(kind="embed").SerializeToString()
committed = threading.Semaphore(0)
journal = SqliteJournal(Path(sys.argv[1]), size_max_bytes=1 << 30)
begun = journal.open(lambda *_: committed.release())
first = 1 + max([task.task_id for task in begun.tasks], default=0)
for i in range(first, first + int(sys.argv[2])):
    journal.append(Entry(submits=[SubmitRecord(i, f"request-{i}", SPEC, os.urandom(i % 7 * 3000), "", 1, 1000.0)]))
    committed.acquire()
os._exit(0)
"""
TASKS = 12


def write(data_dir: Path, tasks: int = TASKS) -> None:
    subprocess.run([sys.executable, "-c", WRITER, data_dir, str(tasks)], check=True)


def tasks_of(data_dir: Path) -> list[int]:
    journal = SqliteJournal(data_dir, size_max_bytes=1 << 30)
    try:
        return [task.task_id for task in journal.open(lambda *_: None).tasks]
    finally:
        journal.close(20)


def commits_of(log: Path) -> list[int]:
    """Where the frames begin that end a transaction."""
    data = log.read_bytes()
    starts = range(HEADER_BYTES, len(data) - FRAME_BYTES + 1, FRAME_BYTES)
    return [at for at in starts if data[at + 4 : at + 8] != bytes(4) and data[at + 8 : at + 16] == data[16:24]]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data_dir = tmp_path_factory.mktemp("killed") / "data"
    write(data_dir)
    return data_dir


def copied(killed: Path, data_dir: Path) -> tuple[Path, bytearray, list[int]]:
    """Copies the journal. The log of the copy, what is in it, and where its commits begin."""
    shutil.copytree(killed, data_dir)
    log = data_dir / (DATABASE_NAME + "-wal")
    return log, bytearray(log.read_bytes()), commits_of(log)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_flipped_bit_in_the_log_is_noticed(seed: int, killed: Path, tmp_path: Path) -> None:
    data_dir, rng = tmp_path / "data", random.Random(seed)
    log, data, (*_, before, _) = copied(killed, data_dir)
    # Of the file's header, of a frame's, or of a page.
    frame = HEADER_BYTES + rng.randrange((before - HEADER_BYTES) // FRAME_BYTES) * FRAME_BYTES
    places = range(HEADER_BYTES), range(frame, frame + 24), range(frame + 24, frame + FRAME_BYTES)
    at = rng.choice(rng.choice(places))
    data[at] ^= 1 << rng.randrange(8)
    log.write_bytes(data)
    with pytest.raises(JournalDamagedError, match=r"or more acknowledged transactions.*salvage"):
        tasks_of(data_dir)
    assert log.read_bytes() == data, "nothing was changed"


def test_a_torn_newest_transaction_is_no_damage(killed: Path, tmp_path: Path) -> None:
    for cut in (1, 4096, FRAME_BYTES - 1):
        data_dir = tmp_path / str(cut)
        log, data, (*_, last) = copied(killed, data_dir)
        torn = slice(last + FRAME_BYTES - cut, last + FRAME_BYTES)
        data[torn] = bytes(byte ^ 0xFF for byte in data[torn])
        log.write_bytes(data)
        assert tasks_of(data_dir) == list(range(1, TASKS))


def test_a_bit_of_a_torn_transaction_that_says_it_has_ended_is_no_damage(killed: Path, tmp_path: Path) -> None:
    """A frame in the middle of what was never acknowledged looks as if it ended a transaction."""
    data_dir = tmp_path / "data"
    log, data, (*_, before, last) = copied(killed, data_dir)
    assert before + FRAME_BYTES < last, "it has more than one frame"
    data[before + FRAME_BYTES + 7] ^= 32
    log.write_bytes(data)
    assert tasks_of(data_dir) == list(range(1, TASKS))


def test_a_torn_end_of_log_of_an_earlier_master_is_not_damage(killed: Path, tmp_path: Path) -> None:
    """The transactions of the next master lie before it, in the same log, and end anywhere in it."""
    for seed in range(6):
        data_dir = tmp_path / str(seed)
        log, data, (*_, before, last) = copied(killed, data_dir)
        # The newest transaction is torn in its first frame, and the rest of it was written.
        first = before + FRAME_BYTES
        assert first < last, "it has more than one frame"
        data[first + 100] ^= 1
        log.write_bytes(data)
        write(data_dir, 1 + seed % 3)
        (data_dir / (DATABASE_NAME + "-shm")).unlink()
        assert tasks_of(data_dir) == list(range(1, TASKS + 1 + seed % 3))


def test_a_log_without_its_database_is_not_taken_for_a_new_one(killed: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    shutil.copytree(killed, data_dir)
    (data_dir / DATABASE_NAME).unlink()
    with pytest.raises(Exception, match=r"journal.sqlite3-wal of that journal .* Move the whole directory away"):
        tasks_of(data_dir)
    assert not (data_dir / DATABASE_NAME).exists()
