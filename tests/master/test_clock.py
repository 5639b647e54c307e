"""The clock follows the host's without a jump."""

from multigpu_master.clock import SLEW, Clock


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
