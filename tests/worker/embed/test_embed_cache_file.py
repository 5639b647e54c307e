"""The embedding cache's file: what outlives an engine, and what becomes of files that are not what they should be."""

import fcntl
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from multigpu_worker.engines.base import EmbeddingCacheSettings
from multigpu_worker.engines.embed import cache_file as embed_cache_file
from multigpu_worker.engines.embed.cache import EmbedCache
from multigpu_worker.engines.embed.cache_file import CacheFile, CacheFileError, Row, check_cache_file
from structlog.testing import capture_logs

FAILS = "the embedding cache's file fails: vectors are not kept"
WORKS = "the embedding cache's file works again"
DAMAGED = "the embedding cache's file was damaged: a new one is begun"


def rows_of(*names: str, vector: bytes = bytes(1536)) -> list[Row]:
    return [Row(name.encode().ljust(32), time.time(), vector) for name in names]


def keys_of(rows: list[Row]) -> set[bytes]:
    return {row.key for row in rows}


def find(file: CacheFile, rows: list[Row]) -> list[Row]:
    return file.find([row.key for row in rows])


def put(file: CacheFile, rows: list[Row]) -> None:
    """Put rows, and wait until they are written."""
    file.put(rows)
    assert file.flush()


def vectors(n: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).random((n, 384), dtype=np.float32)


def open_file(path: Path, entries: int = 1000, bytes_max: int = 1 << 30) -> CacheFile:
    return CacheFile(path, entries=entries, bytes_max=bytes_max, ttl_s=0)


def test_workers_share_a_file(tmp_path: Path) -> None:
    first, second = open_file(tmp_path / "c.db"), open_file(tmp_path / "c.db")
    names = [f"{writer}-{n}" for writer in "ab" for n in range(500)]

    def write(file: CacheFile, part: list[str]) -> None:
        for name in part:
            file.put(rows_of(name))

    with capture_logs() as logs:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(write, (first, second), (names[::2], names[1::2])))
        assert first.flush()
        assert second.flush()
        keys = [row.key for row in rows_of(*names)]
        assert keys_of(first.find(keys)) == keys_of(second.find(keys)) == set(keys)
        first.close()
        second.close()
    assert logs == []
    assert (tmp_path / "c.db").stat().st_mode & 0o777 == 0o600


def test_file_evicts_the_oldest_rows(tmp_path: Path) -> None:
    file = open_file(tmp_path / "c.db", entries=50)
    names = [f"n{n}" for n in range(200)]
    for name in names:
        put(file, rows_of(name))
    assert keys_of(find(file, rows_of(*names))) == keys_of(rows_of(*names[150:]))
    file.close()
    small = open_file(tmp_path / "small.db", bytes_max=1 << 20)
    for at in range(0, 4000, 100):
        put(small, rows_of(*(f"n{n}" for n in range(at, at + 100))))
    small.close()
    with sqlite3.connect(tmp_path / "small.db") as db:
        kept = db.execute("SELECT count(*) FROM vectors").fetchone()[0]
    assert 400 < kept < 700
    assert (tmp_path / "small.db").stat().st_size < 2 << 20


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(b"\x2a" * 100)
    content[at + 50] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a bit of a vector": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:40_000]),
    "overwritten": lambda path: path.write_bytes(path.read_bytes()[:16_384] + b"\xff" * 200_000),
    "its head is gone": lambda path: path.write_bytes(bytes(100) + path.read_bytes()[100:]),
    "of another kind": lambda path: path.write_bytes(b"\x80\x04\x95 a pickle of somebody's"),
}


