"""Outcomes, rows and segments of the journal that expire."""

import json
import sqlite3
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from multigpu_master.errors import JournalError
from multigpu_master.journal.protocol import Entry
from multigpu_master.journal.sqlite.segments import LARGE_BYTES
from multigpu_master.journal.sqlite.specs import INLINE_BYTES_MAX

from tests.master.journal.journals import DEAD_LETTERED, SUCCEEDED, settle, submit
from tests.master.journal.test_journal import opened, reached
from tests.waiting import until


def test_an_outcome_whose_time_to_live_is_over_is_not_given_out(tmp_path: Path) -> None:
    """Also before it is deleted."""
    with opened(tmp_path / "data") as it:
        letter = settle(2, state=DEAD_LETTERED, dead=submit(2))
        it.write(Entry(settles=[settle(1), letter, settle(3, expire_time_s=5001.5), settle(4, b"x" * LARGE_BYTES)]))

        def given() -> list[list[int]]:
            journal = it.journal
            found = [
                journal.read_outcomes(0, 10, 10**9),
                journal.read_outcomes_of(
                    list(journal.find_requests([f"request-{n}" for n in range(1, 5)]).values()), 10**9
                ),
                [o for n in range(1, 5) if (o := journal.get_outcome(n)) is not None],
            ]
            assert [len(each) for each in found] == [4, 4, 4]
            return [[o.task_id for o in each if o.body is not None] for each in found]

        it.clock_s = 4999.0
        assert given() == [[1, 2, 3, 4]] * 3
        it.clock_s = 5001.0
        with sqlite3.connect(tmp_path / "data" / "journal.sqlite3") as other:
            assert other.execute("SELECT count(body) FROM outcome").fetchone() == (4,), "the sweeper has not run"
        other.close()
        assert given() == [[2, 3]] * 3
        assert not any(outcome.lost for outcome in it.journal.read_outcomes(0, 10, 10**9))


@pytest.mark.usefixtures("sweeping")
def test_deleted_dead_letters_do_not_multiply_what_is_examined(tmp_path: Path) -> None:
    letters = range(1, 9)
    with opened(tmp_path / "data") as it:
        it.write(Entry(settles=[settle(n, state=DEAD_LETTERED, dead=submit(n)) for n in letters]))
        for n in letters:
            it.write(Entry(deleted_dead_letters=[n]))
        it.clock_s += 4000.0  # all that waits is examined
        until(lambda: len(it.journal._sweeper._zones) == 1)


@pytest.mark.usefixtures("sweeping")
def test_a_dead_letter_that_is_deleted_while_it_is_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "data") as it:
        journal = it.journal
        letter = submit(1, spec=bytes(INLINE_BYTES_MAX + 1))
        it.write(Entry(settles=[settle(1, state=DEAD_LETTERED, dead=letter)]))
        read_spec = journal._read_spec

        def delete_then_read(held: bytes | str) -> bytes:
            it.write(Entry(deleted_dead_letters=[1]))
            until(lambda: not journal._rows("SELECT 1 FROM spec", ()))
            return read_spec(held)

        monkeypatch.setattr(journal, "_read_spec", delete_then_read)
        assert journal.get_dead_letters([1]) == []


@pytest.mark.usefixtures("sweeping")
def test_outcomes_lose_their_body_and_then_their_row(tmp_path: Path) -> None:
    large = b"x" * LARGE_BYTES
    with opened(tmp_path / "data", dedupe_window_s=10_000) as it:
        it.write(
            Entry(
                settles=[
                    settle(1),
                    settle(2, expire_time_s=9000.0),
                    settle(3, large),
                    settle(4, state=DEAD_LETTERED, dead=submit(4, large)),
                    settle(5),
                ]
            )
        )

        def bodies() -> dict[int, int | None]:
            return {o.task_id: None if o.body is None else len(o.body) for o in it.journal.read_outcomes(0, 10, 10**9)}

        time.sleep(0.2)
        assert bodies() == {1: 3, 2: 3, 3: LARGE_BYTES, 4: 3, 5: 3}
        it.clock_s = 5001.0
        until(lambda: bodies() == {1: None, 2: 3, 3: None, 4: 3, 5: None})
        it.clock_s = 9100.0
        until(lambda: bodies() == {1: None, 2: None, 3: None, 4: 3, 5: None})
        assert it.journal.find_requests(["request-1"])["request-1"].state == SUCCEEDED
        it.clock_s = 12_100.0
        # The newest row stays for the sake of the cursors, the dead letter's until it is deleted.
        until(lambda: bodies() == {4: 3, 5: None})
        assert (it.journal.oldest_cursor(), it.journal.get_dead_letters([4])[0].payload) == (4, large)
        it.write(Entry(deleted_dead_letters=[4]))
        until(lambda: bodies() == {5: None})
        it.write(Entry(settles=[settle(6, expire_time_s=99_000.0)]))
        it.clock_s = 13_000.0
        until(lambda: bodies() == {6: 3})
        assert it.commits[-1][1] == 6
    with opened(tmp_path / "data") as it:
        assert it.recovered.last_cursor == 6
        until(lambda: not list((tmp_path / "data" / "segments").iterdir()))


