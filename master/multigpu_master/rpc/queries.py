"""Queries for tasks. The core has unsettled tasks, settled durable tasks until it learns that their outcomes are on
disk, and settled ephemeral tasks for their result_ttl. The journal has the outcomes of durable tasks. If both have a
task, answers show the core's state of the task.
"""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from multigpu.v1 import task_pb2, task_service_pb2

from multigpu_master.core.model import OutcomeState, Task
from multigpu_master.core.scheduler import Core
from multigpu_master.driver import Driver
from multigpu_master.journal.protocol import LargeBody, OutcomeFilter, SettledTask, StoredOutcome
from multigpu_master.journal.sqlite import reads
from multigpu_master.rpc.intake import fill_stored, parse_outcome
from multigpu_master.rpc.requests import make_page_token, parse_page_token, read_page_size
from multigpu_master.security.auth import caller_queues
from multigpu_master.wire.payloads import outcome_without_result
from multigpu_master.wire.tasks import task_message, task_state
from multigpu_master.wire.times import seconds_of, set_time

T = TypeVar("T")

# The error message for a task that neither the core nor the journal has.
FORGOTTEN = "it was never submitted, or the master has forgotten it since"
TASK_IDS_END = 1 << 62  # above all task_ids
# A loop over tasks or batches holds the event loop for at most this time.
SLICE_S = 0.005


def batched(items: list[T], size: int) -> Iterator[list[T]]:
    """The items in lists of at most `size`."""
    return (items[at : at + size] for at in range(0, len(items), size))


async def pausing(items: Iterable[T]) -> AsyncIterator[T]:
    """Yields the items, and lets other calls run after each SLICE_S."""
    end_s = time.monotonic() + SLICE_S
    for item in items:
        if time.monotonic() > end_s:
            await asyncio.sleep(0)
            end_s = time.monotonic() + SLICE_S
        yield item


async def oldest_submits(core: Core, queues: Collection[str]) -> dict[str, float]:
    """Returns by queue the submit time of the oldest first task of its resource classes, in seconds since 1970. Tasks
    that pause before an attempt do not count. Other calls run meanwhile.
    """
    oldest: dict[str, float] = {}
    async for resource_class in pausing(list(core.ledger.classes.by_key.values())):
        name = resource_class.queue.name
        if name in queues and (head := resource_class.head()) is not None:
            oldest[name] = min(oldest.get(name, math.inf), head.submit_s)
    return oldest


def may_see(task: Task | SettledTask | StoredOutcome | None) -> bool:
    """Whether the running call may see a task. If not, the answer must be as if the task did not exist."""
    queues = caller_queues()
    if queues is None or task is None:
        return True
    return (task.spec.queue if isinstance(task, Task) else task.queue) in queues


def core_task(driver: Driver, task: Task, *, whole: bool, rank: int = 0) -> task_pb2.Task:
    """A task of the core as clients see it. `whole`: with result, partial outputs and log. `rank`: until a gang's task
    settles, the log is that of this rank.
    """
    message = task_message(task, driver.now())
    if whole and task.outcome_if_ephemeral is None:
        message.log = task.log if not rank else _log_of(task, rank)
    if task.outcome_if_ephemeral is not None:
        body = driver.outcomes.write(task)
        if not whole and isinstance(body, LargeBody):
            body = body.without_result()
        fill_from_core(message.outcome, body)
        if not whole:
            _strip(message.outcome)
    return message


def _log_of(task: Task, rank: int) -> str:
    """Returns the log of a rank other than 0 in the current attempt; "" if there is no such rank."""
    gang = task.lease.gang if task.lease is not None else None
    return gang.leases[rank].log if gang is not None and rank < len(gang.leases) else ""


def fill_from_core(message: task_pb2.Outcome, body: bytes | LargeBody) -> None:
    """Fills the Outcome of a settled task of the core. The state is RESULT_MISSING if the result's file is lost. Raises
    MemoryError or OSError if the result cannot be read now.
    """
    try:
        whole = body if isinstance(body, bytes) else body.whole()
    except OSError as error:
        assert isinstance(body, LargeBody), "only large bodies are read from files"
        whole = outcome_without_result(body, error)
    parse_outcome(message, whole)


