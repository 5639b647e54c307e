"""The command-line flags that select tasks."""

import functools
from typing import Any

import click

from multigpu import OutcomeState, TaskState
from multigpu.cli.options import F
from multigpu.options import TaskFilter

STATES = {state.name.lower(): state for state in (TaskState.QUEUED, TaskState.LEASED, TaskState.SETTLED)}
OUTCOMES = {
    "succeeded": OutcomeState.SUCCEEDED,
    "failed": OutcomeState.FAILED,
    "cancelled": OutcomeState.CANCELLED,
    "expired": OutcomeState.EXPIRED,
    "dead-lettered": OutcomeState.DEAD_LETTERED,
}


def filter_options(command: F) -> F:
    """Adds the flags of a TaskFilter to a command, which is called with the filter as `task_filter`."""

    @functools.wraps(command)
    def with_filter(*args: Any, state: tuple[str, ...], outcome: tuple[str, ...], **kwargs: Any) -> Any:
        task_filter = TaskFilter(
            states=[STATES[name] for name in state],
            outcomes=[OUTCOMES[name] for name in outcome],
            queue=kwargs.pop("queue"),
            kind=kwargs.pop("kind"),
            model=kwargs.pop("model"),
            worker_id=kwargs.pop("worker_id"),
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
