"""`mgpuctl tasks`: list, count, get, cancel and explain tasks."""

import sys
import time
from pathlib import Path

import click

from multigpu import AdminClient, Task, TaskState
from multigpu._units import format_duration, format_size
from multigpu.cli import messages, show, tables
from multigpu.cli.admin import connected, newest
from multigpu.cli.commands import Group
from multigpu.cli.failures import Failure, NotFound
from multigpu.cli.options import (
    Number,
    json_option,
    limit_option,
    request_ids_option,
    task_ids_argument,
)
from multigpu.cli.presence import note_unknown_queue
from multigpu.cli.tables import Column
from multigpu.cli.tasks.task_filter import filter_options
from multigpu.cli.text import clean, seconds_of, since
from multigpu.options import TaskFilter
from multigpu.v1 import task_pb2

COLUMNS = (
    Column("TASK", lambda task: str(task.task_id), right=True),
    Column("STATE", lambda task: state_of(task).lower()),
    Column("KIND", lambda task: task.kind),
    Column("QUEUE", lambda task: task.message.spec.queue or "default"),
    Column("PRI", lambda task: str(task.message.spec.priority or 3), right=True),
    Column("AGE", lambda task: since(task.submit_time)),
    Column("TRIES", lambda task: str(task.attempts), right=True),
    Column("WORKER", lambda task: task.worker_id or task.message.outcome.worker_id or "-"),
)
CANDIDATES = (
    Column("WORKER", lambda found: found.worker_id),
    Column("RANK", lambda found: str(found.rank or "-"), right=True),
    Column("SCORE", lambda found: f"{found.score:.4g}" if found.rank else "-", right=True),
    Column("WHY", lambda found: "; ".join(found.excluded_by) or found.score_meaning),
)
ENERGY_METHODS = {
    task_pb2.ENERGY_METHOD_COUNTER: "by the device's counter",
    task_pb2.ENERGY_METHOD_SAMPLED_POWER: "from sampled power",
}
NO_IDS = "give TASK_IDs or --request-id; `mgpuctl tasks list` shows them"


@click.group(cls=Group)
def tasks() -> None:
    """See, fetch, cancel and explain tasks."""


@tasks.command(
    "list",
    examples=(
        ("mgpuctl tasks list --state leased", "What runs now, and where."),
        ("mgpuctl tasks list --outcome failed --kind embed --limit 1000", "What failed."),
        ("mgpuctl tasks list --json | jq '.[].task_id'", "Ids, for programs."),
    ),
)
@filter_options
@limit_option("tasks")
@connected
@json_option
def list_(task_filter: TaskFilter, limit: int, admin: AdminClient, as_json: bool) -> None:
    """Tasks, the newest first."""
    found = newest(admin.list_tasks(**task_filter), limit)
    if not found:
        note_unknown_queue(admin, task_filter["queue"])
    tables.show_rows(found, COLUMNS, as_json=as_json, empty="no such tasks")


def state_of(task: Task) -> str:
    """QUEUED, LEASED, or, once settled, the outcome: SUCCEEDED, FAILED, …"""
    return task.outcome.state.name if task.outcome is not None else task.state.name


@tasks.command("count", examples=(("mgpuctl tasks count --queue night", "How many, by state."),))
@filter_options
@connected
@json_option
def count(task_filter: TaskFilter, admin: AdminClient, as_json: bool) -> None:
    """How many tasks there are, by state."""
    counts = messages.as_dict(admin.count(**task_filter))
    if not any(counts.values()):
        note_unknown_queue(admin, task_filter["queue"])
    if as_json:
        show.value(counts)
    else:
        show.facts([(name.replace("_", "-"), f"{number:,}") for name, number in counts.items()])


@tasks.command(
    "get",
    examples=(
        ("mgpuctl tasks get 17", "All about one task, with its result."),
        ("mgpuctl tasks get 17 --wait 60 -o result.bin", "Wait for it; the result into a file."),
        ("mgpuctl tasks get --request-id order-4711 --json", "By the id that its client gave it."),
        ("mgpuctl tasks get 17 18 --json | jq '.[].outcome.state'", "Several: --json makes a list of them."),
    ),
)
@task_ids_argument
@request_ids_option
@click.option("--wait", "wait_s", type=Number(min=0), default=0.0, metavar="SECONDS", help="Wait at most SECONDS.")
@click.option("-o", "--output", metavar="FILE", help='Write the result to FILE, "-" for stdout, and print no more.')
@connected
@json_option
def get(
    task_ids: tuple[int, ...],
    request_ids: tuple[str, ...],
    wait_s: float,
    output: str | None,
    admin: AdminClient,
    as_json: bool,
) -> None:
    """Tasks: where each is, how it ended, what it returned."""
    names: list[int | str] = [*task_ids, *request_ids]
    if not names:
        raise click.UsageError(NO_IDS)
    if output is not None and len(names) > 1:
        raise click.UsageError("-o writes the result of one task: give one id")
    give_up_at = time.monotonic() + wait_s
    found = [admin.get(name, wait_s=max(0.0, give_up_at - time.monotonic())) for name in names]
    if output is not None:
        _write_result(found[0], output)
    elif as_json:
        values = [messages.as_dict(task) for task in found]
        show.value(values if len(values) > 1 else values[0])
    else:
        for nth, task in enumerate(found):
            if nth:
                show.line()
            show.facts(task_facts(task))


def _write_result(task: Task, output: str) -> None:
    outcome = task.outcome
    if outcome is None or not outcome.succeeded:
        why = f": {outcome.error_type}: {outcome.error_message}" if outcome is not None and outcome.error_type else ""
        raise Failure(f"task {task.task_id} has no result: it is {state_of(task)}{why}")
    if output == "-":
        show.raw(outcome.result)
        return
    try:
        Path(output).write_bytes(outcome.result)
    except OSError as error:
        raise Failure(f"can't write {output}: {error.strerror}") from error


