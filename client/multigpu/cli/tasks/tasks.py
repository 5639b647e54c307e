"""`mgpuctl tasks`: what became of tasks: list, count, get, cancel, explain."""

import sys
import time
from pathlib import Path

import click

from multigpu.cli import show, tables
from multigpu.cli.commands import Group
from multigpu.cli.failures import Failure, NotFound
from multigpu.cli.options import TASK_ID, TASK_ID_OR_OPTION, Number, json_option, master_option
from multigpu.cli.rpc import CALL_TIMEOUT_S, Master
from multigpu.cli.tasks.queues import note_unknown_queue
from multigpu.cli.tasks.task_filter import filter_options
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import task_pb2
from multigpu.v1 import task_service_pb2 as service


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
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, metavar="N", help="At most N tasks."
)
@master_option
@json_option
def list_(task_filter: service.TaskFilter, limit: int, address: str, as_json: bool) -> None:
    """Tasks, the newest first."""
    with Master(address) as master:
        found = master.newest_tasks(master.tasks.List, service.ListRequest(filter=task_filter), limit)
        if not found:
            note_unknown_queue(master, task_filter.queue)
    if as_json:
        show.value([show.as_dict(task) for task in found])
        return
    columns = ("TASK", "STATE", "KIND", "QUEUE", "PRI", "AGE", "TRIES", "WORKER")
    rows = [task_row(task) for task in found]
    tables.table(columns, rows, right=("TASK", "PRI", "TRIES"), empty="no such tasks")


def task_row(task: task_pb2.Task) -> tuple[str, ...]:
    return (
        str(task.task_id),
        state_of(task).lower(),
        task.spec.kind,
        task.spec.queue or "default",
        str(task.spec.priority or 3),
        show.age(task, "submit_time"),
        str(task.attempts),
        task.worker_id or task.outcome.worker_id or "-",
    )


def state_of(task: task_pb2.Task) -> str:
    """QUEUED, LEASED, or, once settled, the outcome: SUCCEEDED, FAILED, …"""
    settled = task.state == task_pb2.TASK_STATE_SETTLED
    return show.enum_name(task.outcome, "state") if settled else show.enum_name(task, "state")


