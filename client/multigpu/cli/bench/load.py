"""The load of `mgpuctl bench`: so many callers, each with one task under way, as an application's threads would have.

All share one client, as they would in one process; a latency is from a caller's call to its result. What the devices do
meanwhile is asked of the master, which has it from the workers' heartbeats.
"""

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from multigpu import AsyncClient
from multigpu.cli.failures import Failure
from multigpu.cli.rpc import Master
from multigpu.v1 import admin_service_pb2 as admin

SAMPLE_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The tasks of one round."""

    kind: str
    # Payload, bytes or a JSON value, and items in it.
    payloads: Sequence[tuple[Any, int]]
    # TaskOptions.
    options: dict[str, Any]

    @property
    def items(self) -> int:
        return sum(items for _, items in self.payloads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What came of it."""

    seconds: float
    # Of each task, in the order of the payloads, in seconds.
    latencies: list[float]
    results: list[bytes]
    # Joules and items of those tasks whose energy was told.
    energy: tuple[float, int]


async def drive(client: AsyncClient, work: Work, concurrency: int, on_done: Callable[[int], None]) -> Round:
    """Run all tasks with so many callers. Raises MultigpuError for a task that doesn't succeed."""
    count = len(work.payloads)
    latencies, results = [0.0] * count, [b""] * count
    joules, measured = 0.0, 0
    todo = iter(enumerate(work.payloads))

    async def call() -> None:
        nonlocal joules, measured
        for index, (payload, items) in todo:
            began = time.perf_counter()
            outcome = await client.run_outcome(work.kind, payload, units=items, **work.options)
            latencies[index] = time.perf_counter() - began
            if not outcome.succeeded:
                raise outcome.to_error()
            results[index] = outcome.result
            if (energy := outcome.energy) is not None:
                joules += energy.joules
                measured += items
            on_done(items)

    began = time.perf_counter()
    callers = [asyncio.ensure_future(call()) for _ in range(min(concurrency, count))]
    try:
        await asyncio.gather(*callers)
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    return Round(seconds=time.perf_counter() - began, latencies=latencies, results=results, energy=(joules, measured))


class Meter:
    """Samples the devices of workers, in a thread of its own, for the time of a `with`; several add up."""

    def __init__(self, address: str, worker_ids: frozenset[str]) -> None:
        self._address = address
        self._worker_ids = worker_ids
        self._busy: list[float] = []
        self._memory: list[int] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._thread is not None
        self._stopped.set()
        self._thread.join()

    @property
    def utilization(self) -> float | None:
        return statistics.fmean(self._busy) if self._busy else None

    @property
    def memory_bytes(self) -> int | None:
        return max(self._memory, default=None)

    def _run(self) -> None:
        with Master(self._address) as master:
            while not self._stopped.wait(SAMPLE_INTERVAL_S):
                try:
                    self._sample(master.list_workers())
                except Failure:
                    continue  # a master that is away tells nothing; the tasks of the round wait for it too

    def _sample(self, workers: Sequence[admin.Worker]) -> None:
        ours = [worker for worker in workers if worker.worker_id in self._worker_ids]
        busy = [worker.telemetry.utilization for worker in ours if worker.telemetry.HasField("utilization")]
        if busy:
            self._busy.append(statistics.fmean(busy))
        # Workers may share a device, and those on the CPU share the host's memory: each counts once.
        memory = {
            (worker.host, worker.device.device_id): worker.telemetry.memory_used_bytes
            for worker in ours
            if worker.telemetry.HasField("memory_used_bytes")
        }
        if memory:
            self._memory.append(sum(memory.values()))
