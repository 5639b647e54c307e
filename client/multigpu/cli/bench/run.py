"""The measurement of `mgpuctl bench`.

A few examples go through the fleet and the baseline first: that loads the model. Then, for each batch size and number
of callers, the fleet and the baseline run the same examples in alternating order, round by round. A row has the numbers
of all rounds together; its ratio is the median of the rounds' ratios.
"""

import asyncio
import contextlib
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from multigpu import AsyncClient
from multigpu.cli import show
from multigpu.cli.bench.baseline import Baseline
from multigpu.cli.bench.source import Source
from multigpu.cli.failures import Failure
from multigpu.cli.options import client_config
from multigpu.cli.text import plural
from multigpu.fleet import Worker

# Tasks of each caller before a row's rounds, and at least in each round.
TASKS_MIN = 2
# Examples that load a model.
FIRST_EXAMPLES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The results of a batch size with a number of callers."""

    model: str
    batch_size: int
    concurrency: int
    tasks: int
    items: int
    items_per_s: float
    # Of the baseline; None: there is none.
    plain_items_per_s: float | None
    # The median over the rounds of items/s divided by the baseline's in the same round.
    ratio: float | None
    # Of tasks, from the call to its result.
    min_latency_ms: float
    mean_latency_ms: float
    p50_latency_ms: float
    p95_latency_ms: float
    p99_latency_ms: float
    max_latency_ms: float


def tasks_in_round(items: int, batch_size: int, concurrency: int) -> int:
    return max(-(-items // batch_size), concurrency * TASKS_MIN)


@dataclass(slots=True, kw_only=True)
class Bench:
    address: str
    kind: str
    model: str
    workers: Sequence[Worker]
    # Batch sizes and numbers of callers.
    shapes: Sequence[tuple[int, int]]
    items: int
    rounds: int
    source: Source
    # None: nothing to compare with, for the reason in `no_baseline`.
    baseline: Baseline | None
    no_baseline: str
    # The results so far.
    rows: list[Row] = field(default_factory=list)

    async def run(self) -> None:
        """Measures everything. SIGTERM cancels it. Raises MultigpuError, or Failure if the baseline fails."""
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        window = max(client_config(self.address).max_in_flight, *(callers for _, callers in self.shapes))
        async with AsyncClient(self.address, max_in_flight=window) as client, self.baseline or contextlib.nullcontext():
            show.note(f"{self.model}: loading")
            await self._load(client)
            for batch_size, callers in self.shapes:
                self.rows.append(await self._row(client, batch_size, callers))
                named = f"{self.model}, batches of {batch_size}, {plural(callers, 'caller')}"
                show.note(f"{named}: {rate_text(self.rows[-1].items_per_s)} items/s")

    async def _load(self, client: AsyncClient) -> None:
        """Loads the model in the fleet and in the baseline. Sets `no_baseline`."""
        batch_size = max(size for size, _ in self.shapes)
        payloads = self.source(-(-FIRST_EXAMPLES // batch_size), batch_size)
        # Once more than there are workers, so that each of them loads it.
        for _ in range(len(self.workers) + 1):
            await self._drive(client, payloads, batch_size, len(self.workers))
        try:
            if self.baseline is not None:
                await self.baseline.load(payloads)
        except Failure as failure:
            self.baseline, self.no_baseline = None, failure.message

    async def _row(self, client: AsyncClient, batch_size: int, concurrency: int) -> Row:
        await self._drive(client, self.source(concurrency * TASKS_MIN, batch_size), batch_size, concurrency)
        tasks = tasks_in_round(self.items, batch_size, concurrency)
        latencies: list[float] = []
        fleet: list[float] = []  # seconds of each round
        plain: list[float] = []
        for number in range(self.rounds):
            payloads = self.source(tasks, batch_size)
            if self.baseline is not None and number % 2:
                plain.append(await self.baseline.run(payloads))
            began = time.perf_counter()
            latencies += await self._drive(client, payloads, batch_size, concurrency)
            fleet.append(time.perf_counter() - began)
            if self.baseline is not None and not number % 2:
                plain.append(await self.baseline.run(payloads))
        items = tasks * batch_size
        return Row(
            model=self.model,
            batch_size=batch_size,
            concurrency=concurrency,
            tasks=tasks * self.rounds,
            items=items * self.rounds,
            items_per_s=items * self.rounds / sum(fleet),
            plain_items_per_s=items / statistics.median(plain) if plain else None,
            ratio=statistics.median(b / a for a, b in zip(fleet, plain, strict=True)) if plain else None,
            **latency_fields(latencies),
        )

    async def _drive(self, client: AsyncClient, payloads: Sequence[bytes], items: int, concurrency: int) -> list[float]:
        """Runs tasks of `items` each from `concurrency` callers that share the client, as an application's would.

        Returns their latencies in seconds. Raises MultigpuError if one fails.
        """
        todo = iter(payloads)
        latencies: list[float] = []

        async def call() -> None:
            for payload in todo:
                began = time.perf_counter()
                await client.run(self.kind, payload, model=self.model, units=items)
                latencies.append(time.perf_counter() - began)

        try:
            async with asyncio.TaskGroup() as callers:
                for _ in range(concurrency):
                    callers.create_task(call())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return latencies


def latency_fields(seconds: Sequence[float]) -> dict[str, float]:
    """The latencies of a Row. Percentiles are by the nearest rank: always a value that was measured.

    https://en.wikipedia.org/wiki/Percentile#The_nearest-rank_method
    """
    ranks = (1e3 * np.percentile(seconds, (0, 50, 95, 99, 100), method="inverted_cdf")).tolist()
    fields = {
        f"{name}_latency_ms": value for name, value in zip(("min", "p50", "p95", "p99", "max"), ranks, strict=True)
    }
    return {**fields, "mean_latency_ms": 1e3 * statistics.fmean(seconds)}


def rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}"
