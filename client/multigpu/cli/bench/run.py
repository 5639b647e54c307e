"""The measurement of `mgpuctl bench`.

For each variant of a model (engine and precision), a few examples go through the fleet first: that loads the model, and
the answers are compared with the baseline's at fp32.
Then, for each batch size and number of callers, the fleet and the baseline run the same examples in alternating order,
round by round. A row has the numbers of all rounds together; its ratio is the median of the rounds' ratios.
"""

import asyncio
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from multigpu import AsyncClient
from multigpu._transport.encoding import decode
from multigpu.cli.bench.baseline import Baseline, BaselineError, Variant
from multigpu.cli.bench.load import Meter, Round, drive
from multigpu.cli.bench.rows import Row, agreement, latency_fields, mean_cosine, rate_text
from multigpu.cli.bench.source import Portion, Rows, Source
from multigpu.cli.presence import not_served
from multigpu.cli.progress import Progress
from multigpu.cli.text import clean, plural
from multigpu.errors import RejectedError, TaskError
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
    """Every combination of these is measured, `rounds` times."""

    kind: str
    # One empty name, if the kind needs no model.
    models: tuple[str, ...]
    engines: tuple[str, ...]
    precisions: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    concurrencies: tuple[int, ...]
    items: int
    rounds: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Batch sizes and numbers of callers."""
        return list(itertools.product(self.batch_sizes, self.concurrencies))

    @property
    def combinations(self) -> int:
        return math.prod(map(len, (self.models, self.engines, self.precisions, self.shapes)))

    def round_items(self, batch_size: int, concurrency: int) -> int:
        return max(self.items, batch_size * concurrency * TASKS_MIN)

    @property
    def items_in_all(self) -> int:
        variants = len(self.models) * len(self.engines) * len(self.precisions)
        return variants * self.rounds * sum(itertools.starmap(self.round_items, self.shapes))

    def variants(self, content_type: str) -> list[Variant]:
        return [
            Variant(model=model, kind=self.kind, engine=engine, precision=precision, content_type=content_type)
            for model, engine, precision in itertools.product(self.models, self.engines, self.precisions)
        ]


@dataclass(slots=True, kw_only=True)
class Bench:
    address: str
    serving: Serving
    grid: Grid
    source: Source
    # None: nothing to compare with, for this reason.
    baseline: Baseline | None
    no_baseline: str
    progress: Progress
    # Tasks that a client may have under way.
    window: int
    # The results so far.
    rows: list[Row] = field(default_factory=list)
    # Tasks whose answers are compared.
    _judged: Portion | None = None
    # By model: the baseline's answers at fp32; None: it has none.
    _references: dict[str, Rows | None] = field(default_factory=dict)

    async def run(self) -> None:
        """Measures everything. Raises MultigpuError if not only one combination failed."""
        async with AsyncClient(self.address, window_tasks=max(self.window, *self.grid.concurrencies)) as client:
            for variant in self.grid.variants(self.source.content_type):
                await self._measure(client, variant)

    async def _measure(self, client: AsyncClient, variant: Variant) -> None:
        """Adds the rows of one variant."""
        names = {name: getattr(variant, name) for name in ("kind", "model", "engine", "precision")}
        left = [Row(**names, batch_size=size, concurrency=callers) for size, callers in self.grid.shapes]
        self.progress.say(f"{variant.name}: loading")
        try:
            judged = await self._judge(client, variant)
            while left:
                row = await self._row(client, variant, replace(left[0], **judged))
                rate = f"{rate_text(row.items_per_s)} items/s"
                shape = f"batches of {row.batch_size}, {plural(row.concurrency, 'caller')}"
                self.progress.say(clean(f"{variant.name}, {shape}: {rate}"))
                self.rows.append(row)
                del left[0]
        except (TaskError, RejectedError) as error:
            self.progress.say(f"{variant.name}: {error}")
            items = sum(self.grid.round_items(row.batch_size, row.concurrency) for row in left)
            self.progress.add(self.grid.rounds * items)
            self.rows += [replace(row, error=str(error)) for row in left]

    async def _judge(self, client: AsyncClient, variant: Variant) -> dict[str, Any]:
        """Loads a model in the fleet and in the baseline. Returns the fields of a Row about its answers."""
        workers = len(self.serving.worker_ids)
        portion = self._judged = self._judged or self.source.portion(*self.source.judged)
        # Once more than there are workers, so that each of them loads it.
        for _ in range(workers + 1):
            done = await self._drive(client, variant, portion, workers, counted=False)
        judged: dict[str, Any] = {}
        if (reference := await self._reference(variant, portion)) is not None:
            rows = self.source.rows(done.results)
            if rows.shape == reference.shape:
                judged["cosine"] = mean_cosine(rows, reference)
                judged["top1"] = agreement(rows, reference) if variant.kind == "classify" else None
        return judged | {"plain_error": await self._load_baseline(variant, portion)}

    async def _reference(self, variant: Variant, portion: Portion) -> Rows | None:
        """The baseline's answers at fp32; None: there are none, or they are not compared, as those of handlers."""
        if not variant.model or self.baseline is None:
            return None
        if variant.model not in self._references:
            self._references[variant.model] = None
            # The reference for texts is torch's; the engine of other models follows from their files.
            exact = replace(variant, engine="torch" if variant.kind == "embed" else "auto", precision="fp32")
            if not await self._load_baseline(exact, portion):
                answers = await self._in_thread(self.baseline.answers, portion.payloads)
                self._references[variant.model] = self.source.rows(answers) if isinstance(answers, list) else answers
        return self._references[variant.model]

    async def _load_baseline(self, variant: Variant, portion: Portion) -> str:
        """Why the baseline can't run the variant; empty: it can."""
        if self.baseline is None:
            return self.no_baseline
        try:
            await self._in_thread(self.baseline.load, variant, portion.payloads)
        except BaselineError as error:
            return str(error)
        return ""

    async def _drive(
        self, client: AsyncClient, variant: Variant, portion: Portion, concurrency: int, *, counted: bool = True
    ) -> Round:
        payloads = [decode(payload, variant.content_type) for payload in portion.payloads]
        sized = list(zip(payloads, portion.sizes, strict=True)) * portion.times
        on_done = self.progress.add if counted else lambda _: None
        return await drive(client, variant.kind, sized, variant.options, concurrency, on_done)

    async def _row(self, client: AsyncClient, variant: Variant, row: Row) -> Row:
        batch_size, concurrency = row.batch_size, row.concurrency
        warm_up = self.source.portion(batch_size * concurrency * WARM_UP_TASKS, batch_size)
        await self._drive(client, variant, warm_up, concurrency, counted=False)
        meter = Meter(self.address, self.serving.worker_ids)
        rounds: list[Round] = []
        items: list[int] = []
        baseline: list[tuple[float, int | None]] = []  # seconds, tokens

        async def run_baseline() -> None:
            if not row.plain_error:
                assert self.baseline is not None
                baseline.append(await self._in_thread(self.baseline.run, portion.payloads, portion.times))

        for number in range(self.grid.rounds):
            portion = self.source.portion(self.grid.round_items(batch_size, concurrency), batch_size)
            if number % 2:
                await run_baseline()
            with meter:
                rounds.append(await self._drive(client, variant, portion, concurrency))
            items.append(portion.items)
            if number % 2 == 0:
                await run_baseline()
        row = replace(row, utilization=meter.utilization, memory_bytes=meter.memory_bytes)
        return _with_numbers(row, rounds, items, baseline)

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
