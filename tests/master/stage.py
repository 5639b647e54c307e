"""A driver with its core and a real journal, for tests."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from multigpu.v1 import task_pb2
from multigpu_master.clock import Clock
from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, Task
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.core.workers.info import Capability, WorkerInfo
from multigpu_master.driver import Driver
from multigpu_master.errors import JournalError
from multigpu_master.ids import first_id
from multigpu_master.journal.protocol import Entry
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.rpc.intake import Intake
from multigpu_master.rpc.task_service import TaskService
from multigpu_master.strategies.registry import load_strategies
from multigpu_master.wire import specs as wire_specs

STREAM_BYTES_MAX = 64 << 20


class Stage:
    """A driver with its core and a real journal, one worker and one Run stream."""

    def __init__(self, data_dir: Path) -> None:
        self.fatal: list[str] = []
        self.commits: list[Sequence[Entry]] = []
        self._loop = asyncio.get_running_loop()
        self.journal = SqliteJournal(data_dir, size_max_bytes=1 << 30)
        recovered = self.journal.open(self._on_commit)
        core = Core(load_strategies(), Limits(), first_id(recovered.epoch), lambda: 0.0)
        specs = wire_specs.SpecReader()
        assert not list(recovered.tasks)
        self.driver = Driver(
            core, self.journal, recovered, specs, Clock().now, STREAM_BYTES_MAX, self.fatal.append,
            lambda _change: None,
        )  # fmt: skip
        self.spec = specs.read(task_pb2.TaskSpec(kind="echo"))
        self.driver.workers.open(1, "p")
        self.driver.handle(ev.Hello(1, WorkerInfo(worker_id="w", capabilities=(Capability(kind="echo"),), slots=8)))
        self.stream, self.outbox = self.driver.open_stream()
        self.service = TaskService(self.driver, Intake(self.driver, 1 << 20), 1000, STREAM_BYTES_MAX, ())

    def _on_commit(self, entries: Sequence[Entry], first_cursor: int, error: JournalError | None) -> None:
        self.commits.append(entries)
        self._loop.call_soon_threadsafe(self.driver.write_buffer.handle_commit, entries, first_cursor, error)

    def submit(self, *names: str) -> list[Task]:
        tasks = [Task(self.spec, name, b"payload", submit_s=self.driver.now()) for name in names]
        self.driver.submit(self.spec, tasks, self.stream, lambda _error: None)
        return tasks

    async def durable(self) -> None:
        async with asyncio.timeout(120):
            await self.driver.write_buffer.flush_and_wait()


def leases_of(tasks: list[Task]) -> list[Lease]:
    return [task.lease for task in tasks if task.lease is not None]
