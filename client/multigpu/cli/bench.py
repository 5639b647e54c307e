"""`mgpuctl bench`: how fast a fleet is with a model, in every way that it can run it, and how right.

bench_run.py measures, and bench_rows.py has the figures; what is here turns a command line into what is to be measured,
and the rows into a table, JSON, CSV and a picture. docs/bench.md explains every column.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from multigpu import embedding, inference
from multigpu.cli import bench_plot, show
from multigpu.cli.bench_fleet import Crew, own_fleet
from multigpu.cli.bench_plain import Plain
from multigpu.cli.bench_rows import TABLE, Row, table_row, to_csv
from multigpu.cli.bench_run import Bench, Grid
from multigpu.cli.bench_source import Arrays, Source, Texts, read_pairs
from multigpu.cli.commands import Command
from multigpu.cli.failures import EXIT_CODES, TasksFailed, WrongUsage
from multigpu.cli.infer import read_inputs
from multigpu.cli.options import Globals, client_config, json_option, master_option
from multigpu.cli.progress import Progress
from multigpu.cli.sdk import sdk_failures
from multigpu.cli.tables import table
from multigpu.cli.vectors import File
from multigpu.repository import ENGINES, PRECISIONS


def words_of(known: Sequence[str]) -> Any:
    """Words between commas, each one of `known`. For `click.option(callback=…)`."""

    def check(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in value.split(","))
        for word in words:
            if word not in known:
                raise click.BadParameter(f"{word!r} is none of {', '.join(known)}", context, parameter)
        return words

    return check


def numbers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Whole numbers from 1 between commas. For `click.option(callback=…)`."""
    try:
        found = tuple(int(word) for word in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list of numbers, such as 1,8,64", context, parameter) from error
    if min(found) < 1 or max(found) > 10_000:
        raise click.BadParameter("must be 1 to 10,000", context, parameter)
    return found


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl bench --up 2", "The packaged model on two workers, started for this."),
        ("mgpuctl bench --engine torch,onnx --concurrency 1,64", "Two engines, one caller and many."),
        ("mgpuctl bench m --precision fp32,bf16 --pairs stsb.tsv", "What a precision costs in accuracy."),
        ("mgpuctl bench vit --input pixels=@batch.npy", "A model that takes arrays."),
        ("mgpuctl bench --csv bench.csv --plot bench.png", "All figures, and a picture of them."),
    ),
    exits=EXIT_CODES,
)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--engine", "engines", default="auto", callback=words_of(ENGINES), metavar="E,…", show_default=True)
@click.option(
    "--precision", "precisions", default="auto", callback=words_of(PRECISIONS), metavar="P,…", show_default=True
)
@click.option(
    "--batch-size", "batch_sizes", default="1,32", callback=numbers, metavar="N,…", help="Items in a task.  [1,32]"
)
@click.option(
    "--concurrency", "concurrencies", default="1,16", callback=numbers, metavar="N,…", help="Callers.  [1,16]"
)
@click.option("--items", type=click.IntRange(1), default=512, show_default=True, help="Texts, or examples, in a round.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Of the fleet and the plain loop.")
@click.option("--texts", metavar="FILE", help="Texts to embed, one a line.  [default: sentences of Python's library]")
@click.option("--pairs", metavar="FILE", help="Lines of score, tab, text, tab, text: adds Spearman's correlation.")
@click.option("--input", "inputs", multiple=True, metavar="NAME=@FILE|NAME=JSON", help="Measure `infer` with this.")
@click.option("--up", "workers", type=click.IntRange(1), metavar="N", help="Start a fleet of N workers for this.")
@click.option(
    "--serve", "served", multiple=True, metavar="NAME=FOLDER", help="Where a model lies, for --up and --plain."
)
@click.option("--plain/--no-plain", "with_plain", default=True, help="Compare with a plain loop in one process.")
@click.option("--plain-threads", type=click.IntRange(1), help="Its threads.  [default: all cores, as `mgpuctl up` has]")
@click.option("--csv", "csv_file", metavar="FILE", help="All figures.")
@click.option("--plot", "plot_file", metavar="FILE", help="A PNG.")
@master_option
@json_option
def bench(address: str, as_json: bool, **options: Any) -> None:
    """Measure a fleet with each MODEL: how fast it is, and how right.

    Every engine, precision, batch size and number of callers that is given, in every combination. Rounds of the
    fleet and of a plain loop in one process take turns, so that both see the same machine. A combination that can't
    be run is told, and the others go on. docs/bench.md explains every column.
    """
    if options["plot_file"]:
        bench_plot.require()
    if options["inputs"] and (options["texts"] or options["pairs"]):
        raise click.UsageError("--input measures infer, --texts and --pairs embed: choose one")
    config_file = (click.get_current_context().find_object(Globals) or Globals()).config_file
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdk_failures())
        if options["workers"]:
            show.note(f"starting {options['workers']} workers")
            address = stack.enter_context(own_fleet(options["workers"], options["served"], config_file))
        crew = Crew.of(address, inference.KIND if options["inputs"] else embedding.KIND)
        grid = grid_of(options, crew)
        plain = stack.enter_context(plain_of(options, crew, config_file))
        total = grid.combinations * options["items"] * options["rounds"]
        progress = stack.enter_context(Progress("items", total, quiet=as_json))
        progress.begin()
        measured = Bench(
            address=address,
            crew=crew,
            grid=grid,
            source=source_of(options, grid),
            pairs=read_pairs(options["pairs"]) if options["pairs"] else None,
            plain=plain,
            progress=progress,
            window=client_config(address).window_tasks,
        )
        rows = asyncio.run(measured.run())
    tell(rows, crew, options, as_json=as_json)
    if failed := [row for row in rows if row.error]:
        raise TasksFailed(f"{len(failed)} of {len(rows)} combinations could not be run")


