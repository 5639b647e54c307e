"""Sick devices and a real master: who gets no work and why, what the breaker does, and what a restart remembers. The
workers are real, their GPUs are simulated.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2
from multigpu.cli import cli
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import device_pb2

from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet, until

# The driver wants peer-to-peer traffic to end: sick, and able to run. And a reset: sick, and not.
DRAIN_P2P, RESET = 3, 1
SICK = device_pb2.HEALTH_STATE_SICK
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    return SimulatedGpus(tmp_path / "gpus", 4)


@pytest.fixture
def fleet(tmp_path: Path, gpus: SimulatedGpus) -> Iterator[Fleet]:
    with Fleet(tmp_path / "fleet", workers=0, env=gpus.env()) as fleet:
        for i in range(4):
            fleet.start_worker(f"w{i}", "--device", f"cuda:{i}")
        fleet.wait_for_workers()
        until(lambda: all(w.health.state for w in fleet.list_workers()), what="their first heartbeats")
        yield fleet
        assert not fleet.faults()


def quarantined(fleet: Fleet) -> list[str]:
    return sorted(w.worker_id for w in fleet.list_workers() if w.quarantined)


@pytest.fixture
def mgpuctl(fleet: Fleet) -> Callable[..., str]:
    def run(*words: str) -> str:
        result = CliRunner().invoke(cli, ["--master", fleet.address, *words], catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    return run


@pytest.mark.slow
def test_a_sick_worker_gets_no_lease_is_shown_as_sick_and_returns_by_itself(
    fleet: Fleet, gpus: SimulatedGpus, mgpuctl: Callable[..., str]
) -> None:
    gpus.recovery_action(0, RESET)
    until(lambda: quarantined(fleet) == ["w0"], what="the quarantine")
    worker = fleet.worker("w0")
    assert (worker.health.state, worker.health.unusable, worker.cordoned) == (SICK, True, False)
    assert worker.health.HasField("since_time")
    assert [reason.code for reason in worker.health.reasons] == ["reset_required"]
    row = next(line for line in mgpuctl("workers").splitlines() if line.startswith("w0"))
    assert "quarantined" in row
    assert "sick: reset_required" in row
    until(lambda: fleet.check_health("worker/w0") == NOT_SERVING, what="the health service")
    ids = fleet.submit("sleep", *[b"0.1"] * 12)
    assert "w0" not in {fleet.outcome(i).worker_id for i in ids}
    (slow,) = fleet.submit("sleep", b"2")
    candidates = fleet.admin.Explain(admin_pb.ExplainRequest(task_id=slow), timeout=20).candidates
    (why,) = next(c for c in candidates if c.worker_id == "w0").excluded_by
    assert why.startswith("quarantined: the driver requires a GPU reset")
    # The operator's word stands, whatever health does.
    fleet.admin.CordonWorker(admin_pb.CordonWorkerRequest(worker_id="w0", reason="fan"), timeout=20)
    gpus.recovery_action(0, 0)
    until(lambda: not quarantined(fleet), what="its return")
    worker = fleet.worker("w0")
    assert (worker.cordoned, worker.cordon_reason) == (True, "fan")
    fleet.admin.UncordonWorker(admin_pb.UncordonWorkerRequest(worker_id="w0"), timeout=20)
    until(lambda: fleet.check_health("worker/w0") == SERVING, what="the health service")
    ids = fleet.submit("sleep", *[b"0.1"] * 24)
    assert "w0" in {fleet.outcome(i).worker_id for i in ids}


@pytest.mark.slow
def test_the_breaker_trips_outlives_the_master_and_is_reset_by_a_person(
    fleet: Fleet, gpus: SimulatedGpus, mgpuctl: Callable[..., str]
) -> None:
    assert "closed: 0 of at most 1" in mgpuctl("breaker", "show")
    gpus.recovery_action(0, DRAIN_P2P)
    until(lambda: quarantined(fleet) == ["w0"], what="the first quarantine")
    gpus.recovery_action(1, DRAIN_P2P)
    until(lambda: fleet.stats().breaker.tripped, what="the breaker")
    assert quarantined(fleet) == ["w0"], "it works on"
    assert fleet.worker("w1").health.state == SICK
    assert [e["level"] for e in fleet.master.events("circuit breaker tripped")] == ["error"]
    assert "CIRCUIT BREAKER TRIPPED" in mgpuctl("status")
    ids = fleet.submit("sleep", *[b"0.1"] * 24)
    assert {fleet.outcome(i).worker_id for i in ids} == {"w1", "w2", "w3"}

    fleet.restart_master()
    fleet.wait_for_workers()
    tripped = json.loads(mgpuctl("breaker", "show", "--json"))
    assert tripped["tripped"]
    assert quarantined(fleet) == ["w0"]
    gpus.recovery_action(2, RESET)
    until(lambda: quarantined(fleet) == ["w0", "w2"], what="the quarantine of what can't run anything")

    assert "closed: 1 of at most 1" in mgpuctl("breaker", "reset")
    assert quarantined(fleet) == ["w0", "w1", "w2"], "who is sick now is quarantined, and counts anew"
    for i in range(3):
        gpus.recovery_action(i, 0)
    until(lambda: not quarantined(fleet), what="their return")
    fleet.restart_master()
    fleet.wait_for_workers()
    assert not fleet.stats().breaker.tripped