def task_facts(found: Task) -> list[tuple[str, str]]:
    """What `tasks get` prints about a task: (label, text), without empty texts."""
    task = found.message
    spec, outcome = task.spec, task.outcome
    error = outcome.error if outcome.HasField("error") else task.last_error
    settled = found.state is TaskState.SETTLED
    attempts = (
        str(task.attempts) if settled and not spec.attempts_max else f"{task.attempts} of {spec.attempts_max or 3}"
    )
    progress = f"{task.progress.fraction:.0%} {task.progress.note}".strip() if task.HasField("progress") else ""
    facts = [
        ("Task", str(task.task_id)),
        ("Request", task.request_id),
        ("State", state_of(found)),
        ("Kind", spec.kind + (f" on {spec.model}" if spec.model else "")),
        ("Queue", f"{spec.queue or 'default'}, priority {spec.priority or 3}"),
        ("Payload", format_size(task.payload_bytes) if task.payload_bytes or not settled else ""),
        ("Submitted", f"{task.submit_time.ToJsonString()} ({since(found.submit_time)} ago)"),
        ("Attempts", attempts),
        ("Worker", task.worker_id or outcome.worker_id),
        ("Progress", progress),
        ("Not before", task.not_before.ToJsonString() if task.HasField("not_before") else ""),
        ("Took", stages_text(outcome.stages)),
        ("Energy", _energy_text(outcome.energy) if outcome.HasField("energy") else ""),
    ]
    if error.type:
        facts.append(("Error" if task.HasField("outcome") else "Last error", f"{error.type}: {error.message}"))
        facts.append(("Traceback", error.traceback.rstrip()))
    facts.append(("Log", found.log.rstrip()))
    if found.outcome is not None and found.outcome.succeeded:
        facts += [(f"Output {index}", _bytes_text(part)) for index, part in enumerate(outcome.partials)]
        facts.append(("Result", _bytes_text(outcome.result)))
    return [fact for fact in facts if fact[1]]


def _bytes_text(data: bytes) -> str:
    decoded = messages.decoded(data, "")
    return decoded if isinstance(decoded, str) else f"{format_size(len(data))} of binary data; -o FILE writes it"


def stages_text(stages: task_pb2.Stages) -> str:
    """How long a task waited in the queue, was on its way to the engine, and ran."""
    names = ("submit_time", "dispatch_time", "start_time", "finish_time")
    times = [seconds_of(getattr(stages, name)) if stages.HasField(name) else None for name in names]
    return ", ".join(
        f"{verb} {format_duration(max(0.0, after - before))}"
        for before, after, verb in zip(times, times[1:], ("waited", "on its way", "ran"), strict=False)
        if before is not None and after is not None
    )


def _energy_text(energy: task_pb2.Energy) -> str:
    how = ENERGY_METHODS.get(energy.method, "")
    return f"{energy.joules:.3g} J ± {energy.uncertainty:.0%} {how}".rstrip()


@tasks.command(
    "cancel",
    examples=(
        ("mgpuctl tasks cancel 17 18 19", "A running one is told to stop."),
        ("mgpuctl tasks cancel --request-id order-4711 --reason 'paid twice'", "By the client's own id."),
        (
            (
                "mgpuctl tasks list --queue night --state queued --limit 9999 --json | "
                "jq '.[].task_id' | xargs mgpuctl tasks cancel"
            ),
            "Those that wait in a queue, up to the limit.",
        ),
    ),
    exits=(("0", "Each is cancelled, or had ended before."), ("4", "The master doesn't know some of them.")),
)
@task_ids_argument
@request_ids_option
@click.option("--reason", default="", help="Recorded in the outcome.")
@connected
@json_option
def cancel(
    task_ids: tuple[int, ...], request_ids: tuple[str, ...], reason: str, admin: AdminClient, as_json: bool
) -> None:
    """End tasks. Their outcome is CANCELLED; results that come later are ignored."""
    if not task_ids and not request_ids:
        raise click.UsageError(NO_IDS)
    answer = admin.cancel(*task_ids, *request_ids, reason=reason)
    if as_json:
        show.value(messages.as_dict(answer))
    else:
        show.line(f"cancelled {len(answer.cancelled_task_ids)}, ended before {len(answer.settled_task_ids)}")
    if answer.unknown:
        raise NotFound(f"the master doesn't know {', '.join(answer.unknown)}")


@tasks.command("explain", examples=(("mgpuctl tasks explain 17", "Why it waits, or why it runs where it runs."),))
@task_ids_argument
@request_ids_option
@connected
@json_option
def explain(task_ids: tuple[int, ...], request_ids: tuple[str, ...], admin: AdminClient, as_json: bool) -> None:
    """Why a task is where it is. Which workers could take it, and what excludes the others."""
    if len(task_ids) + len(request_ids) != 1:
        raise click.UsageError("give one TASK_ID or one --request-id; `mgpuctl tasks list` shows them")
    name: int | str = task_ids[0] if task_ids else request_ids[0]
    answer = admin.explain(name)
    if as_json:
        show.value(messages.as_dict(answer))
        return
    show.line(clean(answer.summary))
    show.line()
    ahead = f"{answer.ahead:,} of its queue's tasks" if answer.ahead is not None else ""
    show.facts([("State", state_of(answer.task)), ("Strategy", answer.strategy), ("Ahead", ahead)])
    if answer.task.state is not TaskState.SETTLED:
        show.line()
        sys.stdout.flush()
        tables.show_rows(answer.candidates, CANDIDATES, empty="the master knows no workers")
