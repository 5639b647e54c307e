"""What mgpuctl prints of foreign text: a terminal obeys none of it, and it stays in its cell."""

import json
import sys

import pytest
from multigpu.cli import show, tables

FOREIGN = "a\x1b[31mRED\x9b31m\u202eevil\nFORGED LINE\r\0\u2028\u2029\x85z\ttab"
OBEYED = "\x1b\x9b\u202e\r\0\u2028\u2029\x85\t"


def test_clean_text_is_one_line_without_control_characters() -> None:
    assert show.clean(FOREIGN).isprintable()
    assert len(show.clean(FOREIGN).splitlines()) == 1
    assert not set(show.clean_lines(FOREIGN)) & set(OBEYED)
    assert len(show.clean_lines(FOREIGN).splitlines()) == 2


def test_a_cell_forges_no_line() -> None:
    lines = tables.render_table(["A", "B"], [["x", FOREIGN]], width=200)
    assert len(lines) == 2
    assert not set("".join(lines)) & set(OBEYED)


def test_json_for_a_terminal_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert show.as_json({"name": FOREIGN}).isascii()
    assert json.loads(show.as_json({"name": FOREIGN})) == {"name": FOREIGN}