def full_file(folder: Path) -> tuple[Path, list[Row]]:
    """A closed file, and what is in it."""
    rows = rows_of(*(f"n{n}" for n in range(100)), vector=b"\x2a" * 1536)
    file = open_file(folder / "c.db")
    file.put(rows)
    file.close()
    return folder / "c.db", rows


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_damaged_file_is_replaced_with_a_warning(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    path, rows = full_file(tmp_path)
    damage(path)
    with capture_logs() as logs:
        file = open_file(path)
        found = find(file, rows)
        put(file, rows[:1])
        put(file, rows[:5])
    assert found == []
    assert [log["event"] for log in logs] == [DAMAGED]
    assert (tmp_path / "c.db.damaged").exists()
    assert keys_of(find(file, rows)) == keys_of(rows[:5])
    file.close()


def test_shared_damaged_file_is_replaced_once(tmp_path: Path) -> None:
    path, rows = full_file(tmp_path)
    flip(path)
    with capture_logs() as logs:
        first, second = open_file(path), open_file(path)
        keys = [row.key for row in rows]
        assert first.find(keys) == []
        put(first, rows[:3])
        assert second.find(keys) == []
        assert second.flush()
        assert len(second.find(keys)) == 3  # of the new file
        first.close()
        second.close()
    assert len(logs) == 2


def test_unusable_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match="no folder"):
        check_cache_file(tmp_path / "gone" / "c.db")
    with pytest.raises(CacheFileError, match="can't be opened"):
        check_cache_file(tmp_path)
    foreign = tmp_path / "journal.db"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE tasks (id INTEGER)")
    before = foreign.read_bytes()
    with pytest.raises(CacheFileError, match="another program's database"):
        check_cache_file(foreign)
    assert foreign.read_bytes() == before
    check_cache_file(tmp_path / "new.db")
    check_cache_file(tmp_path / "new.db")
    with sqlite3.connect(tmp_path / "new.db") as db:
        db.execute(f"PRAGMA user_version = {embed_cache_file.FORMAT + 1}")
    with pytest.raises(CacheFileError, match=r"another version made it, in format 2, .* delete it"):
        check_cache_file(tmp_path / "new.db")


def test_full_disk_costs_only_vectors_and_a_warning(tmp_path: Path) -> None:
    cache = EmbedCache(EmbeddingCacheSettings(entries=1000, file=str(tmp_path / "c.db")))
    assert cache.file is not None
    assert cache.file._writer is not None
    cache.file._writer.execute("PRAGMA max_page_count = 8")
    keys = [b"%032d" % i for i in range(200)]
    with capture_logs() as logs:
        for at in (0, 100):
            cache.put(keys[at : at + 100], vectors(100))
            assert cache.file.flush()
        assert len(cache.find(keys)) == 200
        cache.file._writer.execute("PRAGMA max_page_count = 100000")
        cache.put(keys[:1], vectors(1))
        assert cache.file.flush()
    assert [log["event"] for log in logs] == [FAILS, WORKS]
    assert "full" in logs[0]["problem"]
    cache.close()


@pytest.mark.parametrize("by", ["nobody", "another worker"])
def test_deleted_file_is_created_again(tmp_path: Path, by: str) -> None:
    path, rows = tmp_path / "c.db", rows_of("a", "b", "c")
    file = open_file(path)
    put(file, rows[:1])
    path.unlink()
    others = [open_file(path)] if by == "another worker" else []
    for other in others:
        put(other, rows[1:2])
    put(file, rows[2:])
    others.append(open_file(path))
    expected = keys_of(rows[2:] if by == "nobody" else rows[1:])
    for each in (file, *others):
        assert keys_of(find(each, rows)) == expected
        each.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_moving_a_damaged_file_aside_is_retried(tmp_path: Path) -> None:
    path, rows = tmp_path / "c.db", rows_of("a", "b", "c")
    path.write_bytes(b"no database" * 1000)
    aside = tmp_path / "c.db.damaged"
    aside.mkdir()
    with pytest.raises(CacheFileError, match=r"can't be opened .*Is a directory"):
        check_cache_file(path)
    with capture_logs() as logs:
        file = open_file(path)
        for row in rows[:2]:
            put(file, [row])
            assert file.find([row.key]) == []
        assert [log["event"] for log in logs] == [FAILS]
        aside.rmdir()
        put(file, rows[2:])
    assert [log["event"] for log in logs] == [FAILS, DAMAGED, WORKS]
    assert find(file, rows) == rows[2:]
    file.close()


