"""`mgpuctl bench`: speed of a fleet with a model, next to a plain loop, for each batch size and load.

run.py measures; this module turns the command line into what is measured, and the rows into a table, JSON and a plot.
docs/bench.md explains every column.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from multigpu._kinds import classification, embedding, inference
from multigpu._transport.encoding import JSON, RAW, encode
from multigpu.cli import show, tables
from multigpu.cli.bench import plot
from multigpu.cli.bench.baseline import Baseline
from multigpu.cli.bench.rows import COLUMNS
from multigpu.cli.bench.run import Bench, Grid, Serving, serving
from multigpu.cli.bench.source import Arrays, Singles, Source, Texts, read_pictures, read_texts, to_classify
from multigpu.cli.commands import Command
from multigpu.cli.failures import EXIT_CODES, Failure, TerminatedError, WrongUsage
from multigpu.cli.kinds.infer import read_inputs
from multigpu.cli.kinds.vectors import File
from multigpu.cli.options import client_config, json_option, master_option
from multigpu.cli.progress import Progress
from multigpu.cli.rpc import Master
from multigpu.cli.sdk import sdk_failures
from multigpu.cli.tasks.lines import read_lines
from multigpu.cli.tasks.submit import parse
from multigpu.cli.text import plural
from multigpu.errors import MultigpuError
from multigpu.v1 import admin_service_pb2 as admin

# The examples of each kind; of any other kind, HANDLER.
EXAMPLES = {
    embedding.KIND: ("texts",),
    inference.KIND: ("inputs",),
    classification.KIND: ("texts", "pictures"),
}
HANDLER = ("lines", "parse_json")
FLAGS = {
    "texts": "--texts",
    "inputs": "--input",
    "pictures": "--pictures",
    "lines": "--lines",
    "parse_json": "--parse-json",
}
BATCH_SIZES = (1, 32)


def numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Comma-separated whole numbers from 1. For `click.option(callback=…)`."""
    if value is None:
        return None
    try:
        found = tuple(dict.fromkeys(int(word) for word in value.split(",")))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list of numbers, such as 1,8,64", context, parameter) from error
    if min(found) < 1 or max(found) > 10_000:
        raise click.BadParameter("must be 1 to 10,000", context, parameter)
    return found


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl bench m --concurrency 1,64 --plot bench.png", "One caller and many, and a picture of both."),
        ("mgpuctl bench vit --input pixels=@batch.npy", "A model that takes arrays."),
        ("mgpuctl bench vision --pictures photos/", "A model that classifies."),
        ("mgpuctl bench --kind my.kind --lines in.txt", "A handler of your own."),
    ),
    exits=EXIT_CODES,
)
@click.argument("model", default="", metavar="[MODEL]")
@click.option("--batch-size", "batch_sizes", callback=numbers, metavar="N,…", help="Items in a task.  [default: 1,32]")
@click.option(
    "--concurrency",
    "concurrencies",
    default="1,16",
    callback=numbers,
    metavar="N,…",
    show_default=True,
    help="Callers at one time.",
)
@click.option(
    "--items",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Items in a round; at least 2 tasks for each caller.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds of the fleet and of the baseline."
)
@click.option("--kind", help="What to measure: embed, infer, classify, a handler's kind.  [default: what MODEL is for]")
@click.option("--texts", metavar="FILE", help="Texts, one a line.  [default: sentences of Python's library]")
@click.option("--input", "inputs", multiple=True, metavar="NAME=@FILE|NAME=JSON", help="Arrays, as `infer` takes them.")
@click.option(
    "--pictures",
    multiple=True,
    type=click.Path(exists=True),
    metavar="PATH",
    help="Files or folders of pictures to classify.",
)
@click.option("--lines", metavar="FILE", help="A handler's inputs, one a line.")
@click.option("--parse-json", is_flag=True, help="The input is JSON: the handler gets the value, not the bytes.")
@click.option(
    "--plain/--no-plain", "with_baseline", default=True, help="Compare with a baseline: a plain loop in one process."
)
@click.option("--plot", "plot_file", metavar="FILE", help="Draw the results into this PNG file.")
@master_option
@json_option
def bench(address: str, as_json: bool, **options: Any) -> None:
    """Measure a fleet with MODEL, and compare it with a plain loop.

    Every batch size with every number of callers. Rounds of the fleet and of a baseline in one process alternate, so
    that both see the same machine. After Ctrl-C the table has the complete rows. docs/bench.md explains every column.
    """
    if options["plot_file"]:
        plot.require()
    if options["with_baseline"] and os.getloadavg()[0] > len(os.sched_getaffinity(0)):
        show.note("mgpuctl: this host is busy: VS PLAIN will favour the fleet, whose workers have fewer threads")
    problem: BaseException | None = None
    with sdk_failures():
        with contextlib.ExitStack() as files:
            # Opened before hours of measuring, not after.
            picture = files.enter_context(File(Path(options["plot_file"]))) if options["plot_file"] else None
            with _prepared(address, options, quiet=as_json) as measured:
                try:
                    _run(measured.run())
                except (KeyboardInterrupt, MultigpuError, Failure) as error:
                    if not measured.rows:
                        _print(measured, as_json=as_json, complete=False)
                        raise
                    problem = error
            if picture is not None:
                picture.write(plot.plot(measured.rows))
        _print(measured, as_json=as_json, complete=problem is None)
        if problem is not None:
            raise problem


