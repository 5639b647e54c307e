"""`mgpuctl bench`: how fast a fleet is with a model, in every way that it can run it, and how right.

run.py measures, and rows.py has the figures; what is here turns a command line into what is to be measured,
and the rows into a table, JSON, CSV and a picture. docs/bench.md explains every column.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from multigpu._kinds import classification, embedding, inference
from multigpu._transport.encoding import JSON, RAW, encode
from multigpu.cli import show
from multigpu.cli.bench import plot as bench_plot
from multigpu.cli.bench.baseline import Plain
from multigpu.cli.bench.fleet import Crew, own_fleet
from multigpu.cli.bench.rows import OPTIONAL, TABLE, Row, plural, table_row, to_csv
from multigpu.cli.bench.run import Bench, Grid
from multigpu.cli.bench.source import Arrays, Singles, Source, Texts, read_pairs, read_pictures, read_texts
from multigpu.cli.commands import Command
from multigpu.cli.failures import EXIT_CODES, Failure, TasksFailed, WrongUsage
from multigpu.cli.kinds.infer import read_inputs
from multigpu.cli.kinds.vectors import File
from multigpu.cli.options import client_config, json_option, master_option
from multigpu.cli.progress import Progress
from multigpu.cli.rpc import Master
from multigpu.cli.sdk import sdk_failures
from multigpu.cli.tables import table
from multigpu.cli.tasks.lines import read_lines
from multigpu.cli.tasks.submit import parse
from multigpu.errors import MultigpuError
from multigpu.repository.model import ENGINES, PRECISIONS
from multigpu.v1 import admin_service_pb2 as admin

# What can be said of the examples of a kind; of any other, OWN.
EXAMPLES = {
    embedding.KIND: ("texts", "pairs"),
    inference.KIND: ("inputs",),
    classification.KIND: ("texts", "pictures"),
}
OWN = ("payload", "lines", "parse_json")
FLAGS = {"inputs": "--input", "parse_json": "--parse-json"}
BATCH_SIZES = (1, 32)


def words_of(known: Sequence[str]) -> Any:
    """Words between commas, each one of `known`, each once. For `click.option(callback=…)`."""

    def check(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(word.strip() for word in value.split(",")))
        for word in words:
            if word not in known:
                raise click.BadParameter(f"{word!r} is none of {', '.join(known)}", context, parameter)
        return words

    return check


def numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Whole numbers from 1 between commas, each once. For `click.option(callback=…)`."""
    if value is None:
        return None
    try:
        found = tuple(dict.fromkeys(int(word) for word in value.split(",")))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list of numbers, such as 1,8,64", context, parameter) from error
    if min(found) < 1 or max(found) > 10_000:
        raise click.BadParameter("must be 1 to 10,000", context, parameter)
    return found


