"""One command starts a fleet on eight simulated GPUs, which survives the loss of a GPU under load.

The environment is that of tests/deploy/deployment.py: the Python and the multigpu of the test run.
"""

import os
from pathlib import Path

import pytest
from multigpu.v1 import task_pb2

from tests.deploy.deployment import checkout, deployed
from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet, until
from tests.gpu_host.host import HEALTHY, PYTHON_PATH

__all__ = ["checkout"]  # a fixture


@pytest.mark.slow
def test_one_command_and_eight_gpus_work(checkout: Path, tmp_path: Path) -> None:
    gpus = SimulatedGpus(tmp_path / "gpus", n=8)
    env = {**gpus.env(), "PYTHONPATH": os.pathsep.join([PYTHON_PATH, os.environ.get("PYTHONPATH", "")])}
    up = ("--handlers", "gpu_handlers", "--listen", "127.0.0.1:0")
    try:
        output = deployed(checkout, "--local", "--keep", "--", *up, **env)
        assert "8 found (Simulated H200" in output
        fleet = Fleet(tmp_path / "fleet", workers=0)  # only its stubs
        fleet.address = (checkout / ".local/fleet/ready").read_text().split()[2].rstrip(",")
        workers = {w.device.device_id: w for w in fleet.list_workers()}
        assert set(workers) == set(gpus.uuids)
        assert all(w.device.simulated and w.health.state == HEALTHY for w in workers.values())

        task_ids = fleet.submit("gpu.work", *[b""] * 80, parameters={"seconds": "0.15"}, attempts_max=1)
        until(lambda: all(w.leases for w in fleet.list_workers()), 20, "a task for each GPU")
        gpus.lose(3)
        outcomes = [fleet.outcome(task_id, 60) for task_id in task_ids]
        assert all((o.state, o.attempts) == (task_pb2.OUTCOME_STATE_SUCCEEDED, 1) for o in outcomes)
        assert {o.device_id for o in outcomes} >= set(gpus.uuids) - {gpus.uuid(3)}
        assert [w.device.device_id for w in fleet.list_workers() if w.quarantined] == [gpus.uuid(3)]

        gpus.return_(3, reset=True)
        until(lambda: not any(w.quarantined for w in fleet.list_workers()), 60, "its return")
    finally:
        deployed(checkout, "--local", "--stop", **env)
        if (log := checkout / ".local/fleet/up.log").exists():
            print(log.read_text("utf-8", "replace")[-8000:])
