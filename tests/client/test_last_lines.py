"""The last lines of a task's log, and the end of a text."""

import pytest
from multigpu._handling.attempts import CUT, LOG_CHARS_MAX, end_of, last_lines

LINE = "attempt 1 INFO 0123456789\n"


@pytest.mark.parametrize("before", range(len(LINE), 4 * len(LINE)))
def test_a_part_that_was_cut_before_leaves_no_second_mark(before: int) -> None:
    part = last_lines(LINE * 1000)
    log = last_lines("x" * (before - 1) + "\n" + part)
    assert log.startswith(CUT)
    assert len(log) <= LOG_CHARS_MAX
    assert {*log.removeprefix(CUT).splitlines(keepends=True)} == {LINE}


def test_of_a_last_line_that_is_too_long_the_end_is_kept() -> None:
    """The whole log was lost."""
    log = last_lines(LINE + "x" * 2 * LOG_CHARS_MAX + "the end\n")
    assert log.startswith(CUT + "x")
    assert log.endswith("the end\n")
    assert len(log) == LOG_CHARS_MAX


def test_a_short_log_is_kept_whole() -> None:
    assert last_lines(LINE * 3) == LINE * 3


@pytest.mark.parametrize("text", ["ö" * 100, "x" * 100, "\ud800" * 100])
def test_the_end_of_a_text_has_its_last_bytes(text: str) -> None:
    end = end_of(text + "the end", 20)
    assert end.endswith("the end")
    assert 19 <= len(end.encode()) <= 20
    assert end_of("short", 20) == "short"
