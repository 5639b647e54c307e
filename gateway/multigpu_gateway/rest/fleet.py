"""The fleet: its workers, queues and counters."""

import msgspec

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.http import Request
from multigpu_gateway.rest.requests import NoQuery, UsageQuery, query_of
from multigpu_gateway.rest.values import as_dict


async def workers(request: Request, pair: ClientPair) -> None:
    """Every worker that the master knows, by worker_id."""
    query_of(request, NoQuery)
    found = await pair.admin.list_workers()
    await request.respond(200, msgspec.json.encode({"workers": [as_dict(each) for each in found]}))


async def queues(request: Request, pair: ClientPair) -> None:
    """Queues with tasks, dead letters or settings, by name."""
    query_of(request, NoQuery)
    found = await pair.admin.list_queues()
    await request.respond(200, msgspec.json.encode({"queues": [as_dict(each) for each in found]}))


async def usage(request: Request, pair: ClientPair) -> None:
    """Device time and energy of tasks in a period, summed by the names in `by`."""
    query = query_of(request, UsageQuery)
    report = await pair.admin.usage(query.keys(), begin=query.begin, end=query.end)
    await request.respond(200, msgspec.json.encode(as_dict(report)))


async def stats(request: Request, pair: ClientPair) -> None:
    """The state of the master, and its counters of tasks."""
    query_of(request, NoQuery)
    await request.respond(200, msgspec.json.encode(as_dict(await pair.admin.stats())))
