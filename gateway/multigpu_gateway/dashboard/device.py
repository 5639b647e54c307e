"""One device: the workers on it, their tasks, the processes that use it, and actions on its workers."""

from urllib.parse import quote, unquote

from multigpu.fleet import Worker
from multigpu.task import TaskState

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.dashboard.fleet import product_of, state_of
from multigpu_gateway.dashboard.pages import Page, Redirect, action_of, form_of
from multigpu_gateway.errors import NOT_FOUND, HttpError
from multigpu_gateway.http import Request

PATH = "/ui/devices"
TASKS_MAX = 100


async def show(request: Request, pair: ClientPair) -> Page:
    worker_id = unquote(request.path.removeprefix(f"{PATH}/"))
    workers = await pair.admin.list_workers()
    found = next((worker for worker in workers if worker.worker_id == worker_id), None)
    if found is None:
        raise HttpError(NOT_FOUND, f"the master knows no worker {worker_id!r}")
    same = [worker for worker in workers if _device(worker) == _device(found)]
    tasks = {
        worker.worker_id: await pair.client.list_page(
            page_size=TASKS_MAX, worker_id=worker.worker_id, states=[TaskState.LEASED]
        )
        for worker in same
    }
    return Page(
        "device.html",
        {
            "worker": found, "workers": same, "state_of": state_of, "product": product_of(found),
            "tasks": {worker_id: page for worker_id, (page, _) in tasks.items()}, "tasks_max": TASKS_MAX,
        },
    )  # fmt: skip


def _device(worker: Worker) -> tuple[str, str]:
    return worker.host, worker.device.device_id


async def change(request: Request, pair: ClientPair) -> Redirect:
    form = await form_of(request)
    worker_id, admin = form.get("worker", ""), pair.admin
    action = action_of(form, "cordon", "drain", "uncordon", "forget")
    if action == "forget":
        await admin.forget_worker(worker_id)
        return Redirect("/", action="forgotten")
    if action == "cordon":
        await admin.cordon_worker(worker_id, reason=form.get("reason", ""))
    elif action == "drain":
        await admin.drain_worker(worker_id)
    else:
        await admin.uncordon_worker(worker_id)
    done = {"cordon": "cordoned", "drain": "draining", "uncordon": "uncordoned"}[action]
    return Redirect(f"{PATH}/{quote(worker_id, safe='')}", action=done)
