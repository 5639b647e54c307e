"""Looking at tasks: live ones in the core, settled ones in the journal, both in one list."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from multigpu.v1 import task_pb2, task_service_pb2

from multigpu_master import wire
from multigpu_master.core.model import OutcomeState, Task
from multigpu_master.driver import Driver
from multigpu_master.journal import StoredOutcome
from multigpu_master.rpc.intake import fill_stored
from multigpu_master.rpc.status import make_token, page_size_of, read_token
from multigpu_master.security.gate import caller_queues

FOREVER_S = 1e12
NEWEST = 2**62
# The filter of the journal that matches all.
EVERYTHING: dict[str, Any] = {
    "states": (),
    "queue": "",
    "kind": "",
    "model": "",
    "worker_id": "",
    "submitted_after_s": 0.0,
    "submitted_before_s": FOREVER_S,
}


def live_task(driver: Driver, task: Task, *, whole: bool) -> task_pb2.Task:
    """A task of the core as clients see it. `whole`: with result and partial outputs."""
    message = wire.task_message(task, driver.now())
    if task.outcome is not None:
        body = driver.outcomes.write(task)
        message.outcome.ParseFromString(body if isinstance(body, bytes) else body.whole())
        if not whole:
            _strip(message.outcome)
    return message


def stored_task(stored: StoredOutcome, *, whole: bool) -> task_pb2.Task:
    """A task of the journal as clients see it. What only the core knew of it is gone."""
    message = task_pb2.Task(task_id=stored.task_id, request_id=stored.request_id, state=task_pb2.TASK_STATE_SETTLED)
    message.spec.kind, message.spec.model, message.spec.queue = stored.kind, stored.model, stored.queue
    wire.set_time(message.submit_time, stored.submit_time_s)
    fill_stored(message.outcome, stored)
    message.attempts = message.outcome.attempts
    message.worker_id = message.outcome.worker_id
    if not whole:
        _strip(message.outcome)
    return message


def _strip(outcome: task_pb2.Outcome) -> None:
    outcome.ClearField("result")
    outcome.ClearField("partials")


class Filter:
    """A TaskFilter, asked of both places."""

    def __init__(self, m: Any) -> None:
        states = set(m.states)
        if m.outcomes:
            states = {task_pb2.TASK_STATE_SETTLED}
        self.outcomes = set(m.outcomes)
        self.live_states = states - {task_pb2.TASK_STATE_SETTLED} if states else {1, 2}
        self.settled = not states or task_pb2.TASK_STATE_SETTLED in states
        self.queues = caller_queues()
        self.queue, self.kind, self.model, self.worker_id = m.queue, m.kind, m.model, m.worker_id
        self.after_s = wire.seconds_of(m.submitted_after) if m.HasField("submitted_after") else 0.0
        self.before_s = wire.seconds_of(m.submitted_before) if m.HasField("submitted_before") else FOREVER_S

    def matches(self, task: Task) -> bool:
        """Whether a task of the core is asked for."""
        spec, outcome = task.spec, task.outcome
        if outcome is not None:
            if not self.settled or (self.outcomes and int(outcome.state) not in self.outcomes):
                return False
        else:
            state = task_pb2.TASK_STATE_LEASED if task.lease is not None else task_pb2.TASK_STATE_QUEUED
            if state not in self.live_states:
                return False
        if self.worker_id:
            worker_id = outcome.worker_id if outcome is not None else ""
            if task.lease is not None:
                worker_id = task.lease.worker.worker_id
            if worker_id != self.worker_id:
                return False
        return (
            self.queue in ("", spec.queue)
            and (self.queues is None or spec.queue in self.queues)
            and self.kind in ("", spec.kind)
            and self.model in ("", spec.model)
            and self.after_s <= task.submit_s < self.before_s
        )

    def for_journal(self) -> dict[str, Any]:
        """The same, as the journal takes it."""
        return {
            "states": sorted(self.outcomes),
            "queue": self.queue,
            "queues": self.queues,
            "kind": self.kind,
            "model": self.model,
            "worker_id": self.worker_id,
            "submitted_after_s": self.after_s,
            "submitted_before_s": self.before_s,
        }


async def list_tasks(driver: Driver, request: Any, context: Any) -> task_service_pb2.ListResponse:
    """A page of tasks, newest first."""
    size = await page_size_of(context, request.page_size)
    before = await read_token(context, request.page_token, "page_token") or NEWEST
    wanted = Filter(request.filter)
    found: dict[int, Callable[[], task_pb2.Task]] = {}
    for task in _newest_first(driver, before):
        if wanted.matches(task):
            found[task.task_id] = lambda t=task: live_task(driver, t, whole=False)  # type: ignore[misc]
            if len(found) > size:
                break
    if wanted.settled:
        rows = await asyncio.to_thread(
            driver.journal.list_outcomes, before_task_id=before, limit=size + 1, **wanted.for_journal()
        )
        for row in rows:
            found.setdefault(row.task_id, lambda r=row: stored_task(r, whole=False))  # type: ignore[misc]
    ids = sorted(found, reverse=True)
    response = task_service_pb2.ListResponse(tasks=[found[i]() for i in ids[:size]])
    if len(ids) > size:
        response.next_page_token = make_token(ids[size - 1])
    return response


def _newest_first(driver: Driver, before: int) -> Iterator[Task]:
    """The core's tasks below an id. They are kept in order of age: ids only grow."""
    for task_id, task in reversed(driver.core.tasks.items()):
        if task_id < before:
            yield task


async def count_tasks(driver: Driver, m: Any) -> task_service_pb2.CountResponse:
    """How many tasks match, by state."""
    wanted = Filter(m)
    response = task_service_pb2.CountResponse()
    counts = dict.fromkeys(OutcomeState, 0)
    core = driver.core
    if not m.ListFields() and wanted.queues is None:
        response.queued, response.leased = core.unsettled - core.leased, core.leased
        settled = [t for t in core.tasks.values() if t.outcome is not None] if len(core.tasks) > core.unsettled else []
    else:
        matching = [t for t in core.tasks.values() if wanted.matches(t)]
        response.leased = sum(1 for t in matching if t.lease is not None)
        settled = [t for t in matching if t.outcome is not None]
        response.queued = len(matching) - response.leased - len(settled)
    for task in settled:
        if not task.spec.durable:  # durable ones are about to be in the journal, or already are
            assert task.outcome is not None, "filtered above"
            counts[task.outcome.state] += 1
    if wanted.settled:
        for state, n in (await asyncio.to_thread(driver.journal.count_outcomes, **wanted.for_journal())).items():
            counts[OutcomeState(state)] += n
    response.succeeded = counts[OutcomeState.SUCCEEDED]
    response.failed = counts[OutcomeState.FAILED]
    response.cancelled = counts[OutcomeState.CANCELLED]
    response.expired = counts[OutcomeState.EXPIRED]
    response.dead_lettered = counts[OutcomeState.DEAD_LETTERED]
    return response