@pytest.mark.usefixtures("sweeping")
def test_an_outcome_that_expires_before_older_ones_loses_its_body_before_them(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:

        def examined() -> bool:
            return it.journal._sweeper._entries.get(0, (0.0, 0))[0] > it.clock_s

        until(examined)
        it.write(Entry(settles=[settle(1, expire_time_s=9000.0), settle(2, expire_time_s=9000.0)]))
        it.clock_s += 31.0
        until(examined)
        it.write(Entry(settles=[settle(3, expire_time_s=5000.0)]))
        it.clock_s = 5100.0
        with closing(sqlite3.connect(tmp_path / "data" / "journal.sqlite3")) as other:
            bodies = "SELECT task_id FROM outcome WHERE body IS NOT NULL"
            until(lambda: other.execute(bodies).fetchall() == [(1,), (2,)], 15)


@pytest.mark.usefixtures("sweeping")
def test_the_directory_stays_bounded_under_churn(tmp_path: Path) -> None:
    rows, rounds, body = 2000, 25, b"x" * 900
    with opened(tmp_path / "data", dedupe_window_s=100) as it:
        sizes = []
        for n in range(rounds):
            ids = range(n * rows + 1, (n + 1) * rows + 1)
            it.write(Entry(submits=[submit(i, body) for i in ids]))
            times = {"settle_time_s": it.clock_s, "expire_time_s": it.clock_s + 50}
            it.write(Entry(settles=[settle(i, body, **times) for i in ids]))
            it.clock_s += 150
            until(partial(reached, it.journal, ids[-1]))
            sizes.append((tmp_path / "data" / "journal.sqlite3").stat().st_size)
        assert max(sizes) < 5 * rows * len(body), sizes  # what is live, and what the log held back
        it.clock_s += 150
        with sqlite3.connect(tmp_path / "data" / "journal.sqlite3") as other:
            until(lambda: other.execute("PRAGMA freelist_count").fetchone()[0] < 1024)
        other.close()
    assert (tmp_path / "data" / "journal.sqlite3").stat().st_size < 1024 * 8192 + rows * len(body)


@pytest.mark.usefixtures("sweeping")
def test_segments_without_references_are_deleted(tmp_path: Path) -> None:
    payload = bytes(8 << 20)
    with opened(tmp_path / "data") as it:
        count = 5  # each in a segment of its own
        for i in range(1, count + 1):
            it.write(Entry(submits=[submit(i, payload)]))
        assert it.journal.size_bytes() > count * len(payload)
        it.write(Entry(settles=[settle(i) for i in range(1, count)]))
        until(lambda: it.journal.size_bytes() < 2 * len(payload))
        it.write(Entry(settles=[settle(count)]))
        time.sleep(0.2)  # nothing refers to the open segment now, but it is still written to
        it.write(Entry(submits=[submit(count + 1, payload)]))
    with opened(tmp_path / "data") as it:
        assert it.tasks == [submit(count + 1, payload)]


@pytest.mark.usefixtures("sweeping")
def test_a_segment_without_references_that_somebody_deleted_ends_no_master(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:
        it.write(Entry(submits=[submit(1, bytes(8 << 20))]))
    with opened(tmp_path / "data") as it:
        (segment,) = (tmp_path / "data" / "segments").iterdir()
        segment.unlink()
        it.write(Entry(settles=[settle(1)]))
        until(lambda: it.journal._fatal or not it.journal._segments._sizes)
        it.write(Entry(submits=[submit(2)]))


@pytest.mark.usefixtures("sweeping")
def test_a_start_with_a_clock_that_is_ahead_deletes_no_result(tmp_path: Path) -> None:
    """Nor does a later start, when the clock is right again."""
    with opened(tmp_path / "data", clock_s=3000.0) as it:
        assert it.recovered.clock_difference_s == 0.0
        it.write(Entry(settles=[settle(1), settle(2)]))
        until(lambda: saved_time(tmp_path) == 3000.0)
    for clock_s, ahead_s in ((900_000.0, 897_000.0), (3500.0, 3500.0 - 900_000.0), (3600.0, 100.0)):
        with opened(tmp_path / "data", clock_s=clock_s, dedupe_window_s=100.0) as it:
            assert it.recovered.clock_difference_s == ahead_s
            it.write(Entry(settles=[settle(int(clock_s), expire_time_s=clock_s + 50.0, settle_time_s=clock_s)]))
            until(lambda clock_s=clock_s: saved_time(tmp_path) == clock_s)  # type: ignore[misc]  # the sweeper has run
            assert [o.body for o in it.journal.read_outcomes(0, 2, 10**9)] == [b"out", b"out"]


def test_results_of_a_master_that_soon_died_survive_a_start_with_a_clock_that_is_ahead(tmp_path: Path) -> None:
    """Each master dies before it deletes anything: after a start with a wrong clock, one with the right clock."""
    for clock_s in (900_000.0, 3000.0):
        with opened(tmp_path / "data", clock_s=clock_s) as it:
            it.write(Entry(settles=[settle(int(clock_s), expire_time_s=clock_s + 50.0)]))
    with opened(tmp_path / "data", clock_s=900_100.0) as it:
        assert [o.body for o in it.journal.read_outcomes(0, 2, 10**9)] == [b"out", b"out"]


@pytest.mark.usefixtures("sweeping")
def test_outcomes_age_while_masters_run(tmp_path: Path) -> None:
    with opened(tmp_path / "data", clock_s=3000.0) as it:
        it.write(Entry(settles=[settle(1)]))
        until(lambda: saved_time(tmp_path) == 3000.0)
    with opened(tmp_path / "data", clock_s=4000.0) as it:
        it.write(Entry(settles=[settle(2), settle(3, expire_time_s=9000.0)]))
        it.clock_s = 5500.0  # 2500 s have passed on running masters since the first, 1500 s since the second
        until(lambda: saved_time(tmp_path) == 5500.0)
        assert [o.body for o in it.journal.read_outcomes(0, 3, 10**9)] == [b"out", None, b"out"]
        it.clock_s = 6001.0
        until(lambda: [o.body for o in it.journal.read_outcomes(0, 3, 10**9)] == [None, None, b"out"])
        until(lambda: stored_bodies(tmp_path) == 1)


def saved_time(folder: Path) -> float:
    with closing(sqlite3.connect(folder / "data" / "journal.sqlite3")) as other:
        row = other.execute("SELECT value FROM setting WHERE key = 'journal.time'").fetchone()
    return 0.0 if row is None else json.loads(row[0])["time_s"]


def stored_bodies(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "data" / "journal.sqlite3")) as other:
        return int(other.execute("SELECT count(body) FROM outcome").fetchone()[0])


@pytest.mark.usefixtures("sweeping")
def test_the_newest_removed_cursor_is_kept_though_an_older_outcome_remains(tmp_path: Path) -> None:
    with opened(tmp_path / "data", dedupe_window_s=100) as it:
        it.write(Entry(settles=[settle(1, expire_time_s=99_000.0), *[settle(n) for n in range(2, 7)]]))
        assert it.journal.removed_cursor == 0
        it.clock_s = 6000.0
        until(lambda: [o.task_id for o in it.journal.read_outcomes(0, 10, 10**9)] == [1, 6])
        assert it.journal.removed_cursor == 5
    with opened(tmp_path / "data") as it:
        assert it.journal.removed_cursor == 5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("journal.time", b"{"),
        ("journal.time", b'{"time_s": []}'),
        ("journal.time", b'{"time_s": 1, "downtimes": [[Infinity, 1]]}'),
        ("journal.removed", b"x"),
    ],
)
def test_a_damaged_setting_of_the_journal_is_reported(tmp_path: Path, key: str, value: bytes) -> None:
    with opened(tmp_path / "data"):
        pass
    with closing(sqlite3.connect(tmp_path / "data" / "journal.sqlite3", isolation_level=None)) as other:
        other.execute("INSERT OR REPLACE INTO setting VALUES (?, ?)", (key, value))
    for _ in range(2):  # the directory is not left locked
        with pytest.raises(JournalError, match="own settings can't be parsed"), opened(tmp_path / "data"):
            pass


def test_zones_without_rows_are_not_swept(tmp_path: Path) -> None:
    """One old dead letter before a billion outcomes that are gone made a start slow, with a million zones in memory."""
    with opened(tmp_path / "data") as it:
        it.write(Entry(settles=[settle(1, state=DEAD_LETTERED, dead=submit(1)), settle(2)]))
    with closing(sqlite3.connect(tmp_path / "data" / "journal.sqlite3", isolation_level=None)) as other:
        other.execute("UPDATE outcome SET cursor = 1000000000 WHERE task_id = 2")
    with opened(tmp_path / "data") as it:
        assert len(it.journal._sweeper._zones) == 2
