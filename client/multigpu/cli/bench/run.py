"""The measuring of `mgpuctl bench`.

For each way to run a model (engine and precision) the same few examples go through the fleet first: that loads the
model and warms it up, and the answers are compared with those of the plain loop at fp32. Then, for each batch size and
number of callers, rounds of the fleet and of the plain loop with the same examples take turns, the order changing each
round. A figure is of all rounds together; a ratio is the median over the rounds, each of the two halves of one round.
"""

import asyncio
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from multigpu import AsyncClient
from multigpu._transport.encoding import decode
from multigpu.cli import show
from multigpu.cli.bench.baseline import Plain, PlainError, Way
from multigpu.cli.bench.fleet import Crew
from multigpu.cli.bench.load import Meter, Round, Work, drive
from multigpu.cli.bench.rows import Latency, Row, agreement, mean_cosine, plural, rate_form, ratio_form, spearman
from multigpu.cli.bench.source import Portion, Rows, Source
from multigpu.cli.progress import Progress
from multigpu.errors import RejectedError, TaskError

REFERENCE_PRECISION = "fp32"
# Tasks of each caller, before those that count, and among those.
WARM_UP_TASKS = 2
TASKS_MIN = 2

Pairs = tuple[NDArray[Any], list[str], list[str]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Every combination of these, so many rounds each."""

    kind: str
    # One that is empty, where the kind needs none.
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
        """Items in a round: enough for every caller to be one."""
        return max(self.items, batch_size * concurrency * TASKS_MIN)

    @property
    def items_in_all(self) -> int:
        ways = len(self.models) * len(self.engines) * len(self.precisions)
        return ways * self.rounds * sum(itertools.starmap(self.round_items, self.shapes))

    def ways(self, content_type: str) -> list[Way]:
        return [
            Way(model=model, kind=self.kind, engine=engine, precision=precision, content_type=content_type)
            for model, engine, precision in itertools.product(self.models, self.engines, self.precisions)
        ]


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
class Judged:
    """How right one way is, and whether the plain loop goes it too."""

    # Why there is none; empty: there is one.
    plain_error: str
    cosine: float | None
    top1: float | None
    spearman: float | None


@dataclass(slots=True, kw_only=True)
class Bench:
    address: str
    crew: Crew
    grid: Grid
    source: Source
    pairs: Pairs | None
    # None: nothing to compare with, for this reason.
    plain: Plain | None
    no_plain: str
    progress: Progress
    # Tasks that a client may have under way.
    window: int
    # What is known so far.
    rows: list[Row] = field(default_factory=list)
    # By model: its answers at fp32 to what all are judged by; None: not to be had.
    _references: dict[str, Rows | None] = field(default_factory=dict)

    async def run(self) -> None:
        """Measure everything. Raises MultigpuError where it is not one combination's fault."""
        async with AsyncClient(self.address, window_tasks=max(self.window, *self.grid.concurrencies)) as client:
            for way in self.grid.ways(self.source.content_type):
                await self._measure(client, way)

    async def _measure(self, client: AsyncClient, way: Way) -> None:
        """The rows of one engine and precision of a model."""
        shapes = self.grid.shapes
        self.progress.say(f"{way.name}: loading")
        try:
            judged = await self._judge(client, way)
            while shapes:
                row = await self._row(client, way, judged, *shapes[0])
                self.progress.say(in_words(row))
                self.rows.append(row)
                del shapes[0]
        except (TaskError, RejectedError) as error:
            self.progress.say(f"{way.name}: {error}")
            self.progress.add(self.grid.rounds * sum(itertools.starmap(self.grid.round_items, shapes)))
            self.rows += [Row(**_head(way, *shape), error=str(error)) for shape in shapes]

    async def _judge(self, client: AsyncClient, way: Way) -> Judged:
        """Load a model in the fleet and in the plain loop, and compare their answers."""
        portion = self.source.judged()
        # As often as there are workers, and once more: each is to have loaded it.
        for _ in range(len(self.crew.worker_ids) + 1):
            done = await self._drive(client, way, portion, len(self.crew.worker_ids), counted=False)
        cosine, top1 = None, None
        reference = await self._reference(way, portion)
        rows = None if reference is None else self.source.rows(done.results)
        if reference is not None and rows is not None and rows.shape == reference.shape:
            cosine = mean_cosine(rows, reference)
            top1 = agreement(rows, reference) if self.source.kind == "classify" else None
        correlation = None if self.pairs is None else await self._correlation(client, way, self.pairs)
        why = await self._load_plain(way, portion)
        return Judged(plain_error=why, cosine=cosine, top1=top1, spearman=correlation)

    async def _reference(self, way: Way, portion: Portion) -> Rows | None:
        # What a handler answers is not compared.
        if not way.model or self.plain is None:
            return None
        if way.model not in self._references:
            self._references[way.model] = None
            # Texts are torch's; of other models the file says what runs it.
            engine = "torch" if way.kind == "embed" else "auto"
            exact = replace(way, engine=engine, precision=REFERENCE_PRECISION)
            if not await self._load_plain(exact, portion):
                answers = await self._in_thread(self.plain.answers, exact, portion.payloads)
                rows = self.source.rows(answers) if isinstance(answers, list) else answers
                self._references[way.model] = rows
        return self._references[way.model]

    async def _load_plain(self, way: Way, portion: Portion) -> str:
        """Why the plain loop hasn't got it; empty: it has."""
        if self.plain is None:
            return self.no_plain
        try:
            await self._in_thread(self.plain.load, way, portion.payloads)
        except PlainError as error:
            return str(error)
        return ""

    async def _correlation(self, client: AsyncClient, way: Way, pairs: Pairs) -> float | None:
        scores, firsts, seconds = pairs
        a = await client.embed(firsts, **way.options)
        b = await client.embed(seconds, **way.options)
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        found = spearman((a * b).sum(1) / norms, scores)
        return None if found is None else 100 * found

    async def _drive(
        self, client: AsyncClient, way: Way, portion: Portion, concurrency: int, *, counted: bool = True
    ) -> Round:
        work = Work(
            kind=way.kind,
            payloads=[
                (decode(payload, way.content_type), size)
                for payload, size in zip(portion.payloads, portion.sizes, strict=True)
            ]
            * portion.times,
            options=way.options,
        )
        return await drive(client, work, concurrency, self.progress.add if counted else lambda _: None)

    async def _row(self, client: AsyncClient, way: Way, judged: Judged, batch_size: int, concurrency: int) -> Row:
        warm_up = self.source.portion(batch_size * concurrency * WARM_UP_TASKS, batch_size)
        await self._drive(client, way, warm_up, concurrency, counted=False)
        measured = Measured()
        meter = Meter(self.address, self.crew.worker_ids)
        has_plain = not judged.plain_error
        for number in range(self.grid.rounds):
            portion = self.source.portion(self.grid.round_items(batch_size, concurrency), batch_size)
            if has_plain and number % 2:
                await self._plain_half(way, portion, measured)
            with meter:
                done = await self._drive(client, way, portion, concurrency)
            measured.rounds.append(done)
            measured.items += portion.items
            measured.rates.append(portion.items / done.seconds)
            if has_plain and number % 2 == 0:
                await self._plain_half(way, portion, measured)
        return row_of(Row(**_head(way, batch_size, concurrency)), judged, measured, meter)

    async def _plain_half(self, way: Way, portion: Portion, measured: Measured) -> None:
        assert self.plain is not None
        seconds, tokens = await self._in_thread(self.plain.run, way, portion.payloads, portion.times)
        measured.plain_rates.append(portion.items / seconds)
        measured.tokens = None if tokens is None or measured.tokens is None else measured.tokens + tokens

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call the plain loop. Who is cancelled meanwhile ends it: else the thread would wait for it to the end."""
        assert self.plain is not None
        try:
            return await asyncio.to_thread(call, *arguments)
        except asyncio.CancelledError:
            self.plain.kill()
            raise


def _head(way: Way, batch_size: int, concurrency: int) -> dict[str, Any]:
    """What a row is about."""
    named = {name: getattr(way, name) for name in ("kind", "model", "engine", "precision")}
    return named | {"batch_size": batch_size, "concurrency": concurrency}


def row_of(head: Row, judged: Judged, measured: Measured, meter: Meter) -> Row:
    """The figures of one combination."""
    seconds = sum(done.seconds for done in measured.rounds)
    latencies = [value for done in measured.rounds for value in done.latencies]
    joules = sum(done.energy[0] for done in measured.rounds)
    told = sum(done.energy[1] for done in measured.rounds)
    ratios = [rate / plain for rate, plain in zip(measured.rates, measured.plain_rates, strict=False)]
    return replace(
        head,
        plain_error=judged.plain_error,
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
        cosine=judged.cosine,
        top1=judged.top1,
        spearman=judged.spearman,
    )


def in_words(row: Row) -> str:
    """A row as it is known, for who waits for the table."""
    assert row.latency is not None
    assert row.items_per_s is not None
    ratio = "" if row.ratio is None else f", {row.ratio:{ratio_form(row.ratio)}} times the plain loop"
    rate = format(row.items_per_s, rate_form(row.items_per_s))
    return show.clean(
        f"{row.model or row.kind}, {row.engine}, {row.precision}, "
        f"batches of {row.batch_size}, {plural(row.concurrency, 'caller')}: "
        f"{rate} items/s{ratio}; p50 {row.latency.p50_ms:.1f} ms, p99 {row.latency.p99_ms:.1f} ms"
    )
