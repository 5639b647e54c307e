"""The master's log lines about workers: lost, stopped and joined, and their devices' quarantine."""

import contextlib
import re
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
    """The last of `count` lines with this event."""
    until(lambda: len(fleet.master.events(name)) == count, what=f"{name!r} in the master's log")
    return fleet.master.events(name)[-1]


def hold_leases(fleet: Fleet, count: int) -> None:
    fleet.submit("sleep", *[b"600"] * count)
    until(lambda: fleet.stats().leased == count, what="the leases")


@pytest.mark.parametrize(
    ("signum", "reason"), [(signal.SIGKILL, "its stream ended"), (signal.SIGSTOP, "nothing heard for .*")]
)
def test_a_lost_worker_is_logged_with_the_reason_and_its_leases(fleet: Fleet, signum: int, reason: str) -> None:
    hold_leases(fleet, 2)
    fleet.workers["w0"].signal(signum)
    entry = event(fleet, "worker lost")
    assert entry.items() >= {"level": "warning", "worker_id": "w0", "leases_requeued": 2}.items()
    assert re.fullmatch(reason, entry["reason"])


@pytest.mark.slow
def test_a_stop_of_worker_or_master_is_no_warning(fleet: Fleet) -> None:
    fleet.workers["w0"].stop()
    assert event(fleet, "worker stopped")["level"] == "info"
    fleet.start_worker("w0")
    fleet.wait_for_workers()
    hold_leases(fleet, 1)
    fleet.master.stop()
    assert not fleet.master.events("worker lost")


@pytest.mark.slow
def test_a_reconnected_worker_is_logged_with_its_held_leases(fleet: Fleet) -> None:
    """Not with every lease in its hello, which also lists leases reported to the last master."""

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


@contextlib.contextmanager
def on_gpus(folder: Path) -> Iterator[tuple[Fleet, SimulatedGpus]]:
    gpus = SimulatedGpus(folder / "gpus", 2)
    with Fleet(folder / "fleet", workers=0, env=gpus.env()) as fleet:
        for i in range(2):
            fleet.start_worker(f"w{i}", "--device", f"cuda:{i}")
        fleet.wait_for_workers()
        yield fleet, gpus


@pytest.mark.slow
def test_quarantine_and_return_are_logged(tmp_path: Path) -> None:
    with on_gpus(tmp_path) as (fleet, gpus):
        gpus.lose(0)
        entry = event(fleet, "device quarantined")
        assert entry.items() >= {"level": "warning", "worker_id": "w0"}.items()
        # The order depends on the driver.
        assert entry["reason"].startswith(("xid_79: ", "gpu_is_lost: "))
        # The worker must have seen the loss itself, not only its event: it notices a reset by the end of the loss.
        until(lambda: "gpu_is_lost" in {reason.code for reason in fleet.worker("w0").health.reasons})
        gpus.return_(0, reset=True)
        entry = event(fleet, "device back from quarantine")
        assert entry.items() >= {"level": "info", "worker_id": "w0"}.items()
        assert entry["reason"]


@pytest.mark.slow
def test_an_earlier_quarantine_is_logged_once_the_worker_reports_its_health(tmp_path: Path) -> None:
    with on_gpus(tmp_path) as (fleet, gpus):
        gpus.recovery_action(0, 3)
        assert event(fleet, "device quarantined")["reason"].startswith("drain_p2p: ")
        fleet.restart_master()
        entry = event(fleet, "device quarantined")
        assert entry.items() >= {"level": "warning", "worker_id": "w0"}.items()
        assert entry["reason"].startswith("drain_p2p: ")
        gpus.recovery_action(0, 0)
        assert event(fleet, "device back from quarantine")["worker_id"] == "w0"
