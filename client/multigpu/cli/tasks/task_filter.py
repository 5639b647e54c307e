"""The command-line flags that select tasks."""

import functools
from typing import Any

import click

from multigpu.cli.options import F
from multigpu.v1 import task_pb2
from multigpu.v1 import task_service_pb2 as service

STATES = {
    "queued": task_pb2.TASK_STATE_QUEUED,
    "leased": task_pb2.TASK_STATE_LEASED,
    "settled": task_pb2.TASK_STATE_SETTLED,
}
OUTCOMES = {
    "succeeded": task_pb2.OUTCOME_STATE_SUCCEEDED,
    "failed": task_pb2.OUTCOME_STATE_FAILED,
    "cancelled": task_pb2.OUTCOME_STATE_CANCELLED,
    "expired": task_pb2.OUTCOME_STATE_EXPIRED,
    "dead-lettered": task_pb2.OUTCOME_STATE_DEAD_LETTERED,
}


def filter_options(command: F) -> F:
    """Adds the flags of a TaskFilter to a command, which is called with the filter as `task_filter`."""

    @functools.wraps(command)
    def with_filter(*args: Any, state: tuple[str, ...], outcome: tuple[str, ...], **kwargs: Any) -> Any:
        task_filter = service.TaskFilter(
            states=[STATES[name] for name in state],
            outcomes=[OUTCOMES[name] for name in outcome],
            **{name: kwargs.pop(name) for name in ("queue", "kind", "model", "worker_id")},
        )
        return command(*args, task_filter=task_filter, **kwargs)

    decorated: Any = with_filter
    for option in (
        click.option("--worker", "worker_id", default="", metavar="WORKER", help="Leased to it, or ended by it."),
        click.option("--model", default="", metavar="MODEL", help="On this model."),
        click.option("--kind", default="", metavar="KIND", help="Of this kind."),
        click.option("--queue", default="", metavar="QUEUE", help="Waiting in this queue, or from it."),
        click.option("--outcome", multiple=True, type=click.Choice(list(OUTCOMES)), help="May be repeated."),
        click.option("--state", multiple=True, type=click.Choice(list(STATES)), help="May be repeated."),
    ):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]  # click's decorators keep the function
