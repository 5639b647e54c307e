"""The clock follows the host's without a jump."""

import threading
from pathlib import Path

from multigpu_master.clock import SLEW, Clock
from multigpu_master.journal import Entry, SettleRecord
from multigpu_master.journal_sqlite import SqliteJournal


class Host:
    def __init__(self) -> None:
        self.monotonic_s = 50.0
        self.wall_offset_s = 1.7e9

    def wall(self) -> float:
        return self.monotonic_s + self.wall_offset_s

    def monotonic(self) -> float:
        return self.monotonic_s


def test_a_host_clock_that_was_set_is_followed_without_a_jump_and_never_back() -> None:
    host = Host()
    clock = Clock(host.wall, host.monotonic)
    assert clock.now() == host.wall()
    for jump_s in (30.0, -30.0):
        host.wall_offset_s += jump_s
        before = clock.now()
        for _ in range(4000):
            host.monotonic_s += 0.25
            now = clock.now()
            assert 0 <= now - before <= 0.25 + SLEW
            before = now
        assert abs(clock.now() - host.wall()) < 0.001


def test_a_long_pause_is_no_licence_to_jump() -> None:
    host = Host()
    clock = Clock(host.wall, host.monotonic)
    before = clock.now()
    host.wall_offset_s -= 3600
    host.monotonic_s += 1000
    assert 1000 - SLEW <= clock.now() - before <= 1000


def test_a_journal_keeps_what_is_stamped_by_its_clock_though_the_hosts_is_set(tmp_path: Path) -> None:
    host = Host()
    clock = Clock(host.wall, host.monotonic)
    journal = SqliteJournal(tmp_path / "data", now=clock.now, size_max_bytes=1 << 30)
    committed = threading.Event()
    journal.open(lambda *_: committed.set())
    host.wall_offset_s += 25 * 3600
    host.monotonic_s += 10
    now = clock.now()
    journal.append(Entry(settles=[SettleRecord(1, "r", 1, "q", "k", "", "w", now, now, now + 60, b"body", None)]))
    assert committed.wait(20)
    stored = journal.get_outcome(1)
    assert stored is not None
    assert stored.body == b"body"
    host.monotonic_s += 60
    stored = journal.get_outcome(1)
    assert stored is None or stored.body is None
    journal.close(20)


def test_the_clock_can_be_read_from_several_threads_and_does_not_go_back() -> None:
    host = Host()
    clock = Clock(host.wall, host.monotonic)
    wrong: list[float] = []

    def read() -> None:
        last = 0.0
        for _ in range(20_000):
            now = clock.now()
            if now < last:
                wrong.append(now)
            last = now

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        host.monotonic_s += 1.0
        host.wall_offset_s -= 0.5
    for thread in threads:
        thread.join()
    assert not wrong


def test_skew_is_what_the_clock_is_behind_the_hosts() -> None:
    host = Host()
    clock = Clock(host.wall, host.monotonic)
    assert clock.skew() == 0
    host.wall_offset_s += 3600
    assert clock.skew() == -3600
    for _ in range(2):  # from the next time that the host's clock is read
        host.monotonic_s += 1
        clock.now()
    assert abs(clock.skew() - (SLEW - 3600)) < 0.001
