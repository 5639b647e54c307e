"""`mgpuctl classify`: the most likely classes of pictures or lines of text."""

import dataclasses
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from multigpu import Client
from multigpu._kinds.classification import KIND, TOP_K, TOP_K_MAX, Label, Subject
from multigpu.cli import show
from multigpu.cli.commands import Command
from multigpu.cli.failures import EXIT_CODES, Failure, TasksFailed
from multigpu.cli.kinds.infer import task_options
from multigpu.cli.options import json_option, master_option
from multigpu.cli.presence import loading_notes, wait_for_worker
from multigpu.cli.sdk_errors import sdk_session
from multigpu.cli.tasks.lines import DASH, open_input, read_lines
from multigpu.cli.text import clean

# Subjects under way: pictures may be large.
MAX_IN_FLIGHT = 256


@dataclass(frozen=True, slots=True)
class Read:
    """A subject that was read, or a file that can't be."""

    name: str
    failure: Failure | None = None


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl classify vision photos/*.jpg", "The five most likely classes of each picture."),
        ("curl -s $URL | mgpuctl classify vision --top-k 1 -", "A picture from standard input."),
        ("mgpuctl classify mood --text reviews.txt --json", "A class for each line; one JSON object a line."),
    ),
    exits=EXIT_CODES,
)
@click.argument("model")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
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

    A FILE that can't be read or classified is reported, and the others continue. Results come in the order of the
    FILEs.
    """
    failed = count = 0
    read: deque[Read] = deque()

    def print_unreadable() -> None:
        """Reports files that can't be read when their turn has come."""
        nonlocal failed, count
        while read and (failure := read[0].failure) is not None:
            _print(read.popleft().name, failure, as_json=as_json)
            failed, count = failed + 1, count + 1

    with sdk_session(), Client(address) as client:
        wait_for_worker(address, KIND, model, timeout_s=wait_s, say=show.note)
        subjects = _subjects(files, read, as_text=as_text)
        results = client.classify_map(
            subjects, model=model, top_k=top_k, max_in_flight=MAX_IN_FLIGHT, return_exceptions=True, **task
        )
        with loading_notes(address, KIND, model, show.note) as answered:
            for labels in results:
                answered.set()
                print_unreadable()
                _print(read.popleft().name, labels, as_json=as_json)
                failed, count = failed + isinstance(labels, Exception), count + 1
        print_unreadable()
    if failed:
        raise TasksFailed(f"{failed} of {count} failed")


def _subjects(files: tuple[str, ...], read: "deque[Read]", *, as_text: bool) -> Iterator[Subject]:
    """The readable subjects. `read` gets one entry for each of them and for each file that can't be read."""
    for file in files:
        name = "standard input" if file == DASH else Path(file).name
        try:
            if as_text:
                for text in read_lines([file]):
                    read.append(Read(text))
                    yield text
            else:
                with open_input(file) as opened:
                    picture = opened.read()
                read.append(Read(name))
                yield picture
        except OSError as error:
            read.append(Read(name, Failure(f"can't read {file}: {error.strerror}")))
        except Failure as failure:
            read.append(Read(name, failure))


def _print(name: str, labels: "list[Label] | Exception", *, as_json: bool) -> None:
    """One result, or why there is none."""
    if isinstance(labels, Exception):
        if as_json:
            show.value({"input": name, "error": str(labels)})
        else:
            show.note(f"{name}: {labels}")
    elif as_json:
        show.value({"input": name, "classes": [dataclasses.asdict(found) for found in labels]})
    elif sys.stdout.isatty():
        show.line(clean(name))
        for found in labels:
            show.line(f"  {found.score:6.1%}  {clean(found.label or str(found.index))}")
    else:
        for found in labels:
            show.line(f"{clean(name)}\t{found.score:.6f}\t{found.index}\t{clean(found.label)}")
