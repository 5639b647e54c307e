"""The one owner of the core: it feeds events in, and carries out the commands that come back.

Everything here runs on the event loop, in one thread, and never waits. What must be durable is handed to journaling.py;
dispatch and delivery don't wait for it.

Time is a wall clock that can't jump: read once at the start, and carried on by the monotonic clock.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
from multigpu.v1 import worker_service_pb2

from multigpu_master import settings, wire, wire_large, wire_models
from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, OutcomeState, Spec, Task
from multigpu_master.core.scheduler import Core
from multigpu_master.journal import Journal, JournalError, LargeBody, StoredOutcome
from multigpu_master.journaling import Journaling, tell
from multigpu_master.outbox import FRAME_BYTES, Outbox
from multigpu_master.tracing import record_spans

log = structlog.get_logger()

RunOutbox = Outbox[wire.RunFrame]
SessionOutbox = Outbox[worker_service_pb2.SessionResponse]
# What a lease takes on the wire, beside its payload.
LEASE_BYTES = 32


@dataclass(slots=True)
class Watchers:
    """Those who wait for something to become durable, or for a worker to change."""

    commits: asyncio.Event = field(default_factory=asyncio.Event)
    workers: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self, name: str) -> None:
        """Wakes everyone who waits now."""
        getattr(self, name).set()
        setattr(self, name, asyncio.Event())


class Driver:
    """See the module. `on_fatal` is called once, with the reason, when the master can't go on."""

    def __init__(
        self,
        core: Core,
        journal: Journal,
        specs: wire.SpecReader,
        stream_bytes_max: int,
        on_fatal: Callable[[str], None],
    ) -> None:
        self._stream_bytes_max = stream_bytes_max
        self.core = core
        self.journal = journal
        self.specs = specs
        self.watchers = Watchers()
        self.journaling = Journaling(journal, self.handle, lambda: self.watchers.wake("commits"), on_fatal)
        self.on_worker_changed: Callable[[ev.WorkerChanged], None] = lambda _change: None
        self._loop = asyncio.get_running_loop()
        self._offset_s = time.time() - time.monotonic()
        self._streams: dict[int, RunOutbox] = {}
        self._sessions: dict[int, SessionOutbox] = {}
        self._last_stream = 0
        self._waiters: dict[int, list[asyncio.Future[None]]] = defaultdict(list)
        self.outcomes = wire.OutcomeWriter()
        self._timer: asyncio.Handle | None = None
        self._timer_due_s = 0.0
        self._carry_out: dict[type, Callable[..., None]] = {
            ev.Settled: self._settled, ev.Dispatch: self._dispatch, ev.Welcome: self._welcome, ev.Revoke: self._revoke,
            ev.Desire: self._desire, ev.EndSession: self._end_session, ev.Forward: self._forward,
            ev.WorkerChanged: self._worker_changed, ev.BreakerChanged: self._breaker_changed,
        }  # fmt: skip

    def now(self) -> float:
        """Seconds since the epoch, never going back."""
        return time.monotonic() + self._offset_s

    def handle(self, event: ev.Event) -> list[ev.Command]:
        """Feeds one event to the core and carries out what follows. Returns the commands: some are answers."""
        commands = self.core.handle(event, self.now())
        for command in commands:
            carry_out = self._carry_out.get(type(command))
            if carry_out is not None:
                carry_out(command)
        self._arm_timer()
        return commands

    def _arm_timer(self) -> None:
        due_s = self.core.next_timer_s()
        if due_s is None:
            return
        if self._timer is not None:
            if self._timer_due_s <= due_s + 0.001:
                return
            self._timer.cancel()
        self._timer_due_s = due_s
        self._timer = self._loop.call_later(max(0.0, due_s - self.now()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.handle(ev.Tick())

    # --- clients -----------------------------------------------------------------------------------------------------

    def open_stream(self) -> tuple[int, RunOutbox]:
        """A new Run stream."""
        self._last_stream += 1
        outbox = RunOutbox(wire.RunFrame, wire_large.Peer(self.journal.payloads))
        self._streams[self._last_stream] = outbox
        self.handle(ev.StreamOpened(self._last_stream))
        return self._last_stream, outbox

    def close_stream(self, stream: int) -> None:
        if (outbox := self._streams.pop(stream, None)) is not None:
            outbox.peer.gone()
            self.handle(ev.StreamClosed(stream))
        self.journaling.hurry()  # nobody else can bring its tasks again

    def known(self, request_ids: Sequence[str]) -> dict[str, StoredOutcome]:
        """Those of these requests that have settled and been forgotten by the core."""
        requests = self.core.requests
        unknown = self.journaling.perhaps_known([r for r in request_ids if r and r not in requests])
        return self.journal.find_requests(unknown) if unknown else {}

    def submit(
        self, spec: Spec, tasks: Sequence[Task], stream: int, done: Callable[[JournalError | None], None],
        deleted_dead_letters: Sequence[int] = (), *, patient: bool = False,
    ) -> list[Task | ev.Rejection]:  # fmt: skip
        """Hands tasks to the core. `done` is called when those taken are durable, with an error if they could not be
        made so (then they are gone). What is returned must not be told before that. `patient`: it is not told at all.
        """
        commands = self.handle(ev.Submit(spec, tasks, stream))
        submitted = next(c for c in commands if isinstance(c, ev.Submitted))
        if (outbox := self._streams.get(stream)) is not None:
            outbox.owe(submitted.owed)
        if spec.durable:
            # Soon, and not now: the leases that went out of this are on their way by then, and don't wait for it.
            fresh = submitted.fresh
            letters = deleted_dead_letters if fresh else ()
            if patient:
                self._loop.call_soon(self.journaling.submits_patiently, fresh, done)
            else:
                self._loop.call_soon(self.journaling.submits, fresh, done, letters, not stream)
        else:
            self.soon(done)
        return submitted.results

    async def submit_durably(self, spec: Spec, task: Task, replaces: int) -> Task | ev.Rejection:
        """Submits one task in the place of a dead letter, and returns when both are on the disk."""
        future: asyncio.Future[JournalError | None] = self._loop.create_future()
        answer = self.submit(spec, [task], 0, tell(future), (replaces,))[0]
        error = await future
        return answer if error is None else ev.Rejection(8, str(error), 1.0)

    def soon(self, done: Callable[[JournalError | None], None]) -> None:
        """Calls back without anything having to become durable."""
        self._loop.call_soon(done, None)

    async def settled(self, task_id: int, timeout_s: float) -> None:
        """Returns when the task has settled, or the time is over."""
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

    # --- commands ----------------------------------------------------------------------------------------------------

    def _settled(self, command: ev.Settled) -> None:
        durable: list[tuple[Task, bytes | LargeBody]] = []
        streams, write = self._streams, self.outcomes.write
        for task in command.tasks:
            o = task.outcome
            assert o is not None, "it is settled"
            body: bytes | LargeBody = b""
            for stream in task.streams:
                outbox = streams.get(stream)
                if outbox is not None:
                    body = body or write(task)
                    if type(body) is bytes:
                        outbox.room_for(len(body)).add_outcome(body)
                    else:
                        self.add_large_outcome(outbox, body)
                    outbox.owe(-1)
                    if outbox.bytes > self._stream_bytes_max:
                        outbox.abort(
                            "RESOURCE_EXHAUSTED", "outcomes pile up unread; read faster, or submit less at once"
                        )
            if task.spec.durable:
                durable.append((task, body or write(task)))
            if self._waiters and task.task_id in self._waiters:
                for future in self._waiters.pop(task.task_id):
                    if not future.done():
                        future.set_result(None)
            if task.extra is not None and task.extra.traceparent:
                record_spans(task)
            if o.state is OutcomeState.DEAD_LETTERED and o.error is not None:
                log.warning("task dead-lettered", task_id=task.task_id, error=o.error.type, message=o.error.message)
        if durable:
            self._loop.call_soon(self.journaling.settles, durable)  # as in submit

    def add_large_outcome(self, outbox: RunOutbox, body: bytes | LargeBody) -> None:
        """An outcome with a large result: the place of it, where the client may look there, or all of it."""
        if isinstance(body, LargeBody):
            tail = body.tail
            if isinstance(tail, bytes) or not outbox.peer.lend(tail, self._stream_bytes_max):
                outbox.room_for(len(body)).add_large_outcome(body)
                return
            body = wire_large.outcome_at(body, tail)
        outbox.room_for(len(body)).add_outcome(body)

    def _dispatch(self, command: ev.Dispatch) -> None:
        outbox = self._sessions.get(command.session)
        if outbox is None:
            return
        part: list[Lease] = []
        part_bytes = 0
        spec = command.leases[0].task.spec
        for lease in command.leases:
            task = lease.task
            if task.spec is not spec or part_bytes > FRAME_BYTES:
                # What goes before is not all of this frame's leases: only the last part may carry its number.
                self._put_leases(command.session, outbox, part, part_bytes, command.frame - 1)
                part, part_bytes, spec = [], 0, task.spec
            part.append(lease)
            part_bytes += len(task.payload) + LEASE_BYTES
        self._put_leases(command.session, outbox, part, part_bytes, command.frame)

    def _put_leases(self, session: int, outbox: SessionOutbox, leases: list[Lease], size: int, number: int) -> None:
        read: dict[int, bytes] | None = None
        if wire_large.is_large(size):
            leases, read, lost = wire_large.readable(leases, outbox.peer)
            if lost:
                self._loop.call_soon(self.handle, ev.Reports(session, failures=lost))
        frame = outbox.room_for(size, len(leases))
        frame.frame = number
        if leases:
            wire.fill_leases(frame.lease_batches.add(), self.specs, leases, read)

    def _welcome(self, command: ev.Welcome) -> None:
        outbox = self._sessions.get(command.session)
        if outbox is not None:
            outbox.room_for(64).welcome.adopted_lease_ids.extend(command.adopted)

    def _revoke(self, command: ev.Revoke) -> None:
        outbox = self._sessions.get(command.session)
        if outbox is not None:
            for lease_id in command.lease_ids:
                outbox.room_for(64).revocations.add(lease_id=lease_id, reason=command.reason)

    def _desire(self, command: ev.Desire) -> None:
        outbox = self._sessions.get(command.session)
        if outbox is None:
            return
        desired = outbox.room_for(64).desired
        desired.Clear()
        if command.draining:
            desired.mode = worker_service_pb2.WORKER_MODE_DRAINING
            if command.drain_deadline_s is not None:
                wire.set_time(desired.drain_deadline, command.drain_deadline_s)
        else:
            desired.mode = worker_service_pb2.WORKER_MODE_ACTIVE
        worker = self.core.fleet.sessions.get(command.session)
        desired.check = worker.checks_asked if worker is not None else 0
        if worker is not None:
            wire_models.fill_desired(desired, worker)

    def _end_session(self, command: ev.EndSession) -> None:
        outbox = self._sessions.get(command.session)
        if outbox is not None:
            outbox.abort("ABORTED" if command.taken_over else "UNAVAILABLE", command.reason)

    def _forward(self, command: ev.Forward) -> None:
        task = command.task
        for stream in task.streams:
            outbox = self._streams.get(stream)
            if outbox is not None:
                for index, data in command.partials:
                    outbox.room_for(len(data) + 64).message.partials.add(
                        request_id=task.request_id, task_id=task.task_id, index=index, data=data
                    )

    def _breaker_changed(self, command: ev.BreakerChanged) -> None:
        if command.tripped_s:
            log.error("circuit breaker tripped", reason=command.message)
        else:
            log.info("circuit breaker reset")
        self.journaling.remember(settings.breaker_setting(command.tripped_s))
        self.watchers.wake("workers")

    def _worker_changed(self, command: ev.WorkerChanged) -> None:
        self.on_worker_changed(command)

    # --- workers -----------------------------------------------------------------------------------------------------

    def open_session(self, session: int) -> SessionOutbox:
        outbox = SessionOutbox(worker_service_pb2.SessionResponse, wire_large.Peer(self.journal.payloads))
        self._sessions[session] = outbox
        return outbox

    def close_session(self, session: int) -> None:
        self._sessions.pop(session, None)
        self.handle(ev.SessionClosed(session))
