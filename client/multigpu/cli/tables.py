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
GAP = 2
FIRST_WIDTH_MIN = 12
# Cells that tell nothing.
NOTHING = frozenset({"", "-", "n/a"})


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else PIPE_WIDTH


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    optional: Sequence[str] = (),
    empty: str = "",
) -> None:
    """A table with a heading; `right` names the columns of numbers. Without rows, `empty` is said on stderr instead.

    Where a terminal is too narrow, `optional` columns are left out: those that tell nothing, then the first, and so on.
    """
    if not rows:
        show.note(empty)
        return
    if sys.stdout.isatty():
        columns, rows = fit(columns, rows, optional, _width())
    for text in render_table(columns, rows, right=right, width=_width()):
        show.line(text)


def fit(
    columns: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str], width: int
) -> tuple[list[str], list[list[str]]]:
    """What is left of a table that is to go into `width`."""
    cells = {name: [name, *column] for name, *column in zip(columns, *rows, strict=True)}
    silent = [name for name in optional if set(cells[name][1:]) <= NOTHING]
    for name in (*silent, *(name for name in optional if name not in silent)):
        widths = [max(map(len, column)) for column in cells.values()]
        # The first column may be folded.
        if sum(widths) + GAP * len(widths) - max(0, widths[0] - FIRST_WIDTH_MIN) <= width:
            break
        del cells[name]
    return list(cells), [list(row) for row in zip(*cells.values(), strict=True)][1:]


def render_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), width: int
) -> list[str]:
    """The lines of a table. The first column is folded, not cut, when it is too wide: it is what people copy."""
    grid = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold", show_edge=False)
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
