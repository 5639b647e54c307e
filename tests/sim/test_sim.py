"""The simulator as a test: many seeds in short, and those that once found a bug."""

import os

import pytest

from tests.sim.sim import Simulation

SEEDS = int(os.environ.get("MGPU_SIM_SEEDS", "2000"))
CHUNKS = 20


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_seeds_keep_every_promise(chunk: int) -> None:
    for seed in range(chunk, SEEDS, CHUNKS):
        try:
            Simulation(seed).run()
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}; see: python -m tests.sim --seed {seed} --trace")


def test_a_seed_reproduces_a_run() -> None:
    first, second = Simulation(11, trace=True), Simulation(11, trace=True)
    assert first.run() == second.run()
    assert first.world.lines == second.world.lines
    assert len(first.world.lines) > 10


def test_the_faults_do_happen() -> None:
    """A simulator in which nothing goes wrong proves nothing."""
    seen: dict[str, int] = {}
    for seed in range(60):
        simulation = Simulation(seed)
        simulation.run()
        core = simulation.master.core
        assert core is not None
        seen["requeued"] = seen.get("requeued", 0) + core.counters.requeued
        seen["stale"] = seen.get("stale", 0) + core.counters.stale_reports
        seen["masters"] = seen.get("masters", 0) + simulation.master.epoch - 1
        for client in simulation.clients:
            for ask in client.asks.values():
                for _, _, outcome in ask.outcomes:
                    seen[outcome.state.name] = seen.get(outcome.state.name, 0) + 1
                seen["attached again"] = seen.get("attached again", 0) + (len(ask.outcomes) > 1)
    for what in ("requeued", "stale", "masters", "SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "DEAD_LETTERED"):
        assert seen.get(what, 0) > 3, seen
