"""`mgpuctl energy compare`: whether one result takes more energy than another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from multigpu._units import format_energy
from multigpu.cli import show, tables
from multigpu.cli.commands import Command
from multigpu.cli.energy.report import load_result
from multigpu.cli.failures import Failure, WrongUsage
from multigpu.cli.options import Number, json_option
from multigpu.cli.tables import Column

PERMUTATIONS = 10_000
SIGNIFICANT = 0.05
# Joules and count (requests or tokens) of each block.
Blocks = list[tuple[float, int]]
FIGURES = {"requests": "Energy of a request", "completion_tokens": "Energy of a token"}


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl energy compare before.json after.json", "Exit code 1 if `after` takes significantly more."),
        ("mgpuctl energy compare before.json after.json --tolerate 3", "Up to 3 % more are no failure."),
    ),
    exits=(("0", "The second result takes no more."), ("1", "It takes significantly more."), ("2", "A file is wrong.")),
)
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--tolerate", "percent", type=Number(min=0), default=0, show_default=True, help="Percent that may be more."
)
@json_option
def compare(before: Path, after: Path, percent: float, as_json: bool) -> None:
    """Compare two results of `energy run`: the energy of a request, and of a generated token.

    A difference is significant if fewer than 5 % of 10,000 random exchanges of blocks between the results give one as
    large (a permutation test). Blocks lie within one run each: what differs between runs, such as the temperature of
    the room or the sensors of another GPU, is not seen by the test. Repeat runs before you trust small differences.
    """
    first, second = load_result(before), load_result(after)
    rows = [
        _row(name, _of_blocks(before, first, name), _of_blocks(after, second, name), percent / 100) for name in FIGURES
    ]
    if as_json:
        show.value(rows)
    else:
        tables.show_rows(rows, COLUMNS)
    if any(row["worse"] for row in rows):
        raise SystemExit(Failure.exit_code)


def _row(count: str, first: Blocks, second: Blocks, tolerated: float) -> dict[str, Any]:
    means = [sum(joules for joules, _ in each) / sum(n for _, n in each) for each in (first, second)]
    change = means[1] / means[0] - 1
    chance = p_value(*([joules / n for joules, n in each] for each in (first, second)))
    significant = chance < SIGNIFICANT
    return {
        "figure": FIGURES[count], "before_joules": means[0], "after_joules": means[1], "change": change,
        "p_value": chance, "significant": significant, "worse": significant and change > tolerated,
    }  # fmt: skip


def _of_blocks(path: Path, result: dict[str, Any], count: str) -> Blocks:
    """The blocks of a result that have both. Raises WrongUsage."""
    blocks = result["multigpu"]["blocks"]
    found = [(each["joules"], each[count]) for each in blocks if each["joules"] is not None and each[count]]
    if not any(each["joules"] is not None for each in blocks):
        raise WrongUsage(f"{path}: energy was not measured in this run")
    if len(found) < 2:
        raise WrongUsage(f"{path}: energy was measured in {len(found)} blocks; run it longer (--least)")
    return found


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """How often chance alone gives two samples whose means differ by as much: a permutation test, two-sided."""
    a, both = len(first), np.array([*first, *second])
    difference = abs(both[:a].mean() - both[a:].mean()) * (1 - 1e-9)
    orders = np.random.default_rng(0).permuted(np.tile(both, (PERMUTATIONS, 1)), axis=1)
    differences = abs(orders[:, :a].mean(axis=1) - orders[:, a:].mean(axis=1))
    return float((np.count_nonzero(differences >= difference) + 1) / (PERMUTATIONS + 1))


def _verdict(row: dict[str, Any]) -> str:
    if not row["significant"]:
        return "no significant difference"
    if row["change"] <= 0:
        return "less"
    return "more" if row["worse"] else "more, tolerated"


COLUMNS = (
    Column("FIGURE", lambda row: row["figure"]),
    Column("BEFORE", lambda row: format_energy(row["before_joules"]), right=True),
    Column("AFTER", lambda row: format_energy(row["after_joules"]), right=True),
    Column("CHANGE", lambda row: f"{row['change']:+.1%}", right=True),
    Column("P", lambda row: f"{row['p_value']:.4f}", right=True, rank=1),
    Column("VERDICT", _verdict),
)
