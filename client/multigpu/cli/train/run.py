"""`mgpuctl train run`, `stop` and `resume`."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from multigpu import AlreadyExistsError, Client, RejectedError, TaskHandle
from multigpu._kinds.training import KIND
from multigpu.cli import show
from multigpu.cli.commands import Command
from multigpu.cli.failures import EXIT_CODES, Failure, WrongUsage
from multigpu.cli.options import Number, key_values, master_option, parse_size, queue_option
from multigpu.cli.sdk_errors import sdk_session
from multigpu.cli.text import clean_lines
from multigpu.cli.train.job import find, follow_log, history, name_argument, report_end

# Options of Client.train that are no options of its task.
OF_JOB = ("name", "retries", "checkpoints", "hang_timeout_s")
WORLD_SIZE_MAX = 1024
F = TypeVar("F", bound=Callable[..., Any])


class Range(click.ParamType[tuple[int, int]]):
    """MIN:MAX, two numbers of workers."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        low, mark, high = str(value).partition(":")
        if not (mark and low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= WORLD_SIZE_MAX):
            self.fail(f"{value!r} is not of the form MIN:MAX, such as 2:8.", param, ctx)
        return int(low), int(high)


def task_options(command: F) -> F:
    """Gives a command the options of a job's task, `--detach` and `--master`."""
    options = (
        queue_option,
        click.option("--priority", type=click.IntRange(1, 5), help="1 is served first.  [default: 3]"),
        click.option(
            "--label", "labels", multiple=True, metavar="KEY=VALUE", help="Workers must have it. May be repeated."
        ),
        click.option(
            "--device-memory", "device_memory_bytes", type=parse_size, metavar="SIZE",
            help="Device memory that must be free.",
        ),
        click.option(
            "--wait-for-worker", is_flag=True, help="Queue the job even if no known workers could ever run it."
        ),
        click.option("--spread-ranks", is_flag=True, help="Use as many hosts as possible.  [default: as few]"),
        click.option("--detach", is_flag=True, help="Print the job's name once it is queued, and end."),
        master_option,
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl train run --world-size 4 train.py -- --epochs 3", "On four workers, as torchrun would."),
        ("mgpuctl train run --elastic 2:8 train.py", "On as many of 2 to 8 workers as are idle."),
        ("mgpuctl train run --name night --detach train.py", "Prints the job's name; the job runs on."),
        ("mgpuctl train run --name night train.py", "Again: joins the job, or continues it."),
    ),
    exits=EXIT_CODES,
)
@click.argument("script")
@click.argument("args", nargs=-1)
@click.option(
    "--world-size",
    type=click.IntRange(1, WORLD_SIZE_MAX),
    default=1,
    show_default=True,
    metavar="N",
    help="Workers to run on.",
)  # fmt: skip
@click.option(
    "--elastic",
    type=Range(),
    metavar="MIN:MAX",
    help="In place of --world-size: begin with those of MIN to MAX workers that are idle, and grow at a checkpoint.",
)  # fmt: skip
@click.option("--name", default="", metavar="NAME", help="The job and its folder.  [default: made from the script's]")
@click.option(
    "--retries", type=click.IntRange(0, 1000), default=0, metavar="N", help="Runs again after an error of the script."
)
@click.option(
    "--checkpoints", default="", metavar="DIR|URL", help="Where checkpoints are.  [default: in the job's folder]"
)
@click.option(
    "--hang-timeout", "hang_timeout_s", type=Number(min=0), default=0.0, metavar="SECONDS",
    help="End an attempt in which no rank writes or reports anything for this time.  [default: never]",
)  # fmt: skip
@click.option("--attempts-max", type=click.IntRange(1, 100), metavar="N", help="How often it may begin.  [default: 3]")
@task_options
def run(script: str, args: tuple[str, ...], address: str, detach: bool, **given: Any) -> None:
    """Run SCRIPT on several workers, and show what rank 0 writes.

    SCRIPT is a file in the workers' train_dir, by its path there. Words after "--" are its arguments. It gets what
    torchrun would give it, one process on each worker. The job goes on without this command: Ctrl-C leaves it running.
    It survives the end of every process, and begins again from its last checkpoint (multigpu.train). The name of a job
    that was stopped or has failed continues that job.
    """
    if (sizes := given.pop("elastic")) is not None:
        if given["world_size"] != 1:
            raise WrongUsage("give --world-size or --elastic, not both")
        given["world_size_min"], given["world_size"] = sizes
    options = {each: given.pop(each) for each in OF_JOB} | given_options(given)
    with sdk_session(), Client(address) as client:
        start(client, lambda: client.train(script, args, **options), options["name"], detach=detach)


