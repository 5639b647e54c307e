"""An error of our own, planted in a real worker: it ends the worker, and no task and no engine is charged for it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from multigpu.v1 import worker_service_pb2 as pb
from multigpu_worker import supervision

from tests.worker.conftest import StartWorker
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


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        ("dispatcher", "Dispatcher.batch_done", "echo"),
        ("session.session", "Session.report", "echo"),
        ("processes.pool", "EnginePool.died", "sleep"),
        # In a background task.
        ("models.loader", "ModelLoader.tick", ""),
        ("health_monitor", "HealthMonitor._update_health", ""),
    ],
)
async def test_an_internal_error_ends_the_worker_and_charges_no_task(
    master: ScriptedMaster, start_worker: StartWorker, tmp_path: Path, module: str, name: str, kind: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED.format(module=module, name=name))
    worker = await start_worker(master.address, pythonpath=tmp_path)
    if kind:
        stream = await master.stream()
        stream.lease([(1, b"60")], kind=kind)
        if kind == "sleep":
            await stream.running(1)
            os.kill(worker.engine_pids()[0], signal.SIGKILL)
    assert await worker.wait() == 1
    assert "planted" in worker.log
    assert "makes no sense" not in worker.log, "it is not the engine's"
    assert not kind or pb.REPORT_STATE_FAILED not in {word.state for word in stream.reports.values()}


async def test_a_callback_that_failed_ends_the_worker_even_if_that_cannot_be_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class BrokenLog:
        def critical(self, *_: object, **__: object) -> None:
            raise OSError("no space left on device")

    def fail() -> None:
        raise LookupError("planted")

    monkeypatch.setattr(supervision, "log", BrokenLog())
    watched = supervision.Supervision()
    asyncio.get_running_loop().call_soon(fail)
    with pytest.raises(LookupError):
        await asyncio.wait_for(watched.watch(), 120)
