"""`mgpuctl gpus`: every device of the fleet, and how it does."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from multigpu.cli import show
from multigpu.cli.commands import Command
from multigpu.cli.failures import Unreachable
from multigpu.cli.fleet import device_columns
from multigpu.cli.options import Number, json_option, master_option
from multigpu.cli.rpc import Master
from multigpu.v1 import admin_service_pb2 as admin

FIELDS = (
    *("worker_id", "host", "state", "cordoned", "cordon_reason", "quarantined", "last_heartbeat_time"),
    *("device", "telemetry", "health", "mps"),
)
EMPTY = "no worker has connected yet; start some with `mgpuctl up` or `mgpu-worker`"


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl gpus", "A table of all devices; as many columns as the terminal is wide."),
        ("mgpuctl gpus --watch", "The same, again every second, until Ctrl-C."),
        ("mgpuctl gpus --json | jq '.[].telemetry.power_watts'", "Every figure, for programs."),
        ("mgpuctl gpus | cat", "Every column."),
    ),
)
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C; with --json, one line each time.")
@click.option(
    "--interval",
    "interval_s",
    type=Number(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often --watch shows it.",
)
@master_option
@json_option
def gpus(watch: bool, interval_s: float, address: str, as_json: bool) -> None:
    """Every device of the fleet: model, load and health.

    A worker on the CPU has its host's memory and load here. "-" is what a device doesn't tell.
    """
    with Master(address) as master:
        if not watch:
            show_once(master.list_workers(), as_json=as_json)
        elif as_json:
            while True:
                show.line(show.as_json(as_list(master.list_workers())))
                time.sleep(interval_s)
        elif sys.stdout.isatty():
            _watch(master, interval_s)
        else:
            while True:
                show_once(master.list_workers(), as_json=False)
                show.line()
                time.sleep(interval_s)


def as_list(workers: list[admin.Worker]) -> list[dict[str, Any]]:
    """The devices for json.dumps. What a device doesn't tell is left out."""
    told = [show.as_dict(worker) for worker in workers]
    return [{name: worker[name] for name in FIELDS if name in worker} for worker in told]


def show_once(workers: list[admin.Worker], *, as_json: bool) -> None:
    if as_json:
        show.value(as_list(workers))
    elif not workers:
        show.note(EMPTY)
    elif sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415  only a terminal pays for it

        console = Console(highlight=False)
        console.print(as_text(lines(workers, console.width)))
    else:
        for text, _ in lines(workers, None):
            show.line(text)


def lines(workers: list[admin.Worker], width: int | None) -> list[tuple[str, str]]:
    """The table, what is wrong in words, and a summary, each line with its style. `width` None: nothing is cut."""
    if not workers:
        return [(EMPTY, "")]
    grid = device_columns.fit(workers, width)
    heading = device_columns.row_text(grid, [column.name for column in grid.columns])
    rows = [
        (device_columns.row_text(grid, row), device_columns.style(worker))
        for row, worker in zip(grid.rows, workers, strict=True)
    ]
    wrong = [(text, "") for text in device_columns.complaints(workers)]
    blank = ("", "")
    return [(heading, "bold"), *rows, blank, *wrong, *([blank] if wrong else []), (device_columns.summary(workers), "")]


def as_text(styled: Sequence[tuple[str, str]]) -> Any:
    """Lines for rich to print; words wrap, table rows fit anyway."""
    from rich.text import Text  # noqa: PLC0415  only a terminal pays for it

    return Text("\n").join(Text(text, style=style) for text, style in styled)


def _watch(master: Master, interval_s: float) -> None:
    """Until Ctrl-C; a master that restarts is waited for."""
    from rich.console import Console  # noqa: PLC0415  only a terminal pays for it
    from rich.live import Live  # noqa: PLC0415

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                found = lines(master.list_workers(), console.width)
            except Unreachable as failure:
                found = [(str(failure), "red")]
            if len(found) > console.height:
                rest = len(found) - console.height + 1
                found = [*found[: console.height - 1], (f"… {rest} more lines; `mgpuctl top` scrolls", "dim")]
            live.update(as_text(found), refresh=True)
            time.sleep(interval_s)
