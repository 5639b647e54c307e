"""TaskService: the client's door."""

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import grpc
import structlog
from multigpu.v1 import task_pb2, task_service_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.model import OutcomeState, Task
from multigpu_master.driver import Driver, RunOutbox
from multigpu_master.journal.protocol import Journal, JournalError, JournalFullError, SettledTask, StoredOutcome
from multigpu_master.journal.write_buffer import DURABLE_S, tell
from multigpu_master.payloads import messages as wire_large
from multigpu_master.payloads.shared_files import WRONG_KEY, Offer
from multigpu_master.rpc import queries
from multigpu_master.rpc.intake import DISK_FULL, RESOURCE_EXHAUSTED, Answer, Intake, fill_stored, stored_body
from multigpu_master.rpc.registration import parse
from multigpu_master.rpc.status import count_of, make_cursor, read_cursor, reject
from multigpu_master.rpc.streams import serve_stream
from multigpu_master.security.auth import CALLER, caller_queues
from multigpu_master.wire import messages as wire

log = structlog.get_logger()

# What is read of the journal at a time: it waits in memory for as long as the client does not read.
WATCH_OUTCOMES, WATCH_BYTES = 1024, 256 << 10
WATCHES_MAX = 1000
# In one frame or call, which is served at a stretch: meanwhile nobody else is.
FRAME_TASKS_MAX, CANCEL_TASKS_MAX = 10_000, 10_000
WAIT_MAX_S = 3600.0
COMMIT_S = 1.0  # how long Get waits for an outcome that is on its way to the disk
NOTHING_TO_CANCEL = ev.Rejection(5, "no unsettled task has this request_id: it has ended, or was never submitted")
NOT_DURABLE = (
    "cancelled, but a restart of the master may bring the tasks back: its disk is full. Free space on it, and cancel "
    "once more"
)
CANCELLED_ELSEWHERE = ev.Rejection(1, "cancelled, or ended before; its outcome goes to the stream that submitted it")
CURSOR_ELSEWHERE = (
    "the cursor is of another journal, or of outcomes that an older copy of this one, restored since, does not have; "
    "begin with an empty cursor, which gives the oldest outcome that is there"
)
# How long an acceptance may wait for others, and for the outcome that makes it needless.
ACKNOWLEDGE_S = 0.05


