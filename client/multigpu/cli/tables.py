"""Tables: a tuple of Columns for each kind of row. Fitted to a terminal; whole in a pipe, for grep."""

import io
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from multigpu.cli import messages, show
from multigpu.cli.text import clean

PIPE_WIDTH = 10_000
GAP = 2
FOLDED_WIDTH_MIN = 12
# Cells without information.
NOTHING = frozenset({"", "-", "n/a"})


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    cell: Callable[[Any], str]
    # Numbers: aligned on the right, and never cut, because a cut number is another number.
    right: bool = False
    # On a narrow terminal the column of the highest rank goes first; 0: it never goes.
    rank: int = 0
    # For narrow terminals; None: the same.
    short: Callable[[Any], str] | None = None


Cells = dict[Column, list[str]]


def show_rows(rows: Sequence[Any], columns: Sequence[Column], *, as_json: bool = False, empty: str = "") -> None:
    """Prints a table; or `empty` on stderr if there are no rows; or with `as_json` the rows, which are messages."""
    if as_json:
        show.value([messages.as_dict(row) for row in rows])
    elif not rows:
        show.note(empty)
    else:
        for text in rendered(grid(fit(rows, columns, terminal_width()))):
            show.line(text)


def terminal_width() -> int | None:
    """None: stdout is not a terminal."""
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else None


def fit(rows: Sequence[Any], columns: Sequence[Column], width: int | None) -> Cells:
    """The columns that fit into `width`, with their cells. None: every column.

    Where they don't fit: optional columns without information go, then short forms replace long ones, then the columns
    of the highest ranks go. At the end long forms return where there is space.
    """
    long = {column: [clean(column.cell(row)) for row in rows] for column in columns}
    cells = dict(long)
    by_rank = sorted((column for column in columns if column.rank), key=lambda column: -column.rank)
    for column in by_rank:
        if not _fits(cells, width) and NOTHING.issuperset(cells[column]):
            del cells[column]
    if not _fits(cells, width):
        cells |= {column: [clean(column.short(row)) for row in rows] for column in cells if column.short is not None}
    for column in by_rank:
        if not _fits(cells, width):
            cells.pop(column, None)
    for column in reversed(by_rank):
        if column in cells and _fits(cells | {column: long[column]}, width):
            cells[column] = long[column]
    return cells


def _fits(cells: Cells, width: int | None) -> bool:
    if width is None:
        return True
    widths = [max(len(column.name), *map(len, texts), 0) for column, texts in cells.items()]
    first = next(iter(cells))
    if first.rank == 0 and first.short is None:
        widths[0] = min(widths[0], FOLDED_WIDTH_MIN)
    return sum(widths) + GAP * (len(widths) - 1) <= width


def grid(cells: Cells, *, styles: Sequence[str] = (), one_line: bool = False) -> Table:
    """`styles`: of each row. `one_line`: cells are cut; else they wrap, and the first column, which people copy, is
    folded.
    """
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for index, column in enumerate(cells):
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=column.right,
            overflow="fold" if index == 0 and not one_line else "ellipsis",
        )
    for index, row in enumerate(zip(*cells.values(), strict=True)):
        table.add_row(*(Text(cell, no_wrap=one_line or None) for cell in row), style=styles[index] if styles else None)
    return table


def rendered(renderable: RenderableType, width: int | None = None) -> list[str]:
    """The lines of a renderable; with styles if stdout is a terminal."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width or terminal_width() or PIPE_WIDTH,
        force_terminal=sys.stdout.isatty(),
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(renderable)
    return [text.rstrip() for text in out.getvalue().splitlines()]
