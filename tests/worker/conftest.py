"""Real worker processes for the tests of this folder, and a scripted peer for them to talk to."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import BUSY_FACTOR
from tests.worker.scripted_master import ScriptedMaster, Stream
from tests.worker.toy_models import Shop


class WorkerProcess:
    """A real mgpu-worker, started by the test and ended by its pid."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.process = process
        self.log_path = log_path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def engine_pids(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    async def wait(self, timeout_s: float = 60.0) -> int:
        """If it does not end in time, its log gets its stacks and those of its engines."""
        try:
            async with asyncio.timeout(timeout_s * BUSY_FACTOR):
                return await self.process.wait()
        except TimeoutError:
            for pid in (*self.engine_pids(), self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
                await asyncio.sleep(1)  # it writes, or passes on what its engine has written
            raise

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)


StartWorker = Callable[..., Awaitable[WorkerProcess]]
# Starts a worker of `master`, and returns it with its first session.
Start = Callable[..., Awaitable[tuple[WorkerProcess, Stream]]]
HANDLERS = Path(__file__).parent / "handlers"


@pytest.fixture(scope="session")
def shared_artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of artifacts that tests share: what takes seconds to export is exported once in a run."""
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture
async def master() -> AsyncIterator[ScriptedMaster]:
    async with ScriptedMaster() as master:
        yield master


@pytest.fixture
async def start_worker(tmp_path: Path) -> AsyncIterator[StartWorker]:
    started: list[WorkerProcess] = []

    async def start(
        address: str, *flags: str, pythonpath: Path | None = None, env: Mapping[str, str] | None = None
    ) -> WorkerProcess:
        log_path = tmp_path / f"worker-{len(started)}.log"
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1", **(env or {})}
        if pythonpath is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(pythonpath), os.environ.get("PYTHONPATH")]))
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "multigpu_worker.main", "--master", address, "--device", "cpu"),
                *("--worker-id", f"w{len(started)}", *flags),
                stdout=log,
                stderr=log,
                env=environment,
            )
        worker = WorkerProcess(process, log_path)
        started.append(worker)
        return worker

    yield start
    for worker in started:
        if worker.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGKILL)
            await worker.process.wait()
        print(f"--- log of worker {worker.pid}\n{worker.log}")


@pytest.fixture
def start(master: ScriptedMaster, start_worker: StartWorker) -> Start:
    async def start_and_welcome(*flags: str, **more: Any) -> tuple[WorkerProcess, Stream]:
        return await start_worker(master.address, *flags, **more), await master.stream()

    return start_and_welcome


@pytest.fixture
def start_handlers(start: Start) -> Start:
    """As `start`, with the handlers of `handlers/handlers_for_tests.py`."""
    return partial(start, "--handlers", "handlers_for_tests", pythonpath=HANDLERS)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "models")


@pytest.fixture
async def stream(start_handlers: Start) -> Stream:
    """The session of a worker with the handlers of `handlers/handlers_for_tests.py`."""
    return (await start_handlers())[1]