def stored_task(stored: StoredOutcome, *, whole: bool) -> task_pb2.Task:
    """A task of the journal as clients see it, without the fields that only the core knew."""
    message = task_pb2.Task(task_id=stored.task_id, request_id=stored.request_id, state=task_pb2.TASK_STATE_SETTLED)
    message.spec.kind, message.spec.model, message.spec.queue = stored.kind, stored.model, stored.queue
    set_time(message.submit_time, stored.submit_time_s)
    fill_stored(message.outcome, stored)
    message.attempts = message.outcome.attempts
    message.worker_id = message.outcome.worker_id
    if not whole:
        _strip(message.outcome)
        message.outcome.state = stored.state  # type: ignore[assignment]  # the body may be damaged: lists do not check its CRC
    return message


def listed_tasks(rows: Sequence[StoredOutcome]) -> list[task_pb2.Task]:
    """Tasks of the journal as lists show them. Called on a thread, because the bodies may be large."""
    return [stored_task(row, whole=False) for row in rows]


def ended_early(rows: Sequence[StoredOutcome]) -> bool:
    """Whether the journal has ended a list because of the size of its bodies. Then more tasks may match."""
    return sum([len(row.body or b"") for row in rows]) >= reads.LIST_BYTES


def _strip(outcome: task_pb2.Outcome) -> None:
    outcome.ClearField("result")
    outcome.ClearField("partials")
    outcome.ClearField("partial_content_types")
    outcome.ClearField("log")
    if outcome.state == task_pb2.OUTCOME_STATE_RESULT_MISSING:  # without results, a missing result is not shown either
        outcome.state = task_pb2.OUTCOME_STATE_SUCCEEDED
        outcome.ClearField("error")


class Filter:
    """A TaskFilter, for the core and the journal."""

    def __init__(self, m: Any) -> None:
        states = _known(m.states, task_pb2.TaskState)
        if m.outcomes:
            states = {task_pb2.TASK_STATE_SETTLED}
        self.outcomes = _known(m.outcomes, task_pb2.OutcomeState)
        self.live_states = (
            states - {task_pb2.TASK_STATE_SETTLED}
            if states
            else {task_pb2.TASK_STATE_QUEUED, task_pb2.TASK_STATE_LEASED}
        )
        self.retrying = m.retrying
        if m.retrying:
            self.live_states &= {task_pb2.TASK_STATE_QUEUED}
        self.settled = not m.retrying and (not states or task_pb2.TASK_STATE_SETTLED in states)
        self.queues = caller_queues()
        self.queue, self.kind, self.model, self.worker_id = m.queue, m.kind, m.model, m.worker_id
        self.after_s = seconds_of(m.submitted_after) if m.HasField("submitted_after") else 0.0
        self.before_s = seconds_of(m.submitted_before) if m.HasField("submitted_before") else math.inf

    def matches(self, task: Task) -> bool:
        """Whether a task of the core matches."""
        spec = task.spec
        if task.outcome_if_ephemeral is not None:
            if not self.settled or (self.outcomes and int(task.outcome_if_ephemeral.state) not in self.outcomes):
                return False
        elif task_state(task) not in self.live_states or (self.retrying and not task.attempts):
            return False
        if self.worker_id and self.worker_id not in _worker_ids(task):
            return False
        return (
            self.queue in ("", spec.queue)
            and (self.queues is None or spec.queue in self.queues)
            and self.kind in ("", spec.kind)
            and self.model in ("", spec.model)
            and self.after_s <= task.submit_s < self.before_s
        )

    def for_journal(self, cursor_max: int = 0) -> OutcomeFilter:
        """The filter for the journal's queries."""
        return OutcomeFilter(
            states=self.outcomes,
            **{name: getattr(self, name) for name in ("queue", "queues", "kind", "model", "worker_id")},
            submitted_after_s=self.after_s,
            submitted_before_s=self.before_s,
            cursor_max=cursor_max,
        )


