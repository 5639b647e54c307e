"""The journal without room: submits are rejected, outcomes are kept until they can be written, and all else goes on."""

import gc
import itertools
import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from multigpu_master.errors import JournalFullError
from multigpu_master.journal.protocol import Entry
from multigpu_master.journal.sqlite import journal as journal_sqlite
from multigpu_master.journal.sqlite import room as journal_room
from multigpu_master.journal.sqlite.reads import JournalReads
from multigpu_master.journal.sqlite.segments import LARGE_BYTES

from tests.master.journal.journals import (
    SPEC,
    answered,
    cancel,
    commit,
    dead,
    fill,
    mounted,
    opened,
    reject,
    settle,
    submit,
)
from tests.waiting import until


@pytest.fixture(autouse=True)
def retries_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_sqlite, "RETRY_S", 0.05)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "6m") as disk:
        yield disk


@pytest.mark.usefixtures("sweeping")
def test_over_its_limit_it_rejects_submits_and_writes_all_else(tmp_path: Path) -> None:
    clock_s = [3000.0]
    limits: Any = {"size_max_bytes": 2 << 20, "now": lambda: clock_s[0], "dedupe_window_s": 10.0}
    with opened(tmp_path / "data", **limits) as (journal, commits):
        commit(journal, commits, Entry(submits=[submit(i) for i in range(1, 101)]))
        for i in range(1, 81):  # 8 MB, in rows; and as much in segments
            commit(journal, commits, Entry(settles=[settle(i, bytes(100_000 if i < 41 else LARGE_BYTES))]))
        assert not journal.writable
        for entry in (
            Entry(settles=[cancel(81)]), Entry(settings={"queue/default": b"paused"}),
            Entry(settles=[dead(82, bytes(1000))]), Entry(deleted_dead_letters=[82]),
        ):  # fmt: skip
            commit(journal, commits, entry)
        reject(journal, commits, Entry(submits=[submit(200)]))
    with opened(tmp_path / "data", **limits) as (journal, commits):
        assert len(list(journal.recover_tasks())) == 18
        assert "journal_bytes_max" in reject(journal, commits, Entry(submits=[submit(201)]))
        commit(journal, commits, Entry(settles=[settle(83, bytes(LARGE_BYTES))]))
        clock_s[0] = 9000.0  # all has expired
        until(lambda: journal.writable)
        commit(journal, commits, Entry(submits=[submit(202)]))


def test_outcomes_count_for_its_limit_at_the_next_submit(tmp_path: Path) -> None:
    """Only the sweep counted them: seconds later, or later still while it had work."""
    with opened(tmp_path / "data", 8 << 20) as (journal, commits):
        commit(journal, commits, Entry(submits=[submit(i) for i in range(1, 13)]))
        for i in range(1, 13):
            commit(journal, commits, Entry(settles=[settle(i, bytes(1 << 20))]))
        reject(journal, commits, Entry(submits=[submit(100)]))


@pytest.mark.usefixtures("sweeping")
def test_outcomes_wait_on_a_full_disk_in_their_order(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_sqlite, "RETRY_S", 1.0)  # no room again before all is appended
    monkeypatch.setattr(journal_room, "TRANSACTION_RECORDS", 1)  # so that the order of what is kept could be lost
    clock_s = [3000.0]
    with opened(small_disk / "data", now=lambda: clock_s[0], dedupe_window_s=10.0) as (journal, commits):
        journal.append(*[Entry(settles=[settle(i, bytes(10_000))]) for i in range(1, 251)])
        commit(journal, commits, Entry(submits=[submit(500), submit(501)]))
        fill(small_disk)
        error = reject(journal, commits, Entry(submits=[submit(i, bytes(10_000)) for i in range(600, 680)]))
        assert "Free space on the disk (never delete files in data_dir)" in error
        assert not journal.writable
        kept = [
            Entry(settles=[settle(500, bytes(900_000))]),
            Entry(settles=[settle(501), settle(600), settle(502)]),  # 600 was rejected: nobody may hear of it
            Entry(settings={"strategy": b"x" * 100_000}),
        ]
        for entry in kept:
            journal.append(entry)
        journal.append(also_rejected := Entry(submits=[submit(700, bytes(100_000))]))
        answered(commits, also_rejected)
        time.sleep(0.3)
        assert journal.get_outcome(500) is None
        assert journal.get_outcome(501) is None, "there is room for this one, but not before the first"
        assert journal.get_outcome(1) is not None, "it goes on reading"
        clock_s[0] = 9000.0  # the first outcomes expire, and make room
        until(lambda: journal.get_outcome(502) is not None)
        until(lambda: journal.writable)
        assert journal.get_outcome(600) is None
        answered(commits, kept[1])
        done = [entry for group, _, error in commits if error is None for entry in group]
        wanted = [kept[2], *kept[:2]]  # settings don't wait behind outcomes
        assert [id(entry) for entry in done[251:]] == [id(entry) for entry in wanted], "the same objects, in order"
        assert [record.task_id for record in kept[1].settles] == [501, 502]
        assert [o.task_id for o in journal.read_outcomes(250, 10, 10**9)] == [500, 501, 502]
        commit(journal, commits, Entry(submits=[submit(701)]))
    with opened(small_disk / "data") as (journal, _):
        assert [task.task_id for task in journal.recover_tasks()] == [701]


