"""Tables for people: cut to the terminal's width there; whole into a pipe, so that grep finds what is in them."""

import io
import shutil
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from multigpu.cli import show

PIPE_WIDTH = 10_000


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else PIPE_WIDTH


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), empty: str = "") -> None:
    """A table with a heading; `right` names the columns of numbers. Without rows, `empty` is said on stderr instead."""
    if not rows:
        show.note(empty)
        return
    for text in render_table(columns, rows, right=right, width=_width()):
        show.line(text)


def render_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), width: int
) -> list[str]:
    """The lines of a table. The first column is folded, not cut, when it is too wide: it is what people copy."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for index, name in enumerate(columns):
        # Numbers are never cut: a cut number is another number.
        grid.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name in right,
            overflow="fold" if index == 0 else "ellipsis",
        )
    for row in rows:
        assert len(row) == len(columns)
        grid.add_row(*(Text(show.clean(cell)) for cell in row))
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=sys.stdout.isatty(), highlight=False)
    console.print(grid)
    return [text.rstrip() for text in out.getvalue().splitlines()]
