"""The measuring of `mgpuctl bench`.

For each way to run a model (engine and precision) the same few examples go through the fleet first: that loads the
model and warms it up, and the answers are compared with those of the plain loop at fp32. Then, for each batch size and
number of callers, rounds of the fleet and of the plain loop with the same examples take turns, the order changing each
round. A figure is of all rounds together; a ratio is the median over the rounds, each of the two halves of one round.
"""

import asyncio
import statistics
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multigpu import AsyncClient
from multigpu.cli import show
from multigpu.cli.bench_fleet import Crew
from multigpu.cli.bench_load import Meter, Round, Work, drive
from multigpu.cli.bench_plain import Plain, PlainError
from multigpu.cli.bench_rows import Latency, Row, mean_cosine, spearman
from multigpu.cli.bench_source import Portion, Rows, Source
from multigpu.cli.progress import Progress
from multigpu.errors import RejectedError, TaskError

REFERENCE_PRECISION = "fp32"
# Tasks of each caller, before those that count.
WARM_UP_TASKS = 2

Pairs = tuple[NDArray[Any], list[str], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Every combination of these, so many rounds each."""

    models: tuple[str, ...]
    engines: tuple[str, ...]
    precisions: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    concurrencies: tuple[int, ...]
    items: int
    rounds: int

    @property
    def combinations(self) -> int:
        lists = (self.models, self.engines, self.precisions, self.batch_sizes, self.concurrencies)
        return int(np.prod([len(found) for found in lists]))


@dataclass(slots=True, kw_only=True)
class Measured:
    """What the rounds of one combination came to."""

    rounds: list[Round] = field(default_factory=list)
    items: int = 0
    # Of each round; empty where there is no plain loop.
    plain_rates: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    tokens: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run a model, and how right it is so."""

    model: str
    engine: str
    precision: str
    # True: the plain loop can run it so too.
    has_plain: bool
    cosine: float | None
    spearman: float | None

    @property
    def options(self) -> dict[str, Any]:
        """For tasks."""
        wishes = {"engine": self.engine, "precision": self.precision}
        return {"model": self.model, "parameters": {name: wish for name, wish in wishes.items() if wish != "auto"}}


@dataclass(slots=True, kw_only=True)
class Bench:
    address: str
    crew: Crew
    grid: Grid
    source: Source
    pairs: Pairs | None
    # None: nothing to compare with.
    plain: Plain | None
    progress: Progress
    # Tasks that a client may have under way.
    window: int
    # By model: its answers at fp32 to what all are judged by; None: not to be had.
    _references: dict[str, Rows | None] = field(default_factory=dict)

    async def run(self) -> list[Row]:
        """All rows. Raises MultigpuError where it is not one combination's fault."""
        rows: list[Row] = []
        grid = self.grid
        async with AsyncClient(self.address, window_tasks=max(self.window, *grid.concurrencies)) as client:
            for model in grid.models:
                for engine in grid.engines:
                    for precision in grid.precisions:
                        rows += await self._way(client, model, engine, precision)
        return rows

    async def _way(self, client: AsyncClient, model: str, engine: str, precision: str) -> list[Row]:
        """The rows of one engine and precision of a model."""
        shapes = [(size, callers) for size in self.grid.batch_sizes for callers in self.grid.concurrencies]
        rows: list[Row] = []
        try:
            way = await self._prepare(client, model, engine, precision)
            for batch_size, concurrency in shapes:
                row = await self._row(client, way, batch_size, concurrency)
                self.progress.say(in_words(row))
                rows.append(row)
        except (TaskError, RejectedError) as error:
            self.progress.say(f"{model}, {engine}, {precision}: {error}")
            left = shapes[len(rows) :]
            self.progress.add(len(left) * self.grid.items * self.grid.rounds)
            rows += [
                Row(
                    model=model,
                    engine=engine,
                    precision=precision,
                    batch_size=size,
                    concurrency=callers,
                    error=str(error),
                )
                for size, callers in left
            ]
        return rows

    async def _prepare(self, client: AsyncClient, model: str, engine: str, precision: str) -> Way:
        """Load a model in the fleet and in the plain loop, and judge its answers."""
        way = Way(model=model, engine=engine, precision=precision, has_plain=False, cosine=None, spearman=None)
        judged = self.source.judged()
        # As often as there are workers, and once more: each is to have loaded it.
        for _ in range(len(self.crew.worker_ids) + 1):
            done = await self._drive(client, way, judged, len(self.crew.worker_ids), counted=False)
        reference = await self._reference(model)
        cosine = None if reference is None else mean_cosine(self.source.rows(done.results), reference)
        correlation = None if self.pairs is None else await self._correlation(client, way, self.pairs)
        has_plain = await self._load_plain(model, engine, precision)
        return Way(
            model=model, engine=engine, precision=precision, has_plain=has_plain, cosine=cosine, spearman=correlation
        )

    async def _reference(self, model: str) -> Rows | None:
        if model not in self._references:
            self._references[model] = None
            # Texts are torch's; of other models the file says what runs it.
            engine = "torch" if self.source.kind == "embed" else "auto"
            if self.plain is not None and await self._load_plain(model, engine, REFERENCE_PRECISION):
                examples = self.source.judged().examples
                rows = await asyncio.to_thread(self.plain.rows, model, engine, REFERENCE_PRECISION, examples)
                self._references[model] = rows
        return self._references[model]

    async def _load_plain(self, model: str, engine: str, precision: str) -> bool:
        """Whether the plain loop has it. Says why not."""
        if self.plain is None:
            return False
        examples = self.source.judged().examples
        try:
            await asyncio.to_thread(self.plain.load, model, self.source.kind, engine, precision, examples)
        except PlainError as error:
            self.progress.say(f"no plain loop for {model}, {engine}, {precision}: {error}")
            return False
        return True

    async def _correlation(self, client: AsyncClient, way: Way, pairs: Pairs) -> float:
        scores, firsts, seconds = pairs
        a = await client.embed(firsts, **way.options)
        b = await client.embed(seconds, **way.options)
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        return 100 * spearman((a * b).sum(1) / norms, scores)

    async def _drive(
        self, client: AsyncClient, way: Way, portion: Portion, concurrency: int, *, counted: bool = True
    ) -> Round:
        work = Work(kind=self.source.kind, payloads=portion.payloads, options=way.options)
        return await drive(client, work, concurrency, self.progress.add if counted else lambda _: None)

    async def _row(self, client: AsyncClient, way: Way, batch_size: int, concurrency: int) -> Row:
        warm_up = self.source.portion(batch_size * concurrency * WARM_UP_TASKS, batch_size)
        await self._drive(client, way, warm_up, concurrency, counted=False)
        measured = Measured()
        meter = Meter(self.address, self.crew.worker_ids)
        for number in range(self.grid.rounds):
            portion = self.source.portion(self.grid.items, batch_size)
            if way.has_plain and number % 2:
                await self._plain_half(way, portion, measured)
            with meter:
                done = await self._drive(client, way, portion, concurrency)
            measured.rounds.append(done)
            measured.items += portion.items
            measured.rates.append(portion.items / done.seconds)
            if way.has_plain and number % 2 == 0:
                await self._plain_half(way, portion, measured)
        return row_of(way, batch_size, concurrency, measured, meter)

    async def _plain_half(self, way: Way, portion: Portion, measured: Measured) -> None:
        assert self.plain is not None
        run = self.plain.run
        seconds, tokens = await asyncio.to_thread(run, way.model, way.engine, way.precision, portion.examples)
        measured.plain_rates.append(portion.items / seconds)
        measured.tokens = None if tokens is None or measured.tokens is None else measured.tokens + tokens


def row_of(way: Way, batch_size: int, concurrency: int, measured: Measured, meter: Meter) -> Row:
    """The figures of one combination."""
    seconds = sum(done.seconds for done in measured.rounds)
    latencies = [value for done in measured.rounds for value in done.latencies]
    joules = sum(done.energy[0] for done in measured.rounds)
    told = sum(done.energy[1] for done in measured.rounds)
    ratios = [rate / plain for rate, plain in zip(measured.rates, measured.plain_rates, strict=False)]
    return Row(
        model=way.model,
        engine=way.engine,
        precision=way.precision,
        batch_size=batch_size,
        concurrency=concurrency,
        tasks=len(latencies),
        items=measured.items,
        latency=Latency.of(latencies),
        items_per_s=measured.items / seconds,
        tokens_per_s=measured.tokens / seconds if measured.tokens else None,
        utilization=meter.utilization,
        memory_bytes=meter.memory_bytes,
        joules_per_item=joules / told if told else None,
        plain_items_per_s=statistics.median(measured.plain_rates) if measured.plain_rates else None,
        ratio=statistics.median(ratios) if ratios else None,
        cosine=way.cosine,
        spearman=way.spearman,
    )


def in_words(row: Row) -> str:
    """A row as it is known, for who waits for the table."""
    assert row.latency is not None
    assert row.items_per_s is not None
    ratio = "" if row.ratio is None else f", {row.ratio:.2f} times the plain loop"
    return show.clean(
        f"{row.model}, {row.engine}, {row.precision}, batches of {row.batch_size}, {row.concurrency} callers: "
        f"{row.items_per_s:,.0f} items/s{ratio}; p50 {row.latency.p50_ms:.1f} ms, p99 {row.latency.p99_ms:.1f} ms"
    )
