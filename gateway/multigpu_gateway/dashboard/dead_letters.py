"""Dead letters: tasks that failed every attempt. Actions requeue or delete one, or all that match a filter."""

from urllib.parse import urlencode

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.dashboard import text
from multigpu_gateway.dashboard.filters import Filter, each_batch
from multigpu_gateway.dashboard.pages import ROWS, Page, Redirect, action_of, form_of, task_id_of
from multigpu_gateway.http import Request

PATH = "/ui/dead-letters"
ACTIONS = {"requeue": "requeued", "delete": "deleted"}


def _filter(fields: dict[str, str]) -> Filter:
    return Filter.of({**fields, "state": "dead-lettered"})


async def show(request: Request, pair: ClientPair) -> Page:
    query = request.query
    chosen = _filter(query)
    wanted = chosen.for_master()
    count = (await pair.client.count(**wanted)).dead_lettered
    values = {"filter": chosen, "count": count}
    if action := query.get("confirm"):
        action_of({"action": action}, *ACTIONS)
        if task_id := query.get("task_id", ""):
            values |= {"task_id": task_id_of(task_id), "count": 1, "to": PATH}
            question = f"Delete dead letter {task_id} and its input for good?"
            return Page("confirm.html", {**values, "action": "delete", "question": question}, live=False)
        what = {"requeue": "Run {} again?", "delete": "Delete {} and their input for good?"}[action]
        question = what.format(text.counted(count, "dead letter"))
        values |= {"action": action, "question": question, "to": PATH, "task_id": 0}
        return Page("confirm.html", values, live=False)
    tasks, token = await pair.client.list_page(page_size=ROWS, page_token=query.get("page", ""), **wanted)
    return Page("dead_letters.html", {**values, "tasks": tasks, "next_page": token})


async def change(request: Request, pair: ClientPair) -> Redirect:
    form = await form_of(request)
    action = action_of(form, *ACTIONS)

    async def act(task_ids: list[int]) -> int:
        if action == "requeue":
            return len((await pair.admin.requeue_dead_letters(task_ids)).task_ids)
        return (await pair.admin.delete_dead_letters(task_ids)).deleted

    chosen = _filter(form)
    if "task_id" in form:
        n = await act([task_id_of(form["task_id"])])
    else:
        n = await each_batch(pair, chosen.for_master(), act)
    back = {name: value for name, value in chosen.fields.items() if name != "state"}
    return Redirect(f"{PATH}?{urlencode(back)}", action=ACTIONS[action], n=n)