def test_file_that_cannot_be_opened_at_the_start_is_retried(tmp_path: Path) -> None:
    path = tmp_path / "there later" / "c.db"
    keys = [b"%032d" % i for i in range(3)]
    with capture_logs() as logs:
        cache = EmbedCache(EmbeddingCacheSettings(entries=10, file=str(path)))
        assert cache.file is not None
        cache.put(keys[:1], vectors(1))
        assert cache.file.flush()
        assert set(cache.find(keys)) == set(keys[:1])
        path.parent.mkdir()
        cache.put(keys[1:2], vectors(1))
        assert cache.file.flush()
    assert [log["event"] for log in logs] == [FAILS, WORKS]
    cache.close()
    again = EmbedCache(EmbeddingCacheSettings(entries=10, file=str(path)))
    assert set(again.find(keys)) == set(keys[1:2])
    again.close()


def test_a_stopped_process_with_the_lock_or_a_lookup_without_memory_costs_only_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rows = tmp_path / "c.db", rows_of("a")
    monkeypatch.setattr(embed_cache_file, "BUSY_S", 0.05)
    with (tmp_path / "c.db.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = open_file(path)
        assert "another process has held" in file.trouble
    put(file, rows)
    assert file.find([rows[0].key]) == rows
    file.close()
    file = open_file(tmp_path / "d.db")
    put(file, rows)

    def short(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(embed_cache_file, "_select", short)
        assert file.find([rows[0].key]) == []
    assert [log["problem"] for log in logs] == ["MemoryError"]
    assert file.find([rows[0].key]) == rows
    file.close()


def test_rows_from_the_future_expire_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_cache_file, "EXPIRED_PER_WRITE", 3)
    file = CacheFile(tmp_path / "c.db", entries=100, bytes_max=1 << 30, ttl_s=3600)
    ahead = [row._replace(stored_s=row.stored_s + 1e6) for row in rows_of("a", "b", "c")]
    old = [row._replace(stored_s=row.stored_s - 1e6) for row in rows_of("d", "e", "f")]
    fresh = rows_of("g", "h", "i")
    for row in [*ahead, *old, *fresh]:
        put(file, [row])
    assert keys_of(find(file, [*ahead, *old, *fresh])) == keys_of(fresh)
    file.close()


LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x4000_0002)
"""


def test_file_opened_twice_in_a_process_keeps_its_locks(tmp_path: Path) -> None:
    """SQLite's on the bytes that whoever reads shares (its file format, "File Locking"): to close any descriptor of a
    file takes a process's locks on it away.
    """
    path = tmp_path / "c.db"
    first = open_file(path)
    first.find([b"a" * 32])
    second = open_file(path)
    taken = subprocess.run([sys.executable, "-c", LOCK, str(path)], capture_output=True, timeout=60, check=False)
    assert b"BlockingIOError" in taken.stderr
    second.close()
    first.close()


WRITER = """
import sys, time
from pathlib import Path
from multigpu_worker.engines.embed.cache_file import CacheFile, Row
file = CacheFile(Path(sys.argv[1]), entries=100_000, bytes_max=1 << 30, ttl_s=0)
for n in range(100_000):
    file.put([Row(b"%032d" % n, time.time(), b"\x2a" * 1536)])
    file.flush()
    print(n, flush=True)
    time.sleep(0.002)  # SQLite's lock is not fair
"""


def test_killed_writer_does_not_harm_others(tmp_path: Path) -> None:
    path, rows = tmp_path / "c.db", rows_of(*(f"n{n}" for n in range(60)))
    with capture_logs() as logs:
        file = open_file(path)
        for part in range(3):
            with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
                assert writer.stdout is not None
                for row in rows[part * 20 : part * 20 + 20]:
                    assert writer.stdout.readline()
                    put(file, [row])
                writer.kill()
        known = file.find([b"%032d" % n for n in range(20)])
        assert keys_of(find(file, rows)) == keys_of(rows)
        file.close()
    assert len(known) == 20
    assert logs == []
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
