"""The scheduler. A task walks: Submit -> lane -> lease -> report -> settled -> committed -> forgotten.

`handle` takes one event, changes the state, then dispatches whatever can go. The state and its accounts are in
ledger.py; the events of workers in sessions.py, of operators in operators.py, of clients and of the journal here.
"""

from collections.abc import Callable

from multigpu_master.core import events as ev
from multigpu_master.core.admission import RESOURCE_EXHAUSTED, full, rejection, unplaceable
from multigpu_master.core.attempts import Attempts
from multigpu_master.core.identity import conflict, fingerprint
from multigpu_master.core.ledger import Counters, Ledger, Limits
from multigpu_master.core.model import WITHDRAWN, OutcomeState, Spec, Task, TaskError
from multigpu_master.core.operators import Operators
from multigpu_master.core.placement.dispatch import Dispatcher
from multigpu_master.core.placement.lanes import Lane, partition_of
from multigpu_master.core.placement.recall import Recalls
from multigpu_master.core.timers import Due
from multigpu_master.core.workers.load_reservations import Turns
from multigpu_master.core.workers.quarantine import Quarantine
from multigpu_master.core.workers.sessions import Sessions
from multigpu_master.strategies.base import Strategy

__all__ = ["Core", "Counters", "Limits"]

# How many living Run streams may follow one task.
STREAMS_MAX = 16
TOO_MANY_STREAMS = (
    f"{STREAMS_MAX} Run streams wait for this task already; wait for it with Get, or use another request_id"
)