@pytest.mark.parametrize("body_bytes", [100, 20_000, LARGE_BYTES])
def test_its_limit_holds_for_all_that_is_on_the_disk(tmp_path: Path, body_bytes: int) -> None:
    """Also with the log, of transactions that are large."""
    limit, largest, ids = 16 << 20, 0, iter(range(1, 1 << 40))
    per_entry = 400_000 // body_bytes + 1
    with opened(tmp_path / "data", limit) as (journal, commits):
        while journal.writable:
            more = [
                Entry(submits=[replace(submit(i, os.urandom(body_bytes)), request_id=os.urandom(8).hex())])
                for i in itertools.islice(ids, per_entry)
            ]
            for _ in range(30):
                more.append(
                    Entry(submits=[submit(i, os.urandom(body_bytes)) for i in itertools.islice(ids, per_entry)])
                )
            journal.append(*more)
            answered(commits, more[-1])
            largest = max(largest, sum(path.stat().st_size for path in (tmp_path / "data").rglob("*")))
    assert limit // 2 < largest < 1.1 * limit


@pytest.mark.parametrize("payload_bytes", [2000, LARGE_BYTES])
def test_a_full_disk_rejects_submits_until_there_is_room(small_disk: Path, payload_bytes: int) -> None:
    with opened(small_disk / "data") as (journal, commits):
        ballast = small_disk / "ballast"
        commit(journal, commits, Entry(submits=[submit(1)]))
        with pytest.raises(OSError, match="No space"):
            ballast.write_bytes(os.urandom(8 << 20))
        reject(journal, commits, Entry(submits=[submit(i, os.urandom(payload_bytes)) for i in range(2, 40)]))
        journal.append(kept := Entry(settles=[settle(1, os.urandom(600_000))]))  # more than half of the reserve
        time.sleep(0.3)
        assert not journal.writable
        assert not any(kept in group for group, _, _ in commits)
        assert journal.get_outcome(1) is None
        ballast.unlink()
        assert answered(commits, kept) == "committed"
        until(lambda: journal.writable)
        commit(journal, commits, again := Entry(submits=[submit(i, os.urandom(payload_bytes)) for i in range(2, 10)]))
    with opened(small_disk / "data") as (journal, _):
        assert list(journal.recover_tasks()) == again.submits
        assert journal.get_outcome(1) is not None


