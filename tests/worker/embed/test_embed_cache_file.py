"""The embedding cache's file: what outlives an engine, and what becomes of files that are not what they should be."""

import contextlib
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from multigpu_worker.engines.base import EmbeddingCacheSettings
from multigpu_worker.engines.embed import cache_file as embed_cache_file
from multigpu_worker.engines.embed.cache_file import CacheFile, CacheFileError, Row, check_cache_file
from structlog.testing import capture_logs

FAILS = "the embedding cache's file fails"
DAMAGED = "the embedding cache's file was damaged: it is deleted, and a new one begun"


def rows_of(*names: str, vector: bytes = bytes(1536)) -> list[Row]:
    return [Row(name.encode().ljust(32), time.time(), vector) for name in names]


def keys_of(rows: list[Row]) -> set[bytes]:
    return {row.key for row in rows}


def find(file: CacheFile, rows: list[Row]) -> list[Row]:
    return file.find([row.key for row in rows])


def open_file(path: Path, **limits: Any) -> CacheFile:
    return CacheFile(EmbeddingCacheSettings(**{"entries": 1000, "bytes_max": 1 << 30} | limits, file=str(path)))


SHARER = """
import sys, time
from multigpu_worker.engines.base import EmbeddingCacheSettings
from multigpu_worker.engines.embed.cache_file import CacheFile, Row
for path in sys.argv[2:]:
    file = CacheFile(EmbeddingCacheSettings(entries=1000, file=path))
    for n in range(10):
        file.put([Row(f"{sys.argv[1]} {n}".encode().ljust(32), time.time(), bytes(1536))])
    file.close()
"""


def test_processes_share_a_file_that_none_has_created(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.db" for n in range(20)]
    sharers = [
        subprocess.Popen([sys.executable, "-c", SHARER, name, *map(str, paths)], stdout=subprocess.PIPE)
        for name in "abcd"
    ]
    assert [(sharer.communicate()[0], sharer.returncode) for sharer in sharers] == [(b"", 0)] * 4
    rows = rows_of(*(f"{name} {n}" for name in "abcd" for n in range(10)))
    for path in paths:
        file = open_file(path)
        assert keys_of(find(file, rows)) == keys_of(rows)
        file.close()
        assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_file_evicts_the_oldest_rows(tmp_path: Path) -> None:
    file = open_file(tmp_path / "c.db", entries=50)
    names = [f"n{n}" for n in range(200)]
    for name in names:
        file.put(rows_of(name))
    assert keys_of(find(file, rows_of(*names))) == keys_of(rows_of(*names[150:]))
    file.close()
    small = open_file(tmp_path / "small.db", bytes_max=1 << 20)
    for at in range(0, 4000, 100):
        small.put(rows_of(*(f"n{n}" for n in range(at, at + 100))))
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
}


