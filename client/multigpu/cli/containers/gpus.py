"""The GPUs of this host for a container: those that are named, or those with the most free memory."""

import re

import click

from multigpu import _extras
from multigpu._units import format_size
from multigpu.cli.energy.devices import MIB, ask_host
from multigpu.cli.failures import Failure

# "1.3b", "135M" or "8x7B" in a model's name.
PARAMETERS = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)
# Weights of 16 bits, and a fifth more for what the server needs beside them.
PARAMETER_BYTES = 2 * 1.2


def parse_devices(text: str) -> tuple[str, ...]:
    """Indexes or UUIDs with commas between them; "cuda:0" is the index 0."""
    names = tuple(part.strip().removeprefix("cuda:") for part in text.split(","))
    if wrong := [name for name in names if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", name)]:
        raise click.BadParameter(f"{wrong[0]!r} is neither the index nor the UUID of a GPU; write 0,2 or GPU-…")
    if len({*names}) < len(names):
        raise click.BadParameter(f"{text!r} names a GPU twice")
    return names


def estimate_bytes(model: str) -> int:
    """The memory that a model needs, by the number of parameters in its name; 0 if there is none."""
    match = PARAMETERS.search(model.rpartition("/")[2])
    if match is None:
        return 0
    return round(int(match[1] or 1) * float(match[2]) * (1e9 if match[3] in "bB" else 1e6) * PARAMETER_BYTES)


def _free_bytes() -> dict[str, int]:
    """Free memory of each available GPU of this host, by index; the most first. Raises Failure."""
    if missing := _extras.missing("--auto-select", "worker"):
        raise Failure(missing)
    report = ask_host("info")
    stats = {str(index): report["gpu_stats"][f"gpu_{index}"] for index in report["available_gpus"]}
    known = {index: each for index, each in stats.items() if each["memory_used_mb"] is not None}
    free = {index: round((each["memory_total_mb"] - each["memory_used_mb"]) * MIB) for index, each in known.items()}
    return dict(sorted(free.items(), key=lambda item: -item[1]))


def select(model: str, *, one: bool) -> tuple[str, ...]:
    """The GPUs with the most free memory: as few as have free what the model needs, each an equal part of it.

    Their number is a power of two: it has to divide the model's attention heads. `one`, and a model without a size in
    its name: one GPU. Raises Failure if they don't suffice.
    """
    free, needed, count = _free_bytes(), estimate_bytes(model), 1
    order = [*free][:1] if one else [*free]
    while count <= len(order):
        if free[order[count - 1]] * count >= needed:
            return tuple(sorted(order[:count], key=int))
        count *= 2
    have = ", ".join(f"cuda:{index} {format_size(size)}" for index, size in free.items()) or "no GPU"
    raise Failure(f"{model} needs about {format_size(needed)}; free are: {have}. --devices starts it all the same")
