"""The journal on a disk that loses power, fills up and fails. `python -m tests.disk` is the long form."""

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from multigpu_master.journal.sqlite import schema as journal_schema
from multigpu_master.journal.sqlite.journal import SqliteJournal

from tests.disk import layer as disk_layer
from tests.disk.image import RENAME, SYNC_BEGIN, SYNC_FAILED, Disk, Record, read_log
from tests.disk.journal_process import EVENTS_NAME, EXIT_FATAL
from tests.disk.journal_trial import JournalTrial, run_journal
from tests.disk.layer import FaultInjector
from tests.disk.truth import Contents, Truth

pytestmark = pytest.mark.skipif(bool(disk_layer.missing_requirement()), reason=disk_layer.missing_requirement())
SAMPLES = 20  # disk images per crash point


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A directory in /dev/shm if there is one: these tests need no real sync."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="disk-", dir=memory))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def root(folder: Path) -> Path:
    (folder / "root").mkdir()
    return folder / "root"


def check_after(disk: Disk, log: list[Record], truth: Truth, root: Path) -> None:
    """Checks possible disk images at the end of the log. LostError: an acknowledged entry is missing."""
    events_inode = next(record.inode for record in log if record.data == EVENTS_NAME.encode())
    for record in log:
        disk.apply(record)
        if record.inode == events_inode and record.data.startswith(b"{"):
            truth.observe(record.data)
    for _ in range(SAMPLES):
        disk.lost_power().write(root)
        truth.check(root / "data")


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_when_the_power_is(folder: Path) -> None:
    seed = int(os.environ.get("DISK_SEED", "0")) or random.randrange(1, 2**32)
    print(f"DISK_SEED={seed}")
    figures = JournalTrial(folder, seed).run(cuts=60, cuts_per_run=15)
    assert not figures.lost, f"DISK_SEED={seed}"
    assert figures.cuts >= 60
    assert figures.acknowledged > 100


def test_replaying_the_log_reproduces_the_directory(root: Path, folder: Path) -> None:
    # Replaying the log must reproduce the directory.
    disk = Disk(root, random.Random(1))
    with FaultInjector(root, folder / "log") as layer:
        assert run_journal(layer, root, 1, 150) == 0
        assert layer.read("syncs") > 50
    for record in read_log(folder / "log"):
        disk.apply(record)
    files = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert disk.cached_view().files == {name: data for name, data in files.items() if not name.endswith("-shm")}


def test_a_process_sees_whether_the_disk_has_room(root: Path, folder: Path) -> None:
    """The layer ended a master that asked for it, by a file without a name."""
    code = f"from multigpu_master.journal.sqlite.failures import _has_no_room as full; print(full({str(root)!r}))"
    with FaultInjector(root, folder / "log") as layer:
        command, env = [sys.executable, "-c", code], os.environ | layer.env
        assert subprocess.check_output(command, env=env, text=True) == "False\n"
        layer.schedule(room_bytes=0)
        assert subprocess.check_output(command, env=env, text=True) == "True\n"


def test_a_new_directory_is_still_there_after_a_loss_of_power(root: Path, folder: Path) -> None:
    disk = Disk(root, random.Random(1))
    with FaultInjector(root, folder / "log") as layer:
        assert run_journal(layer, root, 1, 20) == 0
    check_after(disk, list(read_log(folder / "log")), Truth(Contents()), root)


@pytest.mark.slow
@pytest.mark.parametrize("nth", [8, 30])
def test_a_new_master_does_not_rely_on_a_log_whose_sync_failed(root: Path, folder: Path, nth: int) -> None:
    # The page cache has a log that is not on the disk, and the kernel never retries the write.
    disk = Disk(root, random.Random(nth))
    with FaultInjector(root, folder / "log") as layer:
        # SQLite tolerates a failed sync of a checkpoint that wrote nothing: repeat until another sync fails.
        codes: list[int] = []
        while EXIT_FATAL not in codes:
            assert len(codes) < 5
            layer.schedule(match="-wal", eio_sync_in=nth + len(codes))
            codes.append(run_journal(layer, root, 1, 300))
        layer.heal()
        assert run_journal(layer, root, 2, 5) == 0
    log = list(read_log(folder / "log"))
    assert any(record.op == SYNC_FAILED for record in log)
    opened = next(i for i, r in reversed(list(enumerate(log))) if b'"opened"' in r.data)
    check_after(disk, log[: opened + 1], Truth(Contents()), root)


@pytest.mark.slow
def test_a_journal_is_not_begun_without_a_write_ahead_log(root: Path, folder: Path) -> None:
    # After such a failure SQLite silently uses the mode "delete", whose commits would not survive a loss of power.
    with FaultInjector(root, folder / "log") as layer:
        assert run_journal(layer, root, 1, 1) == 0
    log = list(read_log(folder / "log"))
    (root / "data").rename(folder / "first")
    syncs = sum(record.op == SYNC_BEGIN for record in log[: [record.op for record in log].index(RENAME)])
    began = {"wal": 0, "rejected": 0}
    for nth in range(1, syncs + 1):
        shutil.rmtree(root / "data", ignore_errors=True)
        (folder / "log").unlink()
        with FaultInjector(root, folder / "log") as layer:
            layer.schedule(eio_sync_in=nth)
            code = run_journal(layer, root, 1, 1)
            assert layer.read("faults") == 1
        path = root / "data" / journal_schema.DATABASE_NAME
        assert code in (0, EXIT_FATAL)
        if code == 0:
            assert path.read_bytes()[18:20] == b"\2\2", f"sync {nth} failed, and the journal has no write-ahead log"
        began["wal" if code == 0 else "rejected"] += 1
    assert began["rejected"] > 0


def test_a_torn_header_is_restored_from_the_log(tmp_path: Path) -> None:
    data = tmp_path / "data"
    code = (
        "import os, sys; from pathlib import Path; from multigpu_master.journal.protocol import Entry, SubmitRecord; "
        "from multigpu_master.journal.sqlite.journal import SqliteJournal; "
        "j = SqliteJournal(Path(sys.argv[1]), size_max_bytes=1 << 30); j.open(lambda *_: os._exit(0)); "
        "j._writer.execute('CREATE TABLE unused (x)'); "  # so that the first page is in the log
        "j.append(Entry(submits=[SubmitRecord(1, '', b'', b'', '', 1, 0.0)])); j.close(10)"
    )
    subprocess.run([sys.executable, "-c", code, data], check=True)
    path = data / journal_schema.DATABASE_NAME
    whole = bytearray(path.read_bytes())
    whole[63] ^= 1  # of the schema version
    whole[70] ^= 1  # of the application id
    path.write_bytes(whole)
    journal = SqliteJournal(data, size_max_bytes=1 << 30)
    assert [task.task_id for task in journal.open(lambda *_: None).tasks] == [1]
    journal.close(10)
