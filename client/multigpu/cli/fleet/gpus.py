"""`mgpuctl gpus`: every device of the fleet, its load and its health."""

from collections.abc import Sequence

import click

from multigpu import AdminClient
from multigpu.cli import messages, show, tables
from multigpu.cli.admin import connected
from multigpu.cli.commands import Command
from multigpu.cli.fleet import device_columns
from multigpu.cli.options import json_option
from multigpu.fleet import Worker

EMPTY = "no worker has connected yet; start some with `mgpuctl up` or `mgpu-worker`"


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl gpus", "A table of all devices; as many columns as the terminal is wide."),
        ("mgpuctl gpus --json | jq '.[].telemetry.power_watts'", "Every value, for programs."),
        ("mgpuctl gpus | cat", "Every column."),
    ),
)
@connected
@json_option
def gpus(admin: AdminClient, as_json: bool) -> None:
    """Every device of the fleet: model, load and health.

    For a worker on the CPU, memory and load are its host's. "-" is an unknown value.
    """
    workers = admin.list_workers()
    if as_json:
        show.value([messages.as_dict(worker) for worker in workers])
    elif not workers:
        show.note(EMPTY)
    else:
        for text in lines(workers, tables.terminal_width()):
            show.line(text)


def lines(workers: Sequence[Worker], width: int | None) -> list[str]:
    """The table, the problems, and a summary. `width` None: nothing is cut."""
    rows = device_columns.rows(workers)
    cells = tables.fit(rows, device_columns.columns(workers), width)
    styles = [device_columns.style(row) for row in rows]
    problems = device_columns.problems(workers)
    below = "\n".join(["", *problems, *([""] if problems else []), device_columns.summary(workers)])
    return [*tables.rendered(tables.grid(cells, styles=styles, one_line=True), width), *tables.rendered(below, width)]
