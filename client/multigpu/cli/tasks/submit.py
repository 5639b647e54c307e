"""`mgpuctl submit`: tasks of any kind from the command line, from files and from pipes."""

import datetime as dt
import json
import shlex
import sys
import uuid
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NoReturn

import click

from multigpu import AlreadyExistsError, Client, Input, Outcome, RejectedError
from multigpu.cli import messages, show
from multigpu.cli.commands import Command
from multigpu.cli.failures import EXIT_CODES, Failure, TasksFailed
from multigpu.cli.options import json_option, key_values, master_option, parse_size, queue_option, seconds_option
from multigpu.cli.presence import check_takes_model
from multigpu.cli.progress import Progress
from multigpu.cli.sdk_errors import cancelled_at_end, sdk_session, with_flags
from multigpu.cli.tasks.lines import DASH, count_lines, open_input, read_lines

# Ids are printed after each batch, so that a pipe of any length needs bounded memory.
BATCH_TASKS = 1_000
# Flags that are options of the SDK under the same name.
SDK_OPTIONS = (
    *("model", "queue", "priority", "device_memory_bytes", "queue_timeout_s", "run_timeout_s", "result_ttl_s"),
    *("attempts_max", "world_size", "world_size_min", "spread_ranks", "ephemeral", "wait_for_worker", "retry_failed"),
)


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl submit --kind echo --payload hi --wait", "Prints hi."),
        ("mgpuctl submit --kind my.kind --lines inputs.txt", "One task a line; prints their ids."),
        ("mgpuctl submit --kind my.kind --lines in.txt --request-id night", "Run again, it continues."),
        ("mgpuctl submit --kind my.kind --parse-json --payload '{\"n\": 3}' --wait", "The handler gets a dict."),
        ("mgpuctl submit --kind sleep --payload 60 --request-id once", "Repeated, it names the same task."),
        ("cat image.png | mgpuctl submit --kind thumbnail --wait > small.png", "Bytes in, bytes out."),
    ),
    exits=EXIT_CODES,
)
@click.option("--kind", required=True, help="What the task runs: echo, sleep, embed, a handler's kind.")
@click.option("--payload", metavar="TEXT", help="The input.  [default: standard input]")
@click.option("--file", metavar="FILE", help='The input is the content of FILE ("-": standard input).')
@click.option("--lines", metavar="FILE", help='One task for each line of FILE ("-": standard input).')
@click.option("--parse-json", is_flag=True, help="The input is JSON: handlers get the value, not the bytes.")
@click.option("--wait", is_flag=True, help="Wait for the results and print them, in order.")
@click.option("--model", default="", metavar="NAME", help="The model that the kind runs on.")
@queue_option
@click.option("--priority", type=click.IntRange(1, 5), help="1 is served first.  [default: 3]")
@click.option("--parameter", "parameters", multiple=True, metavar="KEY=VALUE", help="For the engine. May be repeated.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Workers must have it. May be repeated.")
@click.option(
    "--device-memory", "device_memory_bytes", type=parse_size, metavar="SIZE", help="Device memory that must be free."
)
@seconds_option("--deadline", "From now. A task that has not ended by then expires.")
@seconds_option("--queue-timeout", "How long a task may wait to be dispatched.")
@seconds_option("--run-timeout", "How long an attempt may run.")
@seconds_option("--result-ttl", "How long the outcome is kept.")
@click.option(
    "--world-size",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Run on N workers at the same time.  [default: 1]",
)
@click.option(
    "--world-size-min",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Begin when N of them are idle, and grow at a checkpoint.  [default: --world-size]",
)
@click.option("--spread-ranks", is_flag=True, help="With --world-size: on as many hosts as possible, not as few.")
@click.option("--attempts-max", type=click.IntRange(1, 100), metavar="N", help="Attempts at most.  [default: 3]")
@click.option("--ephemeral", is_flag=True, help="Keep the task off the master's disk; it is lost if the master ends.")
@click.option("--wait-for-worker", is_flag=True, help="Queue the task even if no known worker could ever take it.")
@click.option(
    "--partition-key", default="", metavar="KEY", help="For strategy static_partition: one worker for each KEY."
)
@click.option(
    "--request-id",
    default="",
    metavar="ID",
    help="Idempotency key: the same ID is the same task. With --lines, line N has the request_id ID:N.",
)
@click.option("--retry-failed", is_flag=True, help="Run tasks of --request-id again that did not succeed.")
@master_option
@json_option
def submit(address: str, wait: bool, as_json: bool, **given: Any) -> None:
    """Submit tasks, and optionally wait for their results.

    Prints the ids of the tasks, once they are safe on the master's disk; with --wait, what they return. With --lines
    and --wait, line N of the output belongs to line N of the input: it is empty for a task that did not succeed, and
    for a result with a line break, which --json shows.

    Ctrl-C and SIGTERM cancel the tasks that --wait waits for. The same command with the same --request-id and input
    continues, also after kill -9: it prints all lines, and tasks that ended in the last 24 hours or still run are not
    run again. Without --request-id, an ID is chosen, and a message names it if the command ends early.
    """
    inputs = _read_inputs(given)
    options = _task_options(given)
    if given["model"]:
        check_takes_model(address, given["kind"])
    lines = inputs if isinstance(inputs, _Lines) else None
    # Output on a terminal shows the progress itself.
    progress = Progress("lines", count_lines([given["lines"]]) if lines else 1, quiet=not lines or sys.stdout.isatty())
    try:
        with progress, sdk_session(), Client(address) as client:
            if wait:
                with cancelled_at_end(client.map_outcomes(given["kind"], inputs, **options)) as outcomes:
                    _print_results(outcomes, progress, many=lines is not None, as_json=as_json)
            else:
                _print_ids(client, given["kind"], inputs, options, progress, as_json=as_json)
    except (KeyboardInterrupt, Failure) as error:
        if lines and (lines.read if wait else progress.done):
            lines.report(error, progress.done, wait=wait)
        elif wait and not lines and isinstance(error, KeyboardInterrupt):
            show.note("mgpuctl: ended early: the task is cancelled if the master answers")
        raise