def test_below_the_watermark_submits_are_rejected_and_all_else_is_written(small_disk: Path) -> None:
    with opened(small_disk / "data") as (journal, commits):
        commit(journal, commits, Entry(submits=[submit(1)]))
        reserve = small_disk / "data" / "reserve"
        whole_bytes = reserve.stat().st_size
        ballast = fill(small_disk)
        os.truncate(ballast, ballast.stat().st_size - whole_bytes // 2)
        reject(journal, commits, Entry(submits=[submit(2)]))
        commit(journal, commits, Entry(settles=[settle(1)]))
        commit(journal, commits, Entry(settings={"queue/default": b"paused"}))
        assert reserve.stat().st_size == whole_bytes, "it was not needed"
        ballast.unlink()
        until(lambda: journal.writable)
        commit(journal, commits, Entry(submits=[submit(3)]))


def test_large_settings_do_not_take_the_space_that_deletions_need(small_disk: Path) -> None:
    with opened(small_disk / "data") as (journal, commits):
        commit(journal, commits, Entry(settles=[dead(i, bytes(10_000)) for i in range(1, 81)]))
        ballast = fill(small_disk)
        reject(journal, commits, Entry(submits=[submit(100)]))
        journal.append(large := Entry(settings={"strategy": bytes(900_000)}))
        time.sleep(0.3)
        commit(journal, commits, Entry(deleted_dead_letters=[1]))
        assert not any(large in group for group, _, _ in commits)
        ballast.unlink()
        assert answered(commits, large) == "committed"


def test_outcomes_that_do_not_fit_together_are_written_one_by_one(small_disk: Path) -> None:
    with opened(small_disk / "data") as (journal, commits):
        commit(journal, commits, Entry(settles=[settle(1)]))
        free = shutil.disk_usage(small_disk).free
        (small_disk / "ballast").write_bytes(os.urandom(free - (1 << 20)))
        entries = [Entry(settles=[settle(i, os.urandom(60_000))]) for i in range(2, 42)]
        journal.append(*entries)
        assert answered(commits, entries[0]) == "committed"
        assert not any(entries[-1] in group for group, _, _ in commits), "there is no room for all of them"


@pytest.mark.usefixtures("sweeping")
def test_large_outcomes_are_written_as_older_ones_expire(small_disk: Path) -> None:
    """Also those of one segment, which is closed when the disk is full."""
    clock_s = [3000.0]
    with opened(small_disk / "data", now=lambda: clock_s[0]) as (journal, commits):
        entries = [Entry(settles=[settle(i, os.urandom(2 * LARGE_BYTES))]) for i in range(1, 61)]  # 15 MiB for 6
        journal.append(*entries)
        until(lambda: not journal.writable)
        assert not any(entries[-1] in group for group, _, _ in commits)
        end_s = time.monotonic() + 60
        while not (journal.writable and any(entries[-1] in group for group, _, _ in commits)):
            assert time.monotonic() < end_s, "what has expired makes no room"
            clock_s[0] += 6000.0
            time.sleep(0.1)
        assert [answered(commits, entry) for entry in entries] == ["committed"] * 60


@pytest.mark.usefixtures("sweeping")
def test_a_disk_that_queued_tasks_fill_empties_as_they_end(small_disk: Path) -> None:
    """A result that is as large as its payload takes a little more space than the payload did."""
    with opened(small_disk / "data", now=lambda: 3000.0) as (journal, commits):
        tasks = 0
        while journal.writable:
            tasks += 1
            journal.append(entry := Entry(submits=[submit(tasks, os.urandom(2 * LARGE_BYTES))]))
            answered(commits, entry)
        fill(small_disk)
        entries = [Entry(settles=[settle(i, os.urandom(LARGE_BYTES))]) for i in range(1, tasks)]
        journal.append(*entries)
        assert {answered(commits, entry) for entry in entries} == {"committed"}


def test_on_a_full_disk_it_looks_for_room_by_itself_and_can_be_closed(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with opened(small_disk / "data") as (journal, commits):
        for after in ("room", "close"):
            with pytest.raises(OSError, match="No space"):
                ballast.write_bytes(os.urandom(8 << 20))
            reject(journal, commits, Entry(submits=[submit(i, os.urandom(3000)) for i in range(40)]))
            time.sleep(0.2)
            assert not journal.writable, "the next look was for room that is not there"
            if after == "room":
                ballast.unlink()
                until(lambda: journal.writable)
                until(lambda: commits[-1] == ([], 1, None))  # the driver is told
        journal.append(kept := Entry(settles=[settle(100, os.urandom(4 << 20))]))
    assert isinstance(answered(commits, kept), JournalFullError)


def test_half_a_payload_is_not_left_behind(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with opened(small_disk / "data") as (journal, commits):
        with pytest.raises(OSError, match="No space"):
            ballast.write_bytes(bytes(8 << 20))
        os.truncate(ballast, ballast.stat().st_size - LARGE_BYTES)  # room for one, and not for two
        reject(journal, commits, Entry(submits=[submit(i, os.urandom(LARGE_BYTES)) for i in (1, 2)]))
        ballast.unlink()
        until(lambda: journal.writable)
        commit(journal, commits, again := Entry(submits=[submit(i, os.urandom(LARGE_BYTES)) for i in (3, 4)]))
    with opened(small_disk / "data") as (journal, _):
        assert list(journal.recover_tasks()) == again.submits


@pytest.mark.usefixtures("sweeping")
def test_a_full_disk_can_be_emptied_also_by_a_new_master(small_disk: Path) -> None:
    """Deletions, cancellations and settings are written, whatever outcomes wait for room; and they make room."""
    with opened(small_disk / "data", now=lambda: 3000.0) as (journal, commits):
        journal.append(
            Entry(submits=[submit(i, bytes(20_000)) for i in range(1, 21)]),
            first := Entry(settles=[dead(i, bytes(20_000)) for i in range(100, 160)]),
        )
        assert answered(commits, first) == "committed"
        fill(small_disk)
        reject(journal, commits, Entry(submits=[submit(i, bytes(60_000)) for i in range(200, 230)]))
        journal.append(kept := Entry(settles=[settle(20, os.urandom(3 << 20))]))  # more than there is without ballast
        for entry in (
            Entry(settles=[cancel(1)]), Entry(settings={"queue/default": b"paused"}),
            Entry(deleted_dead_letters=[100, 101]),
        ):  # fmt: skip
            commit(journal, commits, entry)
        assert not any(kept in group for group, _, _ in commits)
    fill(small_disk, "more ballast")
    with opened(small_disk / "data", now=lambda: 3000.0) as (journal, commits):
        assert not journal.writable
        assert journal.settings()["queue/default"] == b"paused"
        assert journal.get_outcome(1) is not None
        assert journal.get_outcome(20) is None
        reject(journal, commits, Entry(submits=[submit(300)]))
        for i in range(2, 20):
            commit(journal, commits, Entry(settles=[cancel(i)]))
        commit(journal, commits, Entry(deleted_dead_letters=list(range(102, 160))))
        until(lambda: journal.writable)  # of all that only this was needed
        commit(journal, commits, Entry(submits=[submit(301)]))


def test_deletions_do_not_wait_behind_entries_that_are_too_large(small_disk: Path) -> None:
    with opened(small_disk / "data") as (journal, commits):
        journal.append(Entry(submits=[submit(i, bytes(100)) for i in range(1, 2001)]))
        commit(journal, commits, Entry(settles=[dead(i, bytes(10_000)) for i in range(5000, 5080)]))
        fill(small_disk)
        reject(journal, commits, Entry(submits=[submit(6000)]))
        journal.append(large := Entry(settles=[cancel(i) for i in range(1, 2001)]))
        for i in range(5000, 5010):
            commit(journal, commits, Entry(deleted_dead_letters=[i]))
        commit(journal, commits, Entry(settings={"queue/default": b"paused"}))
        journal.append(rest := Entry(deleted_dead_letters=list(range(5010, 5080))))
        assert answered(commits, rest) == answered(commits, large) == "committed"


@contextmanager
def no_descriptor() -> Iterator[None]:
    """This process can open no file."""
    gc.collect()  # garbage of other tests must not free descriptors meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path("/dev/null").open() as lowest:
        number = lowest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("sweeping")
def test_without_a_descriptor_it_rejects_and_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as (journal, commits):  # an old segment, which may be checked
        commit(journal, commits, Entry(submits=[submit(9, bytes(LARGE_BYTES))]))
    with opened(tmp_path / "data") as (journal, commits):
        with no_descriptor():
            assert "descriptor" in reject(journal, commits, Entry(submits=[submit(1, bytes(LARGE_BYTES))]))
            kept = Entry(settles=[settle(2, bytes(LARGE_BYTES))])
            settings = Entry(settings={"strategy": b"auto"})
            journal.append(kept)
            commit(journal, commits, settings)
            time.sleep(0.3)
            assert not journal.writable
        assert answered(commits, kept) == "committed"
        until(lambda: journal.writable)
        commit(journal, commits, Entry(submits=[submit(3, bytes(LARGE_BYTES))]))


def test_a_reader_without_a_descriptor_names_the_limit(tmp_path: Path) -> None:
    """SQLite says of any file that it can't be opened, and the advice was to look at the disk."""
    with opened(tmp_path / "data"):
        pass
    reads = JournalReads(tmp_path / "data")
    with no_descriptor(), pytest.raises(JournalFullError, match="LimitNOFILE"):
        reads.newest_cursor()
    reads.close_readers()


def test_the_payloads_of_dead_letters_and_different_specs_take_room() -> None:
    assert journal_room.content_bytes(Entry(settles=[dead(1, bytes(1000))])) == len("out") + 1000 + len(SPEC)
    submits = [submit(n, b"12345", spec) for n, spec in enumerate([b"one", b"one", b"two"], 1)]
    assert journal_room.content_bytes(Entry(submits=submits)) == 3 * 5 + 2 * 3
