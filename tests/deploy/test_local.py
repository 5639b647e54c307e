"""The deploy script's local fleet."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import multigpu
import pytest

from tests.deploy.deployment import deploy, deployed
from tests.fakes.gpus import SimulatedGpus
from tests.fleet import until


@pytest.mark.slow
def test_a_local_fleet_is_upgraded_under_load(checkout: Path) -> None:
    """Clients submit while master and workers are replaced: every task has exactly one outcome."""
    try:
        deployed(checkout, "--local", "--keep", "--workers", "2", "--", "--listen", "127.0.0.1:0", "--device", "cpu")
        again = deployed(checkout, "--local", "--keep")
        assert "runs already" in again
        address = (checkout / ".local/fleet/ready").read_text().split()[2].rstrip(",")
        workers = pids_of(address)
        assert len(workers) == 2
        results: list[bytes] = []
        stop = threading.Event()

        def load() -> None:
            with multigpu.Client(address) as client:
                while not stop.is_set():
                    results.extend(client.map("echo", [f"{len(results) + k}".encode() for k in range(50)]))

        with ThreadPoolExecutor() as pool:
            loading = pool.submit(load)
            try:
                until(lambda: len(results) > 100)
                (checkout / "client/changed.py").write_text("# another version\n")
                upgraded = deployed(checkout, "--local", "--upgrade")
                at_the_end = len(results)
                until(lambda: len(results) > at_the_end + 100)
            finally:
                stop.set()
            loading.result(60)
        assert "stand-in for pip: install" in upgraded
        assert "2 workers replaced" in upgraded
        assert results == [f"{number}".encode() for number in range(len(results))]
        replaced = pids_of(address)
        assert replaced.keys() == workers.keys()
        assert not set(replaced.values()) & set(workers.values())
        assert "2 active" in deployed(checkout, "--local", "--status")
    finally:
        deployed(checkout, "--local", "--stop")
    assert deploy(checkout, "--local", "--status").returncode == 3
    deployed(checkout, "--local", "--uninstall", "--yes")
    assert not (checkout / ".venv").exists()
    assert not (checkout / ".local").exists()


def pids_of(address: str) -> dict[str, int]:
    """Active workers by name."""
    command = [sys.executable, "-m", "multigpu.cli", "--master", address, "workers", "--json"]
    workers = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout)
    return {worker["worker_id"]: worker["pid"] for worker in workers if worker["state"] == "ACTIVE"}


def test_a_local_fleet_has_a_worker_for_each_gpu(checkout: Path, gpus: SimulatedGpus) -> None:
    """On two of the simulated GPUs; tests/gpu_host uses all eight."""
    try:
        deployed(
            checkout, "--local", "--keep", "--", "--listen", "127.0.0.1:0", **gpus.env(), MULTI_GPU_DEVICE_IDS="1,6"
        )
        address = (checkout / ".local/fleet/ready").read_text().split()[2].rstrip(",")
        assert sorted(name.partition("-")[2] for name in pids_of(address)) == sorted([gpus.uuids[1], gpus.uuids[6]])
    finally:
        deployed(checkout, "--local", "--stop")
