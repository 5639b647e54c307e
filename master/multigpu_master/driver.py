"""The driver owns the core: it feeds events to the core, and executes the commands that the core returns.

All of it runs in the event loop's thread. It never waits for a write to the disk: entries for the journal go to
write_buffer.py, and dispatch does not wait for them. The driver sends an outcome before it is written, except if a
durable task was cancelled (see `is_cancelled`), or a durable task ends while the disk is full. The driver does wait
when it reads request_ids from SQLite and large results from files. Times are those of the master's clock (clock.py).
"""

import asyncio
import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

import grpc
import structlog
from multigpu._transport.payloads import is_transient

from multigpu_master import ids, settings
from multigpu_master.core import events as ev
from multigpu_master.core.identity import REQUEST_ID_FREE
from multigpu_master.core.model import OutcomeState, Task
from multigpu_master.core.scheduler import Core
from multigpu_master.core.spec import Spec
from multigpu_master.errors import CallError, ExhaustedError, JournalError, JournalFullError
from multigpu_master.ids import Incarnations, LeaseProofs
from multigpu_master.journal.protocol import Entry, LargeBody, Recovered, SettledTask
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.outbox import Outbox
from multigpu_master.telemetry.history import History
from multigpu_master.telemetry.tracing import record_spans
from multigpu_master.telemetry.usage import UsageFlusher
from multigpu_master.wire import payloads as payload_messages
from multigpu_master.wire.outcomes import OutcomeWriter, RunFrame
from multigpu_master.wire.specs import SpecReader
from multigpu_master.wire.tasks import fill_rejection
from multigpu_master.worker_streams import WorkerStreams
from multigpu_master.write_buffer import DURABLE_S, Done, WriteBuffer, set_result_of

log = structlog.get_logger()

RunOutbox = Outbox[RunFrame]
CANCEL_TASKS = 100  # limit of the tasks that one Cancel event ends: other calls run between two events

# A task that ended, and its serialized outcome.
Ended = tuple[Task, bytes | LargeBody]


def is_cancelled(task: Task) -> bool:
    """Whether the task was cancelled. If it is durable, its outcome is sent only once it is on the disk: the outcome
    promises that the task does not run again, but a master that starts from a journal without it would run the task.
    """
    return task.outcome is not None and task.outcome.state is OutcomeState.CANCELLED


_NOT_CANCELLED = (
    "{cancelled} tasks were cancelled, {rest} were not: the master's disk is full. Free space on it, and cancel once "
    "more"
)
_NOT_DURABLE_AND_NOT_CANCELLED = (
    "{cancelled} tasks were cancelled, but a restart of the master may bring the last of them back, and {rest} were "
    "not cancelled: the master's disk is full. Free space on it, and cancel once more"
)
# The answer to a submit whose task can't be written.
DISK_FULL = ev.Rejection(
    8,  # RESOURCE_EXHAUSTED
    "the master's disk is full (or journal_bytes_max is reached, or no file descriptor is left: its log says which): "
    "durable tasks are rejected until there is room; free space on its disk (never delete files in "
    "data_dir) or raise the limit, or submit with durability EPHEMERAL (mgpuctl submit --ephemeral)",
    ev.RETRY_DELAY_S,
)
NOT_DURABLE = (
    "cancelled, but a restart of the master may bring the tasks back: its disk is full. Free space on it, and cancel "
    "once more"
)
# Events that no call waits for.
_UNANSWERED = (ev.Tick, ev.SubmitFailed, ev.SettlesDone, ev.IdsRenewed, ev.StreamClosed, ev.SessionClosed)


class BrokenError(CallError):
    """The master handles no more events, because one failed half way."""

    code = grpc.StatusCode.UNAVAILABLE


@dataclass(slots=True)
class ChangeEvents:
    """The events for which calls wait: `commits` is set when outcomes have become durable, `workers` when a worker or
    the circuit breaker has changed. Each event is set once, and is then replaced by a new event.
    """

    commits: asyncio.Event = field(default_factory=asyncio.Event)
    workers: asyncio.Event = field(default_factory=asyncio.Event)

    def outcomes_committed(self) -> None:
        self.commits.set()
        self.commits = asyncio.Event()

    def worker_changed(self) -> None:
        self.workers.set()
        self.workers = asyncio.Event()


