"""`mgpuctl tasks`: list, count, get, cancel and explain tasks."""

import sys
import time
from pathlib import Path

import click

from multigpu.cli import messages, show, tables
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
from multigpu.cli.rpc import CALL_TIMEOUT_S, Master, connected
from multigpu.cli.tables import Column
from multigpu.cli.tasks.task_filter import filter_options
from multigpu.cli.text import age, clean, duration, format_size, seconds_of
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2
from multigpu.v1 import task_service_pb2 as service

COLUMNS = (
    Column("TASK", lambda task: str(task.task_id), right=True),
    Column("STATE", lambda task: state_of(task).lower()),
    Column("KIND", lambda task: task.spec.kind),
    Column("QUEUE", lambda task: task.spec.queue or "default"),
    Column("PRI", lambda task: str(task.spec.priority or 3), right=True),
    Column("AGE", lambda task: age(task, "submit_time")),
    Column("TRIES", lambda task: str(task.attempts), right=True),
    Column("WORKER", lambda task: task.worker_id or task.outcome.worker_id or "-"),
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
def list_(task_filter: service.TaskFilter, limit: int, master: Master, as_json: bool) -> None:
    """Tasks, the newest first."""
    found = master.newest_tasks(master.tasks.List, service.ListRequest(filter=task_filter), limit)
    if not found:
        note_unknown_queue(master, task_filter.queue)
    tables.show_rows(found, COLUMNS, as_json=as_json, empty="no such tasks")


def state_of(task: task_pb2.Task) -> str:
    """QUEUED, LEASED, or, once settled, the outcome: SUCCEEDED, FAILED, …"""
    settled = task.state == task_pb2.TASK_STATE_SETTLED
    return messages.enum_name(task.outcome, "state") if settled else messages.enum_name(task, "state")


@tasks.command("count", examples=(("mgpuctl tasks count --queue night", "How many, by state."),))
@filter_options
@connected
@json_option
def count(task_filter: service.TaskFilter, master: Master, as_json: bool) -> None:
    """How many tasks there are, by state."""
    counts = messages.as_dict(master.call(master.tasks.Count, service.CountRequest(filter=task_filter)))
    if not any(counts.values()):
        note_unknown_queue(master, task_filter.queue)
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
    master: Master,
    as_json: bool,
) -> None:
    """Tasks: where each is, how it ended, what it returned."""
    requests = [service.GetRequest(task_id=task_id) for task_id in task_ids]
    requests += [service.GetRequest(request_id=request_id) for request_id in request_ids]
    if not requests:
        raise click.UsageError(NO_IDS)
    if output is not None and len(requests) > 1:
        raise click.UsageError("-o writes the result of one task: give one id")
    give_up_at = time.monotonic() + wait_s
    found: list[task_pb2.Task] = []
    for request in requests:
        left_s = max(0.0, give_up_at - time.monotonic()) if found else wait_s
        request.wait.FromNanoseconds(round(left_s * 1e9))
        found.append(master.call(master.tasks.Get, request, timeout_s=left_s + CALL_TIMEOUT_S).task)
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


def _write_result(task: task_pb2.Task, output: str) -> None:
    if task.outcome.state != task_pb2.OUTCOME_STATE_SUCCEEDED:
        error = task.outcome.error
        why = f": {error.type}: {error.message}" if error.type else ""
        raise Failure(f"task {task.task_id} has no result: it is {state_of(task)}{why}")
    if output == "-":
        show.raw(task.outcome.result)
        return
    try:
        Path(output).write_bytes(task.outcome.result)
    except OSError as error:
        raise Failure(f"can't write {output}: {error.strerror}") from error


def task_facts(task: task_pb2.Task) -> list[tuple[str, str]]:
    """What `tasks get` prints about a task: (label, text), without empty texts."""
    spec, outcome = task.spec, task.outcome
    error = outcome.error if outcome.HasField("error") else task.last_error
    settled = task.state == task_pb2.TASK_STATE_SETTLED
    attempts = (
        str(task.attempts) if settled and not spec.attempts_max else f"{task.attempts} of {spec.attempts_max or 3}"
    )
    progress = f"{task.progress.fraction:.0%} {task.progress.note}".strip() if task.HasField("progress") else ""
    facts = [
        ("Task", str(task.task_id)),
        ("Request", task.request_id),
        ("State", state_of(task)),
        ("Kind", spec.kind + (f" on {spec.model}" if spec.model else "")),
        ("Queue", f"{spec.queue or 'default'}, priority {spec.priority or 3}"),
        ("Payload", format_size(task.payload_bytes) if task.payload_bytes or not settled else ""),
        ("Submitted", f"{task.submit_time.ToJsonString()} ({age(task, 'submit_time')} ago)"),
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
    if outcome.state == task_pb2.OUTCOME_STATE_SUCCEEDED:
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
        f"{verb} {duration(max(0.0, after - before))}"
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
        ("mgpuctl tasks list --queue night --json | jq '.[].task_id' | xargs mgpuctl tasks cancel", "All of a queue."),
    ),
    exits=(("0", "Each is cancelled, or had ended before."), ("4", "The master doesn't know some of them.")),
)
@task_ids_argument
@request_ids_option
@click.option("--reason", default="", help="Recorded in the outcome.")
@connected
@json_option
def cancel(task_ids: tuple[int, ...], request_ids: tuple[str, ...], reason: str, master: Master, as_json: bool) -> None:
    """End tasks. Their outcome is CANCELLED; results that come later are ignored."""
    if not task_ids and not request_ids:
        raise click.UsageError(NO_IDS)
    request = service.CancelRequest(task_ids=task_ids, request_ids=request_ids, reason=reason)
    answer = master.call(master.tasks.Cancel, request)
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
def explain(task_ids: tuple[int, ...], request_ids: tuple[str, ...], master: Master, as_json: bool) -> None:
    """Why a task is where it is. Which workers could take it, and what excludes the others."""
    if len(task_ids) + len(request_ids) != 1:
        raise click.UsageError("give one TASK_ID or one --request-id; `mgpuctl tasks list` shows them")
    requests = [service.GetRequest(request_id=request_id) for request_id in request_ids]
    task_id = (*task_ids, *(master.call(master.tasks.Get, request).task.task_id for request in requests))[0]
    answer = master.call(master.admin.Explain, admin.ExplainRequest(task_id=task_id))
    if as_json:
        show.value(messages.as_dict(answer))
        return
    show.line(clean(answer.summary))
    show.line()
    ahead = f"{answer.ahead:,} tasks of its queue go first" if answer.HasField("ahead") else ""
    show.facts([("State", state_of(answer.task)), ("Strategy", answer.strategy), ("Ahead", ahead)])
    if answer.task.state != task_pb2.TASK_STATE_SETTLED:
        show.line()
        sys.stdout.flush()
        tables.show_rows(answer.candidates, CANDIDATES, empty="the master knows no workers")
