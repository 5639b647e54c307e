"""Queries for tasks. The core holds unsettled tasks, settled durable tasks until the journal has reported the commit of
their outcomes, and settled ephemeral tasks for their result_ttl. The journal holds the outcomes of durable tasks. If
both hold a task, its state in the core is valid.
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

# Why a task is not found: the end of an error message.
FORGOTTEN = "it was never submitted, or the master has forgotten it since"
TASK_IDS_END = 1 << 62  # above all task_ids
# A loop over tasks or batches holds the event loop for at most this time.
SLICE_S = 0.005


def batched(items: list[T], size: int) -> Iterator[list[T]]:
    """Splits the items into lists of at most `size` items."""
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
    """Returns the submit time of the oldest waiting task of each queue, in seconds since 1970. Looks only at the first
    task of each resource class. A task that pauses before its next attempt does not count. Other calls run meanwhile.
    """
    oldest: dict[str, float] = {}
    async for resource_class in pausing(list(core.ledger.classes.by_key.values())):
        name = resource_class.queue.name
        if name in queues and (head := resource_class.head()) is not None:
            oldest[name] = min(oldest.get(name, math.inf), head.submit_s)
    return oldest


def may_see(task: Task | SettledTask | StoredOutcome | None) -> bool:
    """Whether the current caller may see a task. If not, the call must answer as if the task did not exist."""
    queues = caller_queues()
    if queues is None or task is None:
        return True
    return (task.spec.queue if isinstance(task, Task) else task.queue) in queues


def core_task(driver: Driver, task: Task, *, whole: bool, rank: int = 0) -> task_pb2.Task:
    """Returns a task of the core as clients see it. `whole`: with result, partial outputs and log. `rank`: while the
    task is unsettled, the log is that of this rank of its gang.
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
            _clear_large_fields(message.outcome)
    return message


def _log_of(task: Task, rank: int) -> str:
    """Returns the log of a rank other than 0 in the current attempt; "" if there is no such rank."""
    gang = task.lease.gang if task.lease is not None else None
    return gang.leases[rank].log if gang is not None and rank < len(gang.leases) else ""


def fill_from_core(message: task_pb2.Outcome, body: bytes | LargeBody) -> None:
    """Parses `body`, the outcome of a settled task of the core. If the result's file is lost, the state becomes
    RESULT_MISSING. Raises MemoryError or OSError if the result cannot be read now.
    """
    try:
        whole = body if isinstance(body, bytes) else body.whole()
    except OSError as error:
        assert isinstance(body, LargeBody), "only large bodies are read from files"
        whole = outcome_without_result(body, error)
    parse_outcome(message, whole)


def stored_task(stored: StoredOutcome, *, whole: bool) -> task_pb2.Task:
    """Returns a task of the journal as clients see it, without the fields that only the core knew."""
    message = task_pb2.Task(task_id=stored.task_id, request_id=stored.request_id, state=task_pb2.TASK_STATE_SETTLED)
    message.spec.kind, message.spec.model, message.spec.queue = stored.kind, stored.model, stored.queue
    set_time(message.submit_time, stored.submit_time_s)
    fill_stored(message.outcome, stored)
    message.attempts = message.outcome.attempts
    message.worker_id = message.outcome.worker_id
    if not whole:
        _clear_large_fields(message.outcome)
        message.outcome.state = stored.state  # type: ignore[assignment]  # lists do not check the body's CRC
    return message


def listed_tasks(rows: Sequence[StoredOutcome]) -> list[task_pb2.Task]:
    """Returns tasks of the journal without results. Call it on a thread, because the bodies may be large."""
    return [stored_task(row, whole=False) for row in rows]


def ended_early(rows: Sequence[StoredOutcome]) -> bool:
    """Whether the journal ended this list at its size limit, so that more tasks may follow."""
    return sum([len(row.body or b"") for row in rows]) >= reads.LIST_BYTES


def _clear_large_fields(outcome: task_pb2.Outcome) -> None:
    outcome.ClearField("result")
    outcome.ClearField("partials")
    outcome.ClearField("partial_content_types")
    outcome.ClearField("log")
    if outcome.state == task_pb2.OUTCOME_STATE_RESULT_MISSING:  # without results, do not report a lost result
        outcome.state = task_pb2.OUTCOME_STATE_SUCCEEDED
        outcome.ClearField("error")


