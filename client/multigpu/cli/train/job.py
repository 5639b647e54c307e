"""A training job as the master knows it: its task, its events and its log."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import closing

import click

from multigpu import CallTimeoutError, Client, NotFoundError, Outcome, Task
from multigpu._kinds.job_history import History
from multigpu._kinds.training import KIND
from multigpu.cli import show
from multigpu.cli.failures import NotFound, TasksFailed
from multigpu.cli.tasks.tasks import state_of

POLL_S = 0.5
# The events of a running job are complete once none has come for this time, in seconds.
SILENCE_S = 0.3
# How much of the log's end is searched for again in the next log, whose beginning may be cut off.
OVERLAP_CHARS = 512

name_argument = click.argument("name", metavar="JOB")


def find(client: Client, name: str, *, rank: int = 0) -> Task:
    """The job's task. NotFound: there is no such job."""
    try:
        task = client.get(name, rank=rank)
    except NotFoundError as error:
        raise NotFound(f"there is no job {name}; `mgpuctl train list` shows those that are known") from error
    if task.kind != KIND:
        raise NotFound(f"{name} is a task of kind {task.kind}, not a training job; `mgpuctl train list` shows jobs")
    return task


def history(client: Client, task: Task) -> History:
    """The events until now."""
    if task.outcome is not None:
        return History.of(task.outcome.message.partials)
    found = History()
    now = time.time()
    with closing(client.handle(task.task_id).follow(timeout=SILENCE_S)) as parts:
        try:
            for part in parts:
                if isinstance(part, Outcome):
                    break
                event = json.loads(part.data)
                found.add(event)
                if event.get("time", 0.0) > now:
                    break
        except CallTimeoutError:
            pass
    return found


def follow_log(client: Client, name: str, rank: int = 0) -> Iterator[tuple[str, Task]]:
    """New lines of the log, and the task, again and again until it has ended."""
    known = ""
    while True:
        task = find(client, name, rank=rank)
        log = task.log if rank == 0 or task.outcome is None else ""
        yield new_text(known, log), task
        if task.outcome is not None:
            return
        known = log or known
        time.sleep(POLL_S)


def new_text(known: str, log: str) -> str:
    """What a log has that was not known: it may have lost its beginning."""
    if log.startswith(known):
        return log[len(known) :]
    end = known[-OVERLAP_CHARS:]
    at = log.rfind(end)
    return log[at + len(end) :] if at >= 0 else log


def finetuned_lines(past: History) -> list[str]:
    """What a job that fine-tuned has made, and what to change in the next. Empty: it has made nothing."""
    if (found := past.finetuned) is None:
        return []
    losses = [loss for _, loss in found["evaluations"]]
    perplexity = f"; perplexity {math.exp(losses[0]):.4g}, then {math.exp(min(losses)):.4g}" if losses else ""
    return [
        f"{found['model']} is in the model repository{perplexity}",
        *(f"advice: {text}" for text in found["advice"]),
    ]


def report_end(client: Client, task: Task) -> None:
    """Says how a job ended. TasksFailed: it did not succeed."""
    outcome = task.outcome
    assert outcome is not None, "it has ended"
    name = task.request_id
    if outcome.succeeded:
        show.note(f"job {name} succeeded")
        for line in finetuned_lines(history(client, task)):
            show.note(line)
        return
    error = f": {outcome.error_type}: {outcome.error_message}" if outcome.error_type else ""
    saved = history(client, task).checkpoint
    remedy = f"; `mgpuctl train resume {name}` continues from step {saved['step']}" if saved is not None else ""
    raise TasksFailed(f"job {name} ended {state_of(task)}{error}{remedy}")
