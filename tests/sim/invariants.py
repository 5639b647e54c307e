"""What must hold after every event, whatever happened: the core's state against slow and obvious recounts."""

from collections.abc import Sequence

from multigpu_master.core import events as ev
from multigpu_master.core.lanes import partition_of, shape_of
from multigpu_master.core.ledger import RUN_GRACE_S, _outcome_bytes
from multigpu_master.core.model import Lease, Shape, Task, Worker
from multigpu_master.core.placement import busy
from multigpu_master.core.scheduler import Core
from multigpu_master.strategies.base import Strategy

from tests.sim.world import ViolationError, World


def check(holds: object, message: str, *args: object) -> None:
    if not holds:
        raise ViolationError(message % args if args else message)


class Invariants:
    """Watches one core after another, as masters come and go."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._granted: dict[int, Task] = {}  # every lease that was ever granted
        self._core: Core
        self.checks = 0

    def begin(self, core: Core) -> None:
        """A new master's life."""
        self._core = core
        self._settled: dict[Task, None] = {}
        self._committed: dict[Task, None] = {}
        self._recovered = 0
        self._failed_submits = 0
        self._live: dict[int, Task] = {}
        self._frames: dict[int, int] = {}
        self._holders: dict[int, Worker] = {}
        self._drains: dict[Worker, float] = {}
        self._carried: dict[int, int] = {}  # the frame of each live lease
        self._ran_since: dict[int, float] = {}

    # --- around each event -------------------------------------------------------------------------------------------

    def before(self, event: ev.Event) -> None:
        """Notes which reports must count."""
        core = self._core
        self._live = {x.lease_id: x.task for w in core.fleet.workers.values() for x in w.leases.values()}
        self._carried = {x.lease_id: x.frame for w in core.fleet.workers.values() for x in w.leases.values()}
        self._holders = {x.lease_id: w for w in core.fleet.workers.values() for x in w.leases.values()}
        self._drains = {
            w: w.drain_deadline_s for w in core.fleet.workers.values() if w.draining and w.drain_deadline_s is not None
        }
        if isinstance(event, ev.Drain) and event.deadline_s is not None:
            worker = core.fleet.workers[event.worker_id]
            self._drains[worker] = min(event.deadline_s, self._drains.get(worker, event.deadline_s))
        if isinstance(event, ev.SettlesCommitted):
            self._committed.update(dict.fromkeys(event.tasks))
        if isinstance(event, ev.Recover):
            self._recovered += len(event.tasks)

    def after(self, event: ev.Event, commands: Sequence[ev.Command]) -> None:
        self.checks += 1
        now = self._world.now
        for command in commands:
            match command:
                case ev.Dispatch():
                    self._dispatch(command, now)
                case ev.Settled():
                    self._settle(event, command)
                case ev.Revoke():
                    self._revoke(event, command, now)
                case ev.Welcome() if isinstance(event, ev.Hello):
                    for h in event.leases:
                        holder = self._holders.get(h.lease_id)
                        kept = holder is None or holder.worker_id != event.info.worker_id
                        check(kept or h.lease_id in command.adopted, "lease %s was lost in a reconnect", h.lease_id)
                case _:
                    pass
        if isinstance(event, ev.Reports):
            self._reports(event)
        self._accounts()
        self._lanes(now)
        self._workers()
        if self.checks % 4 == 0:
            self._caches()
        if not self._core.held(now) and not self._core.clogged():
            self._nothing_idles(commands)

    # --- commands ----------------------------------------------------------------------------------------------------

    def _dispatch(self, command: ev.Dispatch, now: float) -> None:
        core = self._core
        worker = core.fleet.sessions.get(command.session)
        check(worker is not None, "a dispatch to session %s, which is over", command.session)
        assert worker is not None, "checked"
        check(worker.accepting, "%s got work it must not get", worker.worker_id)
        check(not core.held(now), "a dispatch while the fleet is awaited")
        check(not core.clogged(), "a dispatch while the journal can't follow")
        check(command.frame > self._frames.get(command.session, 0), "frame numbers must grow")
        self._frames[command.session] = command.frame
        before = worker.leased_bytes - sum(len(x.task.payload) for x in command.leases[-1:])
        check(before < worker.info.window_bytes, "the window's bytes were exceeded on %s", worker.worker_id)
        check(len(worker.leases) <= worker.allowed, "%s holds more than it may", worker.worker_id)
        check(worker.allowed <= worker.info.window_tasks, "%s may hold more than it said", worker.worker_id)
        free = worker.memory_free_bytes()
        if free is not None and any(x.task.spec.memory_bytes for x in command.leases):
            check(worker.leased_memory_bytes <= free, "%s was promised memory it hasn't got", worker.worker_id)
        for lease in command.leases:
            check(lease.frame == command.frame, "a lease has its frame's number")
            check(lease.lease_id not in self._granted, "lease %s was granted twice", lease.lease_id)
            self._granted[lease.lease_id] = lease.task
            check(lease.task.lease is lease, "a dispatched lease is its task's")
            check(not core.queues[lease.task.spec.queue].paused, "a paused queue dispatched")
            unfit = core.fleet.unfit(worker, shape_of(lease.task.spec))
            check(unfit is None, "%s can't run task %s: %s", worker.worker_id, lease.task.task_id, unfit)

    def _settle(self, event: ev.Event, command: ev.Settled) -> None:
        for task in command.tasks:
            check(task not in self._settled, "task %s was settled twice", task.task_id)
            self._settled[task] = None
            outcome = task.outcome
            check(outcome is not None, "a settled task has an outcome")
            assert outcome is not None, "checked"
            check(task.attempts <= task.spec.attempts_max, "task %s had %s attempts", task.task_id, task.attempts)
            check(task.lease is None, "a settled task is leased")
            if outcome.result:
                lease_id = int(outcome.result.split()[1])
                check(self._live.get(lease_id) is task, "a result under lease %s, which was not live", lease_id)
                told = isinstance(event, ev.Reports) and event.session == self._holders[lease_id].session
                check(told, "lease %s was reported by somebody else", lease_id)
                partials = task.extra.partials if task.extra is not None else []
                whole = [b"p0", b"p1"] if b"stream" in task.payload else []
                check(partials == whole or not task.spec.durable, "task %s yielded %s", task.task_id, partials)

    def _reports(self, event: ev.Reports) -> None:
        """Each live lease reported has ended, and each success has settled its task."""
        worker = self._core.fleet.sessions.get(event.session)
        for report in event.reports:
            task = self._live.get(report.lease_id)
            if task is None or worker is None or self._holders[report.lease_id] is not worker:
                continue
            check(task.lease is None or task.lease.lease_id != report.lease_id, "a reported lease lives on")
            if report.state.name == "SUCCEEDED":
                check(task.outcome is not None, "task %s succeeded, and is not settled", task.task_id)

    def _revoke(self, event: ev.Event, command: ev.Revoke, now: float) -> None:
        """Nobody loses a lease without a reason."""
        for lease_id in command.lease_ids:
            task = self._live.get(lease_id)
            worker = self._holders.get(lease_id)
            if task is None or worker is None or worker.session != command.session:
                continue
            if task.outcome is not None or not task.task_id:
                continue
            drained = self._drains.get(worker, now + 1) <= now
            timeout_s = task.spec.run_timeout_s
            ran_since = self._ran_since.get(lease_id, now)
            overdue = timeout_s is not None and now >= ran_since + timeout_s + RUN_GRACE_S
            gone = (
                isinstance(event, ev.Heartbeat)
                and lease_id not in {h.lease_id for h in event.leases}
                and self._carried[lease_id] <= event.last_frame
            )
            check(drained or overdue or gone, "lease %s was revoked for no reason: %s", lease_id, command.reason)

    # --- state -------------------------------------------------------------------------------------------------------

    def _accounts(self) -> None:
        core = self._core
        queued: dict[str, list[int]] = {}
        leased: dict[str, list[int]] = {}
        unsettled = size = 0
        for task in core.tasks.values():
            if task.outcome is not None:
                continue
            unsettled += 1
            size += len(task.payload)
            account = queued if task.lease is None else leased
            tally = account.setdefault(task.spec.queue, [0, 0])
            tally[0] += 1
            tally[1] += len(task.payload)
            if task.request_id:
                check(core.requests.get(task.request_id) is task, "request %s is forgotten", task.request_id)
            check(task.attempts <= task.spec.attempts_max, "task %s had %s attempts", task.task_id, task.attempts)
            lease = task.lease
            if lease is not None:
                check(lease.task is task, "a lease is its task's")
                check(lease.worker.leases.get(lease.lease_id) is lease, "a live lease is in its worker's hands")
        check(core.unsettled == unsettled, "unsettled: %s counted, %s found", core.unsettled, unsettled)
        check(core.unsettled_bytes == size, "bytes: %s counted, %s found", core.unsettled_bytes, size)
        check(core.leased == sum(t[0] for t in leased.values()), "leased: %s counted", core.leased)
        for queue in core.queues.values():
            found = [*queued.get(queue.name, [0, 0]), *leased.get(queue.name, [0, 0])]
            counted = [queue.queued, queue.queued_bytes, queue.leased, queue.leased_bytes]
            check(found == counted, "queue %s: counted %s, found %s", queue.name, counted, found)
        piled = [t for t in core.tasks.values() if t.outcome is not None and t.spec.durable]
        piled += [
            t for t in self._settled if t.spec.durable and t not in self._committed and t.task_id not in core.tasks
        ]
        size = sum(_outcome_bytes(t) for t in piled)
        check(core.uncommitted_bytes == size, "uncommitted: %s counted, %s found", core.uncommitted_bytes, size)
        c = core.counters
        ended = c.succeeded + c.failed + c.cancelled + c.expired + c.dead_lettered
        check(ended == len(self._settled), "%s tasks ended, %s were told", ended, len(self._settled))
        check(c.submitted + self._recovered == unsettled + ended, "tasks were made or lost")

    def _lanes(self, now: float) -> None:
        lanes = self._core.lanes
        offered = {id(entry[3]): entry for entry in lanes._heap if entry[2] == entry[3].ticket}
        standing: dict[Task, int] = {}
        for key, lane in lanes.by_key.items():
            live = 0
            for task in lane.tasks:
                check(task.in_lane, "an entry's task knows it")
                standing[task] = standing.get(task, 0) + 1
                if task.waiting:
                    live += 1
                    check(self._core.lane_for(task) is lane, "task %s stands in the wrong lane", task.task_id)
            check(lane.live == live, "lane %s: counted %s, found %s", key, lane.live, live)
            if live:
                check(id(lane) in offered or lane in lanes.parked, "lane %s is neither offered nor parked", key)
            check(not (id(lane) in offered and lane in lanes.parked), "lane %s is offered and parked", key)
            check(len(lane.tasks) <= 2 * live + 128, "lane %s is mostly hollow", key)
        for task in self._core.tasks.values():
            if task.waiting:
                check(standing.get(task) == 1, "task %s waits in %s lanes", task.task_id, standing.get(task, 0))
            elif task.outcome is None and task.lease is None:
                extra = task.extra
                check(extra is not None and extra.not_before_s > now, "task %s overslept its pause", task.task_id)

    def _workers(self) -> None:
        for worker in self._core.fleet.workers.values():
            leases = list(worker.leases.values())
            check(not leases or worker.session, "%s is lost and holds leases", worker.worker_id)
            for lease in leases:
                if lease.running:
                    self._ran_since.setdefault(lease.lease_id, self._world.now)
                check(lease.worker is worker and lease.task.lease is lease, "a held lease is live")
            check(worker.leased_bytes == sum(len(x.task.payload) for x in leases), "leased bytes drift")
            check(worker.leased_memory_bytes == sum(x.task.spec.memory_bytes for x in leases), "leased memory drifts")
            check(abs(worker.backlog_s - sum(x.cost_s for x in leases)) < 1e-6, "the backlog drifts")
        for session, worker in self._core.fleet.sessions.items():
            check(worker.session == session, "a session is its worker's")

    def _caches(self) -> None:
        """What the fleet remembers is what it would find."""
        fleet = self._core.fleet
        for shape, found in fleet._eligible.items():
            able = [w for w in fleet.workers.values() if fleet.unfit(w, shape) is None]
            check(list(found) == able, "the fleet forgot who can take %s", shape)
        for shape, count in fleet._resident.items():
            able = [w for w in fleet.workers.values() if fleet.unfit(w, shape) is None]
            has = [w for w in able if w.accepting and fleet.load_s(w, shape) == 0.0]
            check(len(has) == count, "the fleet forgot who has the model of %s", shape)

    # --- placement ---------------------------------------------------------------------------------------------------

    def _nothing_idles(self, commands: Sequence[ev.Command]) -> None:
        """No task waits that could run, and none went before one that had the better right."""
        core = self._core
        waiting: dict[tuple[str, Shape], list[Task]] = {}
        for task in core.tasks.values():
            if task.waiting and not core.queues[task.spec.queue].paused:
                strategy = core.strategy_of(core.queues[task.spec.queue])
                partition = partition_of(task.partition_key) if strategy.pinned else -1
                waiting.setdefault((task.spec.queue, shape_of(task.spec, partition)), []).append(task)
        if not waiting:
            return
        for (queue, shape), tasks in waiting.items():
            strategy = core.strategy_of(core.queues[queue])
            best = self._best(strategy, shape, len(tasks))
            if best is not None:
                raise ViolationError(f"task {tasks[0].task_id} waits, though {best.worker_id} could have it")
        for lease in (x for c in commands if isinstance(c, ev.Dispatch) for x in c.leases):
            self._fair(lease, waiting)

    def _fair(self, lease: Lease, waiting: dict[tuple[str, Shape], list[Task]]) -> None:
        spec = lease.task.spec
        strategy = self._core.strategy_of(self._core.queues[spec.queue])
        partition = partition_of(lease.task.partition_key) if strategy.pinned else -1
        for task in waiting.get((spec.queue, shape_of(spec, partition)), ()):
            mine, its = (spec.priority, lease.task.task_id), (task.spec.priority, task.task_id)
            check(mine < its, "task %s went before task %s", lease.task.task_id, task.task_id)

    def _best(self, strategy: Strategy, shape: Shape, queued: int) -> Worker | None:
        """The worker to take the shape, found the slow way; None if none may now."""
        fleet = self._core.fleet
        able = [w for w in fleet.workers.values() if fleet.unfit(w, shape) is None]
        if strategy.pinned:
            able = [w for w in able if w.accepting and strategy.excludes(shape, w, fleet) is None]
            able.sort(key=lambda w: (strategy.score(shape, w, fleet), w.worker_id))
            return able[0] if able and not busy(fleet, strategy, shape, able[0]) else None
        free = [w for w in able if not busy(fleet, strategy, shape, w) and strategy.worth(shape, w, fleet, queued)]
        best = min(free, key=lambda w: (strategy.score(shape, w, fleet), w.last_dispatch), default=None)
        ranking = self._core.placement._rankings.get((strategy.name, shape))
        if ranking is not None and self.checks % 3 == 0:
            found = ranking.best(queued)
            check((found is None) == (best is None), "the ranking says %s, the fleet %s", found, best)
            if found is not None and best is not None:
                mine, its = strategy.score(shape, found, fleet), strategy.score(shape, best, fleet)
                check(mine == its, "%s ranks first, %s should", found.worker_id, best.worker_id)
        return best
