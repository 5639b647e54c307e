"""`mgpuctl gpus`: every device of the fleet, its load and its health."""

import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from multigpu.cli import messages, show, tables
from multigpu.cli.commands import Command
from multigpu.cli.failures import Unreachable, WrongUsage
from multigpu.cli.fleet import device_columns
from multigpu.cli.options import json_option
from multigpu.cli.rpc import Master, connected
from multigpu.v1 import admin_service_pb2 as admin

FIELDS = (
    *("worker_id", "host", "state", "cordoned", "cordon_reason", "quarantined", "last_heartbeat_time"),
    *("device", "telemetry", "health", "mps"),
)
# Between two updates of --watch.
INTERVAL_S = 1.0
EMPTY = "no worker has connected yet; start some with `mgpuctl up` or `mgpu-worker`"


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl gpus", "A table of all devices; as many columns as the terminal is wide."),
        ("mgpuctl gpus --watch", "The same, again every second, until Ctrl-C."),
        ("mgpuctl gpus --json | jq '.[].telemetry.power_watts'", "Every value, for programs."),
        ("mgpuctl gpus | cat", "Every column."),
    ),
)
@click.option("--watch", is_flag=True, help="Show it every second, until Ctrl-C; with --json, one line each time.")
@connected
@json_option
def gpus(watch: bool, master: Master, as_json: bool) -> None:
    """Every device of the fleet: model, load and health.

    For a worker on the CPU, memory and load are its host's. "-" is an unknown value.
    """
    if watch and not as_json:
        _watch(master)
    while watch:
        show.line(show.as_json(_as_list(master.list_workers())))
        time.sleep(INTERVAL_S)
    workers = master.list_workers()
    if as_json:
        show.value(_as_list(workers))
    elif not workers:
        show.note(EMPTY)
    else:
        for text in lines(workers, tables.terminal_width()):
            show.line(text)


def _as_list(workers: Sequence[admin.Worker]) -> list[dict[str, Any]]:
    """The devices for json.dumps. Unknown values are omitted."""
    found = [messages.as_dict(worker) for worker in workers]
    return [{name: worker[name] for name in FIELDS if name in worker} for worker in found]


def lines(workers: Sequence[admin.Worker], width: int | None) -> list[str]:
    """The table, the problems, and a summary. `width` None: nothing is cut."""
    if not workers:
        return [EMPTY]
    cells = tables.fit(workers, device_columns.columns(workers), width)
    styles = [device_columns.style(worker) for worker in workers]
    problems = device_columns.problems(workers)
    below = "\n".join(["", *problems, *([""] if problems else []), device_columns.summary(workers)])
    return [*tables.rendered(tables.grid(cells, styles=styles, one_line=True), width), *tables.rendered(below, width)]


def _watch(master: Master) -> NoReturn:
    """Shows the devices until Ctrl-C, through restarts of the master."""
    if not sys.stdout.isatty():
        raise WrongUsage("--watch needs a terminal; --watch --json prints a line each time")
    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                found = lines(master.list_workers(), console.width)
            except Unreachable as failure:
                found = [str(failure)]
            if len(found) > console.height:
                more = len(found) - console.height + 1
                found[console.height - 1 :] = [f"… {more} more lines; `mgpuctl top` scrolls"]
            live.update(Text.from_ansi("\n".join(found)), refresh=True)
            time.sleep(INTERVAL_S)
