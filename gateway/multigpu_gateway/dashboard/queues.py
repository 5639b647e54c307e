"""Queues: how many tasks wait, for how long, and in what time each queue will be empty without new tasks."""

from multigpu.fleet import Queue

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.dashboard.pages import ROWS, Page, Redirect, action_of, form_of, number_of
from multigpu_gateway.http import Request

SORTS = {
    "queue": lambda queue: queue.queue,
    "queued": lambda queue: -queue.queued,
    "oldest": lambda queue: -(queue.oldest_age_s or 0.0),
    "ended": lambda queue: -queue.end_rate,
}  # fmt: skip


def drain_s(queue: Queue) -> float | None:
    """Returns the seconds until the tasks in the queue have ended, at the last minute's rate. None: no task ended then.
    Tasks that are submitted later are not counted.
    """
    return (queue.queued + queue.leased) / queue.end_rate if queue.end_rate else None


async def show(request: Request, pair: ClientPair) -> Page:
    sort = request.query.get("sort", "queued")
    found = sorted(await pair.admin.list_queues(), key=lambda queue: queue.queue)
    found.sort(key=SORTS.get(sort, SORTS["queued"]))
    first = number_of(request, "from")
    values = {"queues": found[first : first + ROWS], "total": len(found), "first": first, "rows": ROWS, "sort": sort}
    return Page("queues.html", {**values, "drain_s": drain_s})


async def change(request: Request, pair: ClientPair) -> Redirect:
    form = await form_of(request)
    if action_of(form, "pause", "resume") == "pause":
        await pair.admin.pause_queue(form.get("queue", ""))
        return Redirect("/ui/queues", action="paused")
    await pair.admin.resume_queue(form.get("queue", ""))
    return Redirect("/ui/queues", action="resumed")
