"""A running fleet of the former release is upgraded in place: the master first, then worker by worker, under load.

The former release comes from the history of the repository.
"""

import io
import os
import signal
import sqlite3
import subprocess
import sys
import tarfile
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2
from multigpu_master.journal.sqlite.schema import DATABASE_NAME, SCHEMA_VERSION

from tests.fleet import Fleet, until

ROOT = Path(__file__).resolve().parents[3]
FORMER = "15b2a0d8"
HANDLERS = "tests/integration/handlers"
TASKS = 1500

# Runs on the SDK of the former release, over the whole upgrade.
CLIENT = f"""
import sys
import multigpu
with multigpu.Client(sys.argv[1]) as client:
    payloads = [b"%d" % n for n in range({TASKS})]
    results = list(client.map("trial.nap", payloads, parameters={{"seconds": "0.02"}}, max_in_flight=200))
    assert results == [payload[::-1] for payload in payloads], results
"""


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """A checkout of the former release."""
    parts = ["client", "master", "worker", HANDLERS]
    archived = subprocess.run(["git", "-C", ROOT, "archive", FORMER, *parts], capture_output=True, check=False)
    if archived.returncode:
        pytest.skip(f"the history of the repository is not here: {archived.stderr.decode()}")
    tree = tmp_path / "former"
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
        archive.extractall(tree, filter="data")
    return tree


def schema_version(fleet: Fleet) -> int:
    with closing(sqlite3.connect(fleet.data_dir / DATABASE_NAME)) as journal:
        ((version,),) = journal.execute("PRAGMA user_version").fetchall()
    return int(version)


@pytest.mark.slow
def test_a_fleet_of_the_former_release_is_upgraded_under_load(former: Path, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "fleet", workers=2, handlers=["trial_handlers"])
    own = dict(fleet._env)
    fleet.run_from(former)
    fleet._env["PYTHONPATH"] = os.pathsep.join([str(former / HANDLERS), fleet._env["PYTHONPATH"]])
    with fleet, ExitStack() as ended:
        fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="night"), timeout=30)
        waiting = fleet.submit("trial.nap", *(b"%d" % n for n in range(50)), queue="night")
        path = os.pathsep.join([str(former / "client"), own["PYTHONPATH"]])
        command = [sys.executable, "-c", CLIENT, fleet.address]
        client = ended.enter_context(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}))
        ended.callback(client.kill)
        until(lambda: fleet.stats().leased > 10, what="load")

        fleet._env = own
        fleet.restart_master()
        assert schema_version(fleet) == SCHEMA_VERSION
        until(lambda: fleet.stats().leased > 10, what="former workers at work for the new master")
        for name in ("w0", "w1"):
            fleet.workers[name].signal(signal.SIGTERM)
            assert fleet.workers[name].process.wait(120) == 0
            fleet.start_worker(name)
            fleet.wait_for_workers(name)

        assert client.wait(120) == 0
        fleet.admin.ResumeQueue(admin_pb.ResumeQueueRequest(queue="night"), timeout=30)
        for n, task_id in enumerate(waiting):
            outcome = fleet.outcome(task_id)
            assert (outcome.state, outcome.result) == (task_pb2.OUTCOME_STATE_SUCCEEDED, (b"%d" % n)[::-1])
        assert fleet.stats().queued + fleet.stats().leased == 0
        assert not fleet.faults()
