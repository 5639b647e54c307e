"""The fleet: its state now and over the last hour, and its devices."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from multigpu.fleet import HealthState, HistoryPoint, Worker, WorkerState

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.dashboard.filters import Filter
from multigpu_gateway.dashboard.pages import ROWS, Page, Redirect, number_of
from multigpu_gateway.http import Request

# The worst first. The page lists devices in this order.
STATES = ("sick", "quarantined", "recovering", "lost", "degraded", "draining", "cordoned", "busy", "free")
# The states in which a device gets no tasks.
UNUSABLE = ("sick", "quarantined", "recovering", "lost", "draining", "cordoned")
_OF_HEALTH = {HealthState.SICK: "sick", HealthState.RECOVERING: "recovering", HealthState.DEGRADED: "degraded"}


def state_of(worker: Worker) -> str:
    """Returns one of STATES. A degraded device gets tasks."""
    health = worker.health.state if worker.health is not None else HealthState.UNSPECIFIED
    if worker.state is WorkerState.LOST:
        return "lost"
    if health in (HealthState.SICK, HealthState.RECOVERING):
        return _OF_HEALTH[health]
    if worker.quarantined:
        return "quarantined"
    if worker.state is WorkerState.DRAINING:
        return "draining"
    if worker.cordoned:
        return "cordoned"
    return _OF_HEALTH.get(health) or ("busy" if worker.leases else "free")


def product_of(worker: Worker) -> str:
    product = worker.device.product or worker.device.name or "unknown device"
    return f"{product} (simulated)" if worker.device.simulated else product


@dataclass
class ProductCounts:
    """The numbers of devices of one product, by state."""

    product: str
    free: int
    busy: int
    degraded: int
    unusable: int

    @property
    def total(self) -> int:
        return self.free + self.busy + self.degraded + self.unusable


def by_product(workers: Iterable[Worker]) -> list[ProductCounts]:
    counts = Counter((product_of(worker), state_of(worker)) for worker in workers)
    products = sorted({product for product, _ in counts})
    return [
        ProductCounts(
            product, counts[product, "free"], counts[product, "busy"], counts[product, "degraded"],
            sum(counts[product, state] for state in UNUSABLE),
        )
        for product in products
    ]  # fmt: skip


async def show(request: Request, pair: ClientPair) -> Page:
    stats, workers = await pair.admin.stats(), await pair.admin.list_workers()
    states = {worker.worker_id: state_of(worker) for worker in workers}
    query = request.query
    shown = [
        worker
        for worker in workers
        if query.get("state", "") in ("", states[worker.worker_id])
        and query.get("product", "") in ("", product_of(worker))
    ]
    shown.sort(key=lambda worker: (STATES.index(states[worker.worker_id]), worker.host, worker.worker_id))
    first = number_of(request, "from")
    history = await pair.admin.history()
    counted = Counter(states.values())
    lately = await pair.client.count(**Filter(state="unsuccessful", since="1h").for_master())
    return Page(
        "fleet.html",
        {
            "stats": stats, "workers": shown[first : first + ROWS], "states": states, "first": first, "rows": ROWS,
            "total": len(shown), "counted": [(state, counted[state]) for state in STATES if counted[state]],
            "products": by_product(workers), "last": summary_of(history),
            "unsuccessful": lately.failed + lately.dead_lettered + lately.expired,
        },
    )  # fmt: skip


def summary_of(points: Sequence[HistoryPoint]) -> dict[str, float | None]:
    """Returns the mean rate, wait and run time in the last minute (six points), and the latest power."""
    last = points[-6:]
    done = sum(point.succeeded for point in last)

    def mean(name: str) -> float | None:
        total = sum(point.succeeded * (getattr(point, name) or 0.0) for point in last)
        return total / done if done else None

    return {
        "rate": done / (10 * len(last)) if last else None,
        "wait": mean("queue_duration_s"),
        "run": mean("run_duration_s"),
        "power": last[-1].power_watts if last else None,
    }


async def history(request: Request, pair: ClientPair) -> None:
    """Responds with the values of the charts, as JSON: for each, a list of its points in the last hour."""
    points = await pair.admin.history()
    answer: dict[str, list[Any]] = {
        "time": [point.end_time.timestamp() if point.end_time is not None else None for point in points],
        "succeeded": [point.succeeded / 10 for point in points],
        "unsuccessful": [point.unsuccessful / 10 for point in points],
        "queued": [point.queued for point in points],
        "leased": [point.leased for point in points],
        "wait": [point.queue_duration_s for point in points],
        "run": [point.run_duration_s for point in points],
        "power": [point.power_watts for point in points],
        "utilization": [point.utilization and 100 * point.utilization for point in points],
    }
    await request.respond(200, msgspec.json.encode(answer), headers=[(b"cache-control", b"no-store")])


async def reset_breaker(_request: Request, pair: ClientPair) -> Redirect:
    await pair.admin.reset_breaker()
    return Redirect("/", action="breaker")
