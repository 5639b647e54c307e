"""The clock begins at the host's time or the journal's newest, and never jumps."""

from pathlib import Path

import pytest
from multigpu_master.clock import Clock
from multigpu_master.errors import JournalDamagedError
from multigpu_master.journal.protocol import Entry
from multigpu_master.journal.sqlite.journal import SqliteJournal

from tests.master.journal.journals import SIZE_MAX_BYTES, Commit, commit, settle, submit

NOW_S = 1.8e9


class Host:
    def __init__(self) -> None:
        self.monotonic_s = 50.0
        self.wall_offset_s = NOW_S

    def wall(self) -> float:
        return self.monotonic_s + self.wall_offset_s

    def monotonic(self) -> float:
        return self.monotonic_s


@pytest.mark.parametrize("step_s", [86_400.0, -86_400.0])
def test_a_host_clock_that_is_set_moves_only_the_next_masters_clock(step_s: float) -> None:
    host = Host()
    clock = Clock(host.wall, host.monotonic)
    began_s = clock.now()
    assert (began_s, clock.skew()) == (host.wall(), 0.0)
    host.wall_offset_s += step_s
    host.monotonic_s += 7
    assert (clock.now(), clock.skew()) == (began_s + 7, -step_s)
    assert Clock(host.wall, host.monotonic).now() == host.wall()


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_a_clock_begins_not_before_the_newest_time_in_the_journal(ahead_s: float) -> None:
    host = Host()
    clock = Clock(host.wall, host.monotonic)
    clock.begin(host.wall() + ahead_s)
    assert clock.skew() == max(0.0, ahead_s)


def test_the_newest_time_in_a_journal_is_that_of_a_submit_or_an_outcome(tmp_path: Path) -> None:
    def newest(*entries: Entry) -> float:
        found: list[float] = []
        journal = SqliteJournal(tmp_path, size_max_bytes=SIZE_MAX_BYTES)
        commits: list[Commit] = []
        list(journal.open(lambda *answer: commits.append(answer), found.append).tasks)
        for entry in entries:
            commit(journal, commits, entry)
        journal.close(20)
        return found[0]

    assert newest(Entry(submits=[submit(5)])) == 0.0
    assert newest(Entry(settles=[settle(5, settle_time_s=2000.0)])) == 1005.0
    assert newest(Entry(submits=[submit(1500)])) == 2000.0
    assert newest(Entry(settles=[settle(1500, settle_time_s=1e300)])) == 2500.0
    with pytest.raises(JournalDamagedError, match=r"newest time is 1e\+300 s\. Restore"):
        newest()
