"""`mgpuctl classify`: pictures or lines of text through a model, and the likeliest classes of each."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from multigpu import Client
from multigpu._kinds.classification import KIND, TOP_K, TOP_K_MAX, Label, Subject
from multigpu.cli import show
from multigpu.cli.commands import Command
from multigpu.cli.failures import EXIT_CODES, TasksFailed
from multigpu.cli.kinds.infer import task_options
from multigpu.cli.options import json_option, master_option
from multigpu.cli.presence import loading_notes, wait_for_worker
from multigpu.cli.sdk import sdk_failures
from multigpu.cli.tasks.lines import STDIN, open_input, read_lines
from multigpu.cli.text import clean

# Pictures may be large: so many are under way at once.
WINDOW = 256


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl classify vision photos/*.jpg", "The five likeliest classes of each picture."),
        ("curl -s $URL | mgpuctl classify vision --top-k 1 -", "A picture from standard input."),
        ("mgpuctl classify mood --text reviews.txt --json", "A class for each line; one JSON object a line."),
    ),
    exits=EXIT_CODES,
)
@click.argument("model")
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE...", type=click.Path(exists=True, dir_okay=False, allow_dash=True)
)
@click.option("--text", "as_text", is_flag=True, help="FILEs hold texts, one a line, not pictures.")
@click.option("--top-k", type=click.IntRange(1, TOP_K_MAX), default=TOP_K, show_default=True, help="Classes for each.")
@task_options
@master_option
@json_option
def classify(
    model: str,
    files: tuple[str, ...],
    as_text: bool,
    top_k: int,
    task: dict[str, Any],
    address: str,
    wait_s: float,
    as_json: bool,
) -> None:
    """Classify pictures, or lines of text, with MODEL. "-" is standard input.

    A FILE that fails is reported, and the others continue. Results come in the order of the FILEs.
    """
    failed = count = 0
    with sdk_failures(), Client(address) as client:
        wait_for_worker(address, KIND, model, timeout_s=wait_s, say=show.note)
        names: list[str] = []
        subjects = read_subjects(files, names, as_text=as_text)
        results = client.classify_map(model, subjects, top_k, window=WINDOW, return_exceptions=True, **task)
        with loading_notes(address, KIND, model, show.note) as answered:
            for count, labels in enumerate(results, 1):
                answered.set()
                failed += isinstance(labels, Exception)
                tell(names[count - 1], labels, as_json=as_json)
                names[count - 1] = ""
    if failed:
        raise TasksFailed(f"{failed} of {count} failed")


def read_subjects(files: tuple[str, ...], names: list[str], *, as_text: bool) -> Iterator[Subject]:
    """What is to be classified; `names` gets what each is called. Raises Failure."""
    if as_text:
        for text in read_lines(files):
            names.append(text)
            yield text
        return
    for file in files:
        names.append("standard input" if file == STDIN else Path(file).name)
        with open_input(file) as opened:
            yield opened.read()


def tell(name: str, labels: "list[Label] | Exception", *, as_json: bool) -> None:
    """One result, or why there is none."""
    if isinstance(labels, Exception):
        if as_json:
            show.value({"input": name, "error": str(labels)})
        else:
            show.note(f"{name}: {labels}")
    elif as_json:
        classes = [dataclasses.asdict(found) for found in labels]
        show.value({"input": name, "classes": classes})
    elif sys.stdout.isatty():
        show.line(clean(name))
        for found in labels:
            show.line(f"  {found.score:6.1%}  {clean(found.label or str(found.index))}")
    else:
        for found in labels:
            show.line(f"{clean(name)}\t{found.score:.6f}\t{found.index}\t{clean(found.label)}")
