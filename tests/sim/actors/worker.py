"""A simulated worker: the real session (leases held and reports pending), with an engine that acts as payloads say.

A payload is a list of options: `run 0.5` takes half a second, `fail` raises, `fatal` fails without retry, `poison`
kills the worker, `flaky` fails on its first attempt, `stream` yields two partial outputs first, `save` stores a
checkpoint halfway, `stuck` runs until its run_timeout, `deaf` beyond it: only the master can end that one. `stuck` and
`deaf` go on for a while after they are cancelled, and occupy their slot. `sicken N`, a task of N attempts, makes the
device sick.
"""

from __future__ import annotations

from dataclasses import replace

from multigpu_master.core import events as ev
from multigpu_master.core.model import TaskError
from multigpu_master.core.workers.info import (
    HEALTHY,
    Health,
    HealthReason,
    HealthState,
    Resident,
    Telemetry,
    WorkerInfo,
)
from multigpu_worker.session import session as ws
from multigpu_worker.session.lease import Lease, Spec

from tests.sim.actors.engine import SimEngine, reports_of
from tests.sim.actors.grant import PROOFS, Grant
from tests.sim.actors.master import Master
from tests.sim.world import Inbox, Link, World, check

SPEC = Spec(kind="sim")


class SimWorker:
    """One worker daemon, over all its processes, which `life` counts."""

    def __init__(
        self, world: World, master: Master, info: WorkerInfo, heartbeat_s: float, *, primary: bool = True
    ) -> None:  # fmt: skip
        self.world = world
        self._master = master
        self.info = info
        self.primary = primary  # whether it is started again after another process took over its worker_id
        self.skew_s = 0.0  # how wrong its clock is
        self.alive = False
        self.life = 0
        self.held = ws.Session(ws.SessionLimits())
        self.engine = SimEngine(self)
        self.frozen_until = 0.0
        self.inert = False  # it reports HEALTHY, accepts leases, and starts none
        self.stopping = False
        self.resident: tuple[str, ...] = ()
        self.health = HEALTHY  # its device's
        self.memory_used = 0
        self.utilization = 0.0
        self.claims: list[tuple[int, int, int, int]] = []  # leases of others that its hellos list, with proofs
        self.reported: list[int] = []  # leases that it has reported on this stream
        self._heartbeat_s = heartbeat_s
        self._session = 0
        self._stream = 0  # counts streams, so that what belongs to an old one is known
        self._up: Link | None = None
        self._down: Link | None = None
        self._last_frame = 0
        self._inbox = Inbox(world, lambda: self.frozen_until)

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.alive:
            return
        self.alive = True
        self.life += 1
        self.stopping = False
        self.held = ws.Session(ws.SessionLimits())
        self.engine = SimEngine(self)
        self.resident = ()
        self.health = HEALTHY
        self.world.trace("%s starts", self.info.worker_id)
        self.connect()

    def crash(self, back_after_s: float | None) -> None:
        """kill -9; it is started again after this time, if any."""
        if not self.alive:
            return
        self.world.trace("%s is killed", self.info.worker_id)
        self.alive = False
        self._inbox.clear()
        self.frozen_until = 0.0
        self.engine = SimEngine(self)
        self._cut(self.world.between(0.0, 0.05))
        if back_after_s is not None:
            self.world.after(back_after_s, self.start)

    def leave(self, back_after_s: float) -> None:
        """SIGTERM: no more work, leases are returned, the stream ends."""
        if not self.alive or self.stopping:
            return
        self.world.trace("%s leaves", self.info.worker_id)
        self.stopping = True
        self.heartbeat()
        self.held.return_all_leases("the worker stops", 0)
        self.engine.running = {}
        self.flush()
        life = self.life
        self.world.after(0.5, lambda: self.crash(back_after_s) if self.life == life else None)

    def fall_sick(self, *, unusable: bool, well_after_s: float) -> None:
        """Its device becomes sick: it reports that, then returns waiting leases, or all; later it recovers."""
        if not self.awake(lambda: self.fall_sick(unusable=unusable, well_after_s=well_after_s)) or self.stopping:
            return
        if self.health.fit:
            self.world.trace("%s falls sick", self.info.worker_id)
            code = "gpu_is_lost" if unusable else "driver_hung"
            self.health = Health(
                state=HealthState.SICK, reasons=(HealthReason(code),), unusable=unusable,
                checks_passed=self.health.checks_passed,
            )  # fmt: skip
            self.heartbeat()
            self._return_for_health()
            life = self.life
            self.world.after(well_after_s, lambda: self._get_well() if self.life == life else None)

    def _return_for_health(self) -> None:
        if self.health.unusable:
            self.engine.running = {}
        self.held.return_all_leases("the device is sick", 0, kept=self.engine.running)
        self.flush()

    def _get_well(self) -> None:
        if self.awake(self._get_well):
            self.world.trace("%s is well again", self.info.worker_id)
            self.health = replace(HEALTHY, checks_passed=self.health.checks_passed)
            self.heartbeat()

    def _check(self, asked: int) -> None:
        """A check that an operator asked for has ended."""
        if self.awake(lambda: self._check(asked)):
            self.health = replace(self.health, checks_passed=max(asked, self.health.checks_passed))
            self.heartbeat()

    def stall(self) -> None:
        """It starts no tasks from now on, and does not notice."""
        self.world.trace("%s begins nothing more", self.info.worker_id)
        self.inert = True

    def resume(self) -> None:
        self.inert = False
        if self.awake(self.resume):
            self.engine.pump()

    def break_stream(self, heard_after_s: float | None) -> None:
        """The stream breaks; the master notices it after a delay, or not at all."""
        if self._session and self.alive:
            self.world.trace("%s: the stream breaks", self.info.worker_id)
            self._cut(heard_after_s)
            self.engine.drop(self.held.stream_broken())
            self.world.after(self.world.between(0.05, 0.5), self.connect)

    def stall_stream(self, seconds: float, *, up: bool) -> None:
        """Nothing gets through in one direction for a while; nothing is lost."""
        link = self._up if up else self._down
        if link is not None:
            link.stall(seconds)

    def _cut(self, heard_after_s: float | None) -> None:
        session, self._session = self._session, 0
        self._stream += 1
        late_s = 0.0
        if self._down is not None:
            self._down.end(lost=True)
        if self._up is not None:
            # What was sent may be in the master's socket already.
            late_s = self._up.end(lost=self.world.chance(0.5))
        master = self._master
        epoch = master.epoch

        def deliver() -> None:
            if master.core is not None and master.epoch == epoch and session:
                master.down.pop(session, None)
                master.handle(ev.SessionClosed(session))

        if session and heard_after_s is not None:
            self.world.after(max(heard_after_s, late_s), lambda: master.when_awake(deliver))

    def awake(self, what: object) -> bool:
        """Whether the process runs now; a frozen one calls `what` when it continues."""
        assert callable(what), "something to do"
        if self.world.now < self.frozen_until:
            life = self.life
            self.world.after(self.frozen_until - self.world.now, lambda: what() if self.life == life else None)
            return False
        return self.alive

    # --- the stream --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        if not self.awake(self.connect) or self._session:
            return
        master, world = self._master, self.world
        if master.core is None:
            world.after(world.between(0.05, 0.5), self.connect)
            return
        session = self._session = master.new_id()
        self._stream += 1
        self._last_frame = 0
        self.reported = []
        epoch = master.epoch
        delay_s = 0.005 if world.chance(0.1) else 0.0005

        def up(event: ev.Event) -> None:
            def arrive() -> None:
                if master.core is not None and master.epoch == epoch:
                    master.handle(event)

            master.when_awake(arrive)

        self._up = Link(world, delay_s, up)
        self._down = Link(world, delay_s, lambda command: self._inbox.put(lambda: self._down_frame(command)))
        master.down[session] = self._down
        ids_end = master.incarnations.ids_end(self.held.incarnation)
        self._up.send(ev.Hello(session, self.info, self._listed(hello=True), ids_end))
        stream = self._stream
        # If the master has ended by then, there is no reply: the agent notices by itself.
        world.after(3 * self._heartbeat_s, lambda: self._give_up(stream))

    def _give_up(self, stream: int) -> None:
        if not self.awake(lambda: self._give_up(stream)):
            return
        if self._stream == stream and self._session and (not self.held.connected or self._master_gone()):
            self._reconnect()
        elif self._stream == stream and self._session:
            self.world.after(self._heartbeat_s, lambda: self._give_up(stream))

    def _master_gone(self) -> bool:
        return self._session not in self._master.down

    def _reconnect(self) -> None:
        self._cut(0.001)
        if self.held.connected:
            self.engine.drop(self.held.stream_broken())
        self.world.after(self.world.between(0.05, 0.5), self.connect)

    def master_died(self) -> None:
        """The connection is reset."""
        if self._session:
            self._reconnect()

    def _listed(self, *, hello: bool) -> list[ev.HeldLease]:
        listed = [
            ev.HeldLease(
                h.lease.lease_id, h.lease.task_id, h.lease.attempt, h.lease.running, checkpoint=h.checkpoint or b"",
                granted_by_this_journal=(
                    hello and self._proven(h.lease.lease_id, h.lease.task_id, h.lease.attempt, h.lease.proof)
                ),
            )
            for h in self.held.held(hello=hello)
        ]  # fmt: skip
        if hello:
            check(
                all(h.granted_by_this_journal for h in listed),
                "%s cannot prove a lease that it was granted",
                self.info.worker_id,
            )
            own = {h.lease_id for h in listed}
            claims = [claim for claim in self.claims if claim[0] not in own]
            listed += [ev.HeldLease(*claim[:3], granted_by_this_journal=self._proven(*claim)) for claim in claims]
            self.world.coverage["worker: claims in hello"] += len(claims)
        return listed

    def _proven(self, lease_id: int, task_id: int, attempt: int, proof: int) -> bool:
        """As wire.held_leases finds."""
        return PROOFS.of(self.info.worker_id, [lease_id], [task_id], [attempt]) == (proof,)

    def _down_frame(
        self, command: ev.Welcome | ev.Revoke | ev.Recall | ev.SendDesiredState | ev.EndSession | Grant
    ) -> None:  # fmt: skip
        if not self.alive or command.session != self._session:
            return
        match command:
            case ev.Welcome():
                self.engine.drop(self.held.welcome(command.adopted, self._master.incarnations.current))
                pending = [g for g in self.held._outbox if isinstance(g, ws.Reports)]
                listed = [*self.held.leases, *[r.lease.lease_id for g in pending for r in g.reports]]
                unwanted = [x for x in listed if x not in command.adopted]
                check(not unwanted, "%s continues %s, which the master has not adopted", self.info.worker_id, unwanted)
                self._beat(self._stream)
                self.flush()
            case Grant():
                check(command.frame > self._last_frame, "frames must count up")
                self._last_frame = command.frame
                self.held.grant([
                    Lease(
                        lease_id, task_id, attempt, SPEC, payload, proof=proof, checkpoint=checkpoint,
                        partials_received=partials,
                        # Another master would not have those outputs.
                        resumable=not partials,
                    )
                    for lease_id, task_id, attempt, payload, proof, checkpoint, partials, _ in command.leases
                ])  # fmt: skip
                for lease_id, *_, run_timeout_s in command.leases:
                    self.engine.run_timeouts_s[lease_id] = run_timeout_s
                if self.health.unusable:
                    self.world.coverage["worker: leases crossed its report that it is sick"] += 1
                    self._return_for_health()
                self.engine.pump()
            case ev.Revoke():
                leases = [self.held.revoke(x) for x in command.lease_ids]
                self.engine.drop([x for x in leases if x is not None])
            case ev.Recall():
                leases = [self.held.leases.get(x) for x in command.lease_ids if x not in self.engine.running]
                self.held.return_leases([x for x in leases if x is not None], "recalled", 0, error_type="Recalled")
                self.flush()
            case ev.SendDesiredState() if (core := self._master.core) is not None:
                worker = core.fleet.workers.get(self.info.worker_id)
                asked = worker.requested_check if worker is not None else 0  # it was forgotten since
                if asked > self.health.checks_passed:
                    life = self.life
                    self.world.after(0.3, lambda: self._check(asked) if self.life == life else None)
            case ev.EndSession() if command.taken_over and self.held.connected:
                self.world.coverage["worker: taken over"] += 1
                self.world.trace("%s ends: another has its id", self.info.worker_id)
                self.crash(self.world.between(0.5, 2.0) if self.primary else None)
            case ev.EndSession():
                self._reconnect()
            case _:
                pass

    def _beat(self, stream: int) -> None:
        if self._stream == stream and self.awake(lambda: self._beat(stream)):
            self.heartbeat()
            self.world.after(self._heartbeat_s, lambda: self._beat(stream))

    def heartbeat(self) -> None:
        if not self._session or not self.held.connected or self._up is None:
            return
        telemetry = Telemetry(
            sample_s=self.world.now + self.skew_s, memory_total_bytes=1000, memory_used_bytes=self.memory_used,
            utilization=self.utilization,
        )  # fmt: skip
        leases = self._listed(hello=False)
        self._up.send(
            ev.Heartbeat(
                self._session, leases, self._last_frame, telemetry,
                tuple(Resident(model=m, memory_bytes=300) for m in self.resident), self.stopping, self.health,
                occupied_slots=self.engine.occupied,
            )
        )  # fmt: skip

    def flush(self) -> None:
        """Sends what is pending."""
        while self._session and self.held.connected and self._up is not None:
            if self.held.heartbeat_due:
                self.heartbeat()
            if not self.held.has_unsent():
                return
            frame = self.held.take_frame(1 << 20, self.world.now)
            for group in frame.reports:
                self.reported = [*[r.lease.lease_id for r in group.reports], *self.reported[:5]]
                self._up.send(reports_of(self._session, group))
            partials = [
                ev.PartialOutput(p.lease.lease_id, p.index, p.data, p.content_type, p.checkpoint or b"")
                for p in frame.partials
            ]
            if partials:
                self._up.send(ev.Partials(self._session, partials))

    def report_falsely(self, lease_ids: list[int]) -> None:
        """Reports leases that are not its own, or that it has reported already. The master must ignore that."""
        if self._session and self.held.connected and self._up is not None:
            self._up.send(ev.Partials(self._session, [ev.PartialOutput(x, 0, b"lie") for x in lease_ids]))
            good, bad = lease_ids[::2], lease_ids[1::2]
            failures = [ev.Failure(x, TaskError("Lie", "a lie", retryable=False)) for x in bad]
            self._up.send(ev.Reports(self._session, good, [f"lie {x}".encode() for x in good], "", failures))
