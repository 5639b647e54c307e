"""AdminService's methods for dead letters. A call for a queue handles one page of the queue's dead letters."""

import asyncio
from typing import Any

import grpc
from multigpu.v1 import admin_service_pb2 as pb

from multigpu_master.core import events as ev
from multigpu_master.core.admission import FAILED_PRECONDITION
from multigpu_master.core.model import Task
from multigpu_master.driver import Driver
from multigpu_master.errors import CallError, JournalDamagedError, PayloadLostError
from multigpu_master.rpc import queries
from multigpu_master.rpc.admin.saving import save
from multigpu_master.rpc.requests import check_count, make_page_token, parse_page_token, read_page_size
from multigpu_master.security.auth import caller_queues
from multigpu_master.write_buffer import DURABLE_S

LETTERS_MAX = 10_000  # dead letters that one request can name
QUEUE_LETTERS_MAX = 1000  # dead letters in one page of a queue
BATCH = 16  # dead letters requeued together; few, because all their payloads are in memory at that time
REPLACED = (
    "task {task_id} has the same request_id {request_id!r} and was submitted later, so this task must not run again; "
    "delete this dead letter"
)
# gRPC's status codes by number, because Rejection.code is a number.
STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class DeadLetterCalls:
    """See protos/multigpu/v1/admin_service.proto."""

    _driver: Driver
    _busy_dead_letters: set[int]  # dead letters that a call is requeueing or deleting

    async def ListDeadLetters(self, request: Any, _context: Any) -> pb.ListDeadLettersResponse:
        size = read_page_size(request.page_size)
        before = parse_page_token(request.page_token, "page_token")
        rows = await asyncio.to_thread(
            self._driver.journal.list_dead_letters,
            queue=request.queue, before_task_id=before, limit=size + 1, queues=caller_queues(),
        )  # fmt: skip
        tasks = await asyncio.to_thread(queries.listed_tasks, rows[:size])
        response = pb.ListDeadLettersResponse(tasks=tasks)
        if len(rows) > size or queries.ended_early(rows):
            response.next_page_token = make_page_token(tasks[-1].task_id)
        return response

    async def RequeueDeadLetters(self, request: Any, _context: Any) -> pb.RequeueDeadLettersResponse:
        ids, token = await self._requested_ids(request)
        response = pb.RequeueDeadLettersResponse(next_page_token=token)
        rejected: list[tuple[int, ev.Rejection]] = []
        for batch in queries.batched(ids, BATCH):
            # A dead letter stays in the journal until its task is written: another call must not requeue it meanwhile.
            # The response lists the dead letters that another call handles now as unknown.
            claimed = [task_id for task_id in batch if task_id not in self._busy_dead_letters]
            self._busy_dead_letters.update(claimed)
            try:
                # Wait for all requeues, even if one fails: only then may other calls handle these dead letters. (If the
                # client cancels this call, the call runs to its end: audit.py.)
                answers = await asyncio.gather(*map(self._requeue, claimed), return_exceptions=True)
            finally:
                self._busy_dead_letters.difference_update(claimed)
            answer_of = dict(zip(claimed, answers, strict=True))
            response.unknown_task_ids.extend(task_id for task_id in batch if answer_of.get(task_id) is None)
            response.task_ids.extend(answer.task_id for answer in answers if isinstance(answer, Task))
            for task_id, answer in answer_of.items():
                if isinstance(answer, BaseException):
                    raise answer
                if isinstance(answer, ev.Rejection):
                    rejected.append((task_id, answer))
        if rejected:
            task_id, first = rejected[0]
            raise CallError(
                f"requeued {len(response.task_ids)} of {len(ids)} dead letters; {len(rejected)} were rejected, and "
                f"remain dead letters. The first of these is {task_id}: {first.message}",
                STATUS_CODES[first.code],
            )
        return response

    async def DeleteDeadLetters(self, request: Any, _context: Any) -> pb.DeleteDeadLettersResponse:
        ids, token = await self._requested_ids(request)
        claimed = {task_id for task_id in ids if task_id not in self._busy_dead_letters}
        self._busy_dead_letters |= claimed
        try:
            existing = await asyncio.to_thread(self._driver.journal.existing_dead_letters, claimed)
            if existing:
                await save(self._driver, {}, sorted(existing))
        finally:
            self._busy_dead_letters -= claimed
        unknown = [task_id for task_id in ids if task_id not in existing]
        return pb.DeleteDeadLettersResponse(deleted=len(existing), unknown_task_ids=unknown, next_page_token=token)

    async def _requested_ids(self, request: Any) -> tuple[list[int], str]:
        """Returns the ids in the request, or else those of one page of the queue; and the next page's token, or ""."""
        check_count(len(request.task_ids), LETTERS_MAX, "dead letters in one call", "make several")
        if request.task_ids or not request.queue:
            return list(dict.fromkeys(request.task_ids)), ""
        before = parse_page_token(request.page_token, "page_token")
        found = await asyncio.to_thread(
            self._driver.journal.list_dead_letter_ids,
            queue=request.queue, before_task_id=before, limit=QUEUE_LETTERS_MAX + 1,
        )  # fmt: skip
        ids = found[:QUEUE_LETTERS_MAX]
        return ids, make_page_token(ids[-1]) if len(found) > len(ids) else ""

    async def _requeue(self, task_id: int) -> Task | ev.Rejection | None:
        """Submits the task of a dead letter again; the journal deletes the dead letter in the same transaction. Returns
        None if there is no such dead letter.
        """
        try:
            letters = await asyncio.to_thread(self._driver.journal.get_dead_letters, [task_id])
        except (PayloadLostError, JournalDamagedError) as error:
            return ev.Rejection(FAILED_PRECONDITION, str(error))
        if not letters:
            return None
        (letter,) = letters
        # A query of the journal finds a new dead letter before the core handles its commit. Wait until the core has
        # removed the task.
        driver, request_id = self._driver, letter.request_id
        while letter.task_id in driver.core.ledger.tasks:
            await driver.wait_settled(letter.task_id, DURABLE_S)
        live = driver.core.ledger.requests.get(request_id)
        if live is not None and live.outcome is not None and live.outcome.withdrawn:
            live = None
        newest = live or driver.find_settled([request_id]).get(request_id)
        if newest is not None and newest.task_id != letter.task_id:
            return ev.Rejection(FAILED_PRECONDITION, REPLACED.format(request_id=request_id, task_id=newest.task_id))
        spec = driver.specs.restore(letter.spec)
        task = Task(spec, request_id, letter.payload, letter.partition_key, letter.units)
        task.task_id = letter.task_id
        return await driver.resubmit_dead_letter(spec, task, replaces=letter.task_id)
