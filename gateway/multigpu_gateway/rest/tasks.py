"""/v1/tasks: submit, get, list and cancel tasks, and follow one."""

import asyncio
from typing import Any

import msgspec
from multigpu import errors
from multigpu.options import Input
from multigpu.outcome import TaskName
from multigpu.v1 import task_pb2

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import BAD_REQUEST, NOT_FOUND, HttpError, http_error, not_allowed
from multigpu_gateway.http import EVENT_STREAM, Request, decode
from multigpu_gateway.rest.errors import error_body, rest_error
from multigpu_gateway.rest.requests import (
    CancelQuery,
    GetQuery,
    ListQuery,
    NoQuery,
    SubmitRequest,
    TaskRequest,
    query_of,
    wrong,
)
from multigpu_gateway.rest.streams import LAST_EVENT_ID, task_events
from multigpu_gateway.rest.values import as_dict
from multigpu_gateway.routes import Operation, Paths
from multigpu_gateway.tasks import IDEMPOTENCY_KEY, PRIORITY, QUEUE, TaskSettings

PATH = "/v1/tasks"
BY_REQUEST_ID, EVENTS = "by-request-id/", "/events"
ACCEPTED = 202
# Calls of submit_many for one request that run at once. Each submits the tasks that have the same options.
CALLS_MAX = 16
_task = msgspec.json.Decoder(TaskRequest)
_tasks = msgspec.json.Decoder(SubmitRequest)
_shape = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def submit(request: Request, pair: ClientPair) -> None:
    """Submits a task, or many. They run even if the client disconnects before the response."""
    if request.path != PATH:
        raise not_allowed(request.path, "POST", "GET", "DELETE")
    settings = TaskSettings(request, "")
    defaults: dict[str, Any] = {
        name: settings.options[name] for name in ("queue", "priority") if name in settings.options
    }
    body = await request.body()
    if "tasks" not in decode(_shape, body):
        (answer,) = await _submit([decode(_task, body)], settings.key, defaults, pair)
        if isinstance(answer, Exception):
            raise answer
        await request.respond(ACCEPTED, msgspec.json.encode(answer))
        return
    parsed: list[TaskRequest | HttpError] = []
    for raw in decode(_tasks, body).tasks:
        try:
            parsed.append(decode(_task, bytes(raw)))
        except HttpError as error:
            parsed.append(error)
    answers = await _submit(parsed, settings.key, defaults, pair)
    results = [error_body(each) if isinstance(each, HttpError) else each for each in answers]
    await request.respond(ACCEPTED, msgspec.json.encode({"results": results}))


async def _submit(
    parsed: list[TaskRequest | HttpError], key: str, defaults: dict[str, Any], pair: ClientPair
) -> list[dict[str, str] | HttpError]:
    """Submits tasks, and returns the ids or the error of each. `key`: if a task has no request_id, that of task 0 is
    KEY and that of task N is KEY:N.
    """
    answers: list[Any] = list(parsed)
    groups: dict[str, tuple[dict[str, Any], list[tuple[int, Input]]]] = {}
    for at, each in enumerate(parsed):
        if isinstance(each, HttpError):
            continue
        request_id = each.request_id or (f"{key}:{at}" if key and at else key) or None
        own = {"request_id": request_id, "partition_key": each.partition_key, "units": each.units}
        try:
            item = Input(payload=each.payload_value(), **own)  # type: ignore[arg-type]
        except HttpError as error:
            answers[at] = error
            continue
        options = {"kind": each.kind, **defaults, **each.options}
        groups.setdefault(repr(sorted(options.items())), (options, []))[1].append((at, item))
    limit = asyncio.Semaphore(CALLS_MAX)

    async def send(options: dict[str, Any], items: list[tuple[int, Input]]) -> None:
        async with limit:
            try:
                payloads = [item for _, item in items]
                found: list[Any] = list(await pair.client.submit_many(payloads=payloads, **options))
            except errors.RejectedError as error:  # the client rejected a task, and did not send those after it
                found = list(error.submitted)
                found += [error] * (len(items) - len(found))
        for (at, _), handle in zip(items, found, strict=True):
            if isinstance(handle, errors.RejectedError):
                answers[at] = rest_error(handle)
            else:
                answers[at] = {"task_id": str(handle.id), "request_id": handle.request_id}

    # A failed call does not cancel the others: that would withdraw their tasks, which the client's retry must find.
    for failure in await asyncio.gather(*(send(*group) for group in groups.values()), return_exceptions=True):
        if failure is not None:
            raise failure
    return answers


