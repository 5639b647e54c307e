"""One Run stream: tasks and cancellations in; acceptances, rejections, partial outputs and outcomes out."""

import asyncio
from collections.abc import Iterable, Sequence

import structlog
from multigpu.v1 import task_pb2, task_service_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.model import Task
from multigpu_master.driver import NOT_DURABLE, Driver, RunOutbox, reject
from multigpu_master.errors import InvalidArgumentError, JournalError, JournalFullError
from multigpu_master.journal.payload_files import WRONG_KEY
from multigpu_master.journal.protocol import SettledTask
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.rpc import queries
from multigpu_master.rpc.intake import RESOURCE_EXHAUSTED, Intake, count_inputs, stored_body
from multigpu_master.rpc.requests import check_count, parse
from multigpu_master.security.auth import caller_queues
from multigpu_master.wire.payloads import OUTCOME_NOT_READABLE
from multigpu_master.wire.tasks import request_ids_of
from multigpu_master.write_buffer import DURABLE_S

log = structlog.get_logger()

CANCELLED, NOT_FOUND = 1, 5  # gRPC's status codes
FRAME_TASKS_MAX, CANCEL_TASKS_MAX = 10_000, 10_000
# Limits of one read from the journal. The outcomes stay in memory until the client has read them.
READ_OUTCOMES, READ_BYTES = 1024, 256 << 10
# The stream sends the acceptances of this period in one frame. A task that ends sooner needs no acceptance.
ACKNOWLEDGE_S = 0.05
NOTHING_TO_CANCEL = ev.Rejection(NOT_FOUND, "this request_id has no unsettled task: the task has ended, or is unknown")
CANCELLED_ELSEWHERE = ev.Rejection(
    CANCELLED, "the task was cancelled or had already ended; its outcome goes to the stream that submitted it"
)
DETACHED = ev.Rejection(
    CANCELLED,
    "this client did not submit the task on a Run stream of this master, so the task goes on, but this stream gets no "
    "outcome; call Cancel to cancel the task",
)
NOT_KNOWN = ev.Rejection(NOT_FOUND, f"no task has this request_id: {queries.FORGOTTEN}")
CLIENT_ID_BYTES_MAX = 64
QUEUE_RESTRICTED = "a token for certain queues cannot share payload files: omit payload_key to send payloads inline"


