"""The load of `mgpuctl bench`: callers that have one task each under way.

All callers share one client, as an application's would; a latency is the time from a caller's call to its result.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from multigpu import AsyncClient


@dataclass(slots=True, kw_only=True)
class Round:
    """The measurements of a round."""

    seconds: float = 0.0
    # Of each task, in seconds.
    latencies: list[float] = field(default_factory=list)
    # Joules and items of the tasks whose energy is known.
    joules: float = 0.0
    joules_items: int = 0


async def drive(
    client: AsyncClient,
    kind: str,
    payloads: Sequence[tuple[Any, int]],
    model: str,
    concurrency: int,
    on_done: Callable[[int], None],
) -> Round:
    """Runs `payloads`, each with its number of items, from `concurrency` callers. Raises MultigpuError if one fails."""
    done = Round()
    todo = iter(payloads)

    async def call() -> None:
        for payload, items in todo:
            began = time.perf_counter()
            outcome = await client.run_outcome(kind, payload, model=model, units=items)
            done.latencies.append(time.perf_counter() - began)
            if not outcome.succeeded:
                raise outcome.to_error()
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
