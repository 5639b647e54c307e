"""`mgpuctl logs`: the logs of this host's services, by journalctl."""

import os
import shutil
import subprocess
from pathlib import Path

import click

from multigpu.cli.commands import Command
from multigpu.cli.failures import Failure
from multigpu.cli.options import json_option

SYSTEMD_RUNS = Path("/run/systemd/system")
SYSTEMCTL_TIMEOUT_S = 10.0


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl logs -f", "Everything, as it comes."),
        ("mgpuctl logs master -n 20", "The last lines of the master."),
        ("mgpuctl logs GPU-5", "Services of workers whose GPU's UUID begins with that."),
    ),
)
@click.argument("name", metavar="[master|worker|mps|NAME]", default="")
@click.option("-f", "--follow", is_flag=True, help="Follow new lines, until Ctrl-C.")
@click.option(
    "-n", "--lines", "count", type=click.IntRange(min=0), default=100, show_default=True, help="How many old lines."
)
@json_option
def logs(name: str, follow: bool, count: int, as_json: bool) -> None:
    """Show the logs of the mgpu services on this host, with journalctl.

    `mgpuctl up` writes its logs to stderr.
    """
    if not has_services():
        raise Failure("systemd has no mgpu services here; the logs of `mgpuctl up` are on its stderr")
    units = {"": "mgpu-*", "master": "mgpu-master.service", "worker": "mgpu-worker@*", "mps": "mgpu-mps@*"}
    unit = units.get(name) or (name if name.startswith("mgpu-") else f"mgpu-worker@{name}*")
    argv = ["journalctl", "--no-pager", f"--lines={count}", f"--unit={unit}"]
    os.execvp(argv[0], argv + ["--follow"] * follow + ["--output=json"] * as_json)  # noqa: S606


def has_services() -> bool:
    """Whether systemd runs here and has mgpu units."""
    if not SYSTEMD_RUNS.is_dir() or shutil.which("systemctl") is None or shutil.which("journalctl") is None:
        return False
    argv = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--no-pager", "mgpu-*"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SYSTEMCTL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Failure(
            f"systemctl did not answer within {SYSTEMCTL_TIMEOUT_S:g} s; look at `systemctl status`"
        ) from error
    return done.returncode == 0 and bool(done.stdout.strip())