class Driver:
    """See the module. `on_fatal` is called with the reason when the master can't go on."""

    def __init__(
        self,
        core: Core,
        journal: SqliteJournal,
        recovered: Recovered,
        specs: SpecReader,
        now: Callable[[], float],
        stream_bytes_max: int,
        on_fatal: Callable[[str], None],
        on_worker_changed: Callable[[ev.WorkerChanged], None],
    ) -> None:
        self._stream_bytes_max = stream_bytes_max
        self.core = core
        self.journal = journal
        self.incarnations = Incarnations(recovered.incarnations)
        self.proofs = LeaseProofs(recovered.lease_key)
        self._epoch = recovered.epoch
        self.specs = specs
        self.changes = ChangeEvents()
        self._on_fatal = on_fatal
        self._broken = False
        self.write_buffer = WriteBuffer(
            journal, self.handle, self.changes.outcomes_committed, on_fatal, recovered.last_cursor
        )
        self._loop = asyncio.get_running_loop()
        self.now = now
        self._streams: dict[int, RunOutbox] = {}
        self.workers = WorkerStreams(self.handle, core.fleet, specs, self.proofs, journal.payloads)
        self.requeued_before = 0  # the core's count of requeued leases before the current event
        self._last_stream = 0
        # By task_id: the streams that get the outcome once it is on the disk.
        self._held_outcomes: dict[int, list[int]] = {}
        self.history = History(core, now)
        self.usage = UsageFlusher(core.usage, self.write_buffer, now)
        self._waiters: dict[int, list[asyncio.Future[None]]] = defaultdict(list)
        self.outcomes = OutcomeWriter()
        self._timer: asyncio.Handle | None = None
        self._timer_due_s = 0.0
        self._executors: dict[type, Callable[..., None]] = {
            ev.Settled: self._settled, ev.ForwardPartials: self._forward, ev.WorkerChanged: on_worker_changed,
            ev.BreakerChanged: self._breaker_changed, ev.RenewIds: self._renew_ids,
            ev.RejectUnwritten: self._reject_unwritten, ev.Dispatch: self.workers.dispatch,
            ev.Welcome: self.workers.welcome, ev.Revoke: self.workers.revoke, ev.Recall: self.workers.recall,
            ev.SendDesiredState: self.workers.send_desired_state, ev.EndSession: self.workers.end,
        }  # fmt: skip

    def handle(self, event: ev.Event) -> list[ev.Command]:
        """Feeds one event to the core, executes the commands and returns them, because some are answers. If this event
        or an earlier one failed half way, raises BrokenError, or returns [] for an event in _UNANSWERED.
        """
        if not self._broken:
            try:
                self.requeued_before = self.core.ledger.counters.requeued
                final: Sequence[int] = ()
                if self._waiters and isinstance(event, (ev.SettlesDone, ev.SubmitFailed)):
                    # Read now: on SubmitFailed the core sets the task_ids of unsettled tasks to 0.
                    final = [task.task_id for task in event.tasks]
                commands = self.core.handle(event, self.now())
                for command in commands:
                    execute = self._executors.get(type(command))
                    if execute is not None:
                        execute(command)
                for task_id in final:
                    self._wake(task_id)
                self._arm_timer()
            except Exception as error:
                # The core's state may be inconsistent. The journal is consistent, and the next master starts from it.
                self._broken = True
                log.critical("an event failed half way", event_type=type(event).__name__, exc_info=error)
                self._on_fatal(f"an event ({type(event).__name__}) failed half way: {error!r}")
            else:
                return commands
        if isinstance(event, _UNANSWERED):
            return []
        raise BrokenError("the master ends after an internal error, which is in its log; try again in a moment")

    def _arm_timer(self) -> None:
        due_s = self.core.next_timer_s()
        # While the master stops, it ends the workers' streams: a timer would take the workers for lost.
        if due_s is None or self.workers.stopping:
            return
        if self._timer is not None:
            if self._timer_due_s <= due_s + 0.001:
                return
            self._timer.cancel()
        self._timer_due_s = due_s
        self._timer = self._loop.call_later(max(0.0, due_s - self.now()), self._tick)

    def stop(self) -> None:
        """Call before the server ends the streams. The workers keep their leases, which the next master adopts."""
        self.workers.stopping = True
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._timer = None
        self.handle(ev.Tick())

    def open_stream(self) -> tuple[int, RunOutbox]:
        """Opens a Run stream. Returns its number and its outbox."""
        self._last_stream += 1
        outbox = RunOutbox(RunFrame, payload_messages.Peer(self.journal.payloads))
        outbox.peer_name = f"stream {self._last_stream}"  # until a message of the stream names its client
        self._streams[self._last_stream] = outbox
        self.handle(ev.StreamOpened(self._last_stream))
        return self._last_stream, outbox

    def close_stream(self, stream: int) -> None:
        if (outbox := self._streams.pop(stream, None)) is not None:
            outbox.peer.release_all()
            self.handle(ev.StreamClosed(stream))
        # Deferred tasks are only in memory. If the master died, their clients would submit them again, but the client
        # of this stream has left.
        self.write_buffer.flush()

    def find_settled(self, request_ids: Sequence[str]) -> dict[str, SettledTask]:
        """Returns, by request_id, the settled tasks with these request_ids that the core has forgotten."""
        requests = self.core.ledger.requests
        unknown = self.write_buffer.perhaps_known([r for r in request_ids if r and r not in requests])
        found = self.journal.find_requests(unknown) if unknown else {}
        return {request_id: stored for request_id, stored in found.items() if stored.fingerprint != REQUEST_ID_FREE}

    def submit(
        self, spec: Spec, tasks: Sequence[Task], stream: int, done: Done | None,
        replaces: Mapping[str, int] = MappingProxyType({}),
    ) -> list[Task | ev.Rejection]:  # fmt: skip
        """Submits tasks to the core. `done` is called when the accepted tasks are durable, or with an error when the
        journal has rejected them; for ephemeral tasks, in the loop's next round. The caller must not acknowledge a task
        before that. If it acknowledges none, it passes None: then tasks may be written as late as their outcomes.

        `replaces` maps request_ids to task_ids of dead letters: the transaction that writes the task deletes the dead
        letter. An ephemeral task is not written and deletes no dead letter: a restart of the master would lose both.
        """
        commands = self.handle(ev.Submit(spec, tasks, stream))
        submitted = next(c for c in commands if isinstance(c, ev.Submitted))
        if (outbox := self._streams.get(stream)) is not None:
            outbox.add_pending(submitted.pending)
            for task in submitted.fresh:
                task.client_id = outbox.peer_name
        if spec.durable:
            # Later in the loop: this event's leases go to the workers first.
            fresh = submitted.fresh
            letters = [(task.task_id, replaces[task.request_id]) for task in fresh if task.request_id in replaces]
            if done is None and not letters:
                self._loop.call_soon(self.write_buffer.defer, fresh)
            else:
                self._loop.call_soon(self.write_buffer.append_submits, fresh, done, letters, not stream)
        else:
            self.done_soon(done)
        return submitted.results

    async def resubmit_dead_letter(self, spec: Spec, task: Task, replaces: int) -> Task | ev.Rejection:
        """Submits a task in place of the dead letter with the task_id `replaces`. Returns when the journal has written
        both changes; a Rejection if the core or the journal rejected them.
        """
        future: asyncio.Future[JournalError | None] = self._loop.create_future()
        answer = self.submit(spec, [task], 0, set_result_of(future), {task.request_id: replaces})[0]
        error = await future
        return answer if error is None else ev.Rejection(8, str(error), ev.RETRY_DELAY_S)

    def done_soon(self, done: Done | None) -> None:
        """Calls `done` without an error, in the loop's next round: there is nothing to write to the journal."""
        if done is not None:
            self._loop.call_soon(done, None)

    async def wait_settled(self, task_id: int, timeout_s: float) -> None:
        """Returns when the task's outcome becomes final (of a durable task: committed), when the journal rejects the
        task, or after the timeout. The outcome must not be final yet.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        waiters = self._waiters[task_id]
        waiters.append(future)
        try:
            await asyncio.wait([future], timeout=timeout_s)
        finally:
            if not future.done():
                waiters.remove(future)
                if not waiters:
                    del self._waiters[task_id]

    def _renew_ids(self, _command: ev.RenewIds) -> None:
        now_s = self.now()
        epoch = self._epoch = ids.next_epoch(self._epoch, now_s)

        def epoch_written(error: JournalError | None) -> None:
            if error is None:  # else the master is stopping
                self.handle(ev.IdsRenewed(ids.first_id(epoch, now_s)))

        self.write_buffer.append(Entry(epoch=epoch), epoch_written)

    def _settled(self, command: ev.Settled) -> None:
        self.history.observe(command.tasks)
        write, writable = self.outcomes.write, self.write_buffer.writable
        at_once: list[tuple[Task, Sequence[int], bytes | LargeBody]] = []
        durable: list[Ended] = []
        held: list[Ended] = []
        for task in command.tasks:
            ended = task, write(task)
            if task.spec.durable:
                durable.append(ended)
                if not writable or is_cancelled(task):
                    held.append(ended)
                    self._held_outcomes[task.task_id] = list(task.streams)
                    continue
            at_once.append((task, task.streams, ended[1]))
        try:
            self._send_outcomes(at_once)
        finally:  # outcomes go to the journal even if sending them fails
            if durable:
                done = functools.partial(self._send_held, held) if held else None
                # Later in the loop: this event's leases go to the workers first.
                self._loop.call_soon(self.write_buffer.append_settles, durable, self.now(), done)

    def _send_held(self, ended: Sequence[Ended], error: JournalError | None) -> None:
        if error is None:
            self._send_outcomes([(task, self._held_outcomes.pop(task.task_id), body) for task, body in ended])

    def _reject_unwritten(self, command: ev.RejectUnwritten) -> None:
        for task in command.tasks:
            for stream in task.streams:
                if (outbox := self._streams.get(stream)) is not None:
                    reject(outbox, DISK_FULL, task.request_id)
                    outbox.add_pending(-1)

    def join_held_outcome(self, task: Task, stream: int) -> bool:
        """If the task's outcome waits for the disk, adds the stream to those that get the outcome once it is written.
        Returns whether it waits.
        """
        streams = self._held_outcomes.get(task.task_id)
        if streams is not None and stream not in streams:
            streams.append(stream)
            self._streams[stream].add_pending(1)
        return streams is not None

    async def cancel(self, tasks: Iterable[Task], reason: str = "", *, withdrawn: bool = False) -> list[Task]:
        """Cancels the unsettled tasks among these, and returns them. Raises JournalFullError if, because the disk is
        full, some tasks could not be cancelled, or a restart of the master may undo some cancellations; its message
        says which of these, and how many tasks were not cancelled.
        """
        waiting, cancelled = deque(task for task in tasks if task.outcome is None), list[Task]()
        while waiting:
            count = min(CANCEL_TASKS, len(waiting))
            if any(task.spec.durable for task in islice(waiting, count)):  # only those are written
                count = min(count, self.write_buffer.cancellations_max())
            if not count:
                rest = sum([task.outcome is None for task in waiting])
                raise JournalFullError(_NOT_CANCELLED.format(cancelled=len(cancelled), rest=rest))
            part = [task for _ in range(count) if (task := waiting.popleft()).outcome is None and task.task_id]
            self.handle(ev.Cancel(part, reason, withdrawn))
            cancelled += part
            await asyncio.sleep(0)  # other calls run meanwhile
            if not self.write_buffer.writable and not await self.wait_cancellations(part, DURABLE_S):
                # The disk became full since, or another program has used the room that cancellations_max found.
                rest = sum([task.outcome is None for task in waiting])
                message = _NOT_DURABLE_AND_NOT_CANCELLED.format(cancelled=len(cancelled), rest=rest)
                raise JournalFullError(message if rest else NOT_DURABLE)
        return cancelled

    async def wait_cancellations(self, tasks: Sequence[Task], timeout_s: float) -> bool:
        """Waits until the cancellations of these tasks are on the disk. Returns False after the timeout."""
        end_s = time.monotonic() + timeout_s
        for task in tasks:
            while task.task_id in self._held_outcomes:
                if (left_s := end_s - time.monotonic()) <= 0:
                    return False
                await self.wait_settled(task.task_id, left_s)
        return True

    def _send_outcomes(self, ended: Iterable[tuple[Task, Sequence[int], bytes | LargeBody]]) -> None:
        """Sends the outcomes to the streams, wakes the calls that wait for ephemeral tasks, and records the ends of
        tasks in traces and the log.
        """
        streams = self._streams
        for task, receivers, body in ended:
            for stream in receivers:
                outbox = streams.get(stream)
                if outbox is not None:
                    if type(body) is bytes:
                        outbox.frame_for(len(body)).add_outcome(body)
                    else:
                        self.add_outcome(outbox, body, task.request_id)
                    outbox.add_pending(-1)
                    if outbox.partials_from:
                        outbox.partials_from.pop(task.task_id, None)
                    if outbox.waiting_bytes > self._stream_bytes_max:
                        self._abort_unread(outbox)
            if not task.spec.durable:
                self._wake(task.task_id)
            if task.extra is not None and task.extra.traceparent:
                record_spans(task)
            o = task.outcome
            assert o is not None, "it is settled"
            if o.state is OutcomeState.DEAD_LETTERED and o.error is not None:
                log.warning("task dead-lettered", task_id=task.task_id, error=o.error.type, message=o.error.message)

    def _wake(self, task_id: int) -> None:
        """Wakes the calls that wait for the task's outcome."""
        for future in self._waiters.pop(task_id, ()):
            if not future.done():
                future.set_result(None)

    def _abort_unread(self, outbox: RunOutbox) -> None:
        outbox.abort(ExhaustedError("too many outcomes are unread; read faster, or submit less at once"))

    def add_outcome(self, outbox: RunOutbox, body: bytes | LargeBody, request_id: str) -> None:
        """Sends an outcome that may have a large result: as a reference if the client shares the directory, else as
        bytes. If the bytes cannot be read now, sends a rejection; if they are lost, the outcome RESULT_MISSING.
        """
        if isinstance(body, LargeBody):
            tail = body.tail
            if isinstance(tail, bytes) or not outbox.peer.lend(tail, self._stream_bytes_max):
                try:
                    outbox.frame_for(len(body)).add_large_outcome(body)
                except (OSError, MemoryError) as error:
                    if is_transient(error):
                        reject(outbox, payload_messages.OUTCOME_NOT_READABLE, request_id)
                        return
                    without_result = payload_messages.outcome_without_result(body, error)
                    outbox.frame_for(len(without_result)).add_outcome(without_result)
                return
            body = payload_messages.outcome_by_reference(body, tail)
        outbox.frame_for(len(body)).add_outcome(body)

    def _forward(self, command: ev.ForwardPartials) -> None:
        task = command.task
        for stream in task.streams:
            outbox = self._streams.get(stream)
            if outbox is not None:
                first = outbox.partials_from.get(task.task_id, 0)
                for index, data, content_type in command.partials:
                    if index < first:
                        continue
                    outbox.frame_for(len(data) + 64).message.partials.add(
                        request_id=task.request_id, task_id=task.task_id, index=index, data=data,
                        content_type=content_type,
                    )  # fmt: skip
                if outbox.waiting_bytes > self._stream_bytes_max:
                    self._abort_unread(outbox)

    def _breaker_changed(self, command: ev.BreakerChanged) -> None:
        if command.tripped_s:
            log.error("circuit breaker tripped", reason=command.message)
        else:
            log.info("circuit breaker reset")
        self.write_buffer.append(Entry(settings=settings.breaker_setting(command.tripped_s)))
        self.changes.worker_changed()


def reject(outbox: RunOutbox, rejection: ev.Rejection, request_id: str) -> None:
    """Sends a rejection of one task on a Run stream."""
    frame = outbox.frame_for(len(rejection.message) + 64)
    fill_rejection(frame.message.rejected.add(), rejection, request_id)