def full_file(folder: Path) -> tuple[Path, list[Row]]:
    """A closed file, and what is in it."""
    rows = rows_of(*(f"n{n}" for n in range(100)), vector=b"\x2a" * 1536)
    file = open_file(folder / "c.db")
    file.put(rows)
    file.close()
    return folder / "c.db", rows


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_damaged_file_is_deleted_with_a_warning(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    path, rows = full_file(tmp_path)
    damage(path)
    check_cache_file(path)
    with capture_logs() as logs:
        file = open_file(path)
        assert find(file, rows) == []
        file.put(rows[:1])
        file.put(rows[:5])
    assert [log["event"] for log in logs] == [DAMAGED]
    assert keys_of(find(file, rows)) == keys_of(rows[:5])
    file.close()
    assert list(tmp_path.iterdir()) == [path]


OTHER = """
import sys, time
from multigpu_worker.engines.base import EmbeddingCacheSettings
from multigpu_worker.engines.embed.cache_file import CacheFile, Row
file = CacheFile(EmbeddingCacheSettings(entries=1000, file=sys.argv[1]))
for n in range(2):
    file.put([Row(b"%032d" % n, time.time(), bytes(1536))])
    print(len(file.find([b"%032d" % n for n in range(2)])), flush=True)
    sys.stdin.readline()
file.close()
"""


def test_process_that_has_a_deleted_file_open_does_not_harm_the_new_one(tmp_path: Path) -> None:
    path, rows = full_file(tmp_path)
    command = [sys.executable, "-c", OTHER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "1\n"
        flip(path)
        file = open_file(path)
        assert find(file, rows) == []
        file.put(rows[:3])
        assert other.communicate("\n\n", timeout=400)[0] == "2\n"
    assert other.returncode == 0
    file.put(rows[3:5])
    file.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert {key for (key,) in db.execute("SELECT key FROM vectors")} == keys_of(rows[:5])


def test_unusable_files_are_rejected_and_not_changed(tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match="no folder: make it"):
        check_cache_file(tmp_path / "gone" / "c.db")
    with pytest.raises(CacheFileError, match=r"can't be opened .*Is a directory"):
        check_cache_file(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as db:
        db.execute("CREATE TABLE tasks (id INTEGER)")
    (tmp_path / "pickle").write_bytes(b"\x80\x04\x95 a pickle of somebody's" * 10)
    check_cache_file(tmp_path / "new.db")
    check_cache_file(tmp_path / "new.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "new.db")) as db:
        db.execute(f"PRAGMA user_version = {embed_cache_file.FORMAT + 1}")
    for path in sorted(tmp_path.iterdir()):
        before = path.read_bytes()
        with pytest.raises(CacheFileError, match="no embedding cache of this version: delete it"):
            check_cache_file(path)
        file = open_file(path)
        file.put(rows_of("a"))
        file.close()
        assert path.read_bytes() == before


def test_file_that_fails_costs_only_its_rows_and_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_cache_file, "BUSY_S", 0.05)
    path, rows = tmp_path / "there later" / "c.db", rows_of("a", "b")
    file = open_file(path)
    with capture_logs() as logs:
        file.put(rows[:1])
        file.put(rows[:1])
        assert [log["event"] for log in logs] == [FAILS]
        path.parent.mkdir()
        file.put(rows[:1])
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            for _ in range(2):
                other.execute("BEGIN IMMEDIATE")
                file.put(rows[1:])
                file.put(rows[1:])
                other.execute("COMMIT")
                assert find(file, rows[:1]) == rows[:1]
        assert find(file, rows) == rows[:1]
        file.put(rows[1:])
    assert [log["problem"] for log in logs[1:]] == ["database is locked"] * 2
    assert find(file, rows) == rows
    file.close()


def test_full_disk_costs_only_rows_and_a_warning(tmp_path: Path) -> None:
    file, rows = open_file(tmp_path / "c.db"), rows_of(*map(str, range(200)))
    assert find(file, rows) == []
    assert file._db is not None
    file._db.execute("PRAGMA max_page_count = 8")
    with capture_logs() as logs:
        file.put(rows[:100])
        file.put(rows[100:])
        file._db.execute("PRAGMA max_page_count = 100000")
        file.put(rows[:1])
    assert [log["problem"] for log in logs] == ["database or disk is full"]
    assert find(file, rows) == rows[:1]
    file.close()


def test_rows_from_the_future_expire_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_cache_file, "EXPIRED_PER_WRITE", 3)
    file = open_file(tmp_path / "c.db", ttl_s=3600)
    ahead = [row._replace(stored_s=row.stored_s + 1e6) for row in rows_of("a", "b", "c")]
    old = [row._replace(stored_s=row.stored_s - 1e6) for row in rows_of("d", "e", "f")]
    fresh = rows_of("g", "h", "i")
    for row in [*ahead, *old, *fresh]:
        file.put([row])
    assert keys_of(find(file, [*ahead, *old, *fresh])) == keys_of(fresh)
    file.close()


WRITER = """
import sys, time
from multigpu_worker.engines.base import EmbeddingCacheSettings
from multigpu_worker.engines.embed.cache_file import CacheFile, Row
file = CacheFile(EmbeddingCacheSettings(entries=100_000, file=sys.argv[1]))
for n in range(100_000):
    file.put([Row(b"%032d" % n, time.time(), b"\x2a" * 1536)])
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
                    file.put([row])
                writer.kill()
        known = file.find([b"%032d" % n for n in range(20)])
        assert keys_of(find(file, rows)) == keys_of(rows)
        file.close()
    assert len(known) == 20
    assert logs == []
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
