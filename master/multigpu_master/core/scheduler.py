"""The scheduler. A task's stages: Submit -> resource class -> lease -> report -> settled -> committed -> forgotten.

`handle` takes one event, changes the state, then dispatches tasks. Each part of the state has one owner, made in
Core.__init__. sessions.py handles the events of workers, operators.py and quarantine.py those of operators, this module
those of clients and the journal.
"""

from collections.abc import Callable

from multigpu_master.core import events as ev
from multigpu_master.core.admission import RESOURCE_EXHAUSTED, rejection, room_rejection
from multigpu_master.core.attempts import Attempts
from multigpu_master.core.events import Commands
from multigpu_master.core.identity import conflict, fingerprint
from multigpu_master.core.ledger import Counters, Ledger, Limits
from multigpu_master.core.model import WITHDRAWN, Outcome, OutcomeState, Queue, Task, TaskError, partition_of
from multigpu_master.core.operators import Operators
from multigpu_master.core.placement.dispatch import Dispatcher
from multigpu_master.core.placement.gangs import Gangs
from multigpu_master.core.placement.pins import Pins
from multigpu_master.core.placement.recall import Recalls
from multigpu_master.core.placement.resource_classes import ResourceClass
from multigpu_master.core.restart import IdRange, RecoveryHold
from multigpu_master.core.spec import Spec
from multigpu_master.core.strategy import Strategy
from multigpu_master.core.timers import Timers
from multigpu_master.core.usage import Usage
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.core.workers.load_reservations import LoadReservations
from multigpu_master.core.workers.quarantine import Quarantine
from multigpu_master.core.workers.sessions import Sessions

__all__ = ["Core", "Counters", "Limits"]

# Limit of open Run streams that follow one task.
STREAMS_MAX = 16
TOO_MANY_STREAMS = (
    f"{STREAMS_MAX} Run streams wait for this task already; wait for it with Get, or use another request_id"
)


