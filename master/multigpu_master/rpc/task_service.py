"""TaskService: submits, watches, lists and cancels tasks for clients."""

import asyncio
from typing import Any

import grpc
from multigpu.v1 import task_pb2, task_service_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.model import OutcomeState, Task
from multigpu_master.driver import DISK_FULL, NOT_DURABLE, Driver
from multigpu_master.errors import (
    CallError,
    ExhaustedError,
    InvalidArgumentError,
    JournalError,
    JournalFullError,
    NotFoundError,
    PayloadLostError,
)
from multigpu_master.journal.payload_files import InitialMetadata
from multigpu_master.journal.protocol import StoredOutcome
from multigpu_master.rpc import queries
from multigpu_master.rpc.intake import Answer, Intake, count_inputs, fill_stored
from multigpu_master.rpc.requests import check_count, make_cursor, parse_cursor
from multigpu_master.rpc.run_stream import CANCEL_TASKS_MAX, READ_BYTES, READ_OUTCOMES, RunStream
from multigpu_master.rpc.serve_stream import serve_stream
from multigpu_master.security.auth import caller_queues
from multigpu_master.wire.outcomes import RunFrame
from multigpu_master.wire.tasks import fill_rejection, request_ids_of, spec_message
from multigpu_master.wire.times import seconds_of
from multigpu_master.write_buffer import DURABLE_S, set_result_of

WATCHES_MAX = 1000
REASON_CHARS_MAX = 1024
WAIT_MAX_S = 3600.0
# If a task is younger than this, Get waits until the journal has written it. Otherwise a restart of the master could
# lose a task that Get has returned.
YOUNG_S = 2.0
COMMIT_S = 1.0  # Get waits at most this time, or `wait` if longer, until the outcome of an ended task is written
FOREIGN_CURSOR = (
    "the cursor is from another journal, or newer than the backup from which this journal was restored; "
    "begin with an empty cursor, which gives the oldest stored outcome"
)
CURSOR_REMOVED = (
    "outcomes after this cursor have been removed; begin with an empty cursor, which gives the oldest stored outcome"
)