class Core(Ledger):
    """See the module. `first_id` and what follows in its range (model.EPOCH_IDS) must be above every task_id and
    lease_id given before; `random` yields [0.0, 1.0).
    """

    def __init__(
        self,
        strategies: dict[str, Strategy],
        limits: Limits,
        first_id: int,
        random: Callable[[], float],
        strategy: str = "auto",
    ) -> None:
        super().__init__(strategies, limits, first_id, strategy)
        self._streams: set[int] = set()  # the Run streams that live
        self._attempts = Attempts(self, random)
        turns = Turns(self)
        recalls = Recalls(self)
        self._dispatcher = Dispatcher(self, self._attempts, turns, recalls)
        self.quarantine = Quarantine(self)
        sessions = Sessions(self, self._attempts, self.quarantine, turns, recalls)
        operators = Operators(self, self._attempts)
        self._handlers: dict[type, Callable[..., None]] = {
            ev.StreamOpened: self._stream_opened, ev.StreamClosed: self._stream_closed,
            ev.Submit: self._submit, ev.Cancel: self._cancel, ev.SubmitFailed: self._submit_failed,
            ev.SettlesCommitted: self._committed, ev.IdsRenewed: self._ids_renewed, ev.Recover: self._recover,
            ev.Tick: self._tick,
            ev.Hello: sessions.hello, ev.Heartbeat: sessions.heartbeat, ev.Reports: sessions.reports,
            ev.Partials: sessions.partials, ev.SessionClosed: sessions.closed,
            ev.RegisterWorker: operators.register, ev.Cordon: operators.cordon, ev.Uncordon: operators.uncordon,
            ev.Drain: operators.drain, ev.Forget: operators.forget,
            ev.LoadModel: operators.load_model, ev.UnloadModel: operators.unload_model,
            ev.RestoreBreaker: self.quarantine.restore, ev.ResetBreaker: self.quarantine.reset,
            ev.SetStrategy: operators.set_strategy, ev.ConfigureQueue: operators.configure_queue,
        }  # fmt: skip

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        """Takes one event at a time `now` (seconds since the epoch, never less than before); returns what is to be
        done.
        """
        self.timers.fire(now)
        self.expiries.fire(now)
        self._handlers[type(event)](event, now)
        self._dispatcher.run(now)
        if self.settled:
            self.out.append(ev.Settled(self.settled))
            self.settled = []
        if self.next_id >= self.renew_id and not self.renewing:
            self.renewing = True
            self.out.append(ev.RenewIds())
        out, self.out = self.out, []
        return out

    @property
    def unfinished(self) -> bool:
        """Whether tasks are still to be looked at for a worker: the next event is due at once."""
        return self._dispatcher.unfinished_s is not None

    def next_timer_s(self) -> float | None:
        """When the next Tick is due; None: nothing is waited for."""
        due_s = self._dispatcher.unfinished_s
        for when_s in (self.timers.next_s(), self.expiries.next_s()):
            if when_s is not None and (due_s is None or when_s < due_s):
                due_s = when_s
        return due_s

    def unplaceable(self, spec: Spec) -> str:
        """Why no worker that the master knows could ever take a task of this spec, in words."""
        return unplaceable(self, spec)

    def task_due(self, task: Task, what: Due, now: float) -> None:
        """An instant of an unsettled task has come."""
        self._attempts.due(task, what, now)

    def _tick(self, event: ev.Tick, now: float) -> None:
        """The timers have fired already."""

    # --- clients -----------------------------------------------------------------------------------------------------

    def _stream_opened(self, event: ev.StreamOpened, now: float) -> None:
        self._streams.add(event.stream)

    def _stream_closed(self, event: ev.StreamClosed, now: float) -> None:
        """Its tasks go on. They learn that it is gone when another stream joins them."""
        self._streams.discard(event.stream)

    def _submit(self, event: ev.Submit, now: float) -> None:
        spec = event.spec
        reason = rejection(self, spec, now)
        results: list[Task | ev.Rejection] = []
        fresh: list[Task] = []
        lane: Lane | None = None
        lane_key = ""
        owed = 0
        streams = (event.stream,) if event.stream else ()
        for task in event.tasks:
            known = self.requests.get(task.request_id) if task.request_id else None
            if known is not None and not (known.outcome is not None and known.outcome.withdrawn):
                first = known.spec
                other = conflict(
                    known.task_id, first.kind, first.model, fingerprint(known), task, durable=first.durable
                )
                if other is not None:
                    results.append(other)
                    continue
                if event.stream and event.stream not in known.streams:
                    living = [stream for stream in known.streams if stream in self._streams]
                    if len(living) >= STREAMS_MAX:
                        results.append(ev.Rejection(RESOURCE_EXHAUSTED, TOO_MANY_STREAMS, self.limits.retry_delay_s))
                        continue
                    known.streams = (*living, event.stream)
                    owed += known.outcome is None
                results.append(known)
                continue
            why_not = reason or full(self, spec, len(task.payload))
            if why_not is not None:
                results.append(why_not)
                continue
            task.task_id = self.next_id
            self.next_id += 1
            task.submit_s = now
            task.streams = streams
            if lane is None or task.partition_key != lane_key:
                lane_key = task.partition_key
                lane = self.lanes.lane_of(self.queue(spec.queue), spec, partition_of(lane_key))
            self.enter(task, lane)
            results.append(task)
            fresh.append(task)
        self.counters.submitted += len(fresh)
        self.out.append(ev.Submitted(results, fresh, owed + len(fresh) if event.stream else 0))

    def _cancel(self, event: ev.Cancel, now: float) -> None:
        ended = [t for t in dict.fromkeys(event.tasks) if t.outcome is None]
        error_type = WITHDRAWN if event.withdrawn else "Cancelled"
        error = TaskError(error_type, event.reason or "cancelled by the client", retryable=False)
        for task in ended:
            self._attempts.end(task, OutcomeState.CANCELLED, error, now)
        self.out.append(ev.Cancelled(ended))

    # --- the journal -------------------------------------------------------------------------------------------------

    def _ids_renewed(self, event: ev.IdsRenewed, now: float) -> None:
        assert event.first_id >= self.ids_end, "new ids are above all others"
        self.begin_ids(event.first_id)

    def _recover(self, event: ev.Recover, now: float) -> None:
        self.hold_until_s = event.hold_until_s
        self.timers.at(event.hold_until_s, lambda _now: None)
        for task in event.tasks:
            assert 0 < task.task_id < self.next_id, "recovered ids are older than new ones"
            self.enter(task, self.lane_for(task))
        self.expiries.fire(now)  # deadlines that passed while there was no master

    def _submit_failed(self, event: ev.SubmitFailed, now: float) -> None:
        for task in event.tasks:
            self.drop(task)
            if task.outcome is None:
                self._attempts.leave(task, "the master could not write the task to its journal")
                self.close(task)
                self.counters.submitted -= 1
                task.task_id = 0

    def _committed(self, event: ev.SettlesCommitted, now: float) -> None:
        for task in event.tasks:
            assert task.outcome is not None, "only outcomes are committed"
            self.committed(task)
