"""The clock follows the host's without a jump."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from multigpu_master import settings
from multigpu_master.clock import AHEAD_S, SLEW, Clock, SavedSkew
from multigpu_master.errors import JournalError

NOW_S = 1.8e9
DAY_S = 86400.0


class Host:
    def __init__(self) -> None:
        self.monotonic_s = 50.0
        self.wall_offset_s = NOW_S

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


def test_the_clock_can_be_read_from_several_threads_and_does_not_go_back() -> None:
    host = Host()
    clock = Clock(host.wall, host.monotonic)

    def read() -> list[float]:
        return [clock.now() for _ in range(20_000)]

    with ThreadPoolExecutor() as pool:
        reading = [pool.submit(read) for _ in range(4)]
        while not all(each.done() for each in reading):
            host.monotonic_s += 1.0
            host.wall_offset_s -= 0.5
    for each in reading:
        assert each.result() == sorted(each.result())


def pass_time(host: Host, clock: Clock, seconds: int) -> list[SavedSkew]:
    """What a master saves that looks once a second."""
    saved = []
    for _ in range(seconds):
        host.monotonic_s += 1
        if (unsaved := clock.unsaved()) is not None:
            saved.append(unsaved)
    return saved


@pytest.mark.parametrize("jump_s", [2 * DAY_S, -2 * DAY_S])
def test_the_next_masters_clock_goes_on_where_the_last_ones_was(jump_s: float) -> None:
    host = Host()
    clock = Clock(host.wall, host.monotonic)
    host.wall_offset_s += jump_s
    *_, saved = pass_time(host, clock, 25)
    last = clock.now()
    host.monotonic_s += 30  # no master runs
    after = Clock(host.wall, host.monotonic)
    after.resume(saved)
    assert 30 - 1.2 <= after.now() - last <= 30 + 1.2
    before = after.now()
    pass_time(host, after, 1000)
    assert abs(after.now() - before - 1000) == pytest.approx(1000 * SLEW, abs=1)
    assert abs(after.skew()) < abs(saved.skew_s)


def test_the_skew_is_saved_soon_after_a_step_and_when_it_has_moved_and_no_more() -> None:
    host = Host()
    clock = Clock(host.wall, host.monotonic)
    assert not pass_time(host, clock, 100)
    host.wall_offset_s += 0.9
    assert not pass_time(host, clock, 100)
    host.wall_offset_s += 3.5
    (saved,) = pass_time(host, clock, 1)
    assert saved.skew_s == pytest.approx(-3.5, abs=0.2)
    assert saved.time_s == pytest.approx(host.wall() - 3.5, abs=0.2)
    skews = [saved.skew_s for saved in pass_time(host, clock, 100)]
    assert skews == [pytest.approx(-2.5, abs=0.2), pytest.approx(-1.5, abs=0.2), 0.0]
    assert settings.clock_setting(SavedSkew(skews[-1], clock.now())) == {settings.CLOCK: None}


@pytest.mark.parametrize(
    ("skew_s", "saved_ago_s", "ahead_s"),
    [
        # Ever on, also after months.
        (-2 * DAY_S, 2 * DAY_S + 5, -2 * DAY_S),
        (-2 * DAY_S, 90 * DAY_S, -2 * DAY_S),
        (2 * DAY_S, 5 - 2 * DAY_S, 2 * DAY_S),
        # The host's clock was set back while no master ran, before the last stored time ...
        (-2 * DAY_S, 5, -5),
        (-2 * DAY_S, -3600, 3600),
        # ... or forward, so that it would be far beyond.
        (2 * DAY_S, 5, AHEAD_S - 5),
        (2 * DAY_S, AHEAD_S - DAY_S, DAY_S),
        (50 * 365 * DAY_S, 3600, 0),
        # Clean stop, months, start: what was ahead has been caught up with.
        (2 * DAY_S, 90 * DAY_S, 0),
        # The last master started without knowing the time.
        (-50 * 365 * DAY_S, 50 * 365 * DAY_S + 5, 0),
    ],
)
def test_a_skew_is_applied_as_far_as_it_makes_sense(skew_s: float, saved_ago_s: float, ahead_s: float) -> None:
    """`saved_ago_s`: how long ago it was saved, if the host's clock is right and the saved time was, too."""
    host = Host()
    clock = Clock(host.wall, host.monotonic)
    clock.resume(SavedSkew(skew_s, host.wall() - saved_ago_s))
    assert clock.now() - host.wall() == pytest.approx(ahead_s)


def test_the_stored_skew_is_read_back() -> None:
    saved = SavedSkew(-172800.25, NOW_S)
    kept = {key: value for key, value in settings.clock_setting(saved).items() if value is not None}
    assert settings.saved_skew(kept) == saved
    assert settings.saved_skew({}) is None


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[]", b'{"skew_s": "x", "time_s": 1}', b'{"skew_s": 1, "time_s": NaN}',
              b'{"skew_s": Infinity, "time_s": 1}', b'{"skew_s": 1, "time_s": 1e300}'],
)  # fmt: skip
def test_a_damaged_skew_is_told(value: bytes) -> None:
    with pytest.raises(JournalError, match="'clock' is damaged"):
        settings.saved_skew({settings.CLOCK: value})