class RunStream:
    """The messages of one Run stream."""

    def __init__(self, driver: Driver, intake: Intake, stream: int, outbox: RunOutbox, stream_bytes_max: int) -> None:
        self._driver = driver
        self._intake = intake
        self._half_full_bytes = stream_bytes_max // 2
        self._stream = stream
        self._outbox = outbox
        self._outcomes_only = False
        self._to_accept: list[Task] = []  # tasks whose acceptances must be sent
        self._ended: list[SettledTask | Task] = []  # tasks of this frame that had ended when the frame came
        self._acknowledging = False

    async def on_message(self, data: bytes) -> None:
        frame = parse(task_service_pb2.RunRequest, data)
        self._check(frame)
        self._outcomes_only = self._outcomes_only or frame.outcomes_only
        self._outbox.peer_name = frame.client_id or self._outbox.peer_name
        if frame.results_taken:
            self._outbox.peer.release_read(frame.results_taken)
        async for batch in queries.pausing(frame.batches):
            request_ids = request_ids_of(batch)
            if "" in request_ids:
                raise InvalidArgumentError("a task on a Run stream needs a request_id: outcomes are matched by it")
            self._submit(batch, request_ids)
        if frame.follow_request_ids:
            await self._follow(frame.follow_request_ids)
        if frame.cancel_request_ids:
            await self._cancel(frame.cancel_request_ids)
        if self._ended:
            await self._send_ended()
        # Backpressure: read no more from a client that does not read, or submits faster than the disk writes.
        if self._outbox.waiting_bytes > self._half_full_bytes:
            await self._outbox.wait_below(self._half_full_bytes)
        await self._driver.write_buffer.wait_for_backlog()

    def _check(self, frame: task_service_pb2.RunRequest) -> None:
        """Raises InvalidArgumentError if the frame is too large, or has a payload_key that is wrong or not allowed."""
        if frame.payload_key and caller_queues() is not None:
            raise InvalidArgumentError(QUEUE_RESTRICTED)
        if frame.payload_key and not self._outbox.peer.check_key(frame.payload_key):
            raise InvalidArgumentError(WRONG_KEY)
        check_count(len(frame.client_id.encode()), CLIENT_ID_BYTES_MAX, "bytes in a client_id")
        check_count(count_inputs(frame.batches, FRAME_TASKS_MAX), FRAME_TASKS_MAX, "tasks in one frame of a Run stream")
        check_count(len(frame.cancel_request_ids), CANCEL_TASKS_MAX, "cancellations in one frame of a Run stream")
        check_count(len(frame.follow_request_ids), FRAME_TASKS_MAX, "followed tasks in one frame of a Run stream")

    # --- submit ------------------------------------------------------------------------------------------------------

    def _submit(self, batch: task_pb2.TaskBatch, request_ids: Sequence[str]) -> None:
        accepted: list[Task] = []

        def done(_error: JournalError | None) -> None:
            # A task has the task_id 0 if the journal could not write it. The error does not tell this: the batch may
            # have joined tasks of other calls.
            self._acknowledge([task for task in accepted if task.task_id])

        answers = self._intake.submit(
            batch, request_ids, self._stream, None if self._outcomes_only else done, self._outbox.peer
        )
        for index, answer in enumerate(answers):
            if isinstance(answer, Task) and answer.outcome is None:
                accepted.append(answer)
                received = batch.inputs[index].partials_received if index < len(batch.inputs) else 0
                if received:  # after a restart of the master, the worker may send these partial outputs again
                    self._outbox.partials_from[answer.task_id] = received
                if answer.extra is not None and answer.extra.partials:
                    self._send_partials(answer, received)
            elif isinstance(answer, ev.Rejection):
                self._reject(answer, request_ids[index])
            elif isinstance(answer, SettledTask) or not self._driver.join_held_outcome(answer, self._stream):
                self._ended.append(answer)

    def _reject(self, rejection: ev.Rejection, request_id: str) -> None:
        reject(self._outbox, rejection, request_id)

    def _detach(self, task: Task) -> None:
        """Stops following an unsettled task, which goes on."""
        if self._stream in task.streams:
            task.streams = tuple(s for s in task.streams if s != self._stream)
            self._outbox.add_pending(-1)

    def _acknowledge(self, tasks: list[Task]) -> None:
        """Sends acceptances after ACKNOWLEDGE_S, except for tasks that ended by then."""
        self._to_accept.extend(tasks)
        if self._to_accept and not self._acknowledging:
            self._acknowledging = True
            asyncio.get_running_loop().call_later(ACKNOWLEDGE_S, self._send_acceptances)

    def _send_acceptances(self) -> None:
        self._acknowledging = False
        for task in self._to_accept:
            if task.outcome is None:
                self._outbox.frame_for(32).message.accepted.add(request_id=task.request_id, task_id=task.task_id)
        self._to_accept.clear()

    def _send_partials(self, task: Task, received: int) -> None:
        """Sends the task's stored partial outputs from index `received` on. The stream may have sent some before."""
        extra = task.extra
        assert extra is not None, "it has partial outputs"
        for index in range(received, len(extra.partials)):
            data, content_type = extra.partials[index], extra.partial_content_types[index]
            self._outbox.frame_for(len(data) + 64).message.partials.add(
                request_id=task.request_id, task_id=task.task_id, index=index, data=data, content_type=content_type
            )

    # --- follow ------------------------------------------------------------------------------------------------------

    async def _follow(self, request_ids: Sequence[str]) -> None:
        """Sends the outcomes of known tasks on this stream, now or when they end. Waits while the client does not read
        the tasks' partial outputs.
        """
        core, known, waited = self._driver.core, self._driver.find_settled(request_ids), False
        for request_id in request_ids:
            if self._outbox.waiting_bytes > self._half_full_bytes:
                await self._outbox.wait_below(self._half_full_bytes)
                waited = True
            task: Task | SettledTask | None = core.ledger.requests.get(request_id) or known.get(request_id)
            if task is None and waited:  # the task may have ended during the wait
                task = self._driver.find_settled([request_id]).get(request_id)
            if task is None or not queries.may_see(task):
                self._reject(NOT_KNOWN, request_id)
            elif isinstance(task, Task) and task.outcome is None:
                new = self._stream not in task.streams
                if (rejection := core.follow(task, self._stream)) is not None:
                    self._reject(rejection, request_id)
                else:
                    self._outbox.add_pending(int(new))
                    if task.extra is not None and task.extra.partials:
                        self._send_partials(task, 0)
            elif isinstance(task, SettledTask) or not self._driver.join_held_outcome(task, self._stream):
                self._ended.append(task)

    # --- cancel ------------------------------------------------------------------------------------------------------

    async def _cancel(self, request_ids: Iterable[str]) -> None:
        """Cancels the tasks that this client submitted on a Run stream, and stops following other tasks. Sends a
        rejection for each request_id whose task has ended, or whose outcome will not come on this stream.
        """
        requests = self._driver.core.ledger.requests
        tasks: list[Task] = []
        to_reject: list[tuple[str, Task | None]] = []
        for request_id in request_ids:
            task = requests.get(request_id)
            if not queries.may_see(task):
                task = None
            if task is not None and task.outcome is None:
                if task.client_id != self._outbox.peer_name:
                    self._detach(task)
                    self._reject(DETACHED, request_id)
                    continue
                tasks.append(task)
            if task is None or task.outcome is not None or self._stream not in task.streams:
                to_reject.append((request_id, task))
        rejection = CANCELLED_ELSEWHERE
        elsewhere = [task for _, task in to_reject if task is not None]
        try:
            await self._driver.cancel(tasks, withdrawn=True)
            if elsewhere and not await self._driver.wait_cancellations(elsewhere, DURABLE_S):
                rejection = ev.Rejection(RESOURCE_EXHAUSTED, NOT_DURABLE)
        except JournalFullError as error:  # the stream's own tasks need no rejection: their outcomes come when they end
            rejection = ev.Rejection(RESOURCE_EXHAUSTED, str(error))
        for request_id, task in to_reject:
            self._reject(NOTHING_TO_CANCEL if task is None else rejection, request_id)

    # --- outcomes of known tasks -------------------------------------------------------------------------------------

    async def _send_ended(self) -> None:
        """Sends the outcomes of the tasks in `_ended`, no faster than the client reads."""
        ended, self._ended = self._ended, []
        outbox, journal = self._outbox, self._driver.journal
        for task in ended:
            if isinstance(task, Task):
                await outbox.wait_below(self._half_full_bytes)
                self._driver.add_outcome(outbox, self._driver.outcomes.write(task), task.request_id)
        stored = [task for task in ended if isinstance(task, SettledTask)]
        while stored:
            await outbox.wait_below(self._half_full_bytes)
            part = stored[:READ_OUTCOMES]
            try:
                bodies = await asyncio.to_thread(_read_bodies, journal, part)
            except (JournalError, MemoryError) as error:
                log.warning("outcomes cannot be read now", count=len(part), error=repr(error))
                for settled in part:
                    self._reject(OUTCOME_NOT_READABLE, settled.request_id)
                bodies = [b""] * len(part)
            for body in filter(None, bodies):
                outbox.frame_for(len(body)).add_outcome(body)
            del stored[: len(bodies)]


def _read_bodies(journal: SqliteJournal, tasks: Sequence[SettledTask]) -> list[bytes]:
    """Returns the serialized outcomes of the first of these tasks, about READ_BYTES in total. Raises JournalError or
    MemoryError if they cannot be read now.
    """
    return [stored_body(outcome) for outcome in journal.read_outcomes_of(tasks, READ_BYTES)]