class Core:
    """See the module. Issues task_ids and lease_ids from `first_id` on, at most to the end of its epoch, a range of
    EPOCH_IDS ids (model.py). After an IdsRenewed, goes on from IdsRenewed.first_id. The caller must pass a `first_id`
    such that neither this id nor a higher one was issued before. `random` returns 0.0 <= x < 1.0.
    """

    def __init__(
        self,
        strategies: dict[str, Strategy],
        limits: Limits,
        first_id: int,
        random: Callable[[], float],
        strategy: str = "auto",
    ) -> None:
        fleet = self.fleet = Fleet(limits.memory_threshold)
        timers, commands = self.timers, self._commands = Timers(), Commands()
        hold = self.hold = RecoveryHold()
        self.ids, self.pins = IdRange(first_id), Pins(fleet)
        ledger = self.ledger = Ledger(limits, strategies, strategy, fleet, self.pins, timers, commands)
        self.quarantine = Quarantine(ledger, fleet, commands)
        self.usage = Usage()
        self._streams: set[int] = set()  # the open Run streams
        attempts = self._attempts = Attempts(ledger, timers, commands, hold, random)
        reservations = LoadReservations(fleet, timers)
        recalls = Recalls(ledger, fleet, timers, commands, self.can_grant)
        self.gangs = Gangs(ledger, fleet, timers, commands, attempts, self.ids)
        self._dispatcher = Dispatcher(
            ledger, fleet, self.ids, commands, attempts, reservations, recalls, self.gangs, self.can_grant
        )
        sessions = Sessions(
            ledger, fleet, timers, commands, hold, attempts, self.quarantine, reservations, recalls, self.gangs,
            self.usage,
        )  # fmt: skip
        operators = Operators(ledger, fleet, timers, commands, hold, attempts)
        self._handlers: dict[type, Callable[..., None]] = {
            ev.StreamOpened: self._stream_opened, ev.StreamClosed: self._stream_closed,
            ev.Submit: self._submit, ev.Cancel: self._cancel, ev.SubmitFailed: self._submit_failed,
            ev.SettlesDone: self._settles_done, ev.IdsRenewed: self._ids_renewed, ev.Recover: self._recover,
            ev.Tick: self._tick,
            ev.Hello: sessions.hello, ev.Heartbeat: sessions.heartbeat, ev.Reports: sessions.reports,
            ev.Partials: sessions.partials, ev.SessionClosed: sessions.closed,
            ev.RegisterWorker: operators.register, ev.Cordon: operators.cordon, ev.Uncordon: operators.uncordon,
            ev.Drain: operators.drain, ev.Forget: operators.forget,
            ev.LoadModel: operators.load_model, ev.UnloadModel: operators.unload_model,
            ev.CheckDevice: self.quarantine.request_check,
            ev.RestoreBreaker: self.quarantine.restore_breaker, ev.ResetBreaker: self.quarantine.reset_breaker,
            ev.SetStrategy: operators.set_strategy, ev.ConfigureQueue: operators.configure_queue,
        }  # fmt: skip

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        """Handles one event and returns the commands to execute. `now`: seconds since 1970, never decreasing."""
        self.timers.fire(now)
        for when_s, task, limit in self.ledger.expiries.due(now):
            self._attempts.apply_limit(task, limit, when_s, now)
        self._handlers[type(event)](event, now)
        self._dispatcher.run(now)
        commands = self._commands.pop_all()
        if self.ids.next_id >= self.ids.renew_at:
            self.ids.note_requested()
            commands.append(ev.RenewIds())
        return commands

    def can_grant(self, now: float) -> bool:
        """Whether leases can be granted: the recovery hold is over, the journal keeps up, and there is an unused id."""
        return not self.hold.active(now) and not self.ledger.clogged() and self.ids.next_id < self.ids.end

    @property
    def dispatch_unfinished(self) -> bool:
        """Whether the last dispatch stopped at BLOCKS_MAX or COMPARED_MAX: a Tick is due at once."""
        return self._dispatcher.stopped_at_s is not None

    def next_timer_s(self) -> float | None:
        """When the next Tick is due, in seconds since 1970; None: there is no timer."""
        due_s = self._dispatcher.stopped_at_s
        for when_s in (self.timers.next_s(), self.ledger.expiries.next_s()):
            if when_s is not None and (due_s is None or when_s < due_s):
                due_s = when_s
        return due_s

    def _tick(self, event: ev.Tick, now: float) -> None:
        """Does nothing: `handle` fires the due timers and dispatches tasks at every event."""

    # --- clients -----------------------------------------------------------------------------------------------------

    def _stream_opened(self, event: ev.StreamOpened, now: float) -> None:
        self._streams.add(event.stream)

    def _stream_closed(self, event: ev.StreamClosed, now: float) -> None:
        """The stream's tasks continue. `follow` drops a task's closed streams when a new stream follows the task."""
        self._streams.discard(event.stream)

    def _submit(self, event: ev.Submit, now: float) -> None:
        ledger, ids, spec = self.ledger, self.ids, event.spec
        reason = rejection(ledger, self.fleet, spec, now)
        results: list[Task | ev.Rejection] = []
        fresh: list[Task] = []
        # A submit that rejection() rejects must not create its queue. (One that room_rejection() rejects may leave an
        # empty queue, which prune_queues() removes.)
        queue = ledger.queue(spec.queue) if reason is None else Queue(spec.queue)
        resource_class: ResourceClass | None = None
        key = ""  # partition_key of resource_class
        pending = 0  # known unsettled tasks that the stream follows from now on
        streams = (event.stream,) if event.stream else ()
        for task in event.tasks:
            known = ledger.requests.get(task.request_id) if task.request_id else None
            if known is not None and not _may_reuse_request_id(known.outcome, spec):
                followed = event.stream in known.streams
                results.append(self._join(known, task, event.stream))
                pending += not followed and event.stream in known.streams and known.outcome is None
                continue
            why_not = reason or room_rejection(ledger, ids, queue, len(task.payload))
            if why_not is not None:
                results.append(why_not)
                continue
            dead_letter_id = task.task_id  # a requeued dead letter keeps its id; 0: a new task
            task.task_id = dead_letter_id or ids.issue()
            if dead_letter_id:
                task.ensure_extra().first_lease_id = ids.next_id
            task.submit_s = now
            task.streams = streams
            if resource_class is None or task.partition_key != key:
                key = task.partition_key
                resource_class = ledger.classes.get(queue, spec, partition_of(key))
            ledger.add_queued(task, resource_class, requeued_letter=dead_letter_id > 0)
            results.append(task)
            fresh.append(task)
        ledger.counters.submitted += len(fresh)
        self._commands.add(ev.Submitted(results, fresh, pending + len(fresh) if event.stream else 0))

    def _join(self, known: Task, resubmit: Task, stream: int) -> Task | ev.Rejection:
        """Answers a resubmit: returns the known task with the same request_id, which `stream` now follows, or a
        rejection.
        """
        spec = known.spec
        state = known.outcome.state if known.outcome is not None else None
        rejected = conflict(
            known.task_id, spec.kind, spec.model, fingerprint(known), resubmit, state, durable=spec.durable
        )
        if rejected is not None:
            return rejected
        return self.follow(known, stream) or known

    def follow(self, task: Task, stream: int) -> ev.Rejection | None:
        """Adds `stream` (0: none) to the streams that get the task's outcome. Returns a rejection if STREAMS_MAX open
        streams follow the task already.
        """
        if stream and stream not in task.streams:
            open_streams = [each for each in task.streams if each in self._streams]
            if len(open_streams) >= STREAMS_MAX:
                return ev.Rejection(RESOURCE_EXHAUSTED, TOO_MANY_STREAMS, ev.RETRY_DELAY_S)
            task.streams = (*open_streams, stream)
        return None

    def _cancel(self, event: ev.Cancel, now: float) -> None:
        unsettled = [t for t in dict.fromkeys(event.tasks) if t.outcome is None]
        error_type = WITHDRAWN if event.withdrawn else "Cancelled"
        error = TaskError(error_type, event.reason or "cancelled by the client", retryable=False)
        for task in unsettled:
            self._attempts.settle_without_report(task, OutcomeState.CANCELLED, error, now)
        self._commands.add(ev.Cancelled(unsettled))

    # --- the journal -------------------------------------------------------------------------------------------------

    def _ids_renewed(self, event: ev.IdsRenewed, now: float) -> None:
        assert event.first_id >= self.ids.end, "the new range of ids must be above the present one"
        self.ids.begin(event.first_id)
        self.ledger.classes.unblock_all()  # a gang may have waited for ids

    def _recover(self, event: ev.Recover, now: float) -> None:
        self.hold.until_s = event.hold_until_s
        self.timers.at(event.hold_until_s, self._extend_hold_if_suspended)
        ledger = self.ledger
        for task in event.tasks:
            assert 0 < task.task_id < self.ids.next_id, "a recovered task must have an id below the new ids"
            ledger.add_queued(task, ledger.class_of(task))
        for when_s, task, limit in self.ledger.expiries.due(now):  # time limits that passed while no master ran
            self._attempts.apply_limit(task, limit, when_s, now)

    def _extend_hold_if_suspended(self, now: float) -> None:
        """Called when the hold should end. If the call is late, the master was suspended, and may not have read the
        workers' hellos yet: extends the hold. Else does nothing, and the same event dispatches tasks.
        """
        late_s = self.ledger.limits.timer_late_s
        if self.hold.until_s + late_s < now and self.hold.has_expected:
            self.hold.until_s = now + late_s
            self.timers.at(self.hold.until_s, self._extend_hold_if_suspended)

    def _submit_failed(self, event: ev.SubmitFailed, now: float) -> None:
        ledger = self.ledger
        unsettled = [task for task in event.tasks if task.outcome is None]
        for task in event.tasks:
            ledger.forget(task)
            if task.outcome is None:
                self._attempts.take_out(task, "the master could not write the task to its journal")
                ledger.remove_from_counts(task)
                ledger.counters.unwritten += 1
                task.task_id = 0
        self._commands.add(ev.RejectUnwritten(unsettled))

    def _settles_done(self, event: ev.SettlesDone, now: float) -> None:
        for task in event.tasks:
            assert task.outcome is not None, "a settled task must have an outcome"
            self.ledger.forget_settled(task)


def _may_reuse_request_id(outcome: Outcome | None, spec: Spec) -> bool:
    """Whether a new task of this spec may have the request_id of a task with this outcome."""
    if outcome is None:
        return False
    return outcome.withdrawn or (spec.retry_failed and outcome.state is not OutcomeState.SUCCEEDED)
