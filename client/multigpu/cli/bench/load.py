"""The load of `mgpuctl bench`: callers that have one task each under way, and samples of the devices meanwhile.

All callers share one client, as an application's would; a latency is the time from a caller's call to its result.
"""

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from multigpu import AsyncClient
from multigpu.cli.failures import Failure
from multigpu.cli.rpc import Master
from multigpu.v1 import admin_service_pb2 as admin

SAMPLE_INTERVAL_S = 0.25


@dataclass(slots=True, kw_only=True)
class Round:
    """The measurements of a round."""

    seconds: float = 0.0
    # Of each task, in seconds.
    latencies: list[float] = field(default_factory=list)
    # In the order of the payloads.
    results: list[bytes]
    # Joules and items of the tasks whose energy is known.
    joules: float = 0.0
    joules_items: int = 0


async def drive(
    client: AsyncClient,
    kind: str,
    payloads: Sequence[tuple[Any, int]],
    options: dict[str, Any],
    concurrency: int,
    on_done: Callable[[int], None],
) -> Round:
    """Runs `payloads`, each with its number of items, from `concurrency` callers. Raises MultigpuError if one fails."""
    done = Round(results=[b""] * len(payloads))
    todo = iter(enumerate(payloads))

    async def call() -> None:
        for index, (payload, items) in todo:
            began = time.perf_counter()
            outcome = await client.run_outcome(kind, payload, units=items, **options)
            done.latencies.append(time.perf_counter() - began)
            if not outcome.succeeded:
                raise outcome.to_error()
            done.results[index] = outcome.result
            if (energy := outcome.energy) is not None:
                done.joules += energy.joules
                done.joules_items += items
            on_done(items)

    began = time.perf_counter()
    callers = [asyncio.ensure_future(call()) for _ in range(min(concurrency, len(payloads)))]
    try:
        await asyncio.gather(*callers)
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    done.seconds = time.perf_counter() - began
    return done


class Meter:
    """Samples the devices of workers in a thread while it is entered. May be entered several times."""

    def __init__(self, address: str, worker_ids: frozenset[str]) -> None:
        self._address = address
        self._worker_ids = worker_ids
        self._busy: list[float] = []
        self._memory: list[int] = []
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
                    continue  # the master restarts; the tasks of the round wait for it too

    def _sample(self, workers: Sequence[admin.Worker]) -> None:
        ours = [worker for worker in workers if worker.worker_id in self._worker_ids]
        busy = [worker.telemetry.utilization for worker in ours if worker.telemetry.HasField("utilization")]
        if busy:
            self._busy.append(statistics.fmean(busy))
        # Workers may share a device, or on the CPU their host's memory: each counts once.
        memory = {
            (worker.host, worker.device.device_id): worker.telemetry.memory_used_bytes
            for worker in ours
            if worker.telemetry.HasField("memory_used_bytes")
        }
        if memory:
            self._memory.append(sum(memory.values()))
