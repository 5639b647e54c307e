"""Real workers on simulated GPUs."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.fakes.gpus import SimulatedGpus
from tests.worker.conftest import StartWorker, WorkerProcess
from tests.worker.device.reports import HEALTHY, is_
from tests.worker.scripted_master import ScriptedMaster, Stream

HANDLERS = Path(__file__).parent.parent / "handlers"
Begin = Callable[..., Awaitable[tuple[WorkerProcess, Stream]]]


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    return SimulatedGpus(tmp_path / "gpus", 8)


@pytest.fixture
async def begin(gpus: SimulatedGpus, start_worker: StartWorker) -> Begin:
    """Starts a worker on GPU 0, and waits until it reports a healthy device."""

    async def begin(master: ScriptedMaster, *flags: str, **env: str) -> tuple[WorkerProcess, Stream]:
        handlers = ("--device", "cuda:0", "--handlers", "handlers_for_health")
        worker = await start_worker(master.address, *handlers, *flags, pythonpath=HANDLERS, env={**gpus.env(), **env})
        stream = await master.stream()
        await stream.until(lambda: is_(stream, HEALTHY))
        return worker, stream

    return begin
