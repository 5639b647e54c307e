"""Models with two instances, by the real loader and pool; their processes are played."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from multigpu_worker.device.open import open_device
from multigpu_worker.device.sampler import Sampler
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.models.loader import ModelLoader
from multigpu_worker.models.residency import ModelState
from multigpu_worker.processes import pool as pools
from multigpu_worker.processes.death import Death
from multigpu_worker.processes.reports import ModelLoaded
from multigpu_worker.repository.model import ModelSpec, Scan
from multigpu_worker.session.lease import Lease, Spec


class Process:
    """An engine process as far as the pool and the loader use it."""

    def __init__(self, *_: object) -> None:
        self.model, self.pid, self.occupied = "", 0, 0
        self.ready = self.takes_no_batches = self.killed = False
        self.imports: tuple[str, ...] = ()
        self.batches: dict[int, Any] = {}
        self.embedding_cache = None

    def load(self, model: str, _spec: ModelSpec, _slots: int) -> None:
        self.model = model

    def kill(self) -> None:
        self.killed, self.ready = True, False

    def end(self, _grace_s: float) -> None:
        self.takes_no_batches = True
        self.kill()

    release_device = kill


class Stage:
    """A worker with one model of two instances, which are loaded, and one lease that waits for it."""

    def __init__(self, folder: Path) -> None:
        (folder / "m").mkdir()
        spec = ModelSpec(name="m", folder=folder / "m", kind="infer", engine="a:B", source="python", instances=2)
        self.pool = pools.EnginePool(SimpleNamespace(mps=None))  # type: ignore[arg-type]
        self.failed: list[str] = []
        self.pumps = 0
        self.leases = {1: Lease(1, 1, 1, Spec(kind="infer", model="m"), b"")}
        scan = Scan(models={"m": spec}, current={"m": "m"})
        settings = EngineSettings(device="cpu", slots=1, threads=1, artifacts=str(folder))
        self.loader = ModelLoader(
            self, self.pool, Sampler(open_device("cpu")), scan, settings,  # type: ignore[arg-type]
            limit_bytes=1 << 30, progress_timeout_s=0.0, eager=False,
        )  # fmt: skip
        self.pool.model_loader = self.loader
        self.loader.wanted(["m"])
        for process in self.processes:
            self.loaded(process)
        assert self.state is ModelState.READY
        self.pumps = 0

    # The dispatcher.

    @property
    def session(self) -> Any:
        return SimpleNamespace(leases=self.leases)

    def waiting(self) -> list[Lease]:
        return list(self.leases.values())

    def can_load(self) -> bool:
        return not self.pool.device_released

    def fail(self, leases: list[Lease], error: Any) -> None:
        self.failed.append(error.type)
        for lease in leases:
            del self.leases[lease.lease_id]

    def routes_changed(self) -> None:
        self.pumps += 1

    def want_heartbeat(self) -> None: ...

    def return_leases(self, *_: object) -> None: ...

    # The processes.

    @property
    def processes(self) -> list[Any]:
        return list(self.pool.models.get("m", ()))

    @property
    def state(self) -> ModelState:
        return self.loader.routes.residents["m"].state

    def loaded(self, process: Any) -> None:
        process.ready = True
        self.loader.model_loaded(process, ModelLoaded(facts={}, load_s=0.1, one_by_one=False, device_bytes=0))

    def die(self, process: Any, returncode: int = -6) -> None:
        process.ready = False
        self.pool.died(process)
        self.loader.process_died(process, Death(returncode=returncode, slots=[]))


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(pools, "ModelProcess", Process)
    monkeypatch.setattr(pools, "DefaultProcess", Process)
    return Stage(tmp_path)


def replaced(stage: Stage) -> Iterator[Any]:
    """Both instances die one after the other; their replacements."""
    for process in stage.processes:
        stage.die(process)
    yield from stage.processes


async def test_waiting_leases_are_dispatched_once_a_replacement_is_loaded(stage: Stage) -> None:
    """They waited for ever: nothing told the dispatcher."""
    first, _ = replaced(stage)
    stage.loaded(first)
    assert stage.pumps == 1


async def test_if_no_replacement_can_be_loaded_the_model_has_failed(stage: Stage) -> None:
    """It stayed READY without a process, and its leases waited for ever; unloaded, it stayed UNLOADING."""
    for process in replaced(stage):
        stage.loader.load_failed(process, "OSError", "no file", retryable=True)
        stage.die(process)
    assert (stage.state, stage.failed, stage.pool.models) == (ModelState.ABSENT, ["ModelLoadError"], {})


async def test_a_replacement_that_dies_while_it_is_loaded_is_not_replaced_again(stage: Stage) -> None:
    """It was started again and again, without a delay."""
    kept, other = stage.processes
    stage.die(other)
    (replacement,) = [process for process in stage.processes if process is not kept]
    stage.die(replacement)
    assert stage.processes == [kept]
    assert stage.state is ModelState.READY
    stage.die(kept)
    assert (stage.state, len(stage.processes)) == (ModelState.LOADING, 2), "a lease waits"


async def test_the_last_replacement_that_dies_while_it_is_loaded_counts_as_a_failed_load(stage: Stage) -> None:
    for process in replaced(stage):
        stage.die(process)
    assert (stage.state, stage.failed) == (ModelState.ABSENT, ["ModelLoadError"])


async def test_no_process_is_started_on_a_released_device(stage: Stage) -> None:
    """A new instance of the model opened the GPU that all processes had to close."""
    stage.leases.clear()
    stage.pool.release_device()
    for process in stage.processes:
        stage.die(process, -9)
    assert (stage.processes, stage.state) == ([], ModelState.ABSENT)


async def test_whether_tasks_run_one_by_one_is_a_property_of_the_model(stage: Stage) -> None:
    """It was one of the kind: a remote model switched off the limits of a local one of its kind."""
    process = stage.processes[0]
    assert stage.loader.one_by_one == set()
    stage.loader.model_loaded(process, ModelLoaded(facts={}, load_s=0.1, one_by_one=True, device_bytes=0))
    assert stage.loader.one_by_one == {"m"}
    stage.loaded(process)
    assert stage.loader.one_by_one == set()
