"""Real workers on simulated GPUs."""

from pathlib import Path

import pytest

from tests.fakes.gpus import SimulatedGpus
from tests.worker.conftest import HANDLERS, Start, WorkerProcess
from tests.worker.device.reports import HEALTHY, is_
from tests.worker.scripted_master import Stream

ON_GPU_0 = ("--device", "cuda:0", "--handlers", "handlers_for_health")
Begin = Start


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    return SimulatedGpus(tmp_path / "gpus", 8)


@pytest.fixture
async def begin(gpus: SimulatedGpus, start: Start) -> Begin:
    """Starts a worker on GPU 0, and waits until it reports a healthy device."""

    async def begin(*flags: str, **env: str) -> tuple[WorkerProcess, Stream]:
        worker, stream = await start(*ON_GPU_0, *flags, pythonpath=HANDLERS, env={**gpus.env(), **env})
        await stream.until(lambda: is_(stream, HEALTHY))
        return worker, stream

    return begin
