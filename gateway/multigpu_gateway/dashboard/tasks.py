"""Tasks: lists with a filter, actions on all tasks that match, single tasks, and the form to submit one."""

from typing import Any

import msgspec
from multigpu.errors import RejectedError

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.dashboard import task, text
from multigpu_gateway.dashboard.filters import PERIODS, STATES, Filter, each_batch
from multigpu_gateway.dashboard.pages import ROWS, Page, Redirect, action_of, form_of, page, task_id_of, whole_of
from multigpu_gateway.errors import BAD_REQUEST, HttpError, http_error
from multigpu_gateway.http import Request
from multigpu_gateway.rest.streams import task_events

PATH = "/ui/tasks"
CANCELLED = "cancelled in the dashboard"


async def get(request: Request, pair: ClientPair) -> None:
    """Responds with a page, or with the same events of a task as /v1/tasks/ID/events."""
    below, _, last = request.path.removeprefix(f"{PATH}/").rpartition("/")
    if below and last == "events":
        await task_events(request, pair, task_id_of(below))
    else:
        await _page(request, pair)


async def show(request: Request, pair: ClientPair) -> Page:
    query = request.query
    below = request.path.removeprefix(PATH).strip("/")
    if below == "new":
        return await _form(pair, {}, None)
    if below:
        return await task.show(pair, task_id_of(below))
    chosen = Filter.of(query)
    wanted = chosen.for_master()
    counts = await pair.client.count(**wanted)
    values = {"filter": chosen, "counts": counts, "states": list(STATES), "periods": PERIODS}
    if query.get("confirm"):
        open_tasks = counts.queued + counts.leased
        question = f"Cancel {text.counted(open_tasks, 'task')} that have not ended?"
        values |= {"action": "cancel", "question": question, "count": open_tasks, "to": PATH, "task_id": 0}
        return Page("confirm.html", values, live=False)
    oldest_first = query.get("sort") == "oldest"
    tasks, token = await pair.client.list_page(
        page_size=ROWS, page_token=query.get("page", ""), oldest_first=oldest_first, **wanted
    )
    return Page("tasks.html", {**values, "tasks": tasks, "next_page": token, "oldest_first": oldest_first})


_page = page(show)


async def change(request: Request, pair: ClientPair) -> Page | Redirect:
    form = await form_of(request)
    action = action_of(form, "cancel", "submit")
    if action == "submit":
        return await _submit(form, pair)

    async def cancel(task_ids: list[int]) -> int:
        return len((await pair.client.cancel(*task_ids, reason=CANCELLED)).cancelled_task_ids)

    if "task_id" in form:
        task_id = task_id_of(form["task_id"])
        n = await cancel([task_id])
        return Redirect(f"{PATH}/{task_id}", action="cancelled", n=n)
    chosen = Filter.of(form)
    wanted = chosen.for_master()
    n = await each_batch(pair, wanted, cancel)
    return Redirect(f"{PATH}?{chosen.query}", action="cancelled", n=n)


async def _submit(form: dict[str, str], pair: ClientPair) -> Page | Redirect:
    """Submits a task. Its payload is a JSON value, or, for the type text, the text as bytes in UTF-8."""
    given: Any = {name: form[name] for name in ("model", "queue") if form.get(name)}
    if form.get("priority"):
        given["priority"] = whole_of(form["priority"])
    payload: Any = form.get("payload", "").replace("\r\n", "\n")
    try:
        payload = payload.encode() if form.get("type") == "text" else msgspec.json.decode(payload)
        handle = await pair.client.submit(form.get("kind", ""), payload, **given)
    except (msgspec.DecodeError, RecursionError) as error:
        problem = f"the payload is no JSON value: {error}; if the kind takes bytes, choose text"
        return await _form(pair, form, HttpError(BAD_REQUEST, problem))
    except RejectedError as error:
        return await _form(pair, form, http_error(error))
    return Redirect(f"{PATH}/{handle.id}", action="submitted")


async def _form(pair: ClientPair, form: dict[str, str], error: HttpError | None) -> Page:
    workers = await pair.admin.list_workers()
    kinds = sorted({capability.kind for worker in workers for capability in worker.capabilities})
    values = {"form": {"kind": "", "model": "", "queue": "", "priority": "", "payload": "", "type": "json", **form}}
    problem, status = ("", 200) if error is None else (error.message, error.status)
    return Page("submit.html", {**values, "kinds": kinds, "problem": problem}, live=False, status=status)
