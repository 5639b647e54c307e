"""A model in use is measured again, here with a real process that grows."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from multigpu_worker.device.open import open_device
from multigpu_worker.device.sampler import Sampler
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.models import loader
from multigpu_worker.models.loader import ModelLoader
from multigpu_worker.models.measured_sizes import FOLDER
from multigpu_worker.models.residency import ModelState
from multigpu_worker.repository.model import ModelSpec, Scan

MIB = 1 << 20
GROWING = """
import sys
held = []
for line in sys.stdin:
    held.append(b"x" * int(line))
    print("done", flush=True)
"""


Grower = subprocess.Popen[str]


@pytest.fixture
def grower() -> Iterator[Grower]:
    """A process that allocates memory on command."""
    command = [sys.executable, "-c", GROWING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def grow(process: Grower, size_bytes: int) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{size_bytes}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


async def test_a_model_in_use_is_remeasured(tmp_path: Path, grower: Grower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_LOAD_CHECK_S", 0.0)
    monkeypatch.setattr(loader, "MEASURE_S", 0.0)
    (tmp_path / "m").mkdir()
    spec = ModelSpec(name="m", folder=tmp_path / "m", kind="infer", engine="a:B", source="python")
    agent: Any = SimpleNamespace(session=SimpleNamespace(leases={}), waiting=list, can_load=lambda: True)
    agent.want_heartbeat = agent.routes_changed = lambda: None
    process: Any = SimpleNamespace(model="m", pid=grower.pid, batches={}, takes_no_batches=False)
    pool: Any = SimpleNamespace(models={"m": [process]}, keep_spare=lambda _: None)
    model_loader = ModelLoader(
        agent,
        pool,
        Sampler(open_device("cpu")),
        Scan(models={"m": spec}, current={"m": "m"}),
        EngineSettings(device="cpu", slots=1, threads=1, artifacts=str(tmp_path)),
        limit_bytes=1 << 30,
        progress_timeout_s=0.0,
        eager=False,
    )
    resident = model_loader.routes.residents["m"]
    estimate_bytes = resident.memory_bytes
    resident.enter(ModelState.READY, 0.0)

    async def use() -> int:
        model_loader.used("m")
        model_loader.tick()
        await asyncio.gather(*model_loader._sizes._tasks)
        return resident.memory_bytes

    grow(grower, 40 * MIB)
    first_bytes = await use()
    assert first_bytes > max(40 * MIB, estimate_bytes)
    assert await use() == first_bytes, "it has not grown"
    grow(grower, 30 * MIB)
    model_loader.tick()
    assert not model_loader._sizes._tasks, "it was not used"
    grown_bytes = await use()
    assert first_bytes + 25 * MIB < grown_bytes < first_bytes + 40 * MIB
    assert str(grown_bytes) in next((tmp_path / FOLDER).iterdir()).read_text(), "it is kept for the next process"