async def get(request: Request, pair: ClientPair) -> None:
    """Responds with a task, a list of tasks, or the events of a task."""
    if request.path == PATH:
        await list_tasks(request, pair)
        return
    name, events = _named(request)
    if events:
        query_of(request, NoQuery)
        await task_events(request, pair, name)
    else:
        await find(request, pair, name)


async def find(request: Request, pair: ClientPair, name: TaskName) -> None:
    """A task: its state, progress, and outcome with result. `wait`: seconds to wait for its end."""
    query = query_of(request, GetQuery)
    async with request.while_connected():
        found = await pair.client.get(name, wait_s=query.wait)
    await request.respond(200, msgspec.json.encode(as_dict(found)))


async def cancel(request: Request, pair: ClientPair) -> None:
    """Cancels a task. A task that has ended stays as it is."""
    if request.path == PATH:
        raise not_allowed(PATH, "DELETE", "GET", "POST")
    name, events = _named(request)
    if events:
        raise not_allowed(request.path, "DELETE", "GET")
    reason = query_of(request, CancelQuery).reason
    found = await pair.client.cancel(name, reason=reason)
    if found.unknown:
        raise HttpError(NOT_FOUND, f"the master knows no task {name}")
    await request.respond(200, msgspec.json.encode({"cancelled": bool(found.cancelled_task_ids)}))


async def list_tasks(request: Request, pair: ClientPair) -> None:
    """Tasks without results, the newest first."""
    query = query_of(request, ListQuery)
    filters = query.filters()
    async with request.while_connected():
        try:
            tasks, token = await pair.client.list_page(
                page_size=query.limit, page_token=query.page_token, oldest_first=query.oldest_first, **filters
            )
        except errors.RejectedError as error:
            failure = http_error(error)
            if failure.status == BAD_REQUEST and "page_token" in failure.message:
                failure.param = "page_token"
            raise failure from error
    answer = {"tasks": [as_dict(task) for task in tasks], "next_page_token": token}
    await request.respond(200, msgspec.json.encode(answer))


def _named(request: Request) -> tuple[TaskName, bool]:
    """Returns the task in the path, and whether the path ends with EVENTS. Raises HttpError if the path has no task."""
    text = request.path.removeprefix(f"{PATH}/")
    events = text.endswith(EVENTS)
    text = text.removesuffix(EVENTS)
    if text.startswith(BY_REQUEST_ID) and text != BY_REQUEST_ID:
        return text.removeprefix(BY_REQUEST_ID), events
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        raise wrong("task_id", f"{text!r} is no task_id; {PATH}/{BY_REQUEST_ID}NAME takes a request_id")
    return int(text), events


_one: dict[str, Operation] = {
    "GET": Operation(find, query=GetQuery, response=task_pb2.Task),
    "DELETE": Operation(cancel, query=CancelQuery, response={"cancelled": bool}),
}
_events = {"GET": Operation(task_events, content=EVENT_STREAM, headers=(LAST_EVENT_ID,))}
_submitted = {"task_id": str, "request_id": str}
PATHS: Paths = {
    PATH: {
        "GET": Operation(list_tasks, query=ListQuery, response={"tasks": [task_pb2.Task], "next_page_token": str}),
        "POST": Operation(
            submit, body=(TaskRequest, SubmitRequest), status=ACCEPTED, headers=(IDEMPOTENCY_KEY, QUEUE, PRIORITY),
            response=(_submitted, {"results": [dict[str, Any]]}),
        ),
    },
    f"{PATH}/{{task_id}}": _one,
    f"{PATH}/{BY_REQUEST_ID}{{request_id}}": _one,
    f"{PATH}/{{task_id}}{EVENTS}": _events,
    f"{PATH}/{BY_REQUEST_ID}{{request_id}}{EVENTS}": _events,
}  # fmt: skip
