"""What must hold after every event: the core's state against slow and obvious recounts.

The most expensive recounts, whose faults persist, are made after every fourth event; so are those of tasks after
heartbeats and ticks without effect while nothing is queued. Nothing here draws a random number or changes state, so a
run is the same with and without it.
"""

from collections.abc import Container, Sequence
from dataclasses import replace

from multigpu_master.core import events as ev
from multigpu_master.core.attempts import NOT_BEGUN, TO_GROW
from multigpu_master.core.ledger import RANK_ENDED, RUN_GRACE_S, settled_bytes
from multigpu_master.core.model import SLOT, Lease, OutcomeState, Task, Worker, shape_of
from multigpu_master.core.placement.resource_classes import Backlog
from multigpu_master.core.scheduler import Core
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import HEALTHY, Health
from multigpu_master.core.workers.sessions import PARTIAL_OVERHEAD_BYTES

from tests.sim.invariants.attempts import Attempts
from tests.sim.invariants.inputs import Inputs
from tests.sim.invariants.notices import Notices
from tests.sim.invariants.placement import Placement
from tests.sim.invariants.requests import Disk, Requests
from tests.sim.invariants.time import Time
from tests.sim.invariants.windows import Windows
from tests.sim.world import ViolationError, check

# How the reason begins for which a lease is revoked together with another rank's.
WITH_RANK = RANK_ENDED.partition("{")[0]