def grid_of(options: dict[str, Any], crew: Crew) -> Grid:
    """What is to be measured; without a MODEL, the workers' default."""
    models = options["models"] or crew.models[:1]
    if unknown := [name for name in models if name not in crew.models]:
        raise WrongUsage(f"no worker serves the model {unknown[0]!r}; there are: {', '.join(crew.models)}")
    return Grid(
        models=tuple(models),
        **{name: options[name] for name in ("engines", "precisions", "batch_sizes", "concurrencies")},
        items=options["items"],
        rounds=options["rounds"],
    )


def source_of(options: dict[str, Any], grid: Grid) -> Source:
    if options["inputs"]:
        return Arrays(read_inputs(options["inputs"]))
    return Texts.of(options["texts"], (grid.combinations + 1) * grid.rounds * grid.items)


def plain_of(options: dict[str, Any], crew: Crew, config_file: str | None) -> Any:
    """The plain loop, as a context; None in it, with a remark, where there can be none."""
    if not options["with_plain"]:
        return contextlib.nullcontext()
    if crew.hosts != {socket.gethostname()}:
        show.note("no plain loop: the workers are on other hosts; run this on theirs to compare")
        return contextlib.nullcontext()
    threads = options["plain_threads"]
    if not threads and crew.device == "cpu":
        workers, cores = len(crew.worker_ids), len(os.sched_getaffinity(0))
        threads = max(1, cores // workers) * workers
    return Plain(device=crew.device, threads=threads or 0, config_file=config_file, models=options["served"])


def tell(rows: list[Row], crew: Crew, options: dict[str, Any], *, as_json: bool) -> None:
    """All that came of it, to where it was asked for."""
    for file, content in (
        (options["csv_file"], to_csv),
        (options["plot_file"], bench_plot.plot),
    ):
        if file:
            with File(Path(file)) as sink:
                sink.write(content(rows))
    if as_json:
        fleet = {"workers": sorted(crew.worker_ids), "device": crew.device, "products": list(crew.products)}
        show.value({"fleet": fleet, "rows": [row.plain() for row in rows]})
        return
    show.note(f"{len(crew.worker_ids)} workers on {', '.join(crew.products)}")
    table(TABLE, [table_row(row) for row in rows], right=TABLE[3:])
    for row in rows:
        if row.error:
            show.note(f"{row.model}, {row.engine}, {row.precision}: {row.error}")
    sys.stdout.flush()
