"""`mgpuctl containers list`, `logs`, `stop` and `detect`."""

import re
from typing import Any

import click

from multigpu.cli import show, tables
from multigpu.cli.commands import Command
from multigpu.cli.containers import engines
from multigpu.cli.options import json_option
from multigpu.cli.tables import Column
from multigpu.cli.text import clean_lines

# Colours and styles of a terminal.
STYLES = re.compile(r"\x1b\[[\d;]*m")
NONE = "no model server"
# Docker gives GPUs also with NVIDIA's hook alone, and does not tell it.
NO_GPUS = "names no way to give GPUs to containers"
COLUMNS = (
    Column("NAME", lambda row: row["name"]),
    Column("API", lambda row: row["api"], rank=4),
    Column("MODEL", lambda row: row["model"], rank=2),
    Column("GPUS", lambda row: ",".join(row["devices"]), rank=1),
    Column("STATE", lambda row: row["state"]),
    Column("URL", lambda row: row["url"], rank=3),
)


def log_lines(container: Any, count: int | str = "all") -> str:
    """The last lines of a container's log, without styles and unprintable characters."""
    text = container.logs(tail=count).decode("utf-8", errors="replace")
    return clean_lines(STYLES.sub("", text).replace("\r", "").rstrip("\n"))


@click.command("list", cls=Command, examples=(("mgpuctl containers list", "On Docker and on Podman."),))
@json_option
def list_(as_json: bool) -> None:
    """Show the model servers that `deploy` started, also those that have ended."""
    with engines.engine_errors():
        rows = [engine.row(each) for engine, each in engines.servers()]
    show.value(rows) if as_json else tables.show_rows(rows, COLUMNS, empty=NONE)


@click.command(cls=Command, examples=(("mgpuctl containers logs NAME", "What the server has written."),))
@click.argument("name")
def logs(name: str) -> None:
    """Print the log of a model server."""
    with engines.engine_errors():
        show.line(log_lines(engines.named(name)))


@click.command(cls=Command, examples=(("mgpuctl containers stop NAME", "The cache of models stays."),))
@click.argument("name")
def stop(name: str) -> None:
    """Stop a model server, and remove its container."""
    with engines.engine_errors():
        container = engines.named(name)
        container.stop()
        container.remove(v=True)


@click.command(cls=Command, examples=(("mgpuctl containers detect", "Before the first `deploy`."),))
@json_option
def detect(as_json: bool) -> None:
    """Show which engines answer, whether they can give GPUs to containers, and which model servers run.

    An engine can if it has NVIDIA's runtime, or knows GPUs by the Container Device Interface (CDI). Podman before 5.4
    can't.
    """
    with engines.engine_errors():
        answering, errors = engines.answering()
        found = {each.name: {"version": each.version, "gives_gpus_by": each.gives_gpus_by()} for each in answering}
        rows = [engine.row(each) for engine in answering for each in engine.servers()]
    running = [row for row in rows if row["state"] == "running"]
    if as_json:
        show.value({"engines": found, "errors": errors, "servers": running})
        return
    for name, each in found.items():
        how = f"gives GPUs by {each['gives_gpus_by']}" if each["gives_gpus_by"] else NO_GPUS
        show.line(f"{name} {each['version']}: {how}")
    for why in errors.values():
        show.line(why)
    tables.show_rows(running, COLUMNS, empty=NONE)
