"""What the master's log says of its workers: who was lost, why and with how many leases, and whose device fell sick."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from multigpu.v1 import task_service_pb2

from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet, until


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, workers=1) as fleet:
        yield fleet


def event(fleet: Fleet, name: str, count: int = 1) -> dict[str, Any]:
    """The last of `count` such lines of the master's log."""
    until(lambda: len(fleet.master.events(name)) == count, what=f"{name!r} in the master's log")
    return fleet.master.events(name)[-1]


def hold_leases(fleet: Fleet, count: int) -> None:
    fleet.submit("sleep", *[b"60"] * count)
    until(lambda: fleet.stats().leased == count, what="the leases")


def test_a_worker_that_was_killed_is_a_warning_with_its_leases(fleet: Fleet) -> None:
    hold_leases(fleet, 2)
    fleet.workers["w0"].kill()
    told = event(fleet, "worker lost")
    assert told.items() >= {"level": "warning", "worker_id": "w0", "leases_requeued": 2}.items()
    assert told["reason"] == "its stream ended"


def test_a_silent_worker_is_a_warning_with_the_reason(fleet: Fleet) -> None:
    hold_leases(fleet, 1)
    fleet.workers["w0"].signal(signal.SIGSTOP)
    told = event(fleet, "worker lost")
    assert told.items() >= {"level": "warning", "worker_id": "w0", "leases_requeued": 1}.items()
    assert "nothing heard for" in told["reason"]


def test_a_worker_that_stops_and_a_master_that_stops_are_no_warning(fleet: Fleet) -> None:
    fleet.workers["w0"].stop()
    assert event(fleet, "worker stopped")["level"] == "info"
    fleet.start_worker("w0")
    fleet.wait_for_workers()
    hold_leases(fleet, 1)
    fleet.master.stop()
    assert not fleet.master.events("worker lost")


def test_who_joins_again_is_said_to_hold_what_it_holds(fleet: Fleet) -> None:
    """It was what its hello lists: also each lease that it had reported to the last master."""

    def recorded() -> int:
        return int(fleet.tasks.Count(task_service_pb2.CountRequest(), timeout=20).succeeded)

    before = recorded()
    with fleet.client() as client:
        assert len(list(client.map("echo", [b"x"] * 300))) == 300
    until(lambda: recorded() == before + 300)  # else the new master takes leases back
    fleet.restart_master()
    assert event(fleet, "worker joined")["leases"] == 0
    hold_leases(fleet, 1)
    fleet.restart_master()
    assert event(fleet, "worker joined")["leases"] == 1


def test_a_device_that_is_quarantined_and_comes_back_is_in_the_log(tmp_path: Path) -> None:
    gpus = SimulatedGpus(tmp_path / "gpus", 2)
    with Fleet(tmp_path / "fleet", workers=0, env=gpus.env()) as fleet:
        for i in range(2):
            fleet.start_worker(f"w{i}", "--device", f"cuda:{i}")
        fleet.wait_for_workers()
        gpus.lose(0)
        told = event(fleet, "device quarantined")
        assert told.items() >= {"level": "warning", "worker_id": "w0"}.items()
        # Whichever the driver tells first.
        assert told["reason"].startswith(("xid_79: ", "gpu_is_lost: "))
        gpus.return_(0, reset=True)
        told = event(fleet, "device back from quarantine")
        assert told.items() >= {"level": "info", "worker_id": "w0"}.items()
        assert told["reason"]


def test_a_new_master_waits_for_the_workers_word_on_a_device_that_was_quarantined_before_it(tmp_path: Path) -> None:
    gpus = SimulatedGpus(tmp_path / "gpus", 2)
    with Fleet(tmp_path / "fleet", workers=0, env=gpus.env()) as fleet:
        for i in range(2):
            fleet.start_worker(f"w{i}", "--device", f"cuda:{i}")
        fleet.wait_for_workers()
        gpus.recovery_action(0, 3)
        assert event(fleet, "device quarantined")["reason"].startswith("drain_p2p: ")
        fleet.restart_master()
        told = event(fleet, "device quarantined")
        assert told.items() >= {"level": "warning", "worker_id": "w0"}.items()
        assert told["reason"].startswith("drain_p2p: ")
        gpus.recovery_action(0, 0)
        assert event(fleet, "device back from quarantine")["worker_id"] == "w0"