class TaskService:
    """See protos/multigpu/v1/task_service.proto."""

    def __init__(
        self, driver: Driver, intake: Intake, submit_tasks_max: int, stream_bytes_max: int, offer: Offer
    ) -> None:
        self._offer = offer
        self._driver = driver
        self._intake = intake
        self._submit_tasks_max = submit_tasks_max
        self._stream_bytes_max = stream_bytes_max
        self._watches = 0

    async def Submit(self, request: Any, context: Any) -> task_service_pb2.SubmitResponse:
        await count_of(
            context, _size(request.batches, self._submit_tasks_max), self._submit_tasks_max, "tasks in one Submit"
        )
        await self._driver.journaling.room()
        loop = asyncio.get_running_loop()
        response = task_service_pb2.SubmitResponse()
        taken: list[tuple[list[str], list[Answer], asyncio.Future[JournalError | None]]] = []
        end_s = time.monotonic() + queries.SLICE_S
        for batch in request.batches:
            if time.monotonic() > end_s:
                end_s = await queries.pause()
            durable: asyncio.Future[JournalError | None] = loop.create_future()
            request_ids = wire.request_ids_of(batch)
            answers = self._intake.take(batch, request_ids, 0, tell(durable), caller=CALLER.get())
            taken.append((request_ids, answers, durable))
        for request_ids, answers, durable in taken:
            error = await durable
            for answer, request_id in zip(answers, request_ids, strict=True):
                result = response.results.add()
                if isinstance(answer, Task) and (error is not None or not answer.task_id):
                    answer = DISK_FULL  # noqa: PLW2901  it was a task, but it is not ours any more
                if isinstance(answer, ev.Rejection):
                    _fill_rejection(result.rejection, answer, request_id)
                else:
                    result.task_id = answer.task_id
        return response

    async def Run(self, context: Any) -> None:
        stream, outbox = self._driver.open_stream()
        try:
            if self._offer and caller_queues() is None:  # who shares the directory could read everybody's payloads
                await context.send_initial_metadata(self._offer)
            await serve_stream(
                context, outbox, _RunStream(self, stream, outbox, context).on_message, wire.RunFrame.serialize
            )
        finally:
            self._driver.close_stream(stream)

    async def Watch(self, request: Any, context: Any) -> None:
        if self._watches >= WATCHES_MAX:
            await reject(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{WATCHES_MAX} clients watch already; share one of their streams, or try again later",
            )
        self._watches += 1
        try:
            await self._watch(request, context)
        finally:
            self._watches -= 1

    async def _watch(self, request: Any, context: Any) -> None:
        journal, watchers, incarnations = self._driver.journal, self._driver.watchers, self._driver.incarnations
        queues = caller_queues()
        if request.from_now and request.cursor:
            await reject(context, grpc.StatusCode.INVALID_ARGUMENT, "from_now goes with an empty cursor only")
        name, after = await read_cursor(context, request.cursor)
        oldest = await asyncio.to_thread(journal.oldest_cursor)
        last = await asyncio.to_thread(journal.newest_cursor)
        if request.from_now:
            after = last
        elif not request.cursor:
            after = oldest - 1
        elif after >= incarnations.cursors_end(name) or after > last:
            await reject(context, grpc.StatusCode.OUT_OF_RANGE, CURSOR_ELSEWHERE)
        elif after < oldest - 1:
            await reject(
                context,
                grpc.StatusCode.OUT_OF_RANGE,
                "outcomes after this cursor have been removed; begin with an empty cursor, which gives the oldest",
            )
        await context.write(task_service_pb2.WatchResponse(cursor=make_cursor(incarnations.current, after)))
        while True:
            committed = watchers.commits
            rows = await asyncio.to_thread(journal.read_outcomes, after, WATCH_OUTCOMES, WATCH_BYTES)
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
        found = await self._find(request)
        if not _may_see(found):
            found = None
        if isinstance(found, Task) and found.told is None:
            wait_s = min(wire.seconds_of(request.wait), WAIT_MAX_S) if request.HasField("wait") else 0.0
            if found.outcome is not None:  # a Run stream may have told it
                wait_s = max(wait_s, COMMIT_S)
            await self._driver.settled(found.task_id, max(0.0, wait_s))
            if found.spec.durable:  # by its id: the request_id of a withdrawn task may be another's by now
                again = task_service_pb2.GetRequest(task_id=found.task_id)
                found = await self._find(again)
        if found is None:
            name = request.request_id or request.task_id
            await reject(
                context,
                grpc.StatusCode.NOT_FOUND,
                f"no task {name!r}: it was never submitted, or its result_ttl is over",
            )
        if isinstance(found, StoredOutcome):
            message = queries.stored_task(found, whole=True)
            if found.state == OutcomeState.DEAD_LETTERED:
                queries.fill_letter(message, self._driver.journal.get_dead_letters([found.task_id]))
        else:
            assert found is not None, "rejected above"
            message = queries.live_task(self._driver, found, whole=True)
        return task_service_pb2.GetResponse(task=message)

    async def _find(self, request: Any) -> Task | StoredOutcome | None:
        core, journal = self._driver.core, self._driver.journal

        def stored() -> StoredOutcome | None:
            if request.WhichOneof("key") == "task_id":
                return journal.get_outcome(request.task_id)
            settled = journal.find_requests([request.request_id]).get(request.request_id)
            return None if settled is None else journal.read_settled([settled], 0)[0]

        by_request = request.WhichOneof("key") == "request_id"
        live = core.requests.get(request.request_id) if by_request else core.tasks.get(request.task_id)
        return live or await asyncio.to_thread(stored)

    async def List(self, request: Any, context: Any) -> task_service_pb2.ListResponse:
        return await queries.list_tasks(self._driver, request, context)

    async def Count(self, request: Any, context: Any) -> task_service_pb2.CountResponse:
        return await queries.count_tasks(self._driver, request.filter)

    async def Cancel(self, request: Any, context: Any) -> task_service_pb2.CancelResponse:
        count = len(request.task_ids) + len(request.request_ids)
        await count_of(context, count, CANCEL_TASKS_MAX, "tasks in one Cancel")
        core = self._driver.core
        response = task_service_pb2.CancelResponse()
        live: dict[int, Task] = {}
        settled: list[Task] = []
        elsewhere: list[tuple[str, int | str]] = []  # (as it was named, key)
        for name, task, key in [(str(i), core.tasks.get(i), i) for i in request.task_ids] + [
            (r, core.requests.get(r), r) for r in request.request_ids
        ]:
            if not _may_see(task):
                response.unknown.append(name)
                continue
            if task is not None and task.outcome is None:
                live[task.task_id] = task
                continue
            if task is not None:
                response.settled_task_ids.append(task.task_id)
                settled.append(task)
            else:
                elsewhere.append((name, key))
        try:
            cancelled = await self._driver.cancel(live.values(), request.reason[:1024], withdrawn=request.withdraw)
        except JournalFullError as error:
            await reject(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        response.cancelled_task_ids.extend(task.task_id for task in cancelled)
        for task in cancelled:
            del live[task.task_id]
        response.settled_task_ids.extend(task.task_id for task in live.values() if task.outcome is not None)
        settled += cancelled
        if not await self._driver.withdrawn([*live.values(), *settled], DURABLE_S):
            await reject(context, grpc.StatusCode.RESOURCE_EXHAUSTED, NOT_DURABLE)
        if elsewhere:
            stored = await asyncio.to_thread(self._stored, [key for _, key in elsewhere])  # knows the caller, too
            response.settled_task_ids.extend(stored[key] for _, key in elsewhere if key in stored)
            response.unknown.extend(name for name, key in elsewhere if key not in stored)
        return response

    def _stored(self, keys: list[int | str]) -> dict[int | str, int]:
        """The task_ids of those that the journal knows, by task_id and request_id."""
        journal = self._driver.journal
        found: dict[int | str, int] = {
            r: s.task_id
            for r, s in journal.find_requests([k for k in keys if isinstance(k, str)]).items()
            if _may_see(s)
        }
        stored = ((k, journal.get_outcome(k)) for k in keys if isinstance(k, int))
        found.update((k, k) for k, s in stored if s is not None and _may_see(s))
        return found


class _RunStream:
    """One Run stream."""

    def __init__(self, service: TaskService, stream: int, outbox: RunOutbox, context: Any) -> None:
        self._driver = service._driver  # noqa: SLF001  a part of the service
        self._intake = service._intake  # noqa: SLF001  as above
        self._half_full_bytes = service._stream_bytes_max // 2  # noqa: SLF001  as above
        self._stream = stream
        self._outbox = outbox
        self._context = context
        self._caller = CALLER.get()
        self._outcomes_only = False
        self._durable: list[Task] = []  # to be told of
        self._ended: list[SettledTask | Task] = []  # of the frame that is being read: their outcomes are to be sent
        self._acknowledging = False

    async def on_message(self, data: bytes) -> None:
        frame = await parse(task_service_pb2.RunRequest, data, self._context)
        self._outcomes_only = self._outcomes_only or frame.outcomes_only
        peer = self._outbox.peer
        shut_out = self._caller is not None and self._caller.queues is not None
        if frame.payload_key and (shut_out or not peer.show(frame.payload_key)):
            await reject(self._context, grpc.StatusCode.INVALID_ARGUMENT, WRONG_KEY)
        if frame.results_taken:
            peer.taken(frame.results_taken)
        if (count := _size(frame.batches, FRAME_TASKS_MAX)) > FRAME_TASKS_MAX:
            await count_of(self._context, count, FRAME_TASKS_MAX, "tasks in one frame of a Run stream")
        if (count := len(frame.cancel_request_ids)) > CANCEL_TASKS_MAX:
            await count_of(self._context, count, CANCEL_TASKS_MAX, "cancellations in one frame of a Run stream")
        end_s = time.monotonic() + queries.SLICE_S
        for batch in frame.batches:
            if time.monotonic() > end_s:
                end_s = await queries.pause()
            request_ids = wire.request_ids_of(batch)
            if "" in request_ids:
                await reject(
                    self._context,
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "a task on a Run stream needs a request_id: outcomes are matched by it",
                )
            self._take(batch, request_ids)
        if frame.cancel_request_ids:
            await self._cancel(frame.cancel_request_ids)
        if self._ended:
            await self._answer_ended()
        # A client that submits without reading, or faster than the disk, is not read from.
        if self._outbox.bytes > self._half_full_bytes:
            await self._outbox.below(self._half_full_bytes)
        await self._driver.journaling.room()

    async def _cancel(self, request_ids: Iterable[str]) -> None:
        """Ends these tasks. Those whose outcome does not come by this stream are answered here."""
        requests = self._driver.core.requests
        tasks: list[Task] = []
        elsewhere: list[tuple[str, Task | None]] = []
        for request_id in request_ids:
            task = requests.get(request_id)
            if not _may_see(task):
                task = None
            if task is not None and task.outcome is None:
                tasks.append(task)
            if task is None or task.outcome is not None or self._stream not in task.streams:
                elsewhere.append((request_id, task))
        ended = CANCELLED_ELSEWHERE
        others = [task for _, task in elsewhere if task is not None]
        try:
            await self._driver.cancel(tasks, withdrawn=True)
            if others and not await self._driver.withdrawn(others, DURABLE_S):
                ended = ev.Rejection(RESOURCE_EXHAUSTED, NOT_DURABLE)
        except JournalFullError as error:  # this stream gets the outcomes of its own tasks when they end
            ended = ev.Rejection(RESOURCE_EXHAUSTED, str(error))
        for request_id, task in elsewhere:
            _reject(self._outbox, NOTHING_TO_CANCEL if task is None else ended, request_id)

    def _take(self, batch: task_pb2.TaskBatch, request_ids: Sequence[str]) -> None:
        accepted: list[Task] = []

        def done(error: JournalError | None) -> None:
            # What another call had submitted a moment before may have failed with that.
            if error is None and all(task.task_id for task in accepted):
                self._acknowledge(accepted)
            else:
                self._reject([task for task in accepted if not task.task_id])
                self._acknowledge([task for task in accepted if task.task_id])

        deferred = self._outcomes_only
        peer, caller = self._outbox.peer, self._caller
        answers = self._intake.take(batch, request_ids, self._stream, done, peer, deferred=deferred, caller=caller)
        for index, answer in enumerate(answers):
            if isinstance(answer, Task) and answer.outcome is None:
                accepted.append(answer)
                received = batch.inputs[index].partials_received if index < len(batch.inputs) else 0
                if received:  # the worker may come back later, and tell a new master of them once more
                    self._outbox.partials_from[answer.task_id] = received
                if answer.extra is not None and answer.extra.partials:
                    self._catch_up(answer, received)
            elif isinstance(answer, ev.Rejection):
                _reject(self._outbox, answer, request_ids[index])
            elif isinstance(answer, SettledTask) or not self._driver.tells_later(answer, self._stream):
                self._ended.append(answer)

    def _reject(self, tasks: list[Task]) -> None:
        """Tells the client, once, of tasks that could not be made durable."""
        for task in tasks:
            if task.outcome is None and self._stream in task.streams:
                task.streams = tuple(s for s in task.streams if s != self._stream)
                self._outbox.owe(-1)
                _reject(self._outbox, DISK_FULL, task.request_id)

    def _acknowledge(self, tasks: list[Task]) -> None:
        """Tells the client soon that these tasks are durable. Nobody waits for it on this stream, and an outcome stands
        for the acceptance: most tasks that are quick never need one of their own.
        """
        if not self._outcomes_only:
            self._durable.extend(tasks)
        if self._durable and not self._acknowledging:
            self._acknowledging = True
            asyncio.get_running_loop().call_later(ACKNOWLEDGE_S, self._send_acceptances)

    def _send_acceptances(self) -> None:
        self._acknowledging = False
        for task in self._durable:
            if task.outcome is None:
                self._outbox.room_for(32).message.accepted.add(request_id=task.request_id, task_id=task.task_id)
        self._durable.clear()

    def _catch_up(self, task: Task, received: int) -> None:
        """Sends what a running task yielded before this stream joined it."""
        extra = task.extra
        assert extra is not None, "it has partial outputs"
        for index in range(received, len(extra.partials)):
            data, content_type = extra.partials[index], extra.partial_content_types[index]
            self._outbox.room_for(len(data) + 64).message.partials.add(
                request_id=task.request_id, task_id=task.task_id, index=index, data=data, content_type=content_type
            )

    async def _answer_ended(self) -> None:
        """Sends the outcomes of tasks that had ended before: some at a time, and no faster than the client reads."""
        ended, self._ended = self._ended, []
        outbox, journal = self._outbox, self._driver.journal
        for task in ended:
            if isinstance(task, Task):
                await outbox.below(self._half_full_bytes)
                self._driver.add_large_outcome(outbox, self._driver.outcomes.write(task), task.request_id)
        stored = [task for task in ended if isinstance(task, SettledTask)]
        while stored:
            await outbox.below(self._half_full_bytes)
            part = stored[:WATCH_OUTCOMES]
            try:
                bodies = await asyncio.to_thread(_read_bodies, journal, part)
            except (JournalError, MemoryError) as error:
                log.warning("outcomes cannot be read now", count=len(part), error=repr(error))
                for settled in part:
                    _reject(outbox, ev.Rejection(*wire_large.NOT_READABLE), settled.request_id)
                bodies = [b""] * len(part)
            for body in filter(None, bodies):
                outbox.room_for(len(body)).add_outcome(body)
            del stored[: len(bodies)]


def _read_bodies(journal: Journal, tasks: Sequence[SettledTask]) -> list[bytes]:
    """The serialized outcomes of the first of these tasks, up to WATCH_BYTES. JournalError, MemoryError: not now."""
    return [stored_body(outcome) for outcome in journal.read_settled(tasks, WATCH_BYTES)]


def _may_see(found: Task | SettledTask | None) -> bool:
    """Whether the running call's caller may see a task. What it may not see is to look as if it weren't there."""
    queues = caller_queues()
    if queues is None or found is None:
        return True
    return (found.spec.queue if isinstance(found, Task) else found.queue) in queues


def _size(batches: Collection[task_pb2.TaskBatch], limit: int) -> int:
    """How many tasks there are in batches, or how many batches if that is more."""
    if len(batches) > limit:  # too many to look at
        return len(batches)
    return max(len(batches), sum([len(b.inputs) + max(len(b.request_ids), len(b.payloads)) for b in batches]))


def _reject(outbox: RunOutbox, rejection: ev.Rejection, request_id: str) -> None:
    _fill_rejection(outbox.room_for(len(rejection.message) + 64).message.rejected.add(), rejection, request_id)


def _fill_rejection(message: task_service_pb2.Rejection, rejection: ev.Rejection, request_id: str) -> None:
    message.request_id = request_id
    message.code = rejection.code
    message.message = rejection.message
    if rejection.retry_delay_s is not None:
        message.retry_delay.CopyFrom(wire.duration(rejection.retry_delay_s))
