"""The last lines of a task's log."""

import pytest
from multigpu._handling.attempts import CUT, LOG_CHARS_MAX, last_lines

LINE = "attempt 1 INFO 0123456789\n"


@pytest.mark.parametrize("before", range(len(LINE), 4 * len(LINE)))
def test_a_part_that_was_cut_before_leaves_no_second_mark(before: int) -> None:
    part = last_lines(LINE * 1000)
    log = last_lines("x" * (before - 1) + "\n" + part)
    assert log.startswith(CUT)
    assert len(log) <= LOG_CHARS_MAX
    assert {*log.removeprefix(CUT).splitlines(keepends=True)} == {LINE}


def test_a_short_log_is_kept_whole() -> None:
    assert last_lines(LINE * 3) == LINE * 3
