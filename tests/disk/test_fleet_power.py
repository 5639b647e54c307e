"""A few power cuts under a real master. `python -m tests.disk` makes many; DISK_SEED repeats a run."""

import os
import random
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.disk.fleet_trial import EXIT_FAILED, FleetTrial, LayeredFleet
from tests.disk.layer import FaultInjector, missing_requirement
from tests.fleet import until

pytestmark = pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement())
CUTS = 3


@pytest.mark.slow
@pytest.mark.parametrize("file", ["-wal", "/segments"])
def test_a_master_whose_disk_fails_says_so_and_ends(tmp_path: Path, file: str) -> None:
    (tmp_path / "root").mkdir()
    fleet = LayeredFleet(tmp_path / "fleet", workers=0, data_dir=tmp_path / "root" / "data")
    with FaultInjector(tmp_path / "root", tmp_path / "log") as fleet.layer, fleet:
        (first,) = fleet.submit("echo", b"before", wait_for_worker=True)
        fleet.layer.schedule(match=file, eio_sync_in=1)
        request: dict[str, Any] = {"wait_for_worker": True, "request_ids": ["x"]}
        with pytest.raises(grpc.RpcError):
            fleet.submit_raw("echo", bytes(200_000), **request)
        until(lambda: not fleet.master.alive)
        words = fleet.master.log()
        assert fleet.master.process.returncode == EXIT_FAILED
        assert "Look at the disk (dmesg, df)" in words
        assert "starting the master again recovers it" in words
        assert "multigpu_master/" not in words  # gRPC logs the streams that it cancels
        fleet.layer.heal()
        fleet.start_master()
        assert fleet.get(first).task_id == first
        fleet.submit("echo", bytes(200_000), **request)


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_with_the_power_of_a_fleet(tmp_path: Path) -> None:
    seed = int(os.environ.get("DISK_SEED", "0")) or random.randrange(1, 2**32)
    print(f"DISK_SEED={seed}")
    figures = FleetTrial(tmp_path, seed).run(CUTS)
    assert not figures.lost, f"DISK_SEED={seed}"
    assert figures.cuts == CUTS
    assert figures.acknowledged > 50
