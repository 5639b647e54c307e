"""What the core must report: to workers about their leases and drains, to the journal about workers.

A model of each session's knowledge and of what the journal has of each worker, made from commands alone.
"""

from collections.abc import Sequence

from multigpu_master.core import events as ev
from multigpu_master.core.model import Worker
from multigpu_master.core.scheduler import Core

from tests.sim.world import ViolationError

Drain = tuple[bool, float | None]


class Notices:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._desired: dict[int, Drain] = {}  # session -> whether it believes to be drained, and until when
        self._leases: dict[int, int] = {}  # live lease -> the session that holds it
        self._remembered: dict[str, tuple[object, ...]] = {}

    def after(self, event: ev.Event, commands: Sequence[ev.Command]) -> None:
        ended: dict[int, None] = {}
        revoked: dict[int, list[int]] = {}
        remember: dict[Worker, None] = {}
        for command in commands:
            if isinstance(command, ev.Revoke):
                revoked.setdefault(command.session, []).extend(command.lease_ids)
            elif isinstance(command, ev.EndSession):
                ended[command.session] = None
            elif isinstance(command, ev.SendDesiredState):
                if (told := self._core.fleet.sessions.get(command.session)) is not None:
                    self._desired[command.session] = told.draining, told.drain_deadline_s
            elif isinstance(command, ev.WorkerChanged) and command.gone:
                self._remembered.pop(command.worker.worker_id, None)
            elif isinstance(command, ev.WorkerChanged) and command.save:
                remember[command.worker] = None
        for worker in remember:
            self._remembered[worker.worker_id] = _to_remember(worker)
        self._sessions(event, ended)
        self._workers(event)
        self._leases_that_ended(event, revoked)
        if isinstance(event, ev.Hello | ev.Heartbeat):
            self._listed(event, commands, revoked)

    def _sessions(self, event: ev.Event, ended: dict[int, None]) -> None:
        """A session ends when its stream does, or else is told so. One that lives knows whether it is drained."""
        sessions = self._core.fleet.sessions
        if isinstance(event, ev.Hello):
            self._desired.setdefault(event.session, (False, None))
        if isinstance(event, ev.SessionClosed) and event.session in sessions:
            raise ViolationError(f"session {event.session} outlives its stream")
        for session in [s for s in self._desired if s not in sessions]:
            del self._desired[session]
            if session not in ended and not (isinstance(event, ev.SessionClosed) and event.session == session):
                raise ViolationError(f"session {session} was not told that it is over")
        for session, worker in sessions.items():
            drain = (True, worker.drain_deadline_s) if worker.draining else (False, None)
            if self._desired[session] != drain:
                raise ViolationError(f"{worker.worker_id} was told {self._desired[session]}, and is drained: {drain}")

    def _workers(self, event: ev.Event) -> None:
        """A new master would restore the same state of the workers from the settings."""
        workers = self._core.fleet.workers
        if isinstance(event, ev.RegisterWorker):
            worker = workers[event.info.worker_id]
            self._remembered[worker.worker_id] = _to_remember(worker)
            if worker.cordon != event.cordon:
                raise ViolationError(f"{worker.worker_id} is cordoned: {worker.cordon}; it was: {event.cordon}")
        if len(self._remembered) != len(workers):
            raise ViolationError(f"{list(workers)} are there, {list(self._remembered)} are remembered")
        for name, worker in workers.items():
            if self._remembered.get(name) != _to_remember(worker):
                raise ViolationError(f"{name} is remembered as {self._remembered.get(name)}: {_to_remember(worker)}")

    def _leases_that_ended(self, event: ev.Event, revoked: dict[int, list[int]]) -> None:
        """A worker that loses an unreported lease gets a revocation, unless its session has ended."""
        fleet = self._core.fleet
        live = {lease_id: w.session for w in fleet.workers.values() for lease_id in w.leases}
        reported: Sequence[int] = ()
        if isinstance(event, ev.Reports):
            reported = [*event.succeeded, *[f.lease_id for f in event.failures]]
        for lease_id, session in self._leases.items():
            if lease_id in live or session not in fleet.sessions or lease_id in revoked.get(session, ()):
                continue
            if not (isinstance(event, ev.Reports) and event.session == session and lease_id in reported):
                raise ViolationError(f"session {session} was not told that lease {lease_id} is over")
        self._leases = live

    def _listed(
        self, event: ev.Hello | ev.Heartbeat, commands: Sequence[ev.Command], revoked: dict[int, list[int]]
    ) -> None:
        """Every lease that a worker lists is still granted to it, or is revoked."""
        worker = self._core.fleet.sessions.get(event.session)
        if worker is None:
            return
        if isinstance(event, ev.Hello):
            listed = [h.lease_id for h in event.leases]
            (welcome,) = [c for c in commands if isinstance(c, ev.Welcome)]
            granted = [x.lease_id for c in commands if isinstance(c, ev.Dispatch) for x in c.leases]
            if [x for x in welcome.adopted if x not in listed]:
                raise ViolationError(f"{worker.worker_id} was given leases {welcome.adopted}, it listed {listed}")
            over = revoked.get(event.session, ())
            kept = [x for x in worker.leases if x not in granted]
            if [x for x in listed if x not in kept and x not in over]:
                raise ViolationError(f"{worker.worker_id} was not told which of {listed} are over; it keeps {kept}")
            if sorted(kept) != sorted(x for x in welcome.adopted if x not in over):
                raise ViolationError(f"{worker.worker_id} goes on with {kept}, it was told {welcome.adopted}")
            return
        for held in event.leases:
            if held.lease_id not in worker.leases and held.lease_id not in revoked.get(event.session, ()):
                raise ViolationError(f"{worker.worker_id} holds lease {held.lease_id} and was not told that it is over")


def _to_remember(worker: Worker) -> tuple[object, ...]:
    pins = tuple(worker.residency.operator_pins)
    return worker.info, worker.cordon, bool(worker.session), pins
