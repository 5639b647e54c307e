"""`mgpuctl embed`: files of text in, vectors out, through kills of workers and masters, in bounded memory.

The SDK's map does the work: it pulls lines no further ahead than its window, resends what a broken stream lost, and
returns chunks in order. What is here reads, writes, waits for a fleet to appear, and tells who did what.
"""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from multigpu import Client
from multigpu.cli import show
from multigpu.cli.commands import Command
from multigpu.cli.failures import EXIT_CODES
from multigpu.cli.lines import STDIN, count_lines, read_lines
from multigpu.cli.options import Number, client_config, json_option, master_option
from multigpu.cli.presence import wait_for_worker
from multigpu.cli.progress import Progress
from multigpu.cli.sdk import sdk_failures, withdrawn_at_end
from multigpu.cli.vectors import JsonLinesFile, JsonLinesStdout, NpyFile, Sink
from multigpu.embedding import CHUNK_TEXTS, KIND, Chunks

# Texts under way: enough for several batches on every worker of a large fleet, and little memory.
WINDOW_TEXTS = 65_536


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl embed corpus.txt -o vectors.npy", "numpy.load('vectors.npy') is float32 [lines, dimension]."),
        ("zcat *.gz | mgpuctl embed -o vectors.npy", "From standard input, of any length."),
        ("mgpuctl embed a.txt b.txt --format jsonl", "One JSON array a line, to stdout."),
        ("mgpuctl embed a.txt -o a.npy --json | jq .workers", "Who did how many lines."),
    ),
    exits=EXIT_CODES,
)
@click.argument("files", metavar="[FILE]...", nargs=-1)
@click.option("-o", "--output", metavar="FILE", help="Where the vectors go; it appears when they are complete.")
@click.option(
    "--format", "file_format", type=click.Choice(["npy", "jsonl"]), help="[default: by FILE's name, else npy]"
)
@click.option("--model", default="", metavar="NAME", help="[default: the workers' own]")
@click.option(
    "--chunk", type=click.IntRange(1, 10_000), default=CHUNK_TEXTS, show_default=True, help="Lines in a task."
)
@click.option("--queue", default="", metavar="QUEUE", help="The queue to wait in.  [default: default]")
@click.option("--priority", type=click.IntRange(1, 5), default=3, show_default=True, help="1 is served first.")
@click.option(
    "--wait-for-worker",
    "wait_s",
    type=Number(min=0),
    metavar="SECONDS",
    help="How long to wait for a master and a worker to appear.  [default: 60; 0 where workers have other models]",
)
@master_option
@json_option
def embed(
    files: tuple[str, ...], output: str | None, address: str, as_json: bool, wait_s: float | None, **task: Any
) -> None:
    """Embed lines of text: one vector for each line, in order.

    Blank lines count too. Without FILEs, or for "-", reads standard input. Goes on through restarts of the master and
    of workers. A summary tells how fast it went and who did what; --json gives it as one value.
    """
    paths = files or (STDIN,)
    sink = choose_sink(output, task["file_format"], as_json=as_json)
    total = count_lines(paths)
    lines_by_worker: Counter[str] = Counter()
    with Progress("lines", total, quiet=as_json) as progress, sdk_failures(), sink:
        wait_for_worker(address, KIND, task["model"], timeout_s=wait_s, say=progress.say)
        progress.begin()
        started_at = time.monotonic()
        dimension = embed_into(sink, paths, address, task, progress, lines_by_worker)
    seconds = time.monotonic() - started_at
    summary = {
        "lines": progress.done,
        "dimension": dimension,
        "seconds": round(seconds, 3),
        "lines_per_s": round(progress.done / seconds, 1) if seconds else 0.0,
        "output": output,
        "workers": dict(lines_by_worker.most_common()),
    }
    if as_json:
        show.value(summary)
    else:
        tell(summary)


def choose_sink(output: str | None, file_format: str | None, *, as_json: bool) -> Sink:
    """Where the vectors go: a file by its format, or stdout as JSON lines."""
    if file_format is None:
        file_format = "jsonl" if output is not None and output.endswith((".jsonl", ".ndjson")) else "npy"
    if output not in (None, STDIN):
        path = Path(str(output))
        return NpyFile(path) if file_format == "npy" else JsonLinesFile(path)
    if file_format == "npy":
        raise click.UsageError("say where the vectors go: -o vectors.npy, or --format jsonl for stdout")
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
) -> int:
    """Embeds all lines; returns the dimension of the vectors, 0 if there was none."""
    dimension = 0
    chunks = Chunks(task["chunk"])
    config = client_config(address)
    window = max(1, min(WINDOW_TEXTS // task["chunk"], config.window_tasks))
    options: dict[str, Any] = {name: task[name] for name in ("model", "queue", "priority") if task[name]}
    with Client(address, window_tasks=config.window_tasks, window_bytes=config.window_bytes) as client:
        # A worker was there a moment ago; if the last one dies just now, the tasks wait for it to come back.
        texts = chunks.cut(read_lines(paths))
        outcomes = client.map_outcomes(KIND, texts, window=window, wait_for_worker=True, **options)
        with withdrawn_at_end(outcomes):
            for outcome in outcomes:
                rows = chunks.rows(outcome)
                sink.add(rows)
                dimension = rows.shape[1]
                lines_by_worker[outcome.worker_id] += len(rows)
                progress.add(len(rows))
    return dimension


def tell(summary: dict[str, Any]) -> None:
    """The summary for a person, on stderr: stdout may be full of vectors."""
    where = f" -> {summary['output']} [{summary['lines']}, {summary['dimension']}]" if summary["output"] else ""
    rate = f"{summary['lines_per_s']:,.0f} lines/s"
    show.note(f"{summary['lines']:,} lines in {show.duration(summary['seconds'])}, {rate}{where}")
    width = max((len(worker_id) for worker_id in summary["workers"]), default=0)
    for worker_id, count in summary["workers"].items():
        show.note(f"  {worker_id:<{width}}  {count:>10,} lines")
