"""`mgpuctl models plan`: how a model would be divided among devices."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import multigpu
from multigpu import PlanError
from multigpu._units import format_size
from multigpu.cli import show, tables
from multigpu.cli.commands import Command
from multigpu.cli.failures import Failure, WrongUsage
from multigpu.cli.options import json_option, parse_size
from multigpu.cli.tables import Column
from multigpu.cli.text import plural
from multigpu.planning import Plan

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
LAST_NUMBER = re.compile(r"(.*\D)(\d+)")


def _size(value: int) -> str:
    return format_size(value) if value else "-"


DEVICES = (
    Column("INDEX", lambda row: str(row[0]), right=True),
    Column("DEVICE", lambda row: row[1].name),
    Column("WEIGHTS", lambda row: _size(row[1].weights_bytes), right=True),
    Column("CACHE", lambda row: _size(row[1].cache_bytes), right=True, rank=1),
    Column("ACTIVATIONS", lambda row: _size(row[1].activation_bytes), right=True, rank=3),
    Column("PROCESS", lambda row: _size(row[1].process_bytes), right=True, rank=4),
    Column("LEFT", lambda row: format_size(row[1].left_bytes), right=True),
    Column("MODULES", lambda row: ", ".join(ranges(row[1].modules)) or "-", rank=2),
)


def ranges(modules: Sequence[str]) -> list[str]:
    """Names that differ by consecutive last numbers as one: layers.0-11."""
    runs: list[tuple[str, str, int, int]] = []  # module, its name without the last number, first and last number
    for module in modules:
        match = LAST_NUMBER.fullmatch(module)
        stem, number = (match[1], int(match[2])) if match is not None else (module, -1)
        if runs and match is not None and runs[-1][1] == stem and runs[-1][3] == number - 1:
            runs[-1] = (*runs[-1][:3], number)
        else:
            runs.append((module, stem, number, number))
    return [module if first == last else f"{module}-{last}" for module, _, first, last in runs]


def parse_limits(entries: tuple[str, ...]) -> dict[int | str, int | str]:
    """Limits in bytes, as 0=20GiB,cpu=64GiB: by the index of a device, "cpu" or "disk"."""
    limits: dict[int | str, int | str] = {}
    for entry in (part for text in entries for part in text.split(",")):
        name, mark, size = (piece.strip() for piece in entry.partition("="))
        if not mark or not (name.isdecimal() or name in ("cpu", "disk")):
            what = f"{entry!r} is not of the form 0=20GiB, cpu=64GiB or disk=1TiB"
            raise click.BadParameter(what, param_hint="--max-memory")
        place = int(name) if name.isdecimal() else name
        if place in limits:
            raise click.BadParameter(f"{name} has two limits", param_hint="--max-memory")
        limits[place] = parse_size(size)
    return limits


def read_map(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise WrongUsage(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise WrongUsage(f'{path} is no device map: write {{"model.embed_tokens": 0, …}}')
    return value


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl models plan /srv/models/llama", "On the GPUs of this host."),
        ("mgpuctl models plan llama --devices 24GiB,24GiB", "On two GPUs of 24 GiB, which need not exist."),
        ("mgpuctl models plan llama --max-memory 0=20GiB,cpu=64GiB", "With the rest on the host."),
        ("mgpuctl models plan llama --devices 80GiB,80GiB --tensor-parallel 2", "Both share every layer."),
        ("mgpuctl models plan llama --json | jq .device_map > map.json", "The map, for --map or accelerate."),
    ),
    exits=(("1", "The model does not fit, or can't be read."), ("2", "The command is wrong.")),
)
@click.argument("model", type=click.Path())
@click.option(
    "--devices", default="", metavar="DEVICE|SIZE,…",
    help="GPUs of this host (cuda:0), sizes of GPUs anywhere (80GiB), or cpu.  [default: the GPUs of this host]",
)  # fmt: skip
@click.option(
    "--strategy", type=click.Choice(STRATEGIES), default="auto", show_default=True,
    help="auto: balanced, on as few as hold it. balanced_low_0: little on the first. sequential: filled in order.",
)  # fmt: skip
@click.option(
    "--max-memory", "limits", multiple=True, metavar="N=SIZE,…",
    help="Limit of device N; of cpu and disk for what fits on no device.  [default: 95 % of a device, nothing there]",
)  # fmt: skip
@click.option(
    "--tensor-parallel", type=click.IntRange(1, 1024), default=1, metavar="N", help="Ranks that share each layer."
)
@click.option("--pipeline", type=click.IntRange(1, 1024), default=1, metavar="N", help="Stages, one after the other.")
@click.option(
    "--cache-tokens", type=click.IntRange(min=0), metavar="N",
    help="Tokens of keys and values to leave room for.  [default: one sequence of the longest context]",
)  # fmt: skip
@click.option(
    "--map", "map_file", type=click.Path(path_type=Path), metavar="FILE", help="Check this device map (JSON)."
)
@json_option
def plan(model: str, devices: str, limits: tuple[str, ...], map_file: Path | None, as_json: bool, **given: Any) -> None:
    """Plan how MODEL, a folder of model files, is divided among devices.

    MODEL may be a file in the folder, too. Reads the headers of the files and loads nothing. Weights count at the
    precision they are served at (model.toml; else bf16 on GPUs, fp32 on a CPU). Each device also has the keys and
    values of its layers, the intermediate results of a step, and a process; LEFT is what its limit leaves.
    """
    names = [name.strip() for name in devices.split(",") if name.strip()]
    try:
        found = multigpu.plan(
            model, devices=names, max_memory=parse_limits(limits), device_map=read_map(map_file), **given
        )
    except PlanError as error:
        raise Failure(str(error)) from error
    except ValueError as error:
        raise WrongUsage(str(error)) from error
    if as_json:
        show.value(found.as_dict())
        return
    show.facts(_facts(found))
    tables.show_rows([*enumerate(found.devices)], DEVICES)
    for note in found.notes:
        show.line(f"- {note}")


def _facts(found: Plan) -> list[tuple[str, str]]:
    cache = f"{found.cache_tokens:,} tokens of {found.cache_token_bytes:,} bytes" if found.cache_tokens else ""
    fewest = "" if found.fewest_devices is None else plural(found.fewest_devices, "device") + " as the largest"
    return [
        ("Model", f"{found.model}, {found.source}, {found.kind}"),
        ("Architecture", f"{found.architecture}, {found.layers} layers" if found.layers else ""),
        ("Parameters", f"{found.parameters:,}" if found.parameters else ""),
        ("Weights", f"{format_size(found.weights_bytes)} in {found.precision}"),
        ("Cache", cache),
        ("Tensor parallel", str(found.tensor_parallel) if found.tensor_parallel > 1 else ""),
        ("Pipeline", str(found.pipeline) if found.pipeline > 1 else ""),
        ("On the host", format_size(found.host_bytes) if found.host_bytes else ""),
        ("On the disk", format_size(found.disk_bytes) if found.disk_bytes else ""),
        ("Fits on", fewest),
    ]
