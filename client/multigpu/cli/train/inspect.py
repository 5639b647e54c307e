"""`mgpuctl train list`, `show`, `logs` and `metrics`."""

import importlib.util
import itertools
import shlex
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from multigpu import Client, Task
from multigpu._kinds.finetuning import Finetune
from multigpu._kinds.job_history import by_step
from multigpu._kinds.training import KIND, report_text
from multigpu.cli import show, tables
from multigpu.cli.admin import newest
from multigpu.cli.commands import Command
from multigpu.cli.failures import Failure, WrongUsage
from multigpu.cli.kinds.vectors import File
from multigpu.cli.options import json_option, limit_option, master_option
from multigpu.cli.sdk_errors import sdk_session
from multigpu.cli.tables import Column
from multigpu.cli.tasks.tasks import state_of, task_facts
from multigpu.cli.text import clean_lines, since
from multigpu.cli.train.job import find, finetuned_lines, history, name_argument, report_end
from multigpu.cli.train.plot import plot
from multigpu.cli.train.run import follow


def _sizes(task: Task) -> str:
    spec = task.message.spec
    return f"{spec.world_size_min}:{spec.world_size}" if spec.world_size_min else str(spec.world_size or "-")


COLUMNS = (
    Column("JOB", lambda task: task.request_id),
    Column("STATE", lambda task: "running" if task.worker_id and task.outcome is None else state_of(task).lower()),
    Column("RANKS", _sizes, right=True),
    Column("TRIES", lambda task: str(task.attempts), right=True),
    Column("AGE", lambda task: since(task.submit_time)),
    Column(
        "DONE", lambda task: "-" if task.outcome is not None else f"{task.message.progress.fraction:.0%}", right=True
    ),
    Column("LAST REPORT", lambda task: task.message.progress.note or "-"),
)


@click.command(
    "list",
    cls=Command,
    examples=(
        ("mgpuctl train list", "Jobs, the newest first."),
        ("mgpuctl train list --json | jq '.[].job'", "Names."),
    ),
)
@limit_option("jobs")
@master_option
@json_option
def list_(limit: int, address: str, as_json: bool) -> None:
    """Training jobs, the newest first."""
    with sdk_session(), Client(address) as client:
        found = newest(newest_runs(client.list_tasks(kind=KIND)), limit)
    if as_json:
        show.value([_summary(task) for task in found])
    else:
        tables.show_rows(found, COLUMNS, empty="no training jobs; `mgpuctl train run` starts one")


def newest_runs(tasks: Iterable[Task]) -> Iterator[Task]:
    """Of the tasks of each job, which are several if it was resumed, the newest. The newest come first."""
    names = set()
    for task in tasks:
        if task.request_id not in names:
            names.add(task.request_id)
            yield task


def _joules(task: Task) -> float | None:
    """Of the last attempt."""
    outcome = task.outcome
    return outcome.energy.joules if outcome is not None and outcome.energy is not None else None


def _summary(task: Any) -> dict[str, Any]:
    return {
        "job": task.request_id,
        "task_id": task.task_id,
        "state": state_of(task),
        "world_size": task.message.spec.world_size or None,
        "world_size_min": task.message.spec.world_size_min or None,
        "attempts": task.attempts,
        "submit_time": task.submit_time.isoformat() if task.submit_time else None,
        "fraction": task.message.progress.fraction,
        "last_report": task.message.progress.note,
    }


@click.command(
    "show", cls=Command, examples=(("mgpuctl train show night", "Script, attempts, checkpoint, last metrics."),)
)
@name_argument
@master_option
@json_option
def show_(name: str, address: str, as_json: bool) -> None:
    """All about one job."""
    with sdk_session(), Client(address) as client:
        task = find(client, name)
        past = history(client, task)
    job = past.job
    if as_json:
        show.value(
            _summary(task)
            | {"description": job.payload() if job is not None else None}
            | {"device_hours": past.device_hours, "energy_joules": _joules(task)}
            | {"runs": past.attempts, "checkpoint": past.checkpoint, "metrics": past.metrics[-1:]}
            | {"error": task.outcome.error_message if task.outcome is not None else ""}
        )
        return
    hidden = ("Payload", "Request", "Kind", "Log", "Result")
    facts = [("Job", task.request_id)]
    if job is not None:
        if job.finetune is None:
            facts.append(("Script", shlex.join((job.script, *job.args))))
        else:
            facts += [("Model", job.finetune.model), ("Settings", settings_text(job.finetune))]
        facts += [("Ranks", str(past.attempts[-1]["world_size"])), ("Device hours", f"{past.device_hours:.3g}")]
        facts += [("Logs", past.attempts[-1]["logs"])]
    if past.checkpoint is not None and past.finetuned is None:
        facts.append(("Checkpoint", f"step {past.checkpoint['step']} in {past.checkpoint['folder']}"))
    if past.metrics:
        facts.append(("Last report", report_text(by_step(past)[-1])))
    facts += [(label, text) for label, text in task_facts(task) if label not in hidden and "Output" not in label]
    facts += [("Result", line) for line in finetuned_lines(past)]
    show.facts(facts)


