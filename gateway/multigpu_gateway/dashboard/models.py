"""Models: the workers that offer them, those that have loaded them, and the memory that they take."""

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.dashboard.pages import ROWS, Page, Redirect, action_of, form_of, number_of
from multigpu_gateway.http import Request


async def show(request: Request, pair: ClientPair) -> Page:
    found = await pair.admin.list_models()
    first = number_of(request, "from")
    shown = found[first : first + ROWS]
    return Page("models.html", {"entries": shown, "total": len(found), "first": first, "rows": ROWS})


async def change(request: Request, pair: ClientPair) -> Redirect:
    form = await form_of(request)
    model, worker = form.get("model", ""), form.get("worker", "")
    workers = [worker] if worker else []
    if action_of(form, "load", "unload") == "load":
        await pair.admin.load_model(model, workers)
        return Redirect("/ui/models", action="loading")
    await pair.admin.unload_model(model, workers)
    return Redirect("/ui/models", action="unloading")