@tasks.command("count", examples=(("mgpuctl tasks count --queue night", "How many, by state."),))
@filter_options
@master_option
@json_option
def count(task_filter: service.TaskFilter, address: str, as_json: bool) -> None:
    """How many tasks there are, by state."""
    with Master(address) as master:
        answer = master.call(master.tasks.Count, service.CountRequest(filter=task_filter))
        if not any(number for _, number in answer.ListFields()):
            note_unknown_queue(master, task_filter.queue)
    if as_json:
        show.value(show.as_dict(answer))
        return
    counts = show.as_dict(answer)
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
@click.argument("task_ids", metavar="[TASK_ID]...", nargs=-1, type=TASK_ID_OR_OPTION)
@click.option("--request-id", "request_ids", multiple=True, metavar="ID", help="The client's own id. May be repeated.")
@click.option(
    "--wait",
    "wait_s",
    type=Number(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Wait until it has ended, at most SECONDS.",
)
@click.option(
    "-o", "--output", metavar="FILE", help='Write the result\'s bytes to FILE, "-" for stdout, and print no more.'
)
@master_option
@json_option
def get(
    task_ids: tuple[int, ...],
    request_ids: tuple[str, ...],
    wait_s: float,
    output: str | None,
    address: str,
    as_json: bool,
) -> None:
    """Tasks: where each is, how it ended, what it returned."""
    requests = [service.GetRequest(task_id=task_id) for task_id in task_ids]
    requests += [service.GetRequest(request_id=request_id) for request_id in request_ids]
    if not requests:
        raise click.UsageError("give TASK_IDs or --request-id; `mgpuctl tasks list` shows them")
    if output is not None and len(requests) > 1:
        raise click.UsageError("-o writes the result of one task: give one id")
    give_up = time.monotonic() + wait_s
    found: list[task_pb2.Task] = []
    with Master(address) as master:
        for request in requests:
            left_s = max(0.0, give_up - time.monotonic()) if found else wait_s
            request.wait.FromNanoseconds(round(left_s * 1e9))
            found.append(master.call(master.tasks.Get, request, timeout_s=left_s + CALL_TIMEOUT_S).task)
    task = found[0]
    if output is not None:
        write_result(task, output)
    elif as_json:
        show.value(show.as_dict(task) if len(found) == 1 else [show.as_dict(each) for each in found])
    else:
        for nth, each in enumerate(found):
            if nth:
                show.line()
            show.facts(task_facts(each))


def write_result(task: task_pb2.Task, output: str) -> None:
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
    """What a person wants to know about a task."""
    spec, outcome = task.spec, task.outcome
    error = outcome.error if outcome.HasField("error") else task.last_error
    settled = task.state == task_pb2.TASK_STATE_SETTLED
    tries = f"{task.attempts} of {spec.attempts_max or 3}"
    model = f" on {spec.model}" if spec.model else ""
    facts = [
        ("Task", str(task.task_id)),
        ("Request", task.request_id),
        ("State", state_of(task)),
        ("Kind", f"{spec.kind}{model}"),
        ("Queue", f"{spec.queue or 'default'}, priority {spec.priority or 3}"),
        ("Payload", show.size(task.payload_bytes) if task.payload_bytes or not settled else ""),
        ("Submitted", f"{task.submit_time.ToJsonString()} ({show.age(task, 'submit_time')} ago)"),
        ("Attempts", str(task.attempts) if settled and not spec.attempts_max else tries),
        ("Worker", task.worker_id or outcome.worker_id),
    ]
    if task.HasField("progress"):
        facts.append(("Progress", f"{task.progress.fraction:.0%} {task.progress.note}".strip()))
    if task.HasField("not_before"):
        facts.append(("Not before", task.not_before.ToJsonString()))
    if outcome.HasField("stages"):
        facts.append(("Took", stages_in_words(outcome.stages)))
    if outcome.HasField("energy"):
        facts.append(("Energy", energy_in_words(outcome.energy)))
    if error.type:
        facts.append(("Error" if task.HasField("outcome") else "Last error", f"{error.type}: {error.message}"))
        facts.append(("", ""))
        facts.append(("Traceback", error.traceback.rstrip()))
    if outcome.state == task_pb2.OUTCOME_STATE_SUCCEEDED:
        facts += [(f"Output {index}", in_words(part)) for index, part in enumerate(outcome.partials)]
        facts.append(("Result", in_words(outcome.result)))
    return facts


def in_words(data: bytes) -> str:
    """A result, if it is text; else how long it is."""
    decoded = show.decoded(data, "")
    return decoded if isinstance(decoded, str) else f"{show.size(len(data))} of binary data; -o FILE writes it"


def stages_in_words(stages: task_pb2.Stages) -> str:
    """How long a task waited, was on its way, and ran."""
    names = ("submit_time", "dispatch_time", "start_time", "finish_time")
    times = [show.seconds_of(getattr(stages, name)) if stages.HasField(name) else None for name in names]
    parts = []
    for before, after, verb in zip(times, times[1:], ("waited", "on its way", "ran"), strict=False):
        if before is not None and after is not None:
            parts.append(f"{verb} {show.duration(max(0.0, after - before))}")
    return ", ".join(parts)


def energy_in_words(energy: task_pb2.Energy) -> str:
    """How much, how sure, and how it is known."""
    methods = {
        task_pb2.ENERGY_METHOD_COUNTER: "by the device's counter",
        task_pb2.ENERGY_METHOD_SAMPLED_POWER: "from sampled power",
    }
    how = methods.get(energy.method, "")
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
@click.argument("task_ids", metavar="[TASK_ID]...", nargs=-1, type=TASK_ID_OR_OPTION)
@click.option("--request-id", "request_ids", multiple=True, metavar="ID", help="The client's own id. May be repeated.")
@click.option("--reason", default="", help="Recorded in the outcome.")
@master_option
@json_option
def cancel(task_ids: tuple[int, ...], request_ids: tuple[str, ...], reason: str, address: str, as_json: bool) -> None:
    """End tasks. Their outcome is CANCELLED; what they returned later doesn't count."""
    if not task_ids and not request_ids:
        raise click.UsageError("give TASK_IDs or --request-id; `mgpuctl tasks list` shows them")
    with Master(address) as master:
        request = service.CancelRequest(task_ids=task_ids, request_ids=request_ids, reason=reason)
        answer = master.call(master.tasks.Cancel, request)
    if as_json:
        show.value(show.as_dict(answer))
    else:
        show.line(f"cancelled {len(answer.cancelled_task_ids)}, ended before {len(answer.settled_task_ids)}")
    if answer.unknown:
        raise NotFound(f"the master doesn't know {', '.join(answer.unknown)}")


@tasks.command(
    "explain",
    examples=(("mgpuctl tasks explain 17", "Why it waits, or why it runs where it runs."),),
)
@click.argument("task_id", type=TASK_ID)
@master_option
@json_option
def explain(task_id: int, address: str, as_json: bool) -> None:
    """Why a task is where it is. Which workers could take it, and what keeps the others from it."""
    with Master(address) as master:
        answer = master.call(master.admin.Explain, admin.ExplainRequest(task_id=task_id))
    if as_json:
        show.value(show.as_dict(answer))
        return
    show.line(show.clean(answer.summary))
    show.line()
    ahead = f"{answer.ahead:,} tasks of its queue go first" if answer.HasField("ahead") else ""
    show.facts([("State", state_of(answer.task)), ("Strategy", answer.strategy), ("Ahead", ahead)])
    if answer.task.state == task_pb2.TASK_STATE_SETTLED:
        return  # no worker is asked any more
    show.line()
    rows = [
        (
            candidate.worker_id,
            str(candidate.rank) if candidate.rank else "-",
            f"{candidate.score:.4g}" if candidate.rank else "-",
            "; ".join(candidate.excluded_by) if candidate.excluded_by else candidate.score_meaning,
        )
        for candidate in answer.candidates
    ]
    sys.stdout.flush()
    tables.table(("WORKER", "RANK", "SCORE", "WHY"), rows, right=("RANK", "SCORE"), empty="the master knows no workers")