def _run(work: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run; SIGTERM ends the work as Ctrl-C does, by cancellation."""
    before = signal.getsignal(signal.SIGTERM)

    async def until_terminated() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await work

    try:
        asyncio.run(until_terminated())
    except asyncio.CancelledError:
        raise TerminatedError from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _prepared(address: str, options: dict[str, Any], *, quiet: bool) -> Iterator[Bench]:
    """The fleet, the examples and the baseline. Raises Failure, UsageError."""
    with Master(address) as master:
        workers = master.connected_workers()
    kind = _kind(options, workers)
    _check_examples(kind, options)
    found = serving(workers, kind)
    grid = _grid(options, found, kind)
    source = _source(options, grid)
    no_baseline = _why_no_baseline(options, found)
    with contextlib.ExitStack() as stack:
        baseline = None if no_baseline else stack.enter_context(_baseline(found))
        progress = stack.enter_context(Progress("items", grid.items_in_all, quiet=quiet))
        progress.begin()
        yield Bench(
            address=address,
            serving=found,
            grid=grid,
            source=source,
            baseline=baseline,
            no_baseline=no_baseline,
            progress=progress,
            window=client_config(address).window_tasks,
        )


def _kind(options: dict[str, Any], workers: Sequence[admin.Worker]) -> str:
    """The kind to measure. Raises WrongUsage."""
    if options["kind"]:
        return str(options["kind"])
    kinds = {name: found.kind for worker in workers for found in worker.capabilities for name in found.models}
    model = options["model"]
    if model and model not in kinds:
        raise WrongUsage(f"no worker serves the model {model!r}; there are: {', '.join(sorted(kinds)) or 'none'}")
    return kinds[model] if model else embedding.KIND


def _check_examples(kind: str, options: dict[str, Any]) -> None:
    """Raises UsageError for examples that the kind doesn't take, or if it lacks some."""
    allowed = EXAMPLES.get(kind, HANDLER)
    for name, flag in FLAGS.items():
        if options[name] and name not in allowed:
            raise click.UsageError(f"the kind {kind} takes no {flag}, but {', '.join(FLAGS[each] for each in allowed)}")
    if kind == inference.KIND and not options["inputs"]:
        raise click.UsageError("infer takes arrays: give --input NAME=@FILE.npy")
    if kind not in EXAMPLES and not options["lines"]:
        raise click.UsageError(f"{kind} needs an input: give --lines FILE")
    if options["texts"] and options["pictures"]:
        raise click.UsageError("--texts and --pictures are for different models: choose one")
    if kind not in (embedding.KIND, inference.KIND) and (options["batch_sizes"] or (1,)) != (1,):
        raise click.UsageError(f"a task of the kind {kind} has one example: omit --batch-size")


def _grid(options: dict[str, Any], found: Serving, kind: str) -> Grid:
    """What to measure; without a MODEL, with the workers' default."""
    model = options["model"] or next(iter(found.models), "")
    if model and model not in found.models:
        there = f"; there are: {', '.join(found.models)}" if found.models else ", nor does it need one"
        raise WrongUsage(f"no worker serves the model {model!r} for {kind}{there}")
    chosen = {name: options[name] for name in ("concurrencies", "items", "rounds")}
    sizes = options["batch_sizes"] or (BATCH_SIZES if kind in (embedding.KIND, inference.KIND) else (1,))
    return Grid(kind=kind, model=model, batch_sizes=sizes, **chosen)


def _source(options: dict[str, Any], grid: Grid) -> Source:
    """The examples. Raises Failure."""
    texts_wanted = grid.items_in_all * 2  # for warm-ups too
    if grid.kind == inference.KIND:
        return Arrays(read_inputs(options["inputs"]))
    if grid.kind == embedding.KIND:
        return Texts(read_texts(options["texts"], texts_wanted))
    if grid.kind == classification.KIND:
        pictures = read_pictures(options["pictures"]) if options["pictures"] else None
        return to_classify(pictures or read_texts(options["texts"], texts_wanted))
    lines = list(read_lines([options["lines"]]))
    if not lines:
        raise Failure(f"{options['lines']} has no lines")
    as_json = options["parse_json"]
    payloads = [encode(parse(line.encode()))[0] if as_json else line.encode() for line in lines]
    return Singles(payloads, JSON if as_json else RAW)


def _why_no_baseline(options: dict[str, Any], found: Serving) -> str:
    """Why there is no baseline; empty: there is one."""
    if not options["with_baseline"]:
        return "--no-plain"
    if found.hosts != {socket.gethostname()}:
        return "the workers are on other hosts; run this command there to compare"
    return ""


def _baseline(found: Serving) -> Baseline:
    """With the threads that `mgpuctl up` gives its workers."""
    threads = 0
    if found.device == "cpu":
        workers, cores = len(found.worker_ids), len(os.sched_getaffinity(0))
        threads = max(1, cores // workers) * workers
    return Baseline(device=found.device, threads=threads, pid=found.pid)


def _print(measured: Bench, *, as_json: bool, complete: bool) -> None:
    """All rows to stdout; why some are missing or incomplete, to stderr."""
    rows, found = measured.rows, measured.serving
    if as_json:
        fleet = {"workers": sorted(found.worker_ids), "device": found.device, "products": list(found.products)}
        show.value({"fleet": fleet, "complete": complete, "rows": [dataclasses.asdict(row) for row in rows]})
    else:
        show.note(f"{plural(len(found.worker_ids), 'worker')} on {', '.join(found.products)}")
        tables.show_rows(rows, COLUMNS)
    if measured.no_baseline not in ("", "--no-plain"):
        show.note(f"no baseline: {measured.no_baseline}")
    if not complete:
        show.note(f"mgpuctl: ended early, with {len(rows)} of {len(measured.grid.shapes)} rows measured")
