"""The simulated disk (tests/disk/image.py) after a loss of power: it may lose any part of the data that was not synced,
and keeps synced data.
"""

import random
from pathlib import Path

from tests.disk.image import (
    CREATE,
    RENAME,
    SYNC_BEGIN,
    SYNC_END,
    SYNC_FAILED,
    UNLINK,
    WRITE,
    Disk,
    Record,
)  # fmt: skip

SAMPLES = 300


def record(op: int, inode: int = 0, a: int = 0, data: bytes = b"", new_name: bytes = b"", b: int = 0) -> Record:
    return Record(op, inode, a, b, data, new_name)


class Bench:
    """A disk with a file `f` of 2,000 synced bytes."""

    def __init__(self, root: Path) -> None:
        (root / "f").write_bytes(b"a" * 2000)
        self.disk = Disk(root, random.Random(7))
        self.root, self.file = root.stat().st_ino, (root / "f").stat().st_ino

    def do(self, *records: Record) -> "Bench":
        for each in records:
            self.disk.apply(each)
        return self

    def sync(self, inode: int, number: int = 1) -> "Bench":
        return self.do(record(SYNC_BEGIN, inode, number), record(SYNC_END, inode, number))

    def images(self) -> list[dict[str, bytes]]:
        return [self.disk.lost_power().files for _ in range(SAMPLES)]


def test_an_unsynced_write_may_be_lost_or_torn(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.do(record(WRITE, bench.file, 600, b"b" * 1000))
    seen = {image["f"] for image in bench.images()}
    assert b"a" * 2000 in seen
    assert b"a" * 600 + b"b" * 1000 + b"a" * 400 in seen
    # Only the sector from 1024 to 1536 is new. The write begins within the sector before it.
    assert b"a" * 1024 + b"b" * 512 + b"a" * 464 in seen
    for data in seen:
        assert data[:600] == b"a" * 600
        assert data[1600:] == b"a" * 400
        wrong = [byte for byte in data[600:1600] if byte not in b"ab"]
        assert len(wrong) <= 1, "at most one byte has a flipped bit"
    assert any(byte not in b"ab" for data in seen for byte in data)


def test_synced_data_is_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.do(record(WRITE, bench.file, 600, b"b" * 1000)).sync(bench.file)
    assert {image["f"] for image in bench.images()} == {b"a" * 600 + b"b" * 1000 + b"a" * 400}


def test_a_sync_that_never_returned_guarantees_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.do(record(WRITE, bench.file, 0, b"b"), record(SYNC_BEGIN, bench.file, 1))
    assert {image["f"][:1] for image in bench.images()} >= {b"a", b"b"}


def test_data_lost_by_a_failed_sync_is_not_restored_by_a_later_one(tmp_path: Path) -> None:
    ends = set()
    for seed in range(30):
        bench = Bench(tmp_path)
        bench.disk._rng = random.Random(seed)
        bench.do(record(WRITE, bench.file, 0, b"b" * 512), record(SYNC_FAILED, bench.file, 1)).sync(bench.file, 2)
        images = {image["f"][:512] for image in bench.images()}
        assert len(images) == 1, "the failed sync determines the contents"
        ends |= images
    assert {b"a" * 512, b"b" * 512} <= ends


def test_a_new_name_is_kept_only_if_its_directory_is_synced(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.do(record(CREATE, 99, bench.root, b"g"), record(WRITE, 99, 0, b"data")).sync(99)
    assert {image.get("g") for image in bench.images()} == {None, b"data"}
    bench.sync(bench.root, 2)
    assert {image.get("g") for image in bench.images()} == {b"data"}


def test_a_renamed_file_has_one_of_its_names(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.do(record(RENAME, bench.file, bench.root, b"f", b"g", b=bench.root))
    assert {tuple(image) for image in bench.images()} == {("f",), ("g",)}
    bench.sync(bench.root)
    assert {tuple(image) for image in bench.images()} == {("g",)}


def test_a_deleted_file_may_come_back_even_if_its_inode_is_used_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.do(record(UNLINK, 0, bench.root, b"f"), record(CREATE, bench.file, bench.root, b"g"))
    bench.do(record(WRITE, bench.file, 0, b"new")).sync(bench.file)
    images = bench.images()
    assert {image.get("f") for image in images} == {None, b"a" * 2000}
    assert {image.get("g") for image in images} == {None, b"new"}
