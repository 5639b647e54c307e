"""The energy of tasks on a simulated device is in their outcomes."""

import itertools
import os
from pathlib import Path
from typing import Any

import multigpu
import pytest

from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet, until


def span(outcome: Any) -> tuple[float, float]:
    """When it ran, in seconds since 1970: longer than requested on a busy host."""
    stages = outcome.stages
    return stages.start_time.ToNanoseconds() / 1e9, stages.finish_time.ToNanoseconds() / 1e9


def shared_joules(outcome: Any, outcomes: list[Any], watts: float) -> float:
    """Its equal share of a constant power while it ran, from the spans of all tasks."""
    spans = [span(o) for o in outcomes]
    edges = sorted({t for s in spans for t in s})
    start_s, finish_s = span(outcome)
    return sum(
        (b - a) * watts / sum(s <= a and b <= f for s, f in spans)
        for a, b in itertools.pairwise(edges)
        if start_s <= a and b <= finish_s
    )


@pytest.mark.slow
def test_energy_of_tasks(gpus: SimulatedGpus, tmp_path: Path) -> None:
    gpus.no_process(0, os.getpid())
    gpus.power(0, 300.0)
    with Fleet(tmp_path, workers=0, env=gpus.env(), handlers=["trial_handlers"]) as fleet:
        fleet.start_worker("gpu", "--device", "cuda:0", "--slots", "2")
        fleet.wait_for_workers()
        with fleet.client() as client:
            outcomes = list(client.map_outcomes("sleep", [b"0.6"] * 8))
        measured = [outcome for outcome in outcomes if outcome.energy is not None]
        assert len(measured) >= 4, outcomes  # the counter may not have started for the first ones
        for outcome in measured:
            assert outcome.energy is not None and outcome.energy.method is multigpu.EnergyMethod.COUNTER
            assert 0.05 < outcome.energy.uncertainty < 1.0
        # Two ran at the same time: each has half of the energy.
        took = sum(outcome.energy.joules for outcome in measured if outcome.energy is not None)
        messages = [outcome.message for outcome in outcomes]
        wanted = sum(shared_joules(outcome.message, messages, 300.0) for outcome in measured)
        assert took == pytest.approx(wanted, rel=0.35)
        # The sums are those of the outcomes.
        with multigpu.AdminClient(fleet.address) as admin:
            (summed,) = admin.usage(["kind"]).usage
        assert summed.energy_joules == pytest.approx(took, rel=1e-3)
        assert summed.energy_uncertainty_joules == pytest.approx(
            sum(each.energy.joules * each.energy.uncertainty for each in measured if each.energy is not None), rel=1e-3
        )
        assert 0 < (summed.measured_duration_s or 0.0) <= (summed.device_duration_s or 0.0) + 1e-6
        # A task with partial outputs has the energy of its whole time.
        streamed = fleet.outcome(fleet.submit("trial.stream", b"x", parameters={"count": "10", "seconds": "0.15"})[0])
        took_s = span(streamed)[1] - streamed.stages.dispatch_time.ToNanoseconds() / 1e9
        assert took_s >= 10 * 0.15
        assert streamed.energy.joules == pytest.approx(took_s * 300.0, rel=0.3)
        # It is kept with the outcome.
        kept = next(outcome for outcome in outcomes if outcome.energy is not None)
        fleet.restart_master()
        assert fleet.outcome(kept.task_id).energy == kept.message.energy


@pytest.mark.slow
def test_power_is_sampled_without_an_energy_counter(gpus: SimulatedGpus, tmp_path: Path) -> None:
    gpus.power(0, 200.0)
    gpus.fail("nvmlDeviceGetTotalEnergyConsumption", 0)
    try:
        with Fleet(tmp_path, workers=0, env=gpus.env()) as fleet:
            fleet.start_worker("gpu", "--device", "cuda:0")
            fleet.start_worker("cpu")
            fleet.wait_for_workers()
            (task_id,) = fleet.submit("sleep", b"2.5")
            outcome = fleet.outcome(task_id)
            if outcome.worker_id == "cpu":
                fleet.workers["cpu"].stop()
                assert not outcome.HasField("energy")
                outcome = fleet.outcome(fleet.submit("sleep", b"2.5")[0])
            assert outcome.energy.method == multigpu.EnergyMethod.SAMPLED_POWER
            start_s, finish_s = span(outcome)
            assert outcome.energy.joules == pytest.approx((finish_s - start_s) * 200.0, rel=0.2)
    finally:
        gpus.mend()


@pytest.mark.slow
def test_idle_processes_do_not_share_energy(gpus: SimulatedGpus, tmp_path: Path) -> None:
    gpus.power(0, 300.0)
    with Fleet(tmp_path, workers=0, env=gpus.env(), handlers=["trial_handlers"]) as fleet:
        fleet.start_worker("gpu", "--device", "cuda:0")
        fleet.wait_for_workers()
        (engine,) = fleet.workers["gpu"].children()

        def measured(*utilizations: int) -> tuple[float, float]:
            """Reported energy as a share of power times time, and the largest uncertainty."""
            for pid, percent in zip((engine, os.getpid()), utilizations, strict=True):
                gpus.process(0, pid, 1 << 30, mps=True, sm_utilization=percent)
            beat_ns = fleet.worker("gpu").last_heartbeat_time.ToNanoseconds()
            until(lambda: fleet.worker("gpu").last_heartbeat_time.ToNanoseconds() > beat_ns + 2e9, what="samples")
            with fleet.client() as client:
                outcomes = list(client.map_outcomes("sleep", [b"0.6"] * 6))
            with_energy = [(o.energy, span(o.message)) for o in outcomes if o.energy is not None]
            assert len(with_energy) >= 3, outcomes
            took = sum(energy.joules for energy, _ in with_energy)
            drawn = sum((end - begin) * 300.0 for _, (begin, end) in with_energy)
            return took / drawn, max(energy.uncertainty for energy, _ in with_energy)

        share, uncertainty = measured(90, 0)
        assert share == pytest.approx(1.0, rel=0.2)
        assert uncertainty < 1.0
        share, uncertainty = measured(60, 30)
        assert share == pytest.approx(0.5, rel=0.2)
        assert uncertainty > 1.0
        # Without utilization of clients, each of them may have worked.
        share, _ = measured(0, 0)
        assert share == pytest.approx(0.5, rel=0.2)