class TaskService:
    """See protos/multigpu/v1/task_service.proto."""

    def __init__(
        self,
        driver: Driver,
        intake: Intake,
        submit_tasks_max: int,
        stream_bytes_max: int,
        payload_metadata: InitialMetadata,
    ) -> None:
        self._payload_metadata = payload_metadata
        self._driver = driver
        self._intake = intake
        self._submit_tasks_max = submit_tasks_max
        self._stream_bytes_max = stream_bytes_max
        self._watches = 0

    async def Submit(self, request: Any, context: Any) -> task_service_pb2.SubmitResponse:
        check_count(
            count_inputs(request.batches, self._submit_tasks_max),
            self._submit_tasks_max,
            "tasks in one Submit",
            "send several",
        )
        await self._driver.write_buffer.wait_for_backlog()
        loop = asyncio.get_running_loop()
        response = task_service_pb2.SubmitResponse()
        submitted: list[tuple[list[str], list[Answer], asyncio.Future[JournalError | None]]] = []
        async for batch in queries.pausing(request.batches):
            durable: asyncio.Future[JournalError | None] = loop.create_future()
            request_ids = request_ids_of(batch)
            answers = self._intake.submit(batch, request_ids, 0, set_result_of(durable))
            submitted.append((request_ids, answers, durable))
        for request_ids, answers, durable in submitted:
            error = await durable
            for answer, request_id in zip(answers, request_ids, strict=True):
                result = response.results.add()
                # If the journal can't write the new tasks, a known task that the batch joined goes on. But if the known
                # task has ended, its outcome may not be written either: do not report it as accepted.
                lost = isinstance(answer, Task) and error is not None and answer.outcome is not None
                if lost or (isinstance(answer, Task) and not answer.task_id):
                    answer = DISK_FULL  # noqa: PLW2901  its write failed
                if isinstance(answer, ev.Rejection):
                    fill_rejection(result.rejection, answer, request_id)
                else:
                    result.task_id = answer.task_id
        return response

    async def Run(self, context: Any) -> None:
        stream, outbox = self._driver.open_stream()
        try:
            # The shared directory holds the payloads of all queues.
            if self._payload_metadata and caller_queues() is None:
                await context.send_initial_metadata(self._payload_metadata)
            run = RunStream(self._driver, self._intake, stream, outbox, self._stream_bytes_max)
            await serve_stream(context, outbox, run.on_message, RunFrame.serialize)
        finally:
            self._driver.close_stream(stream)

    async def Watch(self, request: Any, context: Any) -> None:
        if self._watches >= WATCHES_MAX:
            raise ExhaustedError(f"{WATCHES_MAX} clients watch already; share one of their streams, or try again later")
        self._watches += 1
        try:
            await self._watch(request, context)
        finally:
            self._watches -= 1

    async def _watch(self, request: Any, context: Any) -> None:
        journal, changes, incarnations = self._driver.journal, self._driver.changes, self._driver.incarnations
        queues = caller_queues()
        if request.from_now and request.cursor:
            raise InvalidArgumentError("from_now goes with an empty cursor only")
        incarnation, after = parse_cursor(request.cursor)
        oldest = await asyncio.to_thread(journal.oldest_cursor)
        last = await asyncio.to_thread(journal.newest_cursor)
        if request.from_now:
            after = last
        elif not request.cursor:
            after = oldest - 1
        elif after >= incarnations.cursors_end(incarnation) or after > last:
            raise CallError(FOREIGN_CURSOR, grpc.StatusCode.OUT_OF_RANGE)
        elif after < journal.removed_cursor:
            raise CallError(CURSOR_REMOVED, grpc.StatusCode.OUT_OF_RANGE)
        removed_before = journal.removed_cursor  # earlier removals do not end this Watch
        await context.write(task_service_pb2.WatchResponse(cursor=make_cursor(incarnations.current, after)))
        while True:
            committed = changes.commits
            rows = await asyncio.to_thread(journal.read_outcomes, after, READ_OUTCOMES, READ_BYTES)
            if after < journal.removed_cursor > removed_before:  # the caller reads more slowly than outcomes expire
                raise CallError(CURSOR_REMOVED, grpc.StatusCode.OUT_OF_RANGE)
            if not rows:
                await committed.wait()
                continue
            after = rows[-1].cursor
            response = task_service_pb2.WatchResponse(cursor=make_cursor(incarnations.current, after))
            for row in rows:
                if queues is not None and row.queue not in queues:
                    continue
                if request.queue in ("", row.queue) and request.kind in ("", row.kind):
                    fill_stored(response.outcomes.add(), row)
            await context.write(response)

    async def Get(self, request: Any, context: Any) -> task_service_pb2.GetResponse:
        if not (request.task_id or request.request_id):
            raise InvalidArgumentError("the request names no task; give its task_id or its request_id")
        found = await self._find(request)
        if not queries.may_see(found):
            found = None
        if isinstance(found, Task) and found.outcome is None and self._driver.now() - found.submit_s < YOUNG_S:
            await self._driver.write_buffer.wait_written(found)
            if not found.task_id:  # the journal has rejected it
                found = None
            elif found.spec.durable and self._driver.core.ledger.tasks.get(found.task_id) is not found:
                found = await self._find(task_service_pb2.GetRequest(task_id=found.task_id))  # the task has ended
        if isinstance(found, Task) and found.outcome_if_ephemeral is None:
            wait_s = min(seconds_of(request.wait), WAIT_MAX_S) if request.HasField("wait") else 0.0
            task_id, durable = found.task_id, found.spec.durable
            if found.outcome is not None:  # not final yet, but its client may have got the outcome from Run
                wait_s = max(wait_s, COMMIT_S)
            await self._driver.wait_settled(task_id, max(0.0, wait_s))
            if durable:  # by task_id: after a withdrawal, a newer task may have the request_id
                found = await self._find(task_service_pb2.GetRequest(task_id=task_id))
        if found is None:
            name = request.request_id or request.task_id
            raise NotFoundError(f"no task {name!r}: {queries.FORGOTTEN}")
        if isinstance(found, StoredOutcome):
            message = queries.stored_task(found, whole=True)
            if found.state == OutcomeState.DEAD_LETTERED:
                await self._fill_dead_letter(message)
        else:
            message = queries.core_task(self._driver, found, whole=True, rank=request.rank)
        return task_service_pb2.GetResponse(task=message)

    async def _fill_dead_letter(self, message: task_pb2.Task) -> None:
        """Fills in the fields that only a dead letter has, unless it was deleted. If its payload is lost, its spec and
        its size are missing.
        """
        journal = self._driver.journal
        try:
            letters = await asyncio.to_thread(journal.get_dead_letters, [message.task_id])
        except PayloadLostError:
            message.dead_letter = True
            return
        for letter in letters:
            message.spec.CopyFrom(spec_message(self._driver.specs.restore(letter.spec)))
            message.payload_bytes = len(letter.payload)
            message.dead_letter = True

    async def _find(self, request: Any) -> Task | StoredOutcome | None:
        core, journal = self._driver.core, self._driver.journal

        def stored() -> StoredOutcome | None:
            if request.WhichOneof("key") == "task_id":
                return journal.get_outcome(request.task_id)
            settled = journal.find_requests([request.request_id]).get(request.request_id)
            return None if settled is None else journal.read_outcomes_of([settled], 0)[0]

        by_request = request.WhichOneof("key") == "request_id"
        live = core.ledger.requests.get(request.request_id) if by_request else core.ledger.tasks.get(request.task_id)
        return live or await asyncio.to_thread(stored)

    async def List(self, request: Any, context: Any) -> task_service_pb2.ListResponse:
        return await queries.list_tasks(self._driver, request)

    async def Count(self, request: Any, context: Any) -> task_service_pb2.CountResponse:
        return await queries.count_tasks(self._driver, request.filter)

    async def Cancel(self, request: Any, context: Any) -> task_service_pb2.CancelResponse:
        count = len(request.task_ids) + len(request.request_ids)
        check_count(count, CANCEL_TASKS_MAX, "tasks in one Cancel", "send several")
        core = self._driver.core
        response = task_service_pb2.CancelResponse()
        live: dict[int, tuple[str, Task]] = {}  # unsettled tasks by task_id, with their names in the request
        settled: list[Task] = []
        not_in_core: list[tuple[str, int | str]] = []  # (name in the request, task_id or request_id)
        for name, task, key in [(str(i), core.ledger.tasks.get(i), i) for i in request.task_ids] + [
            (r, core.ledger.requests.get(r), r) for r in request.request_ids
        ]:
            if not queries.may_see(task):
                task = None  # noqa: PLW2901  reported as unknown, in the order of the request
            if task is None:
                not_in_core.append((name, key))
            elif task.outcome is None:
                live[task.task_id] = name, task
            else:
                response.settled_task_ids.append(task.task_id)
                settled.append(task)
        try:
            cancelled = await self._driver.cancel(
                [task for _, task in live.values()], request.reason[:REASON_CHARS_MAX], withdrawn=request.withdraw
            )
        except JournalFullError as error:
            raise ExhaustedError(str(error)) from None
        response.cancelled_task_ids.extend(task.task_id for task in cancelled)
        for task in cancelled:
            del live[task.task_id]
        for name, task in live.values():
            if task.outcome is not None:
                response.settled_task_ids.append(task.task_id)
                settled.append(task)
            else:  # the journal has rejected the task meanwhile
                response.unknown.append(name)
        settled += cancelled
        if not await self._driver.wait_cancellations(settled, DURABLE_S):
            raise ExhaustedError(NOT_DURABLE)
        if not_in_core:
            # to_thread copies the contextvars, from which may_see gets the caller.
            stored = await asyncio.to_thread(self._stored_task_ids, [key for _, key in not_in_core])
            response.settled_task_ids.extend(stored[key] for _, key in not_in_core if key in stored)
            response.unknown.extend(name for name, key in not_in_core if key not in stored)
        return response

    def _stored_task_ids(self, keys: list[int | str]) -> dict[int | str, int]:
        """Returns by key (task_id or request_id) the task_ids of the settled tasks that the caller may see."""
        journal = self._driver.journal
        found: dict[int | str, int] = {
            r: s.task_id
            for r, s in journal.find_requests([k for k in keys if isinstance(k, str)]).items()
            if queries.may_see(s)
        }
        by_id = journal.find_tasks([k for k in keys if isinstance(k, int)])
        found.update((k, k) for k, s in by_id.items() if queries.may_see(s))
        return found
