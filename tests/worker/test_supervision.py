"""An error of our own, planted in a real worker: it ends the worker, and no task and no engine is charged for it."""

import os
import signal
from pathlib import Path

import pytest
from multigpu.v1 import worker_service_pb2 as pb

from tests.worker.conftest import Start, StartWorker
from tests.worker.scripted_master import ScriptedMaster

# In the agent alone: its engines have the same environment.
PLANTED = """
import sys

if "multigpu_worker.main" in sys.orig_argv:
    import multigpu_worker.{module} as module

    def broken(*args, **kwargs):
        raise LookupError("planted")

    module.{name} = broken
"""


@pytest.fixture
def plant(tmp_path: Path) -> Path:
    folder = tmp_path / "planted"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("dispatcher", "Dispatcher.batch_done"),
        ("session.session", "Session.report"),
        ("processes.pool", "EnginePool.died"),
    ],
)
async def test_an_internal_error_in_a_callback_ends_the_worker_and_charges_no_task(
    start: Start, plant: Path, module: str, name: str
) -> None:
    plant.joinpath("sitecustomize.py").write_text(PLANTED.format(module=module, name=name))
    worker, stream = await start(pythonpath=plant)
    if name == "EnginePool.died":
        stream.lease([(1, b"60")], kind="sleep")
        await stream.until(lambda: any(held.running for beat in stream.heartbeats for held in beat.leases))
        os.kill(worker.engine_pids()[0], signal.SIGKILL)
    else:
        stream.lease([(1, b"x")], kind="echo")
    assert await worker.wait() == 1
    assert "planted" in worker.log
    assert "makes no sense" not in worker.log, "it is not the engine's"
    assert pb.REPORT_STATE_FAILED not in {word.state for word in stream.reports.values()}


@pytest.mark.parametrize(
    ("module", "name"), [("models.loader", "ModelLoader.tick"), ("device.health_monitor", "HealthMonitor._look")]
)
async def test_an_error_in_a_background_task_ends_the_worker(
    master: ScriptedMaster, start_worker: StartWorker, plant: Path, module: str, name: str
) -> None:
    plant.joinpath("sitecustomize.py").write_text(PLANTED.format(module=module, name=name))
    worker = await start_worker(master.address, pythonpath=plant)
    assert await worker.wait() == 1
    assert "planted" in worker.log
