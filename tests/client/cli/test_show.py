"""What mgpuctl prints of foreign text: a terminal obeys none of it, and it stays in its cell."""

import json
import sys

import pytest
from multigpu.cli import show, tables, text

FOREIGN = "a\x1b[31mRED\x9b31m\u202eevil\nFORGED LINE\r\0\u2028\u2029\x85z\ttab"
OBEYED = "\x1b\x9b\u202e\r\0\u2028\u2029\x85\t"


def test_clean_text_is_one_line_without_control_characters() -> None:
    assert text.clean(FOREIGN).isprintable()
    assert len(text.clean(FOREIGN).splitlines()) == 1
    assert not set(text.clean_lines(FOREIGN)) & set(OBEYED)
    assert len(text.clean_lines(FOREIGN).splitlines()) == 2


def test_a_cell_forges_no_line() -> None:
    columns = (tables.Column("A", lambda _: "x"), tables.Column("B", lambda row: row))
    lines = tables.rendered(tables.grid(tables.fit([FOREIGN], columns, None)), 200)
    assert len(lines) == 2
    assert not set("".join(lines)) & set(OBEYED)


def test_json_for_a_terminal_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert show.as_json({"name": FOREIGN}).isascii()
    assert json.loads(show.as_json({"name": FOREIGN})) == {"name": FOREIGN}


def test_json_in_a_pipe_escapes_only_unprintable_characters() -> None:
    printed = show.as_json({"name": FOREIGN, "text": "h\u00e9llo \U0001f600 \u65e5\u672c"})
    assert printed.isprintable()
    assert "\\u202e" in printed
    assert "h\u00e9llo \U0001f600 \u65e5\u672c" in printed
    assert json.loads(printed)["name"] == FOREIGN
    assert show.as_json("\U000e0001") == '"\\udb40\\udc01"'  # an invisible tag, beyond 16 bits
