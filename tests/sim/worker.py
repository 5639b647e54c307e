"""A simulated worker: the worker's own session (what it holds and owes), with an engine that acts out what payloads
say.

A payload is a list of words: `run 0.5` takes half a second, `fail` raises, `fatal` can't succeed, `poison` kills the
worker, `flaky` fails on its first attempt, `stream` yields two partial outputs first, `stuck` never ends.
"""

from __future__ import annotations

from multigpu_master.core import events as ev
from multigpu_master.core.model import ReportState, TaskError, Telemetry, WorkerInfo
from multigpu_worker import session as ws

from tests.sim.invariants import check
from tests.sim.master import Grant, Master
from tests.sim.world import Inbox, Link, World

HEARTBEAT_S = 1.0
SPEC = ws.Spec(kind="sim")


class SimWorker:
    """One worker daemon, over all its lives. `life` counts its processes."""

    def __init__(self, world: World, master: Master, info: WorkerInfo) -> None:
        self._world = world
        self._master = master
        self.info = info
        self.alive = False
        self.life = 0
        self.held = ws.Session(ws.SessionLimits())
        self.running: dict[int, ws.Lease] = {}
        self.frozen_until = 0.0
        self.stopping = False
        self.resident: tuple[str, ...] = ()
        self.memory_used = 0
        self.utilization = 0.0
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
        self.running = {}
        self.resident = ()
        self._world.trace("%s starts", self.info.worker_id)
        self.connect()

    def crash(self, back_after_s: float) -> None:
        """kill -9; something starts it again."""
        if not self.alive:
            return
        self._world.trace("%s is killed", self.info.worker_id)
        self.alive = False
        self._inbox.clear()
        self.frozen_until = 0.0
        self.running = {}
        self._cut(self._world.between(0.0, 0.05))
        self._world.after(back_after_s, self.start)

    def leave(self, back_after_s: float) -> None:
        """SIGTERM: no more work, what is held goes back, the stream ends."""
        if not self.alive or self.stopping:
            return
        self._world.trace("%s leaves", self.info.worker_id)
        self.stopping = True
        self._heartbeat()
        self.held.return_all("the worker stops", 0)
        self.running = {}
        self.flush()
        self._world.after(0.5, lambda: self.crash(back_after_s))

    def break_stream(self, heard_after_s: float | None) -> None:
        """The stream breaks; the master hears of it after a while, or not at all."""
        if self._session and self.alive:
            self._world.trace("%s: the stream breaks", self.info.worker_id)
            self._cut(heard_after_s)
            self._drop(self.held.break_stream())
            self._world.after(self._world.between(0.05, 0.5), self.connect)

    def _cut(self, heard_after_s: float | None) -> None:
        session, self._session = self._session, 0
        self._stream += 1
        for link in (self._up, self._down):
            if link is not None:
                link.broken = True
        master = self._master
        epoch = master.epoch

        def heard() -> None:
            if master.core is not None and master.epoch == epoch and session:
                master.down.pop(session, None)
                master.handle(ev.SessionClosed(session))

        if session and heard_after_s is not None:
            self._world.after(heard_after_s, lambda: master.when_awake(heard))

    def _awake(self, what: object) -> bool:
        """Whether the process runs now; a frozen one does `what` when it thaws."""
        assert callable(what), "something to do"
        if self._world.now < self.frozen_until:
            life = self.life
            self._world.after(self.frozen_until - self._world.now, lambda: what() if self.life == life else None)
            return False
        return self.alive

    # --- the stream --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        if not self._awake(self.connect) or self._session:
            return
        master, world = self._master, self._world
        if master.core is None:
            world.after(world.between(0.05, 0.5), self.connect)
            return
        session = self._session = master.new_id()
        self._stream += 1
        self._last_frame = 0
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
        self._up.send(ev.Hello(session, self.info, self._listed(hello=True)))
        stream = self._stream
        # Should the master be gone by then, nobody says so: the agent notices by itself.
        world.after(3.0, lambda: self._give_up(stream))

    def _give_up(self, stream: int) -> None:
        if not self._awake(lambda: self._give_up(stream)):
            return
        if self._stream == stream and self._session and (not self.held.connected or self._master_gone()):
            self._reconnect()
        elif self._stream == stream and self._session:
            self._world.after(1.0, lambda: self._give_up(stream))

    def _master_gone(self) -> bool:
        return self._session not in self._master.down

    def _reconnect(self) -> None:
        self._cut(0.001)
        if self.held.connected:
            self._drop(self.held.break_stream())
        self._world.after(self._world.between(0.05, 0.5), self.connect)

    def master_died(self) -> None:
        """The connection is reset."""
        if self._session:
            self._reconnect()

    def _listed(self, *, hello: bool) -> list[ev.HeldLease]:
        held = self.held.held(hello=hello)
        return [
            ev.HeldLease(h.lease.lease_id, h.lease.task_id, h.lease.attempt, h.lease.running, checkpoint=h.checkpoint
            or b"") for h in held
        ]  # fmt: skip

    def _down_frame(self, command: ev.Welcome | ev.Revoke | ev.Desire | ev.EndSession | Grant) -> None:
        if not self.alive or command.session != self._session:
            return
        match command:
            case ev.Welcome():
                self._drop(self.held.welcome(command.adopted))
                self._beat(self._stream)
                self.flush()
            case Grant():
                check(command.frame > self._last_frame, "frames must count up")
                self._last_frame = command.frame
                self.held.grant([
                    ws.Lease(
                        lease_id, task_id, attempt, SPEC, payload, checkpoint=checkpoint, partials_received=partials,
                        # Another master would not have those outputs.
                        resumable=not partials,
                    )
                    for lease_id, task_id, attempt, payload, checkpoint, partials in command.leases
                ])  # fmt: skip
                self._pump()
            case ev.Revoke():
                leases = [self.held.revoke(x) for x in command.lease_ids]
                self._drop([x for x in leases if x is not None])
            case ev.EndSession():
                self._reconnect()
            case _:
                pass

    def _beat(self, stream: int) -> None:
        if self._stream == stream and self._awake(lambda: self._beat(stream)):
            self._heartbeat()
            self._world.after(HEARTBEAT_S, lambda: self._beat(stream))

    def _heartbeat(self) -> None:
        if not self._session or not self.held.connected or self._up is None:
            return
        telemetry = Telemetry(
            sample_s=self._world.now, memory_total_bytes=1000, memory_used_bytes=self.memory_used,
            utilization=self.utilization,
        )  # fmt: skip
        leases = self._listed(hello=False)
        self._up.send(
            ev.Heartbeat(self._session, leases, self._last_frame, telemetry, self.resident, self.stopping)
        )  # fmt: skip

    def flush(self) -> None:
        """Sends what is owed."""
        while self._session and self.held.connected and self._up is not None:
            if self.held.heartbeat_due:
                self._heartbeat()
            if not self.held.owes():
                return
            frame = self.held.take_frame(1 << 20, self._world.now)
            for group in frame.reports:
                reports = [
                    ev.Report(
                        r.lease.lease_id, ReportState(r.state.value), r.result, r.content_type,
                        TaskError(r.error.type, r.error.message, r.error.retryable) if r.error is not None else None,
                    )
                    for r in group.reports
                ]  # fmt: skip
                self._up.send(ev.Reports(self._session, reports, group.start_ns / 1e9, group.finish_ns / 1e9))
            partials = [ev.PartialOutput(p.lease.lease_id, p.index, p.data) for p in frame.partials]
            if partials:
                self._up.send(ev.Partials(self._session, partials))

    def lie(self, lease_ids: list[int]) -> None:
        """Reports leases that are not its own. Nobody may believe it."""
        if self._session and self.held.connected and self._up is not None:
            reports = [ev.Report(x, ReportState.SUCCEEDED, f"lie {x}".encode()) for x in lease_ids]
            self._up.send(ev.Reports(self._session, reports))

    # --- the engine --------------------------------------------------------------------------------------------------

    def _drop(self, leases: list[ws.Lease]) -> None:
        for lease in leases:
            self.running.pop(lease.lease_id, None)
        self._pump()

    def _pump(self) -> None:
        for lease in list(self.held.leases.values()):
            if len(self.running) >= self.info.slots:
                return
            if lease.lease_id not in self.running and not self.stopping:
                self._begin(lease)

    def _begin(self, lease: ws.Lease) -> None:
        lease.running = True
        self.running[lease.lease_id] = lease
        words = lease.payload.decode().split()
        run_s = float(words[words.index("run") + 1])
        began_s, life = self._world.now, self.life
        if "stream" in words and lease.partials_received == 0:
            self.held.partial(lease, b"p0")
            self.flush()
        if "stuck" not in words:
            self._world.after(run_s, lambda: self._finish(lease, words, began_s, life))

    def _finish(self, lease: ws.Lease, words: list[str], began_s: float, life: int) -> None:
        if self.life != life or not self._awake(lambda: self._finish(lease, words, began_s, life)):
            return
        if self.running.get(lease.lease_id) is not lease:
            return
        if "poison" in words:
            self.crash(self._world.between(0.1, 0.5))
            return
        del self.running[lease.lease_id]
        if "stream" in words and lease.partials_received + lease.partials_made < 2:
            self.held.partial(lease, b"p1")
        error = None
        if "fatal" in words:
            error = ws.TaskError(type="ValueError", message="this can't work", retryable=False)
        elif "fail" in words or ("flaky" in words and lease.attempt == 1):
            error = ws.TaskError(type="RuntimeError", message="this did not work", retryable=True)
        state = ws.ReportState.SUCCEEDED if error is None else ws.ReportState.FAILED
        result = f"{words[0]} {lease.lease_id}".encode() if error is None else b""
        report = ws.Report(lease, state, result, error=error)
        self.held.report(int(began_s * 1e9), int(self._world.now * 1e9), [report])
        self._pump()
        self.flush()