class Invariants:
    """Watches one core after another, as masters come and go."""

    def __init__(self, world: Disk) -> None:
        self._world = world
        self._granted: dict[int, Task] = {}  # every lease that was ever granted
        # (lease, worker, task, attempt) of every grant, also by masters of a journal that was lost.
        self._grants: dict[tuple[int, str, int, int], None] = {}
        self._requests = Requests(world)
        self._core: Core
        self.checks = 0

    def begin(self, core: Core) -> None:
        """A new master's life."""
        self._core = core
        self._notices, self._time = Notices(core), Time(core)
        self._inputs, self._attempts, self._windows = Inputs(core), Attempts(core), Windows(core)
        self._placement = Placement(core)
        self._settled: dict[Task, None] = {}
        self._uncommitted: dict[Task, None] = {}  # settled and durable, but the journal has not said so
        self._rejected: dict[Task, None] = {}  # that the journal could not write
        self._recovered = 0
        self._live: dict[int, Task] = {}
        self._dispatches: dict[int, int] = {}
        self._holders: dict[int, Worker] = {}
        self._drains: dict[Worker, float] = {}
        self._carried: dict[int, int] = {}  # the dispatch number of each live lease
        self._ran_since: dict[int, float] = {}
        self._bytes_before = self._bytes_told = 0  # unsettled, and of partial outputs in the event
        self._health: dict[int, Health] = {}  # what each session said of its device last

    def forget(self, known: Container[str]) -> None:
        """The journal is another one: of the requests answered so far it knows only these. And while the clock stands
        still, ids come again that the other journal gave out.
        """
        self._requests.forget(known)
        self._granted = {}

    # --- around each event -------------------------------------------------------------------------------------------

    def before(self, event: ev.Event) -> None:
        """Notes what the event says. Which leases are live was noted after the last one."""
        self._time.before(event, self._world.now)
        self._inputs.before(event)
        if isinstance(event, ev.Drain):
            if event.deadline_s is not None:
                worker = self._core.fleet.workers[event.worker_id]
                self._drains[worker] = min(event.deadline_s, self._drains.get(worker, event.deadline_s))
        elif isinstance(event, ev.Heartbeat):
            self._health[event.session] = event.health
        elif isinstance(event, ev.Partials):
            self._bytes_before = self._core.ledger.unsettled_bytes
            self._bytes_told = sum([len(p.data) + PARTIAL_OVERHEAD_BYTES for p in event.partials])
        elif isinstance(event, ev.SettlesDone):
            for task in event.tasks:
                check(task in self._uncommitted, "task %s was committed and had not settled", task.task_id)
                del self._uncommitted[task]
                if task.request_id and task not in self._rejected:
                    self._requests.answered[task.request_id] = task.task_id
        elif isinstance(event, ev.SubmitFailed):
            self._rejected.update(dict.fromkeys(event.tasks))
        elif isinstance(event, ev.Recover):
            self._recovered += len(event.tasks)

    def after(self, event: ev.Event, commands: Sequence[ev.Command]) -> None:
        self.checks += 1
        now, core = self._world.now, self._core
        if isinstance(event, ev.Hello) and any(_foreign(h, event) for h in event.leases):
            event, commands = _without_foreign(event, commands)
        again = set[int]()
        for command in commands:
            if isinstance(command, ev.WorkerChanged):  # most are
                continue
            if isinstance(command, ev.Dispatch):
                self._dispatch(command, commands, now)
            elif isinstance(command, ev.Settled):
                self._settle(event, command)
            elif isinstance(command, ev.Submitted):
                for task in command.fresh:
                    self._requests.taken(task)
            elif isinstance(command, ev.Revoke):
                again |= {*command.lease_ids} if command.reason == NOT_BEGUN else set()
                self._revoke(event, command, again, now)
                again |= {*command.lease_ids} if command.reason.startswith(WITH_RANK) else set()
            elif isinstance(command, ev.Welcome) and isinstance(event, ev.Hello):
                self._reconnect(event, command, commands)
        if isinstance(event, ev.Reports):
            self._reports(event, commands)
        elif isinstance(event, ev.Partials):
            size, limit = core.ledger.unsettled_bytes, core.ledger.limits.bytes_max
            check(size <= max(limit, self._bytes_before), "with partial outputs the master holds %s bytes", size)
        waiting: list[Task] = []
        if self.checks % 4 == 0 or not self._quiet(event, commands):
            waiting = self._accounts(now)
            self._classes(waiting)
        check(core.ids.next_id <= core.ids.end, "ids were given out that the journal had not begun")
        self._workers()
        if self.checks % 4 == 0:
            self._placement.caches()
        self._notices.after(event, commands)
        self._inputs.after(event, commands, now)
        self._attempts.after(event, commands, now)
        self._time.after(event, commands, now)
        self._windows.after(commands, now)
        if core.dispatch_unfinished:
            due_s = core.next_timer_s() or 0.0
            check(due_s <= now, "nothing wakes the master for the classes that it has not tried")
        if waiting and core.can_grant(now) and not core.dispatch_unfinished:
            self._placement.nothing_idles(commands, waiting)

    def _quiet(self, event: ev.Event, commands: Sequence[ev.Command]) -> bool:
        """Whether the event could bring nothing about: a heartbeat or a tick, while nothing is queued."""
        if type(event) not in {ev.Heartbeat, ev.Tick} or self._core.ledger.unsettled != self._core.ledger.leased:
            return False
        return all(type(command) is ev.WorkerChanged for command in commands)

    # --- commands ----------------------------------------------------------------------------------------------------

    def _dispatch(self, command: ev.Dispatch, commands: Sequence[ev.Command], now: float) -> None:
        core = self._core
        worker = core.fleet.sessions.get(command.session)
        check(worker is not None, "a dispatch to session %s, which is over", command.session)
        assert worker is not None, "checked"
        check(worker.accepting, "%s got work it must not get", worker.worker_id)
        health = self._health.get(command.session, HEALTHY)
        check(not worker.quarantined, "%s is quarantined and got work", worker.worker_id)
        check(not health.unusable, "%s got work that it can't run", worker.worker_id)
        check(health.fit or core.quarantine.breaker.tripped_s, "%s is sick and got work", worker.worker_id)
        check(not core.hold.active(now), "a dispatch while the fleet is awaited")
        # What expired in the course of the dispatch counts only for the next one.
        settled = [t for c in commands if isinstance(c, ev.Settled) for t in c.tasks]
        expired = sum([settled_bytes(t) for t in settled if t.outcome and t.outcome.state is OutcomeState.EXPIRED])
        before = core.ledger.uncommitted_bytes - expired
        check(before <= core.ledger.limits.uncommitted_bytes_max, "a dispatch while the journal can't follow")
        check(command.number == self._dispatches.get(command.session, 0) + 1, "dispatch numbers count up from 1")
        self._dispatches[command.session] = command.number
        before = worker.leased_bytes - sum(len(x.task.payload) for x in command.leases[-1:])
        check(before < worker.info.window_bytes, "the window's bytes were exceeded on %s", worker.worker_id)
        shares = worker.leased_shares - sum(x.share for x in command.leases[-1:])
        narrow = worker.shares and shares < (worker.info.slots + 1) * SLOT
        check(len(worker.leases) <= worker.pace.leases_max or narrow, "%s holds more than it may", worker.worker_id)
        check(len(worker.leases) <= worker.info.window_tasks, "%s holds more than it said", worker.worker_id)
        check(worker.pace.leases_max <= worker.info.window_tasks, "%s may hold more than it said", worker.worker_id)
        free = worker.memory_free_bytes()
        if free is not None and any(x.task.spec.memory_bytes for x in command.leases):
            check(worker.leased_memory_bytes <= free, "%s was promised memory it hasn't got", worker.worker_id)
        for lease in command.leases:
            check(lease.dispatch_number == command.number, "a lease has its dispatch's number")
            check(lease.lease_id not in self._granted, "lease %s was granted twice", lease.lease_id)
            self._granted[lease.lease_id] = lease.task
            self._grants[lease.lease_id, worker.worker_id, lease.task.task_id, lease.attempt] = None
            check(_is_lease_of(lease.task, lease), "a dispatched lease is its task's")
            check(not core.ledger.queues[lease.task.spec.queue].paused, "a paused queue dispatched")
            why_never = core.fleet.ineligibility(worker, shape_of(lease.task.spec))
            check(why_never is None, "%s can't run task %s: %s", worker.worker_id, lease.task.task_id, why_never)

    def _settle(self, event: ev.Event, command: ev.Settled) -> None:
        for task in command.tasks:
            check(task not in self._settled, "task %s was settled twice", task.task_id)
            self._settled[task] = None
            if task.spec.durable:
                self._uncommitted[task] = None
            outcome = task.outcome
            check(outcome is not None, "a settled task has an outcome")
            assert outcome is not None, "checked"
            check(task.attempts <= task.spec.attempts_max, "task %s had %s attempts", task.task_id, task.attempts)
            check(task.lease is None, "a settled task is leased")
            if outcome.result:
                lease_id = int(outcome.result.split()[1])
                if task.spec.world_size > 1:  # its other ranks may have succeeded later
                    check(self._granted.get(lease_id) is task, "a result under lease %s of another task", lease_id)
                else:
                    check(self._live.get(lease_id) is task, "a result under lease %s, which was not live", lease_id)
                    by_holder = isinstance(event, ev.Reports) and event.session == self._holders[lease_id].session
                    check(by_holder, "lease %s was reported by another session", lease_id)
                partials = task.extra.partials if task.extra is not None else []
                whole = [b"p0", b"p1"] if b"stream" in task.payload else []
                check(partials == whole or not task.spec.durable, "task %s yielded %s", task.task_id, partials)

    def _reports(self, event: ev.Reports, commands: Sequence[ev.Command]) -> None:
        """Each live lease reported has ended, and each success has settled its task, unless the lease was taken back
        just before: the deadline of a drain had passed while the master was away.
        """
        revoked = [x for c in commands if isinstance(c, ev.Revoke) for x in c.lease_ids]
        worker = self._core.fleet.sessions.get(event.session)
        succeeded = set(event.succeeded)
        for lease_id in (*succeeded, *(failure.lease_id for failure in event.failures)):
            task = self._live.get(lease_id)
            if task is None or worker is None or self._holders[lease_id] is not worker:
                continue
            check(lease_id not in worker.leases, "a reported lease lives on")
            if task.spec.world_size == 1 and lease_id in succeeded and lease_id not in revoked:
                check(task.outcome is not None, "task %s succeeded, and is not settled", task.task_id)

    def _reconnect(self, event: ev.Hello, welcome: ev.Welcome, commands: Sequence[ev.Command]) -> None:
        """A worker that comes back keeps its leases, but for those that had to end before, and gets no others."""
        name, grants = event.info.worker_id, self._grants
        granted = {h.lease_id for h in event.leases if (h.lease_id, name, h.task_id, h.attempt) in grants}
        check(granted.issuperset(welcome.adopted), "%s took leases that it was not granted", name)
        revokes = [c for c in commands if isinstance(c, ev.Revoke) and c.session != event.session]
        over = {lease_id for revoke in revokes for lease_id in revoke.lease_ids}
        for h in event.leases:
            holder = self._holders.get(h.lease_id)
            kept = holder is None or holder.worker_id != event.info.worker_id or h.lease_id in over
            check(kept or h.lease_id in welcome.adopted, "lease %s was lost in a reconnect", h.lease_id)

    def _revoke(self, event: ev.Event, command: ev.Revoke, again: set[int], now: float) -> None:
        """Nobody loses a lease without a reason. A heartbeat may list what was taken back, as not begun or with another
        rank, by the timers that came due with it; it is then revoked twice.
        """
        for lease_id in command.lease_ids:
            task = self._live.get(lease_id)
            worker = self._holders.get(lease_id)
            if task is None or worker is None or worker.session != command.session:
                continue
            if task.outcome is not None or not task.task_id or lease_id in again:
                continue  # attempts.py checks those that were not begun
            drained = self._drains.get(worker, now + 1) <= now
            timeout_s = task.spec.run_timeout_s
            ran_since = self._ran_since.get(lease_id, now)
            overdue = timeout_s is not None and now >= ran_since + timeout_s + RUN_GRACE_S
            gone = (
                isinstance(event, ev.Heartbeat)
                and lease_id not in {h.lease_id for h in event.leases}
                and self._carried[lease_id] <= event.last_dispatch_number
            )
            limit = self._core.ledger.limits.bytes_max
            full = isinstance(event, ev.Partials) and self._bytes_before + self._bytes_told > limit
            with_gang = command.reason.startswith(WITH_RANK) and lease_id not in worker.leases
            saved = isinstance(event, ev.Heartbeat) and any(
                h.checkpoint for h in event.leases if h.lease_id == lease_id
            )
            grew = command.reason == TO_GROW and saved and task.spec.world_size_min != task.spec.world_size
            excused = drained or overdue or gone or full or with_gang or grew
            check(excused, "lease %s was revoked for no reason: %s", lease_id, command.reason)

    # --- state -------------------------------------------------------------------------------------------------------

    def _accounts(self, now: float) -> list[Task]:
        """Counts every task. Returns those that may be dispatched."""
        core = self._core
        found: dict[str, list[int]] = {}  # queue -> queued, their bytes, leased, their bytes
        waiting: list[Task] = []
        unsettled = size = leases = 0
        for task in core.ledger.tasks.values():
            if task.outcome is not None:
                continue
            lease, bytes_ = task.lease, len(task.payload)
            unsettled += 1
            size += bytes_
            if task.extra is not None:
                size += sum([len(data) + PARTIAL_OVERHEAD_BYTES for data in task.extra.partials])
                size += len(task.extra.checkpoint) + len(task.extra.log)
                if (error := task.extra.last_error) is not None:
                    size += len(error.type) + len(error.message) + len(error.traceback)
            tally = found.get(task.spec.queue)
            if tally is None:
                tally = found[task.spec.queue] = [0, 0, 0, 0]
            if task.attempts > task.spec.attempts_max:
                raise ViolationError(f"task {task.task_id} had {task.attempts} attempts")
            if task.request_id and core.ledger.requests.get(task.request_id) is not task:
                raise ViolationError(f"request {task.request_id} is forgotten")
            if lease is not None:
                leases += 1
                tally[2] += 1
                tally[3] += bytes_
                if lease.task is not task or lease.rank:
                    raise ViolationError(f"task {task.task_id} has the lease of another task or rank")
                all_ranks, succeeded = ([lease], 0) if lease.gang is None else (lease.gang.leases, lease.gang.succeeded)
                held = [x for x in all_ranks if x.worker.leases.get(x.lease_id) is x]
                if len(held) != len(all_ranks) - succeeded or not _fits(task.spec, len(all_ranks)):
                    raise ViolationError(f"the leases of task {task.task_id} are not its workers'")
                if len({x.worker.device_key for x in all_ranks}) < len(all_ranks):
                    raise ViolationError(f"ranks of task {task.task_id} share a device")
                continue
            tally[0] += 1
            tally[1] += bytes_
            if task.waiting:
                waiting.append(task)
            elif task.extra is None or task.extra.not_before_s <= now:
                raise ViolationError(f"task {task.task_id} overslept its pause")
        check(core.ledger.unsettled == unsettled, "unsettled: %s counted, %s found", core.ledger.unsettled, unsettled)
        counted_bytes = core.ledger.unsettled_bytes
        check(counted_bytes == size, "bytes: %s counted, %s found", counted_bytes, size)
        check(core.ledger.leased == leases, "leased: %s counted, %s found", core.ledger.leased, leases)
        for queue in core.ledger.queues.values():
            counted = [queue.queued, queue.queued_bytes, queue.leased, queue.leased_bytes]
            recount = found.get(queue.name) or [0, 0, 0, 0]
            check(recount == counted, "queue %s: counted %s, found %s", queue.name, counted, recount)
        size = sum([settled_bytes(t) for t in self._uncommitted])
        counted_bytes = core.ledger.uncommitted_bytes
        check(counted_bytes == size, "uncommitted: %s counted, %s found", counted_bytes, size)
        c = core.ledger.counters
        ended = c.succeeded + c.failed + c.cancelled + c.expired + c.dead_lettered
        check(ended == len(self._settled), "%s tasks ended, %s were told", ended, len(self._settled))
        check(c.submitted - c.unwritten + self._recovered == unsettled + ended, "tasks were made or lost")
        check(len(core.ledger.requests) <= len(core.ledger.tasks), "a request outlives its task")
        return waiting

    def _classes(self, waiting: list[Task]) -> None:
        classes = self._core.ledger.classes
        standing: dict[int, int] = {}
        backlogs: dict[Backlog, int] = {}
        for key, resource_class in classes.by_key.items():
            live = 0
            for task in resource_class.tasks:
                standing[id(task)] = standing.get(id(task), 0) + 1
                if task.waiting:
                    live += 1
                    if self._core.ledger.class_of(task) is not resource_class:
                        raise ViolationError(f"task {task.task_id} stands in the wrong class")
            check(resource_class.size == live, "class %s: counted %s, found %s", key, resource_class.size, live)
            check(live, "class %s is there for nothing", key)
            backlog = resource_class.backlog
            check((backlog is None) == resource_class.queue.paused, "class %s is paused, or offered, wrongly", key)
            if backlog is not None:
                backlogs[backlog] = backlogs.get(backlog, 0) + live
        check(set(backlogs) == set(classes.backlogs.values()), "a backlog is there for nothing")
        blocked = set(classes.blocked)
        for backlog, live in backlogs.items():
            check(backlog.size == live, "a backlog counts %s tasks, %s are found", backlog.size, live)
            ready = backlog.entry_number > 0 and any(backlog.entry_number == entry[1] for entry in classes.ready._heap)
            check(ready == (backlog not in blocked), "a backlog is both ready and blocked, or neither")
        check(blocked <= backlogs.keys(), "an empty backlog is blocked")
        for task in waiting:
            if standing.get(id(task)) != 1:
                raise ViolationError(f"task {task.task_id} waits in {standing.get(id(task), 0)} classes")

    def _workers(self) -> None:
        """Sums up what each worker holds, and notes it for the next event."""
        fleet, now = self._core.fleet, self._world.now
        live, carried, holders, drains = self._live, self._carried, self._holders, self._drains
        live.clear()
        carried.clear()
        holders.clear()
        drains.clear()
        for worker in fleet.workers.values():
            if worker.draining and worker.drain_deadline_s is not None:
                drains[worker] = worker.drain_deadline_s
            size = memory = shares = 0
            leased_s = 0.0
            for lease_id, lease in worker.leases.items():
                task = lease.task
                if lease.worker is not worker or not _is_lease_of(task, lease) or lease.lease_id != lease_id:
                    raise ViolationError(f"{worker.worker_id} holds lease {lease_id}, which is not live")
                if lease.gang is not None and len(worker.leases) > 1:
                    raise ViolationError(f"{worker.worker_id} runs a rank of task {task.task_id}, and other tasks")
                live[lease_id], carried[lease_id], holders[lease_id] = task, lease.dispatch_number, worker
                if lease.running:
                    self._ran_since.setdefault(lease_id, now)
                size += len(task.payload)
                memory += task.spec.memory_bytes
                leased_s += lease.cost_s
                shares += lease.share
            if worker.leases and not worker.session:
                raise ViolationError(f"{worker.worker_id} is lost and holds leases")
            if (worker.leased_bytes, worker.leased_memory_bytes, worker.leased_shares) != (size, memory, shares):
                raise ViolationError(f"the accounts of {worker.worker_id} drift")
            if abs(worker.leased_s - leased_s) > 1e-6:
                raise ViolationError(f"the backlog of {worker.worker_id} drifts")
        for session, worker in fleet.sessions.items():
            if worker.session != session:
                raise ViolationError(f"session {session} is not its worker's")


