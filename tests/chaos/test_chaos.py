"""Chaos in its short form. `python -m tests.chaos --sweep --rounds 50` is the long one; CHAOS_SEED repeats a run."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.failpoints import FAILPOINTS
from tests.chaos.records.checker import check
from tests.chaos.records.report import Report, report
from tests.chaos.rounds import Chaos


def run(folder: Path, tasks: int, what: Callable[[Chaos], None]) -> Report:
    """Runs something on a fleet and checks its history."""
    seed = int(os.environ.get("CHAOS_SEED", "0")) or random.randrange(1, 2**32)
    print(f"CHAOS_SEED={seed}")
    chaos = Chaos(folder, seed, tasks=tasks, strikes=(2, 4))
    if chaos.no_network:
        print(f"without faults of the network: {chaos.no_network}")
    with chaos:
        what(chaos)
    records = chaos.records()
    result = report(records, check(records))
    print("\n".join(result.lines()))
    assert not result.broken, f"CHAOS_SEED={seed}"
    assert result.figures["outcomes"] == chaos.expected_outcomes
    return result


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_acknowledged_is_lost_while_everything_breaks(tmp_path: Path) -> None:
    result = run(tmp_path, 300, lambda chaos: chaos.random_rounds(3))
    assert sum(result.by_kind.values()) >= 6


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_lost_when_a_process_dies_at_any_failpoint(tmp_path: Path) -> None:
    result = run(tmp_path, 300, lambda chaos: chaos.sweep(FAILPOINTS))
    assert sum(n for kind, n in result.by_kind.items() if "at a failpoint" in kind) == len(FAILPOINTS)