def settings_text(tuning: Finetune) -> str:
    """The settings that are not their defaults."""
    plain, usual = tuning.plain(), Finetune(model=tuning.model).plain()
    shown = [f"{name} {value}" for name, value in plain.items() if value != usual[name] and name != "method"]
    return ", ".join([f"method {tuning.method}", *shown])


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl train logs -f night", "What rank 0 writes, until the job ends."),
        ("mgpuctl train logs --rank 3 night", "The last lines of another rank."),
    ),
)
@name_argument
@click.option("-f", "--follow", "follows", is_flag=True, help="Show what comes, until the job ends.")
@click.option("--rank", type=click.IntRange(0, 1023), default=0, show_default=True, help="Whose log.")
@master_option
def logs(name: str, follows: bool, rank: int, address: str) -> None:
    """The last lines that a rank of a job has written; the whole log is in the job's folder."""
    with sdk_session(), Client(address) as client:
        task = find(client, name, rank=rank)
        if rank and task.outcome is not None:
            attempts = history(client, task).attempts
            if attempts and rank >= (size := attempts[-1]["world_size"]):
                raise Failure(f"{name} has no rank {rank}: its last attempt had ranks 0 to {size - 1}")
            where = f": its log is in {attempts[-1]['logs']}/rank-{rank} on its host" if attempts else ""
            raise Failure(f"{name} has ended, and the master keeps the log of rank 0 alone{where}")
        if follows and task.outcome is None:
            follow(client, name, rank)
        elif task.log:
            show.line(clean_lines(task.log.removesuffix("\n")))
        elif task.outcome is not None:
            report_end(client, task)
        else:
            show.note(f"rank {rank} of {name} has written nothing yet")


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl train metrics night", "A table, one line for each report."),
        ("mgpuctl train metrics night --plot loss.png", "A picture of each metric by step."),
        ("mgpuctl train metrics night --json | jq '.[-1].metrics.loss'", "For programs."),
    ),
)
@name_argument
@click.option("--plot", "plot_file", metavar="FILE", help="Draw them into FILE, a PNG.")
@master_option
@json_option
def metrics(name: str, plot_file: str | None, address: str, as_json: bool) -> None:
    """What a job has reported, by step; of steps that ran again, the last."""
    if plot_file and importlib.util.find_spec("matplotlib") is None:
        raise WrongUsage("--plot needs matplotlib: pip install 'multigpu[plot]'")
    with sdk_session(), Client(address) as client:
        reports = by_step(history(client, find(client, name)))
    if plot_file is not None:
        with File(Path(plot_file)) as picture:
            picture.write(plot(name, reports))
    elif as_json:
        show.value(reports)
    else:
        names = list(dict.fromkeys(itertools.chain.from_iterable(report["metrics"] for report in reports)))
        columns = [
            Column("TIME", lambda report: datetime.fromtimestamp(report["time"], UTC).strftime("%H:%M:%S")),
            Column("STEP", lambda report: str(report["step"] if report["step"] is not None else "-"), right=True),
        ]
        columns += [_metric_column(name) for name in names]
        tables.show_rows(reports, columns, empty=f"{name} has reported no metrics (multigpu.train.report)")


def _metric_column(metric: str) -> Column:
    def number(report: dict[str, Any]) -> str:
        value = report["metrics"].get(metric, "-")
        return value if isinstance(value, str) else f"{value:.6g}"

    return Column(metric.upper(), number, right=True)