def _worker_ids(task: Task) -> list[str]:
    """The workers to which the task is leased, or the worker that ended it."""
    lease, outcome = task.lease, task.outcome
    if lease is None:
        return [] if outcome is None else [outcome.worker_id]
    return [each.worker.worker_id for each in (lease.gang.leases if lease.gang is not None else (lease,))]


async def list_tasks(driver: Driver, request: Any) -> task_service_pb2.ListResponse:
    """A page of tasks."""
    size = read_page_size(request.page_size)
    edge = parse_page_token(request.page_token, "page_token")
    matching, table, oldest_first = Filter(request.filter), driver.core.ledger.tasks, request.oldest_first
    found: dict[int, Callable[[], task_pb2.Task]] = {}
    cut = False
    blocks = table.blocks_after(edge) if oldest_first else table.blocks_before(edge or TASK_IDS_END)
    async for block in pausing(blocks):
        for task in filter(matching.matches, block):
            found[task.task_id] = lambda t=task: core_task(driver, t, whole=False)  # type: ignore[misc]
        if len(found) > size:
            break
    if matching.settled:
        rows = await asyncio.to_thread(
            driver.journal.list_outcomes, matching.for_journal(), edge, size + 1, oldest_first=oldest_first
        )
        for stored in await asyncio.to_thread(listed_tasks, rows):
            found.setdefault(stored.task_id, lambda m=stored: m)  # type: ignore[misc]
        if cut := ended_early(rows):
            last = rows[-1].task_id
            found = {i: made for i, made in found.items() if (i <= last if oldest_first else i >= last)}
    ids = sorted(found, reverse=not oldest_first)
    tasks = [found[i]() async for i in pausing(ids[:size])]
    response = task_service_pb2.ListResponse(tasks=[t for t in tasks if t.task_id])  # 0: the journal has rejected it
    if cut or len(ids) > size:
        response.next_page_token = make_page_token(ids[:size][-1])
    return response


def _known(values: Sequence[int], enum: Any) -> set[int]:
    """Returns those `values` that the enum has. If it has none of them, returns {-1}, which matches no task. A request
    may have half a million values.
    """
    return set(enum.values()).intersection(values) or ({-1} if values else set())


async def count_tasks(driver: Driver, m: Any) -> task_service_pb2.CountResponse:
    """The number of matching tasks, by state. Each task is counted once: in the core, or in the journal up to the
    newest outcome whose task the core has forgotten. (A dead letter whose requeue is not written yet is counted in
    both.)
    """
    matching = Filter(m)
    response = task_service_pb2.CountResponse()
    counts = dict.fromkeys(OutcomeState, 0)
    core = driver.core
    core_has_settled = len(core.ledger.tasks) > core.ledger.unsettled
    cursor_max = driver.write_buffer.last_cursor
    if not m.ListFields() and matching.queues is None and not core_has_settled:
        response.queued, response.leased = core.ledger.unsettled - core.ledger.leased, core.ledger.leased
    elif matching.live_states or core_has_settled:
        async for block in pausing(core.ledger.tasks.blocks()):
            for task in block:
                if not task.task_id or not matching.matches(task):  # 0: the journal has rejected it meanwhile
                    continue
                if task.outcome_if_ephemeral is not None:
                    counts[task.outcome_if_ephemeral.state] += 1
                elif task_state(task) == task_pb2.TASK_STATE_LEASED:
                    response.leased += 1
                else:
                    response.queued += 1
    if matching.settled and cursor_max:
        counted = await asyncio.to_thread(driver.journal.count_outcomes, matching.for_journal(cursor_max))
        for state, n in counted.items():
            counts[OutcomeState(state)] += n
    for counted_state, n in counts.items():
        setattr(response, counted_state.name.lower(), n)
    return response


def rss_bytes() -> int:
    """Resident memory of this process (proc(5): the second field of statm, in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
