"""The measurement of `mgpuctl bench`.

A few examples go through the fleet and the baseline first: that loads the model. Then, for each batch size and number
of callers, the fleet and the baseline run the same examples in alternating order, round by round. A row has the numbers
of all rounds together; its ratio is the median of the rounds' ratios.
"""

import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from multigpu import AsyncClient
from multigpu._transport.encoding import decode
from multigpu.cli.bench.baseline import Baseline, BaselineError
from multigpu.cli.bench.load import Round, drive
from multigpu.cli.bench.rows import Row, latency_fields, rate_text
from multigpu.cli.bench.source import Portion, Source
from multigpu.cli.presence import not_served
from multigpu.cli.progress import Progress
from multigpu.cli.text import clean, plural
from multigpu.v1 import admin_service_pb2 as admin

# Tasks of each caller: before a row's rounds, and at least in each round.
WARM_UP_TASKS = 2
TASKS_MIN = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The workers that serve a kind."""

    worker_ids: frozenset[str]
    # The default first.
    models: tuple[str, ...]
    hosts: frozenset[str]
    # Of the first worker: "cpu", "cuda:0".
    device: str
    pid: int
    products: tuple[str, ...]


def serving(connected: Sequence[admin.Worker], kind: str) -> Serving:
    """Raises Failure if none of the connected workers serves the kind."""
    if (failure := not_served(connected, kind)) is not None:
        raise failure
    offers = [(worker, found) for worker in connected for found in worker.capabilities if found.kind == kind]
    return Serving(
        worker_ids=frozenset(worker.worker_id for worker, _ in offers),
        models=tuple(dict.fromkeys(name for _, found in offers for name in found.models)),
        hosts=frozenset(worker.host for worker, _ in offers),
        device=offers[0][0].device.name,
        pid=offers[0][0].pid,
        products=tuple(dict.fromkeys(worker.device.product for worker, _ in offers)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Every batch size with every number of callers is measured, `rounds` times."""

    kind: str
    # Empty, if the kind needs no model.
    model: str
    batch_sizes: tuple[int, ...]
    concurrencies: tuple[int, ...]
    items: int
    rounds: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Batch sizes and numbers of callers."""
        return list(itertools.product(self.batch_sizes, self.concurrencies))

    def round_items(self, batch_size: int, concurrency: int) -> int:
        return max(self.items, batch_size * concurrency * TASKS_MIN)

    @property
    def items_in_all(self) -> int:
        return self.rounds * sum(itertools.starmap(self.round_items, self.shapes))


@dataclass(slots=True, kw_only=True)
class Bench:
    address: str
    serving: Serving
    grid: Grid
    source: Source
    # None: nothing to compare with, for the reason in `no_baseline`.
    baseline: Baseline | None
    no_baseline: str
    progress: Progress
    # Tasks that a client may have under way.
    window: int
    # The results so far.
    rows: list[Row] = field(default_factory=list)

    async def run(self) -> None:
        """Measures everything. Raises MultigpuError if a task fails."""
        kind, model = self.grid.kind, self.grid.model
        async with AsyncClient(self.address, window_tasks=max(self.window, *self.grid.concurrencies)) as client:
            self.progress.say(f"{model or kind}: loading")
            await self._load(client)
            for batch_size, concurrency in self.grid.shapes:
                row = Row(kind=kind, model=model, batch_size=batch_size, concurrency=concurrency)
                self.rows.append(await self._row(client, row))
                shape = f"batches of {batch_size}, {plural(concurrency, 'caller')}"
                self.progress.say(clean(f"{model or kind}, {shape}: {rate_text(self.rows[-1].items_per_s)} items/s"))

    async def _load(self, client: AsyncClient) -> None:
        """Loads the model in the fleet and in the baseline. Sets `no_baseline`."""
        portion = self.source.portion(*self.source.first)
        # Once more than there are workers, so that each of them loads it.
        for _ in range(len(self.serving.worker_ids) + 1):
            await self._drive(client, portion, len(self.serving.worker_ids), counted=False)
        if self.baseline is not None:
            load, task = self.baseline.load, (self.grid.kind, self.grid.model, self.source.content_type)
            try:
                await self._in_thread(load, *task, portion.payloads)
            except BaselineError as error:
                self.no_baseline = str(error)

    async def _drive(self, client: AsyncClient, portion: Portion, concurrency: int, *, counted: bool = True) -> Round:
        payloads = [decode(payload, self.source.content_type) for payload in portion.payloads]
        sized = list(zip(payloads, portion.sizes, strict=True)) * portion.times
        on_done = self.progress.add if counted else lambda _: None
        return await drive(client, self.grid.kind, sized, self.grid.model, concurrency, on_done)

    async def _row(self, client: AsyncClient, row: Row) -> Row:
        batch_size, concurrency = row.batch_size, row.concurrency
        warm_up = self.source.portion(batch_size * concurrency * WARM_UP_TASKS, batch_size)
        await self._drive(client, warm_up, concurrency, counted=False)
        rounds: list[Round] = []
        items: list[int] = []
        baseline: list[tuple[float, int | None]] = []  # seconds, tokens

        async def run_baseline() -> None:
            if not self.no_baseline:
                assert self.baseline is not None
                baseline.append(await self._in_thread(self.baseline.run, portion.payloads, portion.times))

        for number in range(self.grid.rounds):
            portion = self.source.portion(self.grid.round_items(batch_size, concurrency), batch_size)
            if number % 2:
                await run_baseline()
            rounds.append(await self._drive(client, portion, concurrency))
            items.append(portion.items)
            if number % 2 == 0:
                await run_baseline()
        return _with_numbers(replace(row, plain_error=self.no_baseline), rounds, items, baseline)

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Calls the baseline. A cancellation kills it, because the thread can't be interrupted."""
        assert self.baseline is not None
        try:
            return await asyncio.to_thread(call, *arguments)
        except asyncio.CancelledError:
            self.baseline.kill()
            raise


def _with_numbers(row: Row, rounds: list[Round], items: list[int], baseline: list[tuple[float, int | None]]) -> Row:
    seconds = sum(done.seconds for done in rounds)
    latencies = [value for done in rounds for value in done.latencies]
    joules_items = sum(done.joules_items for done in rounds)
    plain_rates = [count / plain_s for count, (plain_s, _) in zip(items, baseline, strict=False)]
    # Both ran the same items in a round.
    ratios = [plain_s / done.seconds for done, (plain_s, _) in zip(rounds, baseline, strict=False)]
    tokens = [count for _, count in baseline if count is not None]
    return replace(
        row,
        tasks=len(latencies),
        items=sum(items),
        items_per_s=sum(items) / seconds,
        tokens_per_s=sum(tokens) / seconds if tokens else None,
        joules_per_item=sum(done.joules for done in rounds) / joules_items if joules_items else None,
        plain_items_per_s=statistics.median(plain_rates) if plain_rates else None,
        ratio=statistics.median(ratios) if ratios else None,
        **latency_fields(latencies),  # type: ignore[arg-type]  # they are floats
    )