class Filter:
    """A TaskFilter message, parsed for the core and the journal."""

    def __init__(self, m: Any) -> None:
        states = _known_values(m.states, task_pb2.TaskState)
        if m.outcomes:
            states = {task_pb2.TASK_STATE_SETTLED}
        self.outcomes = _known_values(m.outcomes, task_pb2.OutcomeState)
        states = states or {task_pb2.TASK_STATE_QUEUED, task_pb2.TASK_STATE_LEASED, task_pb2.TASK_STATE_SETTLED}
        self.live_states = states - {task_pb2.TASK_STATE_SETTLED}
        self.retrying = m.retrying
        if m.retrying:
            self.live_states &= {task_pb2.TASK_STATE_QUEUED}
        self.settled = not m.retrying and task_pb2.TASK_STATE_SETTLED in states
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
    """Returns the workers that hold leases of the task, or else the worker in its outcome."""
    lease, outcome = task.lease, task.outcome
    if lease is None:
        return [] if outcome is None else [outcome.worker_id]
    return [each.worker.worker_id for each in (lease.gang.leases if lease.gang is not None else (lease,))]


async def list_tasks(driver: Driver, request: Any) -> task_service_pb2.ListResponse:
    """Returns a page of tasks."""
    size = read_page_size(request.page_size)
    edge = parse_page_token(request.page_token, "page_token")  # the last task_id of the previous page, or 0
    task_filter, table, oldest_first = Filter(request.filter), driver.core.ledger.tasks, request.oldest_first
    found: dict[int, Callable[[], task_pb2.Task]] = {}
    cut = False
    blocks = table.blocks_after(edge) if oldest_first else table.blocks_before(edge or TASK_IDS_END)
    async for block in pausing(blocks):
        for task in filter(task_filter.matches, block):
            found[task.task_id] = lambda t=task: core_task(driver, t, whole=False)  # type: ignore[misc]
        if len(found) > size:
            break
    if task_filter.settled:
        rows = await asyncio.to_thread(
            driver.journal.list_outcomes, task_filter.for_journal(), edge, size + 1, oldest_first=oldest_first
        )
        for stored in await asyncio.to_thread(listed_tasks, rows):
            found.setdefault(stored.task_id, lambda m=stored: m)  # type: ignore[misc]
        if cut := ended_early(rows):  # leave tasks beyond the journal's last row to the next page
            last = rows[-1].task_id
            found = {i: make for i, make in found.items() if (i <= last if oldest_first else i >= last)}
    ids = sorted(found, reverse=not oldest_first)
    tasks = [found[i]() async for i in pausing(ids[:size])]
    response = task_service_pb2.ListResponse(tasks=[t for t in tasks if t.task_id])  # 0: the journal has rejected it
    if cut or len(ids) > size:
        response.next_page_token = make_page_token(ids[:size][-1])
    return response


def _known_values(values: Sequence[int], enum: Any) -> set[int]:
    """Returns the values that the enum has, or {-1}, which matches nothing, if it has none of them. A request
    may have half a million values.
    """
    return set(enum.values()).intersection(values) or ({-1} if values else set())


async def count_tasks(driver: Driver, m: Any) -> task_service_pb2.CountResponse:
    """Returns the number of matching tasks by state. Counts the tasks in the core, and the journal's outcomes up to the
    last one whose task the core had forgotten when the call began: so each task counts once. (Exception: a dead letter
    whose requeue is not written yet counts twice.)
    """
    task_filter = Filter(m)
    response = task_service_pb2.CountResponse()
    counts = dict.fromkeys(OutcomeState, 0)
    core = driver.core
    core_has_settled = len(core.ledger.tasks) > core.ledger.unsettled
    cursor_max = driver.write_buffer.last_cursor
    if not m.ListFields() and task_filter.queues is None and not core_has_settled:
        response.queued, response.leased = core.ledger.unsettled - core.ledger.leased, core.ledger.leased
    elif task_filter.live_states or core_has_settled:
        async for block in pausing(core.ledger.tasks.blocks()):
            for task in block:
                if not task.task_id or not task_filter.matches(task):  # 0: rejected by the journal meanwhile
                    continue
                if task.outcome_if_ephemeral is not None:
                    counts[task.outcome_if_ephemeral.state] += 1
                elif task_state(task) == task_pb2.TASK_STATE_LEASED:
                    response.leased += 1
                else:
                    response.queued += 1
    if task_filter.settled and cursor_max:
        counted = await asyncio.to_thread(driver.journal.count_outcomes, task_filter.for_journal(cursor_max))
        for state, n in counted.items():
            counts[OutcomeState(state)] += n
    for counted_state, n in counts.items():
        setattr(response, counted_state.name.lower(), n)
    return response


def rss_bytes() -> int:
    """Resident memory of this process (proc(5): the second field of statm, in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
