"""`mgpuctl handlers reload`: have workers run the handlers as their files are now, one worker after the other."""

import time

import click

from multigpu.cli import show
from multigpu.cli.commands import Group
from multigpu.cli.failures import Failure
from multigpu.cli.options import complete_worker_id, json_option, master_option
from multigpu.cli.rpc import Master
from multigpu.v1 import admin_service_pb2 as admin

POLL_INTERVAL_S = 0.1


@click.group(
    cls=Group, examples=(("mgpuctl handlers reload --all", "After an edit: the whole fleet, worker by worker."),)
)
def handlers() -> None:
    """Have workers reload your handlers, one after the other.

    A worker runs the version that it read when it began, whatever happens to the files. `mgpuctl workers --json` shows
    it, and `mgpuctl doctor` warns where workers run different ones.
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
@master_option
@json_option
def reload(worker_ids: tuple[str, ...], everywhere: bool, address: str, as_json: bool) -> None:
    """Have workers read their handlers again, one after the other. Each finishes what runs, for at most its
    drain_timeout_s; what runs longer begins anew.

    A WORKER is an id, or the beginning of one. Where the new version can't be imported the old one goes on, and the
    workers after that keep theirs.
    """
    if bool(worker_ids) == everywhere:
        raise click.UsageError("name workers, or say --all")
    told: list[dict[str, str]] = []
    with Master(address) as master:
        found = [master.find_worker_id(prefix) for prefix in worker_ids]
        if everywhere:
            lost = admin.WORKER_STATE_LOST
            found = [w.worker_id for w in master.list_workers() if w.HasField("handlers") and w.state != lost]
        try:
            for worker_id in found:
                told.append(_reload(master, worker_id))
                if not as_json:
                    show.line(show.clean("{worker_id}: {before} before, {version} now".format(**told[-1])))
        finally:
            if as_json:
                show.value(told)


def _reload(master: Master, worker_id: str) -> dict[str, str]:
    """Failure: it runs what it ran before."""
    before = master.call(master.admin.ReloadHandlers, admin.ReloadHandlersRequest(worker_id=worker_id)).worker
    while True:
        worker = next((w for w in master.list_workers() if w.worker_id == worker_id), admin.Worker())
        if worker.session_id != before.session_id:
            raise Failure(f"worker {worker_id} lost its session meanwhile: see `mgpuctl workers`, then reload it again")
        if worker.handlers.reloads > before.handlers.reloads:
            break
        time.sleep(POLL_INTERVAL_S)
    if worker.handlers.error:
        raise Failure(
            f"worker {worker_id} can't import the new handlers and goes on with version {worker.handlers.version}: "
            f"{worker.handlers.error}; correct them, then reload again"
        )
    return {"worker_id": worker_id, "before": before.handlers.version, "version": worker.handlers.version}