def _task_options(given: dict[str, Any]) -> dict[str, Any]:
    """The SDK's options, without those that were not given."""
    options = {name: given[name] for name in SDK_OPTIONS if given[name] not in (None, "", False)}
    for name, flag in (("parameters", "--parameter"), ("labels", "--label")):
        if given[name]:
            options[name] = key_values(flag, given[name])
    if given["deadline_s"] is not None:
        options["deadline"] = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=given["deadline_s"])
    return options


def _read_inputs(given: dict[str, Any]) -> "_Lines | list[Input]":
    """The tasks' inputs, read as they are needed."""
    if sum(given[name] is not None for name in ("payload", "file", "lines")) > 1:
        raise click.UsageError("give one of --payload, --file and --lines")
    if given["retry_failed"] and not given["request_id"]:
        raise click.UsageError("--retry-failed runs the task of a --request-id again: give one")
    if given["lines"] is not None:
        return _Lines(given)
    if given["payload"] is not None:
        data = given["payload"].encode()
    else:
        with open_input(given["file"] or DASH) as file:
            data = file.read()
    payload = parse(data) if given["parse_json"] else data
    return [Input(payload=payload, partition_key=given["partition_key"], request_id=given["request_id"] or None)]


class _Lines:
    """The lines of a file as inputs. Line N has the request_id ID:N, so another run joins this one's tasks."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._request_id = given["request_id"] or uuid.uuid4().hex
        self.read = 0

    def __iter__(self) -> Iterator[Input]:
        path, key = self._given["lines"], self._given["partition_key"]
        name = "standard input" if path == DASH else path
        for number, line in enumerate(read_lines([path]), 1):
            data = line.encode()
            payload = parse(data, f"{name}, line {number}: ") if self._given["parse_json"] else data
            self.read = number
            yield Input(payload=payload, partition_key=key, request_id=f"{self._request_id}:{number}")

    def report(self, error: BaseException, done: int, *, wait: bool) -> None:
        """Prints what a run leaves that ends early or with failed tasks, and the command that continues it."""
        argv = ["mgpuctl", *sys.argv[1:], *(() if self._given["request_id"] else ("--request-id", self._request_id))]
        if isinstance(error, TasksFailed):
            if wait:
                argv += () if self._given["retry_failed"] else ("--retry-failed",)
                show.note(f"mgpuctl: once the cause is repaired, this runs them again: {shlex.join(argv)}")
            return
        if isinstance(error.__cause__, AlreadyExistsError):
            return  # the same command would be rejected again
        left = f"{done:,} lines submitted, and their tasks go on"
        if wait:
            left = (
                f"{self.read:,} lines read, {done:,} results printed; pending tasks are cancelled if the master answers"
            )
        show.note(f"mgpuctl: ended early: {left}; with the same input, this continues: {shlex.join(argv)}")


def parse(data: bytes, where: str = "") -> Any:
    """The JSON value in `data`. Raises Failure."""
    try:
        return json.loads(data, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise Failure(f"{where}not JSON: {reason}: {data[:100].decode(errors='replace')!r}") from error


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _print_ids(
    client: Client, kind: str, inputs: Iterable[Input], options: dict[str, Any], progress: Progress, *, as_json: bool
) -> None:
    """Submits the tasks and prints their ids in order. A rejected task is reported, and the others go on."""
    taken = rejected = 0
    iterator = iter(inputs)
    while batch := list(islice(iterator, BATCH_TASKS)):
        for answer in client.submit_many(kind, batch, **options):
            if not isinstance(answer, RejectedError):
                taken += 1
                progress.add(1)
                show.line(show.as_json({"task_id": answer.id}) if as_json else str(answer.id))
                continue
            rejected += 1
            message = with_flags(answer.message)
            if as_json:
                reason = {"code": answer.code, "error": message, "retry_delay_s": answer.retry_delay_s}
                show.line(show.as_json(reason))
            else:
                show.note(f"mgpuctl: rejected: {with_flags(str(answer))}")
    if rejected:
        failure = TasksFailed if taken else Failure
        raise failure(f"{rejected:,} of {taken + rejected:,} tasks were rejected")


def _print_results(outcomes: Iterable[Outcome], progress: Progress, *, many: bool, as_json: bool) -> None:
    """Prints results in the order of the inputs: unchanged, or as JSON lines with the whole outcome."""
    done = failed = broken = 0
    for outcome in outcomes:
        done += 1
        failed += not outcome.succeeded
        if as_json:
            show.line(show.as_json(messages.as_dict(outcome)))
        elif not outcome.succeeded:
            if many:
                show.line()  # keeps line N of the output with line N of the input
            show.note(f"mgpuctl: {f'line {done:,}: ' if many else ''}{outcome.to_error()}")
        elif many and (b"\n" in outcome.result or b"\r" in outcome.result):
            broken += 1
            show.line()
            show.note(f"mgpuctl: line {done:,}: the result holds a line break; --json shows it")
        elif many:
            show.raw(outcome.result + b"\n")
        else:
            show.result(outcome.result)
        progress.add(1)
    if failed or broken:
        faults = {"did not succeed": failed, "have a result with a line break": broken}
        texts = [f"{number:,} of {done:,} tasks {fault}" for fault, number in faults.items() if number]
        raise TasksFailed("; ".join(texts))
