"""`mgpuctl energy check`, `info` and `recommend`: the devices of this host, for the energy benchmark."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from multigpu import _extras
from multigpu._units import format_size
from multigpu.cli import show, tables
from multigpu.cli.commands import Command
from multigpu.cli.driver_calls import ask_driver
from multigpu.cli.failures import Failure, WrongUsage
from multigpu.cli.options import json_option
from multigpu.cli.tables import Column

TIMEOUT_S = 20.0
MIB = 1 << 20
UNAVAILABLE = (("1", "A device is unavailable."), ("2", "The configuration is wrong."))


def ask_host(*arguments: str) -> dict[str, Any]:
    """The answer of multigpu_worker.energy.main. Raises Failure, or WrongUsage for a wrong configuration."""
    if missing := _extras.missing("mgpuctl energy", "worker"):
        sys.exit(missing)
    argv = [sys.executable, "-m", "multigpu_worker.energy.main", *arguments]
    try:
        done = ask_driver(argv, TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise Failure(f"the NVIDIA driver did not answer within {TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise (WrongUsage if done.returncode == WrongUsage.exit_code else Failure)(reason)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


settings_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Another value of the file, as backend.device=cpu."
)


def parse_settings(settings: tuple[str, ...]) -> list[str]:
    for each in settings:
        if not each.partition("=")[0] or "=" not in each:
            raise click.BadParameter(f"{each!r} is not of the form KEY=VALUE", param_hint="--set")
    return [*settings]


def parse_devices(text: str) -> list[str]:
    """Indexes of GPUs with commas between them."""
    names = [part.strip() for part in text.split(",")]
    if not all(name.isdecimal() for name in names):
        raise click.BadParameter(f"{text!r} is not a list of GPUs; write 0,1")
    return names


@click.command(
    cls=Command,
    examples=(("mgpuctl energy check CONFIG.yaml", "Whether its GPUs can be used, and how they are doing."),),
    exits=UNAVAILABLE,
)
@click.argument("config", type=click.Path(path_type=Path))
@settings_option
@json_option
def check(config: Path, settings: tuple[str, ...], as_json: bool) -> None:
    """Check the configuration of a benchmark, and the GPUs that it names.

    A GPU is unavailable if it is not there, does not answer, is in MIG mode, or has less free memory than max_memory.
    """
    _show_report(ask_host("check", str(config), *parse_settings(settings)), as_json=as_json)


@click.command(
    cls=Command, examples=(("mgpuctl energy info --devices 0,1", "The first two GPUs."),), exits=UNAVAILABLE[:1]
)
@click.option("--devices", type=parse_devices, default=None, metavar="N,N", help="GPUs by index.  [default: all]")
@json_option
def info(devices: list[str] | None, as_json: bool) -> None:
    """Show the GPUs of this host: memory, load, temperature, power and processes."""
    _show_report(ask_host("info", *devices or ()), as_json=as_json)


@click.command(
    cls=Command, examples=(("mgpuctl energy recommend > config.yaml", "A configuration for the GPUs of this host."),)
)
def recommend() -> None:
    """Print the backend section of a configuration for the GPUs of this host: 90 % of the memory of each."""
    answer = ask_host("recommend")
    for index, error in answer["errors"].items():
        show.note(f"left out: cuda:{index}: {error}")
    show.line(answer["yaml"].rstrip("\n"))


def _show_report(report: dict[str, Any], *, as_json: bool) -> None:
    """Ends the command with exit code 1 if a device is unavailable."""
    if as_json:
        show.value(report)
    else:
        if report["gpu_stats"]:
            tables.show_rows([*report["gpu_stats"].items()], COLUMNS)
        for index, error in report["errors"].items():
            show.line(f"cuda:{index} is unavailable: {error}")
        energy = "energy is measured" if report["cpu"]["energy_readable"] else "energy (RAPL) can't be read here"
        show.line(f"cpu: {report['cpu']['name']}: {energy}")
        for key, reason in report.get("unsupported", {}).items():
            show.note(f"{key} is not followed: {reason}")
    if not report["all_available"]:
        raise SystemExit(Failure.exit_code)


Row = tuple[str, dict[str, Any]]


def _number(key: str, form: str, row: Row) -> str:
    """A value that may be unknown."""
    value = row[1][key]
    return "-" if value is None else form.format(value)


def _memory(row: Row) -> str:
    used, total = row[1]["memory_used_mb"], row[1]["memory_total_mb"]
    return "-" if used is None or total is None else f"{_size(used)} of {_size(total)}"


def _processes(row: Row) -> str:
    each = (f"{process['pid']} ({_size(process['memory_used_mb'])})" for process in row[1]["processes"])
    return ", ".join(each) or "-"


def _size(mib: float | None) -> str:
    return "-" if mib is None else format_size(round(mib * MIB))


COLUMNS = (
    Column("DEVICE", lambda row: row[0].replace("gpu_", "cuda:")),
    Column("PRODUCT", lambda row: row[1]["name"], rank=4),
    Column("MEMORY", _memory, right=True),
    Column("BUSY", partial(_number, "utilization_percent", "{:.0f}%"), right=True, rank=1),
    Column("TEMP", partial(_number, "temperature_c", "{:.0f}°C"), right=True, rank=2),
    Column("POWER", partial(_number, "power_draw_w", "{:.0f} W"), right=True, rank=3),
    Column("PROCESSES", _processes, rank=5),
)