def given_options(given: dict[str, Any]) -> dict[str, Any]:
    """The options that were given. Labels come as a tuple."""
    if labels := given.pop("labels"):
        given["labels"] = key_values("--label", labels)
    return {name: value for name, value in given.items() if value is not None and value is not False and value != ""}


def start(client: Client, submit: Callable[[], TaskHandle[Any]], name: str, *, detach: bool) -> None:
    """Submits a job and, unless `detach`, follows it."""
    try:
        handle = submit()
    except (ValueError, TypeError) as error:
        raise WrongUsage(str(error)) from error
    except AlreadyExistsError as error:
        remedy = f"choose another --name; `mgpuctl train show {name}` shows that job"
        raise Failure(f"there is a job of this name with another script, arguments or options: {remedy}") from error
    except RejectedError as error:
        if "kind" in str(error) and "train" in str(error):
            raise Failure(f"{error}; workers run training jobs with --train-dir (docs/training.md)") from error
        raise
    if detach:
        show.line(handle.request_id)
    else:
        follow(client, handle.request_id)


def follow(client: Client, name: str, rank: int = 0) -> None:
    """Shows a rank's log until the job ends."""
    show.note(f"job {name}")
    said, first = False, True
    try:
        for text, task in follow_log(client, name, rank):
            if first and task.outcome is not None:
                show.note("it has ended before")
            first = False
            if text:
                sys.stdout.write(clean_lines(text))
                sys.stdout.flush()
            if task.outcome is not None:
                report_end(client, task)
            elif not task.worker_id and not task.attempts and not said:
                said = True
                show.note(f"it waits for workers: `mgpuctl tasks explain --request-id {name}` says why")
    except KeyboardInterrupt:
        show.note(f"the job goes on: `mgpuctl train logs -f {name}` follows it, `mgpuctl train stop {name}` ends it")
        raise


@click.command(
    cls=Command,
    examples=(("mgpuctl train stop night", "Its script gets SIGTERM; `resume` continues from its last checkpoint."),),
)
@name_argument
@master_option
def stop(name: str, address: str) -> None:
    """End a job. What it has saved stays."""
    with sdk_session(), Client(address) as client:
        task = find(client, name)
        if client.cancel(task.task_id, reason="mgpuctl train stop").cancelled_task_ids:
            show.line(f"stopped {name}")
        else:
            show.line(f"{name} had ended before")


@click.command(
    cls=Command,
    examples=(("mgpuctl train resume night", "From its last checkpoint, with the script and options it had."),),
)
@name_argument
@click.option("--detach", is_flag=True, help="Print the job's name once it is queued, and end.")
@master_option
def resume(name: str, address: str, detach: bool) -> None:
    """Continue a job that was stopped or has failed, and show what rank 0 writes."""
    with sdk_session(), Client(address) as client:
        task = find(client, name)
        if task.outcome is not None and task.outcome.succeeded:
            raise Failure(f"{name} has succeeded: there is nothing to continue")
        job = history(client, task).job
        if task.outcome is None:
            follow(client, name)
        elif job is None:
            raise Failure(f"{name} had not begun: `mgpuctl train run --name {name} …` starts it")
        else:
            payload, options = job.payload(), {**job.options, "retry_failed": True}
            start(client, lambda: client.submit(KIND, payload, request_id=name, **options), name, detach=detach)
