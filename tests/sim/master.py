"""The simulated master: the real core behind a driver that is as thin as the real one, and can be killed at any
moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multigpu_master.core import events as ev
from multigpu_master.core.model import Outcome, OutcomeState, Spec, Task, Worker, WorkerInfo
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.strategies.registry import load_strategies

from tests.sim.invariants import Invariants
from tests.sim.journal import Entry, Row, Settle, SimJournal
from tests.sim.world import Inbox, Link, World

if TYPE_CHECKING:
    from tests.sim.client import Client

STRATEGIES = load_strategies()
LIMITS = Limits(session_timeout_s=5.0, ephemeral_bytes_max=20_000, tasks_max=400, uncommitted_bytes_max=5_000)


@dataclass(slots=True)
class Known:
    """What a master remembers of a worker across restarts."""

    info: WorkerInfo
    cordoned: bool
    cordon_reason: str
    connected: bool


@dataclass(slots=True)
class Grant:
    """A dispatch as it goes over the wire: copied when it is sent."""

    session: int
    frame: int
    leases: list[tuple[int, int, int, bytes, bytes, int]]

    @classmethod
    def of(cls, command: ev.Dispatch) -> Grant:
        leases = []
        for x in command.leases:
            checkpoint, partials = (x.task.extra.checkpoint, len(x.task.extra.partials)) if x.task.extra else (b"", 0)
            leases.append((x.lease_id, x.task.task_id, x.attempt, x.task.payload, checkpoint, partials))
        return cls(command.session, command.frame, leases)


class Master:
    """Owns the core of the day. `epoch` counts its lives; `core` is None while it is down."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.journal = SimJournal(world)
        self.core: Core | None = None
        self.epoch = 0
        self.down: dict[int, Link] = {}  # session -> the way to its worker
        self.streams: dict[int, Client] = {}
        self.strategy = "auto"
        self.queue_rules: dict[str, ev.ConfigureQueue] = {}
        self.queue_strategies: dict[str, str] = {}
        self.known: dict[str, Known] = {}
        self.stalled_until = 0.0
        self.invariants = Invariants(world)
        self._inbox = Inbox(world, lambda: self.stalled_until)
        self._ids = 0
        self._tick_at = 0.0

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.core is not None:
            return
        world = self.world
        self.epoch += 1
        self.journal.open()
        core = Core(STRATEGIES, LIMITS, self.epoch << 32, world.random.random, self.strategy)
        self.core = core
        self.invariants.begin(core)
        self._tick_at = 0.0
        for known in list(self.known.values()):
            event = ev.RegisterWorker(known.info, known.cordoned, known.cordon_reason, expected=known.connected)
            self.handle(event)
        for rule in list(self.queue_rules.values()):
            self.handle(rule)
        for queue, name in list(self.queue_strategies.items()):
            self.handle(ev.SetStrategy(name, queue))
        rows = sorted(self.journal.tasks.values(), key=lambda r: r.task_id)
        tasks = [
            Task(r.spec, r.request_id, r.payload, r.partition_key, submit_s=r.submit_s, task_id=r.task_id) for r in rows
        ]
        expected = any(k.connected for k in self.known.values())
        world.trace("master %d starts with %d tasks", self.epoch, len(tasks))
        self.handle(ev.Recover(tasks, world.now + 3.0 if expected else 0.0))

    def crash(self) -> None:
        """kill -9."""
        if self.core is None:
            return
        self.world.trace("master %d is killed", self.epoch)
        self.core = None
        self._inbox.clear()
        self.stalled_until = 0.0
        self.journal.open()
        for link in self.down.values():
            link.broken = True
        self.down = {}
        for client in list(self.streams.values()):
            client.stream_broke()
        self.streams = {}

    def new_id(self) -> int:
        """Of a session or a stream."""
        self._ids += 1
        return self._ids

    # --- the core ----------------------------------------------------------------------------------------------------

    def when_awake(self, what: Callable[[], None]) -> None:
        """Does `what` now, or in order when a stall of the whole process is over; never if it dies first."""
        self._inbox.put(what)

    def handle(self, event: ev.Event) -> list[ev.Command]:
        core = self.core
        assert core is not None, "the master is up"
        now = self.world.now
        self.world.trace("  %s", event, brief=True)
        self.invariants.before(event)
        commands = core.handle(event, now)
        for command in commands:
            self.world.trace("    %s", command, brief=True)
        self.invariants.after(event, commands)
        for command in commands:
            self._carry_out(command)
        self._arm()
        return commands

    def _arm(self) -> None:
        assert self.core is not None, "the master is up"
        due = self.core.next_timer_s()
        if due is None or (self._tick_at and self._tick_at <= due):
            return
        self._tick_at = due
        epoch = self.epoch

        def tick() -> None:
            if self.core is not None and self.epoch == epoch and self._tick_at == due:
                self._tick_at = 0.0
                self.handle(ev.Tick())

        self.world.after(max(0.0, due - self.world.now), lambda: self.when_awake(tick))

    def _carry_out(self, command: ev.Command) -> None:
        match command:
            case ev.Settled():
                self._settled(command.tasks)
            case ev.WorkerChanged():
                self._worker_changed(command.worker, gone=command.gone, remember=command.remember)
            case ev.Welcome() | ev.Dispatch() | ev.Revoke() | ev.Desire() | ev.EndSession():
                link = self.down.get(command.session)
                if link is not None:
                    link.send(Grant.of(command) if isinstance(command, ev.Dispatch) else command)
                    if isinstance(command, ev.EndSession):
                        del self.down[command.session]
            case _:
                pass

    def _worker_changed(self, worker: Worker, *, gone: bool, remember: bool) -> None:
        if gone:
            self.known.pop(worker.worker_id, None)
        elif remember:
            self.known[worker.worker_id] = Known(
                worker.info, worker.cordoned, worker.cordon_reason, bool(worker.session)
            )

    # --- clients -----------------------------------------------------------------------------------------------------

    def submit(self, client: Client, stream: int, spec: Spec, tasks: list[Task]) -> None:
        """As the Run rpc does: what the journal has settled is answered, the rest goes to the core."""
        assert self.core is not None, "the master is up"
        fresh: list[Task] = []
        for task in tasks:
            old = self.journal.by_request.get(task.request_id)
            if old is not None and task.request_id not in self.core.requests:
                client.outcome(old.request_id, old.task_id, old.outcome, self.epoch)
            else:
                fresh.append(task)
        commands = self.handle(ev.Submit(spec, fresh, stream))
        answer = next(c for c in commands if isinstance(c, ev.Submitted))

        def done(ok: bool) -> None:
            if not ok and answer.fresh and self.core is not None:
                self.handle(ev.SubmitFailed(answer.fresh))
            for asked, result in zip(fresh, answer.results, strict=True):
                self._answer(client, stream, asked.request_id, result)

        if spec.durable:
            rows = [Row(t.task_id, t.request_id, t.spec, t.payload, t.partition_key, t.submit_s) for t in answer.fresh]
            self.journal.append(Entry(submits=rows, done=done))
        else:
            done(True)

    def _answer(self, client: Client, stream: int, request_id: str, result: Task | ev.Rejection) -> None:
        if self.streams.get(stream) is not client:
            return
        if isinstance(result, ev.Rejection):
            client.rejected(request_id, result)
        elif result.outcome is not None:
            client.outcome(request_id, result.task_id, result.outcome, self.epoch)
        elif result.task_id:
            client.accepted(request_id, result, self.epoch)
        else:
            client.rejected(request_id, ev.Rejection(8, "the journal is full", 1.0))

    def _settled(self, tasks: list[Task]) -> None:
        durable = []
        for task in tasks:
            outcome = task.outcome
            assert outcome is not None, "it is settled"
            for stream in task.streams:
                client = self.streams.get(stream)
                if client is not None:
                    client.send_outcome(task.request_id, task.task_id, outcome, self.epoch)
            if task.spec.durable:
                durable.append(task)
        if durable:
            settles = [Settle(t.task_id, t.request_id, _outcome(t), t.attempts) for t in durable]

            def done(ok: bool) -> None:
                assert ok, "outcomes are written in the end"
                self.handle(ev.SettlesCommitted(durable))

            self.journal.append(Entry(settles=settles, done=done))

    def cancel(self, request_id: str) -> None:
        assert self.core is not None, "the master is up"
        task = self.core.requests.get(request_id)
        if task is not None:
            self.handle(ev.Cancel([task, task], "no longer wanted"))


def _outcome(task: Task) -> Outcome:
    assert task.outcome is not None, "it is settled"
    assert task.outcome.state in list(OutcomeState), "a settled task has a state"
    return task.outcome
