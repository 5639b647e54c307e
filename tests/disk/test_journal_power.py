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
from tests.disk.journal_process import EXIT_FATAL
from tests.disk.journal_trial import JournalTrial, run_journal
from tests.disk.layer import Layer
from tests.disk.truth import Contents, Truth

pytestmark = pytest.mark.skipif(bool(disk_layer.missing()), reason=disk_layer.missing())
IMAGES = 20  # disks that are looked at where one moment is at stake


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: nothing here ever needs a real sync."""
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
    """Loses the power where the log ends, and looks at what may be left. LostError: something acknowledged isn't."""
    said = next(record.inode for record in log if record.one == b"said")
    for record in log:
        disk.apply(record)
        if record.inode == said and record.one.startswith(b"{"):
            truth.hear(record.one)
    for _ in range(IMAGES):
        disk.lost_power().write(root)
        truth.check(root / "data")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nothing_acknowledged_is_lost_when_the_power_is(folder: Path) -> None:
    seed = int(os.environ.get("DISK_SEED", "0")) or random.randrange(1, 2**32)
    print(f"DISK_SEED={seed}")
    figures = JournalTrial(folder, seed).run(cuts=60, cuts_per_run=15)
    assert not figures.lost, f"DISK_SEED={seed}"
    assert figures.cuts >= 60
    assert figures.acknowledged > 100


def test_the_model_is_of_this_disk(root: Path, folder: Path) -> None:
    # Had the layer missed a call, what it logged would not come to what lies there.
    disk = Disk(root, random.Random(1))
    with Layer(root, folder / "log") as layer:
        assert run_journal(layer, root, 1, 150) == 0
        assert layer.read("syncs") > 50
    for record in read_log(folder / "log"):
        disk.apply(record)
    there = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert disk.seen().files == {name: data for name, data in there.items() if not name.endswith("-shm")}


def test_a_new_directory_is_still_there_after_a_loss_of_power(root: Path, folder: Path) -> None:
    disk = Disk(root, random.Random(1))
    with Layer(root, folder / "log") as layer:
        assert run_journal(layer, root, 1, 20) == 0
    check_after(disk, list(read_log(folder / "log")), Truth(Contents()), root)


@pytest.mark.slow
@pytest.mark.parametrize("nth", [8, 30])
def test_what_a_failed_sync_left_in_memory_is_no_ground_to_build_on(root: Path, folder: Path, nth: int) -> None:
    # The kernel shows the next master a log that is not on the disk, and never writes it by itself.
    disk = Disk(root, random.Random(nth))
    with Layer(root, folder / "log") as layer:
        # The sync of a checkpoint, which has nothing to write, may fail: SQLite goes on then.
        codes: list[int] = []
        while EXIT_FATAL not in codes:
            assert len(codes) < 5
            layer.schedule(match="-wal", eio_sync_in=nth + len(codes))
            codes.append(run_journal(layer, root, 1, 300))
        layer.heal()
        assert run_journal(layer, root, 2, 5) == 0
    log = list(read_log(folder / "log"))
    assert any(record.op == SYNC_FAILED for record in log)
    opened = next(i for i, r in reversed(list(enumerate(log))) if b'"opened"' in r.one)
    check_after(disk, log[: opened + 1], Truth(Contents()), root)


@pytest.mark.slow
def test_a_journal_is_not_begun_without_a_write_ahead_log(root: Path, folder: Path) -> None:
    # SQLite answers "delete" then, and raises nothing; its commits would not outlive a loss of power.
    with Layer(root, folder / "log") as layer:
        assert run_journal(layer, root, 1, 1) == 0
    log = list(read_log(folder / "log"))
    (root / "data").rename(folder / "first")
    syncs = sum(record.op == SYNC_BEGIN for record in log[: [record.op for record in log].index(RENAME)])
    began = {"wal": 0, "rejected": 0}
    for nth in range(1, syncs + 1):
        shutil.rmtree(root / "data", ignore_errors=True)
        (folder / "log").unlink()
        with Layer(root, folder / "log") as layer:
            layer.schedule(eio_sync_in=nth)
            code = run_journal(layer, root, 1, 1)
            assert layer.read("faults") == 1
        path = root / "data" / journal_schema.DATABASE_NAME
        assert code in (0, EXIT_FATAL)
        if code == 0:
            assert path.read_bytes()[18:20] == b"\2\2", f"sync {nth} failed, and the journal has no write-ahead log"
        began["wal" if code == 0 else "rejected"] += 1
    assert began["rejected"] > 0


def test_a_header_torn_while_the_log_has_it_whole_does_no_harm(tmp_path: Path) -> None:
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