def _fits(spec: Spec, ranks: int) -> bool:
    """Whether a task may run on so many workers."""
    return (spec.world_size_min or spec.world_size) <= ranks <= spec.world_size


def _is_lease_of(task: Task, lease: Lease) -> bool:
    """Whether a lease is the task's, or one of its ranks'."""
    if lease.gang is None:
        return task.lease is lease
    return task.lease is lease.gang.leases[0] and lease.gang.leases[lease.rank] is lease


def _foreign(held: ev.HeldLease, hello: ev.Hello) -> bool:
    return max(held.lease_id, held.task_id) >= hello.ids_end


def _without_foreign(hello: ev.Hello, commands: Sequence[ev.Command]) -> tuple[ev.Hello, list[ev.Command]]:
    """A hello as it counts: leases of another journal, whose ids may be those of ours, are revoked, and that is all."""
    ours = [h for h in hello.leases if not _foreign(h, hello)]
    foreign = [h.lease_id for h in hello.leases if _foreign(h, hello)]
    rest: list[ev.Command] = []
    for command in commands:
        if isinstance(command, ev.Welcome):
            check(not {*command.adopted} & {*foreign}, "leases %s of another journal were taken back", foreign)
        if isinstance(command, ev.Revoke) and command.session == hello.session:
            known = [x for x in command.lease_ids if x not in foreign]
            rest += [replace(command, lease_ids=known)] if known else []
        else:
            rest.append(command)
    return replace(hello, leases=ours), rest
