"""Chaos in its short form. `python -m tests.chaos --rounds 50` is the long one; CHAOS_SEED repeats a run."""

import os
import random
from pathlib import Path

import pytest

from tests.chaos.checker import check
from tests.chaos.rounds import Chaos

ROUNDS, TASKS, KILLS = 10, 300, (2, 4)


@pytest.mark.timeout(300)
def test_nothing_acknowledged_is_lost_while_everything_is_killed(tmp_path: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "0")) or random.randrange(1, 2**32)
    print(f"CHAOS_SEED={seed}")
    chaos = Chaos(tmp_path, seed, TASKS, KILLS)
    try:
        chaos.run(ROUNDS)
    finally:
        chaos.history.save(tmp_path / "history.jsonl")
    findings = check(chaos.history.records())
    print(findings.figures)
    assert not findings.broken, f"CHAOS_SEED={seed}"
    assert findings.figures["outcomes"] == ROUNDS * TASKS
    assert sum(figure for name, figure in findings.figures.items() if name.endswith(" kills")) >= 20
