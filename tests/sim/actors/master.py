"""The simulated master: the real core, the real write_buffer and the real settings, behind a driver that is as thin as
the real one, and can be killed at any moment.

Its clock is a wall clock that was read when it started: it may be wrong by hours, and differently so in its next life,
as the real one's if the host's clock is set while no master runs. It never goes back while the master lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from multigpu_master import ids, settings
from multigpu_master.core import events as ev
from multigpu_master.core import identity
from multigpu_master.core.attempts import TO_GROW
from multigpu_master.core.model import EPOCH_IDS, OutcomeState, Task
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.core.spec import Spec
from multigpu_master.driver import is_cancelled
from multigpu_master.errors import JournalError
from multigpu_master.journal.protocol import Entry, LargeBody, SettleRecord
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.strategies.registry import load_strategies
from multigpu_master.wire import outcomes as wire_outcomes
from multigpu_master.wire import tasks as wire_tasks
from multigpu_master.write_buffer import Done, WriteBuffer

from tests.sim.actors.grant import Grant, stored_outcome
from tests.sim.invariants.core import Invariants
from tests.sim.journal import Rows, SimJournal, SimLoop
from tests.sim.world import Inbox, Link, ViolationError, World

if TYPE_CHECKING:
    from tests.sim.actors.client import Client

DISK_FULL = ev.Rejection(8, "the journal is full", 1.0)

STRATEGIES = load_strategies()


class Master:
    """Owns the core of the day. `epoch` counts its lives; `core` is None while it is down."""

    def __init__(self, world: World, limits: Limits, strategy: str, grace_s: float) -> None:
        self.world = world
        self.journal = SimJournal(world)
        self.core: Core | None = None
        self.write_buffer: WriteBuffer
        self.epoch = 0
        self.down: dict[int, Link] = {}  # session -> the way to its worker
        self.streams: dict[int, Client] = {}
        self.on_trip: Callable[[], None] = lambda: None  # called when the breaker trips
        self.specs: dict[bytes, Spec] = {}  # those that the clients use, by what the journal keeps of them
        self.stalled_until = 0.0
        self.wall_skew_s = 0.0  # how wrong its host's wall clock is now
        self.ids_left = EPOCH_IDS  # at the beginning of each range of ids
        self.incarnations: ids.Incarnations
        self.restored = 0  # the last life before the journal was lost, or an older copy of it restored
        self.cursors: list[tuple[str, list[int]]] = []  # each that a client may have: by whom, and what comes up to it
        self.requeued: Counter[int] = Counter()  # how often an operator was told that a dead letter is
        self.discarded: dict[int, None] = {}
        self.invariants = Invariants(self)
        self._limits = limits
        self._strategy = strategy
        self._grace_s = grace_s  # how long a new master waits for the workers of the last one
        self._skew_s = 0.0
        self._loop: SimLoop
        self.requeueing: dict[int, None] = {}
        self._withdrawn: dict[int, list[int]] = {}  # as the driver's
        self._inbox = Inbox(world, lambda: self.stalled_until)
        self._outcomes = wire_outcomes.OutcomeWriter()
        self._ids = 0
        self._tick_at = 0.0

    @property
    def now(self) -> float:
        """By its own clock."""
        return self.world.now + self._skew_s

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.core is not None:
            return
        world = self.world
        self.epoch += 1
        self._skew_s = self.wall_skew_s
        self._tick_at = 0.0
        self._loop = SimLoop(world, self.when_awake)
        self.requeueing = {}
        self._withdrawn = {}
        self.journal.begin_incarnation(f"life {self.epoch}")
        self.incarnations = ids.Incarnations(self.journal.incarnations)
        self._judge_cursors()
        core = self.core = Core(
            STRATEGIES, self._limits, self._first_id(self.journal.epoch), world.random.random, self._strategy
        )
        self.invariants.begin(core)
        with self._loop.running():
            write_buffer = WriteBuffer(cast("SqliteJournal", self.journal), self.handle, lambda: None, self._fatal)
        self.write_buffer = write_buffer
        loop = self._loop
        self.journal.open(lambda *commit: loop.call_soon_threadsafe(write_buffer.handle_commit, *commit))
        expected = settings.restore(self.handle, STRATEGIES, self.journal.settings)
        rows = sorted(self.journal.tasks.values(), key=lambda r: r.task_id)
        tasks = [wire_tasks.restored_task(r, self.specs[r.spec]) for r in rows]
        world.trace("master %d starts with %d tasks, its clock wrong by %g s", self.epoch, len(tasks), self._skew_s)
        self.handle(ev.Recover(tasks, self.now + self._grace_s if expected else self.now))

    def crash(self) -> None:
        """kill -9, or loss of power."""
        if self.core is None:
            return
        self.world.trace("master %d is killed", self.epoch)
        self.tally()
        if not self.cursors or len(self.cursors[-1][1]) != len(self.journal.outcomes):
            self.cursors.append((self.incarnations.current, [r.task_id for r in self.journal.outcomes]))
        self.core = None
        self._loop.dead = True
        self._inbox.clear()
        self.stalled_until = 0.0
        self.journal.close()
        for link in self.down.values():
            link.end(lost=True)
        self.down = {}
        for client in list(self.streams.values()):
            client.stream_broke()
        self.streams = {}

    def restore(self, rows: Rows) -> None:
        """The data directory is another one from now on."""
        self.crash()
        self.journal.restore(rows)
        self.restored = self.epoch
        self.requeued &= rows.deleted
        self.invariants.forget(rows.by_request)

    def _first_id(self, epoch: int) -> int:
        return ids.first_id(epoch) + EPOCH_IDS - self.ids_left

    def _judge_cursors(self) -> None:
        """A cursor that is accepted stands for what it stood for when it was given out."""
        for name, before in self.cursors:
            if len(before) < self.incarnations.cursors_end(name):
                self.world.coverage["cursor: accepted"] += 1
                if [r.task_id for r in self.journal.outcomes[: len(before)]] != before:
                    raise ViolationError(f"a cursor of {name} after {before} skips outcomes")
            else:
                self.world.coverage["cursor: out of range"] += 1

    def _renew_ids(self) -> None:
        epoch = ids.next_epoch(self.journal.epoch, 0.0)

        def begun(error: JournalError | None) -> None:
            if error is None:
                self.handle(ev.IdsRenewed(self._first_id(epoch)))

        self.write_buffer.append(Entry(epoch=epoch), begun)

    def tally(self) -> None:
        """Counts what this life brought."""
        core, coverage = self.core, self.world.coverage
        assert core is not None, "it lives"
        coverage["core: requeued"] += core.ledger.counters.requeued
        coverage["core: stale reports"] += core.ledger.counters.stale_reports

    def _fatal(self, reason: str) -> None:
        raise ViolationError(f"the master gave up: {reason}")

    def new_id(self) -> int:
        """Of a session or a stream."""
        self._ids += 1
        return self._ids

    # --- the core ----------------------------------------------------------------------------------------------------

    def when_awake(self, what: Callable[[], None]) -> None:
        """Does `what` now, or in order when a stall of the whole process is over; never if it dies first."""
        self._inbox.put(what)

    def handle(self, event: ev.Event) -> list[ev.Command]:
        core, world = self.core, self.world
        assert core is not None, "the master is up"
        coverage = world.coverage
        coverage[type(event).__name__] += 1
        if world.tracing:
            world.trace("  %s", event, brief=True)
        self.invariants.before(event)
        commands = core.handle(event, self.now)
        if core.dispatch_unfinished:
            coverage["core: classes left for the next event"] += 1
        for command in commands:
            coverage[type(command).__name__] += 1
            if isinstance(command, ev.Revoke) and command.reason == TO_GROW:
                coverage["core: a gang began again with more workers"] += 1
            if world.tracing:
                world.trace("    %s", command, brief=True)
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

        # A little late, as timers are, so that none is early by a rounding error.
        self.world.after(max(0.0, due - self.now) + 1e-6, lambda: self.when_awake(tick))

    def _carry_out(self, command: ev.Command) -> None:
        match command:
            case ev.Settled():
                self._settled(command.tasks)
            case ev.WorkerChanged():
                if command.save:
                    setting = settings.worker_setting(command.worker)
                    self.write_buffer.append(Entry(settings=dict.fromkeys(setting) if command.gone else setting))
            case ev.RenewIds():
                self._renew_ids()
            case ev.RejectUnwritten():
                for task in command.tasks:
                    for stream in task.streams:
                        if stream in self.streams:
                            self.streams[stream].send_rejected(stream, task.request_id, DISK_FULL)
            case ev.BreakerChanged():
                self.world.coverage[f"core: the breaker {'tripped' if command.tripped_s else 'was reset'}"] += 1
                if command.tripped_s:
                    self.on_trip()
                self.write_buffer.append(Entry(settings=settings.breaker_setting(command.tripped_s)))
            case ev.Welcome() | ev.Dispatch() | ev.Revoke() | ev.Recall() | ev.SendDesiredState() | ev.EndSession():
                if isinstance(command, ev.Welcome) and command.adopted:
                    self.world.coverage["core: adopted leases"] += len(command.adopted)
                link = self.down.get(command.session)
                if link is not None:
                    link.send(Grant.of(command) if isinstance(command, ev.Dispatch) else command)
                    if isinstance(command, ev.EndSession):
                        del self.down[command.session]
            case _:
                pass

    # --- clients -----------------------------------------------------------------------------------------------------

    def stream_opened(self, stream: int, client: Client) -> None:
        self.streams[stream] = client

        def opened() -> None:
            self.handle(ev.StreamOpened(stream))

        self.when_awake(opened)

    def stream_closed(self, stream: int) -> None:
        """As the driver does when a Run stream ends."""
        self.streams.pop(stream, None)
        if self.core is not None:

            def close() -> None:
                self.handle(ev.StreamClosed(stream))
                self.write_buffer.flush()

            self.when_awake(close)

    def submit(self, client: Client, stream: int, spec: Spec, tasks: list[Task]) -> None:
        """As the Run rpc does: what the journal has settled is answered, the rest goes to the core, and what it took is
        told once it is durable.
        """
        core, epoch = self.core, self.epoch
        assert core is not None, "the master is up"
        if spec.durable and not self.write_buffer.writable:
            for task in tasks:
                client.send_rejected(stream, task.request_id, DISK_FULL)
            return
        request_ids = [t.request_id for t in tasks if t.request_id not in core.ledger.requests]
        known = self.journal.find_requests(self.write_buffer.perhaps_known(request_ids))
        known = {r: stored for r, stored in known.items() if stored.fingerprint != identity.REQUEST_ID_FREE}
        failed: dict[str, SettleRecord] = {}
        if spec.retry_failed:
            failed = {r: known.pop(r) for r, s in list(known.items()) if s.state != OutcomeState.SUCCEEDED}
        replaces = {r: s.task_id for r, s in failed.items() if s.state == OutcomeState.DEAD_LETTERED}
        live = [
            core.ledger.requests[t.request_id]
            for t in tasks
            if t.request_id in core.ledger.requests and spec.retry_failed
        ]
        replaces |= {
            t.request_id: t.task_id for t in live if t.outcome and t.outcome.state is OutcomeState.DEAD_LETTERED
        }
        for task in [t for t in tasks if t.request_id in known]:
            stored = known[task.request_id]
            other = identity.conflict(stored.task_id, stored.kind, stored.model, stored.fingerprint, task, stored.state)
            if other is not None:
                client.send_rejected(stream, task.request_id, other)
            else:
                client.send_outcome(stream, task.request_id, stored.task_id, stored_outcome(stored), epoch)
        fresh = [t for t in tasks if t.request_id not in known]
        accepted: list[tuple[str, Task]] = []

        def done(error: JournalError | None) -> None:
            for request_id, task in accepted:
                if task.task_id and task.outcome is None:
                    client.send_accepted(stream, request_id, task.task_id, epoch)

        for task, answer in zip(
            fresh, self.submit_tasks(spec, fresh, stream, None if client.outcomes_only else done, replaces), strict=True
        ):
            if isinstance(answer, ev.Rejection):
                if task.request_id in failed and answer.code == identity.ALREADY_EXISTS:
                    raise ViolationError(f"{task.request_id} has failed, and is not run again: {answer.message}")
                client.send_rejected(stream, task.request_id, answer)
            elif (streams := self._withdrawn.get(answer.task_id)) is not None:
                streams.append(stream)
            elif answer.outcome is not None:
                client.send_outcome(stream, task.request_id, answer.task_id, answer.outcome, epoch)
            else:
                accepted.append((task.request_id, answer))

    def submit_tasks(
        self, spec: Spec, tasks: list[Task], stream: int, done: Done | None, replaces: Mapping[str, int]
    ) -> list[Task | ev.Rejection]:
        """As the driver does."""
        answer = next(c for c in self.handle(ev.Submit(spec, tasks, stream)) if isinstance(c, ev.Submitted))
        if spec.durable:
            letters = [(t.task_id, replaces[t.request_id]) for t in answer.fresh if t.request_id in replaces]
            if done is None and not letters:
                self._loop.call_soon(self.write_buffer.defer, answer.fresh)
            else:
                self._loop.call_soon(self.write_buffer.append_submits, answer.fresh, done, letters, not stream)
        elif done is not None:
            self._loop.call_soon(done, None)
        return answer.results

    def _settled(self, tasks: list[Task]) -> None:
        durable: list[tuple[Task, bytes | LargeBody]] = []
        writable = self.write_buffer.writable
        cancelled = [task for task in tasks if task.spec.durable and (is_cancelled(task) or not writable)]
        self._withdrawn.update({task.task_id: list(task.streams) for task in cancelled})
        for task in tasks:
            outcome = task.outcome
            assert outcome is not None, "it is settled"
            if not outcome.dispatch_s <= outcome.finish_s <= self.now:
                raise ViolationError(f"task {task.task_id} ended at {outcome.finish_s}, by a clock that is not ours")
            if task.task_id not in self._withdrawn:
                self._send_outcome(task, task.streams)
            if task.spec.durable:
                durable.append((task, self._outcomes.write(task)))
        if durable:
            if self.core is not None and self.core.ledger.clogged():
                self.world.coverage["core: nothing dispatched for outcomes not written"] += 1

            def done(error: JournalError | None) -> None:
                for task in cancelled if error is None else ():
                    self._send_outcome(task, self._withdrawn.pop(task.task_id))

            self._loop.call_soon(self.write_buffer.append_settles, durable, self.now, done if cancelled else None)

    def _send_outcome(self, task: Task, streams: Sequence[int]) -> None:
        assert task.outcome is not None, "it is settled"
        for stream in streams:
            client = self.streams.get(stream)
            if client is not None:
                client.send_outcome(stream, task.request_id, task.task_id, task.outcome, self.epoch)

    def cancel(self, request_id: str) -> None:
        assert self.core is not None, "the master is up"
        task = self.core.ledger.requests.get(request_id)
        if task is not None:
            self.handle(ev.Cancel([task, task], "no longer wanted"))

    # --- operators ---------------------------------------------------------------------------------------------------

    def operate(self, event: ev.Event, answered: Callable[[], None]) -> None:
        """As the admin service does: the core first, and the answer once its rules are on the disk."""
        core = self.core
        assert core is not None, "the master is up"
        self.handle(event)
        setting: dict[str, bytes | None] = {}
        match event:
            case ev.ConfigureQueue() | ev.SetStrategy() if event.queue:
                setting = settings.queue_setting(core.ledger.queue(event.queue))
            case ev.SetStrategy():
                setting = {settings.STRATEGY: event.name.encode()}
            case ev.Cordon() | ev.Uncordon() | ev.Drain() | ev.CheckDevice() | ev.LoadModel() | ev.UnloadModel():
                setting = settings.worker_setting(core.fleet.workers[event.worker_id])
            case _:
                answered()
                return
        self.write_buffer.append(Entry(settings=setting), lambda error: answered() if error is None else None)
