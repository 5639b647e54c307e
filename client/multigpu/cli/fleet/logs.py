"""`mgpuctl logs`: the logs of this host's daemons: services from journald, a local fleet from its file."""

import contextlib
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import click

from multigpu.cli import show
from multigpu.cli.commands import Command
from multigpu.cli.failures import Failure
from multigpu.cli.local.fleet_log import LOG_NAME, json_object, older
from multigpu.cli.options import config_option, json_option, load_config
from multigpu.cli.text import clean
from multigpu.config import config

POLL_INTERVAL_S = 0.2
SYSTEMD_RUNS = Path("/run/systemd/system")
SYSTEMCTL_TIMEOUT_S = 10.0
# Keys of a line that are not in Entry.fields.
TAKEN = frozenset({"timestamp", "level", "event", "process", "exception"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    # RFC 3339; empty: not known.
    timestamp: str
    # "master", "up", or a worker's id.
    process: str
    level: str
    message: str
    fields: dict[str, Any] = field(default_factory=dict)


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl logs -f", "Everything, as it comes."),
        ("mgpuctl logs master -n 20", "The last lines of the master."),
        ("mgpuctl logs 0", "The service mgpu-worker@0; or local workers whose id begins with 0."),
        ("mgpuctl logs worker --json | jq 'select(.level == \"error\")'", "For programs: one JSON value a line."),
    ),
)
@click.argument("name", metavar="[master|worker|mps|NAME]", default="")
@click.option("-f", "--follow", is_flag=True, help="Follow new lines, until Ctrl-C.")
@click.option(
    "-n", "--lines", "count", type=click.IntRange(min=0), default=100, show_default=True, help="How many old lines."
)
@click.option(
    "--data-dir", metavar="DIR", help="Read the local fleet's log in this data directory, even if there are services."
)
@config_option
@json_option
def logs(name: str, follow: bool, count: int, data_dir: str | None, as_json: bool) -> None:
    """Show the logs of the daemons on this host.

    If systemd has mgpu units, this runs journalctl; else it reads the file that `mgpuctl up` keeps in its data
    directory.
    """
    if data_dir is None and has_services():
        run_journalctl(name, count=count, follow=follow, as_json=as_json)
    settings = load_config(config.MasterConfig, flags={"data_dir": data_dir}).config
    entries = from_file(settings.data_dir / LOG_NAME, matcher(name), count=count, follow=follow)
    for entry in entries:
        show.line(show.as_json(as_dict(entry)) if as_json else as_text(entry))


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


def run_journalctl(name: str, *, count: int, follow: bool, as_json: bool) -> NoReturn:
    """Replaces this process by journalctl."""
    units = {"": "mgpu-*", "master": "mgpu-master.service", "worker": "mgpu-worker@*", "mps": "mgpu-mps@*"}
    unit = units.get(name) or (name if name.startswith("mgpu-") else f"mgpu-worker@{name}*")
    argv = ["journalctl", "--no-pager", f"--lines={count}", f"--unit={unit}"]
    os.execvp(argv[0], argv + ["--follow"] * follow + ["--output=json"] * as_json)  # noqa: S606


def matcher(name: str) -> Callable[[str], bool]:
    """Selects processes of a local fleet by name. The supervisor, "up", is no worker."""
    if name == "mps":
        raise Failure("a local fleet has no MPS processes; its workers log about MPS: `mgpuctl logs worker`")
    if name == "worker":
        return lambda process: process not in ("master", "up")
    return lambda process: process.startswith(name)


def from_file(path: Path, wanted: Callable[[str], bool], *, count: int, follow: bool) -> Iterator[Entry]:
    """Entries of a fleet's log, the oldest first. Raises Failure if there is none."""
    if not path.exists():
        raise Failure(
            f"no services here, and no log of a local fleet at {path}; start one with `mgpuctl up`, "
            "or name its data directory with --data-dir"
        )
    last: deque[Entry] = deque(maxlen=count)
    lines = tail(path)
    old = older(path).read_bytes().splitlines() if older(path).exists() else []
    for line in (*old, *iter(lines.__next__, None)):
        if (entry := _from_line(line)) is not None and wanted(entry.process):
            last.append(entry)
    yield from last
    if follow:
        for new in lines:
            if new is None:
                time.sleep(POLL_INTERVAL_S)
            elif (entry := _from_line(new)) is not None and wanted(entry.process):
                yield entry


def tail(path: Path) -> Iterator[bytes | None]:
    """The lines of a file, and of the files that replace it; None each time there is no more."""
    file = path.open("rb")
    while True:
        begin = file.tell()
        line = file.readline()
        if line.endswith(b"\n"):
            yield line
            continue
        file.seek(begin)  # the rest is still being written
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                yield from file
                file.close()
                file = path.open("rb")
                continue
        yield None


def _from_line(line: bytes) -> Entry | None:
    record = json_object(line)
    if record is None:
        return None
    message = str(record.get("event", ""))
    if record.get("exception"):
        message += f"\n{record['exception']}"
    return Entry(
        timestamp=str(record.get("timestamp", "")),
        process=str(record.get("process", "")),
        level=str(record.get("level", "info")),
        message=message,
        fields={key: value for key, value in record.items() if key not in TAKEN},
    )


def as_dict(entry: Entry) -> dict[str, Any]:
    head = {"timestamp": entry.timestamp, "process": entry.process, "level": entry.level, "message": entry.message}
    return head | {key: value for key, value in entry.fields.items() if key not in head}


def as_text(entry: Entry) -> str:
    """An entry on one line, in local time; a traceback follows."""
    try:
        at = datetime.fromisoformat(entry.timestamp).astimezone().strftime("%F %T.%f")[:-3]
    except ValueError:
        at = entry.timestamp
    first, *more = entry.message.splitlines() or [""]
    fields = "".join(f" {key}={value}" for key, value in entry.fields.items() if key != "logger")
    return "\n".join(clean(text) for text in (f"{at}  {entry.process}  {entry.level:<7}  {first}{fields}", *more))
