"""MPS from end to end: a real master and worker, a simulated GPU and control daemon. What an operator sees of it."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from multigpu.v1 import device_pb2, task_pb2

from tests.fakes.gpus import SimulatedGpus
from tests.fakes.mps_host import FAKE
from tests.fleet import Fleet, until


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="mps") as pipes:  # a socket's path is short
        gpus = SimulatedGpus(tmp_path / "gpus", n=1)
        env = {**gpus.env()}
        env["PATH"] = f"{FAKE}{os.pathsep}{env.get('PATH', os.environ['PATH'])}"
        flags = ("--device", "cuda:0", "--mps", "auto", "--mps-pipe-dir", pipes)
        with Fleet(
            tmp_path, workers=1, worker_flags=flags, handlers=["mps_handlers"], handlers_dir=FAKE, env=env
        ) as fleet:
            yield fleet
            fleet.workers["w0"].stop(30)  # the daemon ends with its last worker


@pytest.mark.slow
def test_operators_see_mps_and_a_fault_costs_its_task_an_attempt(fleet: Fleet) -> None:
    until(lambda: fleet.worker("w0").mps.state == device_pb2.MPS_STATE_RUNNING)
    assert fleet.worker("w0").mps.clients_max == 48
    fault, work = fleet.submit("m.fault", b"", attempts_max=1)[0], fleet.submit("m.work", b"0")[0]
    outcome = fleet.outcome(fault, wait_s=60)
    assert outcome.state == task_pb2.OUTCOME_STATE_DEAD_LETTERED
    assert "illegal memory access" in outcome.error.message
    assert fleet.outcome(work, wait_s=60).state == task_pb2.OUTCOME_STATE_SUCCEEDED
    until(lambda: fleet.worker("w0").mps.state == device_pb2.MPS_STATE_RUNNING and fleet.worker("w0").mps.clients)
