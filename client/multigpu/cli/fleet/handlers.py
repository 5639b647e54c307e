"""`mgpuctl handlers reload`: workers import the handlers' edited files, one worker after the other."""

import time

import click

from multigpu import AdminClient
from multigpu.cli import show
from multigpu.cli.admin import complete_worker_id, connected, find_worker_id
from multigpu.cli.commands import Group
from multigpu.cli.failures import Failure, NotFound
from multigpu.cli.options import json_option
from multigpu.cli.text import clean
from multigpu.fleet import Handlers, WorkerState

POLL_INTERVAL_S = 0.1


@click.group(
    cls=Group, examples=(("mgpuctl handlers reload --all", "After an edit: the whole fleet, worker by worker."),)
)
def handlers() -> None:
    """Have workers reload your handlers, one after the other.

    A worker keeps the version that it read at its start, even if the files change. `mgpuctl workers --json` shows the
    version, and `mgpuctl doctor` warns if workers run different ones.
    """


@handlers.command(
    "reload",
    examples=(
        ("mgpuctl handlers reload --all", "Every worker that has handlers."),
        ("mgpuctl handlers reload box-cpu-0", "One, to try an edit."),
    ),
)
@click.argument("worker_ids", metavar="[WORKER]...", nargs=-1, shell_complete=complete_worker_id)
@click.option("--all", "everywhere", is_flag=True, help="All connected workers that have handlers.")
@connected
@json_option
def reload(worker_ids: tuple[str, ...], everywhere: bool, admin: AdminClient, as_json: bool) -> None:
    """Have workers read their handlers again, one after the other. Each lets its tasks finish for at most its
    drain_timeout_s; tasks that run longer start again.

    A WORKER is an id, or the beginning of one. If a worker can't import the new version, it keeps the old one, and the
    workers after it are not reloaded.
    """
    if bool(worker_ids) == everywhere:
        raise click.UsageError("give either WORKERs or --all")
    found = [find_worker_id(admin, prefix) for prefix in worker_ids]
    if everywhere:
        connected_workers = [w for w in admin.list_workers() if w.state is not WorkerState.LOST]
        found = [worker.worker_id for worker in connected_workers if worker.handlers is not None]
        if not found:
            raise NotFound("no connected worker has handlers; start workers with --handlers MODULE")
    reloaded: list[dict[str, str]] = []
    try:
        for worker_id in found:
            reloaded.append(_reload(admin, worker_id))
            if not as_json:
                show.line(clean("{worker_id}: {before} before, {version} now".format(**reloaded[-1])))
    finally:
        if as_json:
            show.value(reloaded)


def _reload(admin: AdminClient, worker_id: str) -> dict[str, str]:
    """Reloads one worker's handlers and waits for the end. Failure: the worker kept its old version, or was lost."""
    asked = admin.reload_handlers(worker_id)
    before = asked.handlers
    assert before is not None, "else the master rejects the call"
    while True:
        now: Handlers | None = None
        for worker in admin.list_workers():
            if worker.worker_id == worker_id and worker.session_id == asked.session_id:
                now = worker.handlers
        if now is None:
            raise Failure(f"worker {worker_id} lost its session meanwhile: see `mgpuctl workers`, then reload it again")
        if now.reloads > before.reloads:
            break
        time.sleep(POLL_INTERVAL_S)
    if now.error:
        raise Failure(
            f"worker {worker_id} can't import the new handlers and goes on with version {now.version}: "
            f"{now.error}; correct them, then reload again"
        )
    return {"worker_id": worker_id, "before": before.version, "version": now.version}