def output(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A file to write. For `click.option(callback=…)`."""
    if value == "-":
        raise click.BadParameter("must be a file; --json prints all figures to stdout", context, parameter)
    return value


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl bench --up 2", "The packaged model on two workers, started for this."),
        ("mgpuctl bench --engine torch,onnx --concurrency 1,64", "Two engines, one caller and many."),
        ("mgpuctl bench m --precision fp32,bf16 --pairs stsb.tsv", "What a precision costs in accuracy."),
        ("mgpuctl bench vit --input pixels=@batch.npy", "A model that takes arrays."),
        ("mgpuctl bench vision --pictures photos/", "A model that classifies."),
        ("mgpuctl bench --kind my.kind --lines in.txt --handlers my_module --up 2", "A handler of your own."),
        ("mgpuctl bench --csv bench.csv --plot bench.png", "All figures, and a picture of them."),
    ),
    exits=EXIT_CODES,
)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--engine", "engines", default="auto", callback=words_of(ENGINES), metavar="E,…", show_default=True)
@click.option(
    "--precision", "precisions", default="auto", callback=words_of(PRECISIONS), metavar="P,…", show_default=True
)
@click.option("--batch-size", "batch_sizes", callback=numbers, metavar="N,…", help="Items in a task.  [default: 1,32]")
@click.option(
    "--concurrency",
    "concurrencies",
    default="1,16",
    callback=numbers,
    metavar="N,…",
    help="Callers at one time.  [default: 1,16]",
)
@click.option(
    "--items",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Items in a round; at least 2 tasks for each caller.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds of the fleet and of the plain loop."
)
@click.option("--kind", help="What to measure: embed, infer, classify, a handler's kind.  [default: what MODEL is for]")
@click.option("--texts", metavar="FILE", help="Texts, one a line.  [default: sentences of Python's library]")
@click.option("--pairs", metavar="FILE", help="Lines of score, tab, text, tab, text: adds Spearman's correlation.")
@click.option("--input", "inputs", multiple=True, metavar="NAME=@FILE|NAME=JSON", help="Arrays, as `infer` takes them.")
@click.option(
    "--pictures",
    multiple=True,
    type=click.Path(exists=True),
    metavar="PATH",
    help="Files or folders of pictures to classify.",
)
@click.option("--payload", metavar="TEXT", help="What a handler is sent, every time.")
@click.option("--lines", metavar="FILE", help="What a handler is sent, one a line.")
@click.option("--parse-json", is_flag=True, help="The input is JSON: the handler gets the value, not the bytes.")
@click.option("--up", "workers", type=click.IntRange(1), metavar="N", help="Start a fleet of N workers for this.")
@click.option(
    "--serve", "served", multiple=True, metavar="NAME=FOLDER", help="Folder of a model, for --up and the plain loop."
)
@click.option("--handlers", multiple=True, metavar="MODULE", help="Module of handlers, for the same.")
@click.option("--plain/--no-plain", "with_plain", default=True, help="Compare with a plain loop in one process.")
@click.option(
    "--plain-threads",
    type=click.IntRange(1),
    help="Threads of the plain loop.  [default: all cores, as `mgpuctl up` has]",
)
@click.option("--csv", "csv_file", callback=output, metavar="FILE", help="Write all figures to this file.")
@click.option("--plot", "plot_file", callback=output, metavar="FILE", help="Draw the figures into this PNG file.")
@master_option
@json_option
def bench(address: str, as_json: bool, **options: Any) -> None:
    """Measure a fleet with each MODEL: speed and accuracy.

    Every engine, precision, batch size and number of callers that is given, in every combination. Rounds of the
    fleet and of a plain loop in one process take turns, so that both see the same machine. A combination that can't
    be run is reported, and the others continue. After Ctrl-C the table has what was measured by then. docs/bench.md
    explains every column.
    """
    if options["plot_file"]:
        bench_plot.require()
    problem: BaseException | None = None
    with sdk_failures():
        with contextlib.ExitStack() as files:
            # Before hours of measuring, not after: is there a place for what comes of it?
            sinks = [
                (files.enter_context(File(Path(options[name]))), content)
                for name, content in (("csv_file", to_csv), ("plot_file", bench_plot.plot))
                if options[name]
            ]
            with measuring(address, options, quiet=as_json) as measured:
                try:
                    run(measured.run())
                except (KeyboardInterrupt, MultigpuError, Failure) as error:
                    if not measured.rows:
                        raise
                    problem = error
            for sink, content in sinks:
                sink.write(content(measured.rows))
        tell(measured, as_json=as_json, complete=problem is None)
        if problem is not None:
            raise problem
    if failed := [row for row in measured.rows if row.error]:
        raise TasksFailed(f"{len(failed)} of {len(measured.rows)} combinations could not be run")


def run(work: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run. SIGTERM ends it as Ctrl-C does, at a point where it waits, and is raised again afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    terminated = False

    async def until_terminated() -> None:
        task = asyncio.current_task()
        assert task is not None

        def end() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        await work

    try:
        asyncio.run(until_terminated())
    except asyncio.CancelledError:
        if not terminated:
            raise
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def measuring(address: str, options: dict[str, Any], *, quiet: bool) -> Iterator[Bench]:
    """All that it takes: a fleet, examples, the plain loop. Raises Failure, UsageError."""
    with contextlib.ExitStack() as stack:
        if options["workers"]:
            show.note(f"starting {plural(options['workers'], 'worker')}")
            fleet = own_fleet(options["workers"], options["served"], options["handlers"])
            address = stack.enter_context(fleet)
        with Master(address) as master:
            workers = master.connected_workers()
        kind = kind_of(options, workers)
        check_examples(kind, options)
        crew = Crew.of(workers, kind)
        grid = grid_of(options, crew, kind)
        source = source_of(options, grid)
        pairs = read_pairs(options["pairs"]) if options["pairs"] else None
        no_plain = why_no_plain(options, crew)
        plain = None if no_plain else stack.enter_context(plain_of(options, crew))
        progress = stack.enter_context(Progress("items", grid.items_in_all, quiet=quiet))
        progress.begin()
        yield Bench(
            address=address,
            crew=crew,
            grid=grid,
            source=source,
            pairs=pairs,
            plain=plain,
            no_plain=no_plain,
            progress=progress,
            window=client_config(address).window_tasks,
        )


def kind_of(options: dict[str, Any], workers: Sequence[admin.Worker]) -> str:
    """What is to be measured. Raises WrongUsage."""
    if options["kind"]:
        return str(options["kind"])
    offered = [found for worker in workers for found in worker.capabilities]
    kinds = {name: found.kind for found in offered for name in found.models}
    if unknown := [name for name in options["models"] if name not in kinds]:
        raise WrongUsage(f"no worker serves the model {unknown[0]!r}; there are: {', '.join(sorted(kinds)) or 'none'}")
    meant = {kinds[name]: name for name in options["models"]}
    if len(meant) > 1:
        told = " and ".join(f"{name} is for {kind}" for kind, name in meant.items())
        raise WrongUsage(f"{told}: measure one kind at a time")
    # Without a MODEL the examples say it; those that suit several kinds are for the first.
    given = [name for name in (*OWN, *sum(EXAMPLES.values(), ())) if options[name]]
    fits = [kind for kind, names in EXAMPLES.items() if set(given) <= set(names)]
    return next(iter([*meant, *fits, embedding.KIND]))


def check_examples(kind: str, options: dict[str, Any]) -> None:
    """Raises UsageError for what such a kind is not sent, or the lack of what it is."""
    allowed = EXAMPLES.get(kind, OWN)
    for name in (*OWN, *sum(EXAMPLES.values(), ())):
        if options[name] and name not in allowed:
            flags = ", ".join(FLAGS.get(each, f"--{each}") for each in allowed)
            message = f"{FLAGS.get(name, f'--{name}')} is nothing for the kind {kind}, which takes {flags}"
            raise click.UsageError(message if options["kind"] else f"{message}; --kind names another")
    if kind == inference.KIND and not options["inputs"]:
        raise click.UsageError("infer takes arrays: say which with --input NAME=@FILE.npy")
    if kind not in EXAMPLES and (options["payload"] is None) == (options["lines"] is None):
        raise click.UsageError(f"say what {kind} is to be sent: --payload TEXT or --lines FILE")
    if options["texts"] and options["pictures"]:
        raise click.UsageError("--texts and --pictures are for different models: choose one")
    single = kind not in (embedding.KIND, inference.KIND)
    if single and (options["batch_sizes"] or (1,)) != (1,):
        raise click.UsageError(f"a task of the kind {kind} has one example: leave --batch-size out")


def grid_of(options: dict[str, Any], crew: Crew, kind: str) -> Grid:
    """What is to be measured; without a MODEL, the workers' default."""
    models = options["models"] or crew.models[:1] or ("",)
    if unknown := [name for name in models if name and name not in crew.models]:
        there = f"; there are: {', '.join(crew.models)}" if crew.models else ", nor does it need one"
        raise WrongUsage(f"no worker serves the model {unknown[0]!r} for {kind}{there}")
    chosen = {name: options[name] for name in ("engines", "precisions", "concurrencies", "items", "rounds")}
    if not models[0] and (options["engines"], options["precisions"]) != (("auto",), ("auto",)):
        raise WrongUsage(f"{kind} has neither engines nor precisions: leave --engine and --precision out")
    sizes = options["batch_sizes"] or (BATCH_SIZES if kind in (embedding.KIND, inference.KIND) else (1,))
    return Grid(kind=kind, models=tuple(dict.fromkeys(models)), batch_sizes=sizes, **chosen)


def source_of(options: dict[str, Any], grid: Grid) -> Source:
    """What is sent. Raises Failure."""
    wanted = grid.items_in_all * 2  # warm-ups among them
    if grid.kind == inference.KIND:
        return Arrays(read_inputs(options["inputs"]))
    if grid.kind == embedding.KIND:
        return Texts(read_texts(options["texts"], wanted))
    if grid.kind == classification.KIND:
        pictures = read_pictures(options["pictures"]) if options["pictures"] else None
        return Singles.to_classify(pictures or read_texts(options["texts"], wanted))
    lines = [options["payload"]] if options["lines"] is None else list(read_lines([options["lines"]]))
    if not lines:
        raise Failure(f"{options['lines']} has no lines")
    as_json = options["parse_json"]
    payloads = [encode(parse(line.encode()))[0] if as_json else line.encode() for line in lines]
    return Singles(grid.kind, payloads, JSON if as_json else RAW)


def why_no_plain(options: dict[str, Any], crew: Crew) -> str:
    """Why there is nothing to compare with; empty: there is."""
    if not options["with_plain"]:
        return "--no-plain"
    if crew.hosts != {socket.gethostname()}:
        return "the workers are on other hosts; run this on theirs to compare"
    return ""


def plain_of(options: dict[str, Any], crew: Crew) -> Plain:
    threads = options["plain_threads"]
    if not threads and crew.device == "cpu":
        workers, cores = len(crew.worker_ids), len(os.sched_getaffinity(0))
        threads = max(1, cores // workers) * workers
    return Plain(
        device=crew.device,
        threads=threads or 0,
        models=options["served"],
        handlers=options["handlers"],
        pid=crew.pid,
    )


def tell(measured: Bench, *, as_json: bool, complete: bool) -> None:
    """All that came of it, to stdout; what is missing from it, to stderr."""
    rows, crew = measured.rows, measured.crew
    if as_json:
        fleet = {"workers": sorted(crew.worker_ids), "device": crew.device, "products": list(crew.products)}
        show.value({"fleet": fleet, "complete": complete, "rows": [row.plain() for row in rows]})
    else:
        show.note(f"{plural(len(crew.worker_ids), 'worker')} on {', '.join(crew.products)}")
        table(TABLE, [table_row(row) for row in rows], right=TABLE[3:], optional=OPTIONAL)
    for text in remarks(rows):
        show.note(text)
    if not complete:
        show.note(f"mgpuctl: ended early, with {len(rows)} of {measured.grid.combinations} combinations measured")


def remarks(rows: Sequence[Row]) -> list[str]:
    """Why rows have no figures, or none of a plain loop; each reason once."""
    reasons: list[tuple[str, Callable[[Row], str]]] = [
        ("", lambda row: row.error),
        ("no plain loop: ", lambda row: row.plain_error),
    ]
    return list(
        dict.fromkeys(
            f"{row.model or row.kind}, {row.engine}, {row.precision}: {prefix}{reason(row)}"
            for prefix, reason in reasons
            for row in rows
            if reason(row) not in ("", "--no-plain")
        )
    )
