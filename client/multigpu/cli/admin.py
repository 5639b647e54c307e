"""The connection of mgpuctl's commands to a master: an AdminClient whose errors end the command as Failures.

Calls are not retried, so that a person at a prompt sees an error at once.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import click

from multigpu import AdminClient, Task
from multigpu.cli import show
from multigpu.cli.failures import NotFound
from multigpu.cli.options import master_option
from multigpu.cli.sdk_errors import failures
from multigpu.errors import ConfigError, MultigpuError
from multigpu.fleet import Worker, WorkerState

COMPLETION_TIMEOUT_S = 1.0

F = TypeVar("F", bound=Callable[..., Any])


def connected(command: F) -> F:
    """Adds `--master` to a command, and calls the command with an AdminClient as `admin`."""

    @functools.wraps(command)
    def with_connection(*args: Any, address: str, **kwargs: Any) -> Any:
        with connection(address) as admin:
            return command(*args, admin=admin, **kwargs)

    return master_option(with_connection)  # type: ignore[return-value]  # as in master_option


@contextmanager
def connection(address: str) -> Iterator[AdminClient]:
    """An AdminClient; errors of the block are Failures."""
    with failures(), AdminClient(address, connect_timeout_s=0) as admin:
        yield admin


def active(workers: Iterable[Worker]) -> list[Worker]:
    return [worker for worker in workers if worker.state is WorkerState.ACTIVE]


def newest(tasks: Iterator[Task], limit: int) -> list[Task]:
    """The first `limit` tasks. If there are more, prints a note to stderr."""
    found = list(islice(tasks, limit + 1))
    if len(found) > limit:
        show.note(f"only the newest {limit:,}; --limit shows more")
    return found[:limit]


def find_worker_id(admin: AdminClient, prefix: str) -> str:
    """The id of the one worker whose id is, or begins with, `prefix`."""
    worker_ids = [worker.worker_id for worker in admin.list_workers()]
    if prefix in worker_ids:
        return prefix
    found = [worker_id for worker_id in worker_ids if worker_id.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFound(f"{prefix!r} fits {len(found)} workers: {', '.join(found)}; write more of the id")
    known = ", ".join(worker_ids) or "none"
    raise NotFound(f"no worker's id begins with {prefix!r}; the master knows: {known}")


def complete_worker_id(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Worker ids for the shell's completion; none if the master does not answer quickly."""
    master = context.params.get("master") or context.find_root().params.get("master")
    try:
        with AdminClient(master, connect_timeout_s=0, timeout=COMPLETION_TIMEOUT_S) as admin:
            worker_ids = [worker.worker_id for worker in admin.list_workers()]
    except (MultigpuError, ConfigError):
        return []
    return [worker_id for worker_id in worker_ids if worker_id.startswith(incomplete)]


workers_argument = click.argument(
    "worker_ids", metavar="WORKER...", nargs=-1, required=True, shell_complete=complete_worker_id
)
