"""`mgpuctl logs`: the logs of this host's daemons: services from journald, a local fleet from its file."""

import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

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
MICROSECONDS = 1_000_000
# Names of the daemons' levels by syslog(3)'s numbers.
LEVELS = {"0": "critical", "1": "critical", "2": "critical", "3": "error", "4": "warning", "7": "debug"}
STYLES = {"critical": "bold red", "error": "red", "warning": "yellow", "debug": "bright_black"}
# Keys of a line that are not in Entry.fields.
TAKEN = frozenset({"timestamp", "level", "event", "process", "exception"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    # RFC 3339; empty: not known.
    timestamp: str
    # "master", a worker's id; for services the unit: "mgpu-worker@0".
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

    From journald if systemd has mgpu units; else from the file that `mgpuctl up` keeps in its data directory.
    """
    if data_dir is None and has_services():
        entries = from_journal(name, count=count, follow=follow)
    else:
        settings = load_config(config.MasterConfig, flags={"data_dir": data_dir}).config
        entries = from_file(settings.data_dir / LOG_NAME, matcher(name), count=count, follow=follow)
    say = _printer(as_json=as_json)
    for entry in entries:
        say(entry)


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


def from_journal(name: str, *, count: int, follow: bool) -> Iterator[Entry]:
    """Entries of the units' journal, the oldest first. Raises Failure if journalctl fails."""
    units = {"": "mgpu-*", "master": "mgpu-master.service", "worker": "mgpu-worker@*", "mps": "mgpu-mps@*"}
    unit = units.get(name) or (name if name.startswith("mgpu-") else f"mgpu-worker@{name}*")
    argv = ["journalctl", "--no-pager", "--output=json", f"--lines={count}", f"--unit={unit}"]
    # journalctl's own errors go to stderr.
    with subprocess.Popen([*argv, "--follow"] if follow else argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if (record := json_object(line)) is not None:
                    yield from_journal_entry(record)
        finally:
            process.terminate()
    if process.returncode > 0:
        raise Failure(f"journalctl ended with exit code {process.returncode}; its message is above")


def from_journal_entry(record: dict[str, Any]) -> Entry:
    """One value of `journalctl --output=json`. Text that is not UTF-8 is a list of bytes."""
    message = record.get("MESSAGE") or ""
    if isinstance(message, list):
        message = bytes(message).decode("utf-8", "replace")
    at = record.get("__REALTIME_TIMESTAMP")
    unit = str(record.get("_SYSTEMD_UNIT") or record.get("UNIT") or record.get("SYSLOG_IDENTIFIER") or "")
    fields = {key.removeprefix("MGPU_").lower(): value for key, value in record.items() if key.startswith("MGPU_")}
    return Entry(
        timestamp=datetime.fromtimestamp(int(at) / MICROSECONDS, UTC).isoformat().replace("+00:00", "Z") if at else "",
        # systemd's own entries about a unit have its name in UNIT.
        process=str(record.get("UNIT") or unit).removesuffix(".service"),
        level=LEVELS.get(str(record.get("PRIORITY")), "info"),
        message=message,
        fields=fields,
    )


def matcher(name: str) -> Callable[[str], bool]:
    """Selects processes of a local fleet by name. The supervisor, "up", is no worker."""
    if name == "mps":
        raise Failure("a local fleet has no MPS processes; its workers log about MPS: `mgpuctl logs worker`")
    if name == "worker":
        return lambda process: process not in ("master", "up")
    return lambda process: process.startswith(name)


def from_file(path: Path, wanted: Callable[[str], bool], *, count: int, follow: bool) -> Iterator[Entry]:
    """Entries of a fleet's log, the oldest first. Raises Failure if there is none."""
    if not path.exists() and not (follow and path.parent.is_dir()):
        raise Failure(
            f"no services here, and no log of a local fleet at {path}; start one with `mgpuctl up`, "
            "or name its data directory with --data-dir"
        )
    last: deque[Entry] = deque(maxlen=count)
    reader = _Reader(path)
    for line in (*_lines_of(older(path)), *reader.lines()):
        if (entry := _from_line(line)) is not None and wanted(entry.process):
            last.append(entry)
    yield from last
    while follow:
        time.sleep(POLL_INTERVAL_S)
        for line in reader.lines():
            if (entry := _from_line(line)) is not None and wanted(entry.process):
                yield entry


class _Reader:
    """New lines of a file, also after it is rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0

    def lines(self) -> Iterator[bytes]:
        """Complete lines since the last call."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return
        if self._inode not in (0, status.st_ino):
            moved = older(self._path)
            if moved.exists() and moved.stat().st_ino == self._inode:
                yield from self._rest(moved)
            self._offset = 0
        self._inode = status.st_ino
        yield from self._rest(self._path)

    def _rest(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._offset += len(line)
                yield line


def _lines_of(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except FileNotFoundError:
        return []


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


def _printer(*, as_json: bool) -> Callable[[Entry], None]:
    if as_json:
        return lambda entry: show.line(show.as_json(as_dict(entry)))
    if not sys.stdout.isatty():
        return lambda entry: show.line(as_text(entry))
    console = Console(highlight=False, soft_wrap=True)
    return lambda entry: console.print(Text(as_text(entry), style=STYLES.get(entry.level, "")))


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
    # A service's message contains its fields already.
    fields = "".join(
        f" {key}={value}" for key, value in entry.fields.items() if f"{key}=" not in first and key != "logger"
    )
    return "\n".join(clean(text) for text in (f"{at}  {entry.process}  {entry.level:<7}  {first}{fields}", *more))
