"""`mgpuctl bench`: speed of a fleet with a model, next to a plain loop, for each batch size and load.

run.py measures; this module turns the command line into what is measured, and the rows into a table, JSON and a plot.
docs/bench.md explains every column.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import itertools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from multigpu._kinds import classification, embedding, inference
from multigpu.cli import show, tables
from multigpu.cli.admin import active, connection
from multigpu.cli.bench import plot
from multigpu.cli.bench.baseline import Baseline
from multigpu.cli.bench.run import Bench, rate_text, tasks_in_round
from multigpu.cli.bench.source import Source, read_pictures, read_texts, to_classify, to_embed, to_infer
from multigpu.cli.commands import Command
from multigpu.cli.failures import EXIT_CODES, Failure, TerminatedError, WrongUsage
from multigpu.cli.kinds.infer import read_inputs
from multigpu.cli.kinds.vectors import File
from multigpu.cli.options import json_option, master_option
from multigpu.cli.presence import not_served
from multigpu.cli.sdk_errors import sdk_session
from multigpu.cli.tables import Column
from multigpu.cli.text import plural
from multigpu.errors import MultigpuError
from multigpu.fleet import Worker

# The examples of each kind.
EXAMPLES = {
    embedding.KIND: {"--texts"},
    inference.KIND: {"--input"},
    classification.KIND: {"--texts", "--pictures"},
}
COLUMNS = (
    Column("MODEL", lambda row: row.model),
    Column("BATCH", lambda row: str(row.batch_size), right=True),
    Column("CALLERS", lambda row: str(row.concurrency), right=True),
    Column("ITEMS/S", lambda row: rate_text(row.items_per_s), right=True),
    Column("VS PLAIN", lambda row: "n/a" if row.ratio is None else f"{row.ratio:.3g}", right=True),
    Column("P50 MS", lambda row: f"{row.p50_latency_ms:.1f}", right=True),
    Column("P95 MS", lambda row: f"{row.p95_latency_ms:.1f}", right=True),
    Column("P99 MS", lambda row: f"{row.p99_latency_ms:.1f}", right=True),
)


def numbers(text: str) -> tuple[int, ...]:
    """Comma-separated whole numbers from 1. For `click.option(type=numbers)`."""
    try:
        found = tuple(dict.fromkeys(map(int, text.split(","))))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no list of numbers, such as 1,8,64") from error
    if min(found) < 1 or max(found) > 10_000:
        raise click.BadParameter("must be 1 to 10,000")
    return found


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl bench m --concurrency 1,64 --plot bench.png", "One caller and many, and a picture of both."),
        ("mgpuctl bench vit --input pixels=@batch.npy", "A model that takes arrays."),
        ("mgpuctl bench vision --pictures photos/", "A model that classifies."),
    ),
    exits=EXIT_CODES,
)
@click.argument("model", default="", metavar="[MODEL]")
@click.option("--batch-size", "batch_sizes", type=numbers, metavar="N,…", help="Items in a task.  [default: 1,32]")
@click.option(
    "--concurrency", "concurrencies", type=numbers, default="1,16", metavar="N,…", show_default=True,
    help="Callers at one time.",
)  # fmt: skip
@click.option(
    "--items", type=click.IntRange(1), default=512, show_default=True,
    help="Items in a round; at least 2 tasks for each caller.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds of the fleet and of the baseline."
)
@click.option("--texts", metavar="FILE", help="Texts, one a line.  [default: sentences of Python's library]")
@click.option("--input", "inputs", multiple=True, metavar="NAME=@FILE|NAME=JSON", help="Arrays, as `infer` takes them.")
@click.option("--pictures", type=click.Path(exists=True, path_type=Path), help="A picture to classify, or a folder.")
@click.option("--plot", "plot_file", metavar="FILE", help="Draw the results into this PNG file.")
@master_option
@json_option
def bench(address: str, as_json: bool, plot_file: str | None, **options: Any) -> None:
    """Measure a fleet with MODEL, and compare it with a plain loop.

    Every batch size with every number of callers. Rounds of the fleet and of a baseline in one process alternate, so
    that both see the same machine. After Ctrl-C the table has the complete rows. docs/bench.md explains every column.
    """
    if os.getloadavg()[0] > len(os.sched_getaffinity(0)):
        show.note("mgpuctl: this host is busy: VS PLAIN will favour the fleet, whose workers have fewer threads")
    if plot_file and importlib.util.find_spec("matplotlib") is None:
        raise WrongUsage("--plot needs matplotlib: pip install 'multigpu[plot]'")
    with sdk_session():
        measured = _prepared(address, options)
        # Opened before hours of measuring, not after.
        with File(Path(plot_file)) if plot_file else contextlib.nullcontext() as picture:
            problem = _run(measured)
            _print(measured, as_json=as_json)
            if problem is not None and not measured.rows:
                raise problem
            if picture is not None:
                picture.write(plot.plot(measured.rows))
        if problem is not None:
            raise problem


def _run(measured: Bench) -> BaseException | None:
    """Returns what ended the measurement before its last row."""
    try:
        asyncio.run(measured.run())
    except asyncio.CancelledError:
        return TerminatedError()
    except (KeyboardInterrupt, MultigpuError, Failure) as error:
        return error
    return None


def _prepared(address: str, options: dict[str, Any]) -> Bench:
    """The fleet, the examples and the baseline. Raises Failure, UsageError."""
    with connection(address) as admin:
        kind, model, workers = _chosen(active(admin.list_workers()), options["model"])
    sizes = options["batch_sizes"] or ((1,) if kind == classification.KIND else (1, 32))
    if kind == classification.KIND and sizes != (1,):
        raise click.UsageError(f"a task of the kind {kind} has one example: omit --batch-size")
    shapes = list(itertools.product(sizes, options["concurrencies"]))
    items, rounds = options["items"], options["rounds"]
    texts_wanted = 2 * rounds * sum(size * tasks_in_round(items, size, callers) for size, callers in shapes)
    # The threads that `mgpuctl up` gives all workers.
    device, cores = workers[0].device.name, len(os.sched_getaffinity(0))
    threads = max(1, cores // len(workers)) * len(workers) if device == "cpu" else 0
    baseline = Baseline(device=device, threads=threads, pid=workers[0].pid, kind=kind, model=model)
    elsewhere = {worker.host for worker in workers} != {socket.gethostname()}
    return Bench(
        address=address, kind=kind, model=model, workers=workers, shapes=shapes, items=items, rounds=rounds,
        source=_source(kind, options, texts_wanted), baseline=None if elsewhere else baseline,
        no_baseline="the workers are on other hosts; run this command there to compare" if elsewhere else "",
    )  # fmt: skip


def _chosen(connected: Sequence[Worker], model: str) -> tuple[str, str, list[Worker]]:
    """The kind, the name and the workers of a model; if `model` is empty, of the default to embed. Raises Failure."""
    offers = [(each.kind, name, worker) for worker in connected for each in worker.capabilities for name in each.models]
    if not model:
        if (failure := not_served(connected, embedding.KIND)) is not None:
            raise failure
        model = next((name for kind, name, _ in offers if kind == embedding.KIND), "")
    kinds = [kind for kind, name, _ in offers if name == model]
    if not kinds:
        there = ", ".join(sorted({name for _, name, _ in offers})) or "none"
        raise WrongUsage(f"no worker serves the model {model!r}; there are: {there}")
    if kinds[0] not in EXAMPLES:
        raise WrongUsage(f"{model} is a model for {kinds[0]}; bench measures models for {', '.join(EXAMPLES)}")
    return kinds[0], model, [worker for _, name, worker in offers if name == model]


def _source(kind: str, options: dict[str, Any], texts_wanted: int) -> Source:
    """The examples. Raises Failure, UsageError."""
    flags = {"--texts": options["texts"], "--input": options["inputs"], "--pictures": options["pictures"]}
    given, allowed = [flag for flag, value in flags.items() if value], EXAMPLES[kind]
    if len(given) > 1 or not allowed.issuperset(given) or (kind == inference.KIND and not given):
        found = f", not {' and '.join(given)}" if given else ""
        raise click.UsageError(f"for a model of the kind {kind} give {' or '.join(sorted(allowed))}{found}")
    if kind == inference.KIND:
        return to_infer(read_inputs(options["inputs"]))
    if options["pictures"]:
        return to_classify(read_pictures(options["pictures"]))
    texts = read_texts(options["texts"], texts_wanted)
    return to_embed(texts) if kind == embedding.KIND else to_classify(texts)


def _print(measured: Bench, *, as_json: bool) -> None:
    """All rows to stdout; why some are missing or incomplete, to stderr."""
    rows, workers = measured.rows, measured.workers
    complete = len(rows) == len(measured.shapes)
    products = list(dict.fromkeys(worker.device.product for worker in workers))
    if as_json:
        fleet: dict[str, Any] = {"workers": sorted(worker.worker_id for worker in workers)}
        fleet |= {"device": workers[0].device.name, "products": products}
        shown = [dataclasses.asdict(row) for row in rows]
        show.value({"fleet": fleet, "complete": complete, "plain_error": measured.no_baseline, "rows": shown})
    else:
        show.note(f"{plural(len(workers), 'worker')} on {', '.join(products)}")
        tables.show_rows(rows, COLUMNS)
    if measured.no_baseline:
        show.note(f"no baseline: {measured.no_baseline}")
    if not complete:
        show.note(f"mgpuctl: ended early, with {len(rows)} of {len(measured.shapes)} rows measured")
