"""`mgpuctl embed`: computes vectors of lines of text, in bounded memory.

The SDK's map reads ahead by at most max_in_flight, resends tasks after a broken stream, and returns chunks in order.
This module reads lines, writes vectors, waits for a worker, and reports how many lines each worker embedded.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np

from multigpu import Client, Input
from multigpu._kinds.embedding import BATCH_SIZE, KIND, Chunks
from multigpu._units import format_duration
from multigpu.cli import show
from multigpu.cli.commands import Command
from multigpu.cli.failures import EXIT_CODES, Failure
from multigpu.cli.kinds.vectors import JsonLinesFile, JsonLinesStdout, NpyFile, Rows, Sink
from multigpu.cli.options import client_config, json_option, master_option, submit_options
from multigpu.cli.presence import loading_notes, wait_for_worker
from multigpu.cli.progress import Progress
from multigpu.cli.sdk_errors import cancelled_at_end, sdk_session
from multigpu.cli.tasks.lines import DASH, count_lines, read_lines

# Limit of texts in submitted tasks without an outcome: several batches for every worker of a large fleet.
WINDOW_TEXTS = 65_536
# The largest difference of a component between two vectors of the same text and model, which other engines or
# precisions may have computed.
SAME_VECTOR = 0.02
RESUME_REMEDY = "; give the same input and model, or run without --resume"


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl embed corpus.txt -o vectors.npy", "numpy.load('vectors.npy') is float32 [lines, dimension]."),
        ("zcat *.gz | mgpuctl embed -o vectors.npy", "From standard input, of any length."),
        ("mgpuctl embed a.txt b.txt --format jsonl", "One JSON array a line, to stdout."),
        ("mgpuctl embed a.txt -o a.npy --resume", "Continues after an interrupted run."),
        ("mgpuctl embed a.txt -o a.npy --json | jq .workers", "How many lines each worker did."),
    ),
    exits=EXIT_CODES,
)
@click.argument("files", metavar="[FILE]...", nargs=-1)
@click.option("-o", "--output", metavar="FILE", help="File for the vectors. It appears when it is complete.")
@click.option("--resume", is_flag=True, help="Continue after the lines in FILE.part. Give the same input and model.")
@click.option(
    "--format", "file_format", type=click.Choice(["npy", "jsonl"]), help="[default: by FILE's name, else npy]"
)
@click.option("--model", default="", metavar="NAME", help="[default: the workers' own]")
@click.option(
    "--batch-size", type=click.IntRange(1, 10_000), default=BATCH_SIZE, show_default=True, help="Lines in a task."
)
@submit_options
@master_option
@json_option
def embed(
    files: tuple[str, ...],
    output: str | None,
    resume: bool,
    address: str,
    as_json: bool,
    wait_s: float | None,
    **task: Any,
) -> None:
    """Embed lines of text: one vector for each line, in order.

    Blank lines count too. Without FILEs, or for "-", reads standard input. Continues through restarts of the master and
    of workers. If it ends early, or a task fails, the vectors so far stay in FILE.part; --resume continues there, and
    runs failed tasks again. A summary tells the speed and how many lines each worker did; --json prints it as a value.
    """
    paths = files or (DASH,)
    if output is not None and (same := next((path for path in paths if _is_same_file(path, output)), None)):
        raise click.UsageError(f"-o {output} would replace the input {same}: give another file")
    sink = choose_sink(output, task["file_format"], as_json=as_json, resume=resume)
    total = count_lines(paths)
    lines_by_worker: Counter[str] = Counter()
    with Progress("lines", total, quiet=as_json) as progress, sdk_session(), sink:
        resumed = sink.rows
        if resumed:
            progress.say(f"going on after {resumed:,} lines")
        wait_for_worker(address, KIND, task["model"], timeout_s=wait_s, say=progress.say)
        progress.begin(resumed)
        started_at = time.monotonic()
        with loading_notes(address, KIND, task["model"], progress.say) as answered:
            dimension = embed_into(sink, paths, address, task, progress, lines_by_worker, answered.set)
    seconds = time.monotonic() - started_at
    summary = {
        "lines": progress.done,
        "resumed_lines": resumed,
        "dimension": dimension,
        "seconds": round(seconds, 3),
        "lines_per_s": round((progress.done - resumed) / seconds, 1) if seconds else 0.0,
        "output": output,
        "workers": dict(lines_by_worker.most_common()),
    }
    if as_json:
        show.value(summary)
    else:
        _print(summary)


def _is_same_file(path: str, output: str) -> bool:
    return DASH not in (path, output) and os.path.realpath(path) == os.path.realpath(output)


def choose_sink(output: str | None, file_format: str | None, *, as_json: bool, resume: bool) -> Sink:
    """The sink for the options: a file in the given format, or JSON lines to stdout."""
    if file_format is None:
        file_format = "jsonl" if output is not None and output.endswith((".jsonl", ".ndjson")) else "npy"
    if output not in (None, DASH):
        path = Path(str(output))
        return (NpyFile if file_format == "npy" else JsonLinesFile)(path, resume=resume)
    if resume:
        raise click.UsageError("--resume continues a file: name it with -o")
    if file_format == "npy":
        raise click.UsageError("no output given: use -o vectors.npy, or --format jsonl for stdout")
    if as_json:
        raise click.UsageError("vectors and --json can't both go to stdout: write the vectors to a file with -o")
    return JsonLinesStdout()


def embed_into(
    sink: Sink,
    paths: tuple[str, ...],
    address: str,
    task: dict[str, Any],
    progress: Progress,
    lines_by_worker: Counter[str],
    answered: Callable[[], None],
) -> int:
    """Embeds the lines after those that an earlier run left in the sink. Returns the vectors' dimension; 0: unknown."""
    dimension, begun = sink.dimension, sink.rows
    chunks = Chunks(task["batch_size"])
    config = client_config(address)
    max_in_flight = max(1, min(WINDOW_TEXTS // task["batch_size"], config.max_in_flight))

    def counted(inputs: Iterable[Input]) -> Iterator[Input]:
        nonlocal begun
        for each in inputs:
            begun += each.units
            yield each

    options: dict[str, Any] = {name: task[name] for name in ("model", "queue", "priority") if task[name]}
    with Client(address) as client:
        # wait_for_worker: if the last worker stops, the tasks wait for its restart. One was connected a moment ago.
        lines = read_lines(paths)
        if sink.rows:
            check_resumed(sink, lines, lambda texts: client.embed(texts, model=task["model"] or ""))
        texts = counted(chunks.cut(lines))
        outcomes = client.map_outcomes(KIND, texts, max_in_flight=max_in_flight, wait_for_worker=True, **options)
        try:
            with cancelled_at_end(outcomes):
                for outcome in outcomes:
                    answered()
                    rows = chunks.rows(outcome)
                    sink.add(rows)
                    dimension = rows.shape[1]
                    lines_by_worker[outcome.worker_id] += len(rows)
                    progress.add(len(rows))
        except BaseException:
            if discarded := begun - progress.done:
                progress.say(f"ended early: {discarded:,} lines under way were discarded{sink.left()}")
            raise
    return dimension


def check_resumed(sink: Sink, lines: Iterator[str], embed: Callable[[list[str]], Rows]) -> None:
    """Skips the lines whose rows are in the sink, and embeds the first, the middle and the last of them again.

    Failure: the input has fewer lines than the sink has rows, or a vector differs, so input or model have changed.
    """
    rows = sink.rows
    sample = dict.fromkeys((0, rows // 2, rows - 1))
    texts, found = [], 0
    for line in islice(lines, rows):
        if found in sample:
            texts.append(line)
        found += 1
    if found < rows:
        raise Failure(f"the input has {found:,} lines, and an earlier run left {rows:,} rows{RESUME_REMEDY}")
    for number, vector in zip(sample, embed(texts), strict=True):
        row = sink.row(number)
        if row.shape != vector.shape or float(np.abs(row - vector).max()) > SAME_VECTOR:
            raise Failure(f"line {number + 1:,} has another vector than an earlier run found{RESUME_REMEDY}")


def _print(summary: dict[str, Any]) -> None:
    """Prints the summary to stderr, because the vectors may go to stdout."""
    where = f" -> {summary['output']} [{summary['lines']}, {summary['dimension']}]" if summary["output"] else ""
    rate = f"{summary['lines_per_s']:,.0f} lines/s"
    show.note(f"{summary['lines']:,} lines in {format_duration(summary['seconds'])}, {rate}{where}")
    width = max((len(worker_id) for worker_id in summary["workers"]), default=0)
    for worker_id, count in summary["workers"].items():
        show.note(f"  {worker_id:<{width}}  {count:>10,} lines")
