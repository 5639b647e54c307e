"""Inputs take effect: of clients (submit, cancel), operators (queues, strategies, workers) and workers (their reports).
Accepted tasks keep to the limits.
"""

from collections.abc import Sequence

from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, Worker, shape_of
from multigpu_master.core.scheduler import Core

from tests.sim.world import ViolationError, check


class Inputs:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._strategy = core.ledger.strategy
        self._strategies: dict[str, str] = {}
        self._paused: dict[str, bool] = {}
        self._reported: dict[int, tuple[tuple[str, ...], bool]] = {}  # session -> its models, whether it is stopping
        self._run_s: dict[Lease, float] = {}  # since when each is known to run
        self._loading: dict[Worker, dict[tuple[str, str], None]] = {}
        self._idle = False  # whether the worker that speaks held nothing before

    def before(self, event: ev.Event) -> None:
        if isinstance(event, ev.Heartbeat):
            worker = self._core.fleet.sessions.get(event.session)
            self._idle = worker is not None and not worker.leases

    def after(self, event: ev.Event, commands: Sequence[ev.Command], now: float) -> None:
        match event:
            case ev.Submit():
                self._submit(event, commands, now)
            case ev.Cancel():
                alive = [t for t in event.tasks if t.task_id and t.outcome is None]
                check(not alive, "a cancelled task lives on")
            case ev.Hello():
                self._reported[event.session] = (), False
                tasks = [t for h in event.leases if (t := self._core.ledger.tasks.get(h.task_id)) is not None]
                worker = self._core.fleet.sessions[event.session]
                self._loading[worker] = {(t.spec.kind, t.spec.model): None for t in tasks}
                self._observed(event, now)
                narrow = min(worker.info.slots + 1, worker.info.window_tasks)
                if worker.pace.leases_max != narrow:
                    raise ViolationError(f"{worker.worker_id} begins with a window of {worker.pace.leases_max}")
            case ev.Heartbeat() if event.session in self._core.fleet.sessions:
                self._reported[event.session] = tuple(m.model for m in event.models), event.stopping
                self._observed(event, now)
            case ev.SetStrategy() if event.queue:
                self._strategies[event.queue] = event.name
            case ev.SetStrategy():
                self._strategy = event.name
            case ev.ConfigureQueue() if event.paused is not None:
                self._paused[event.queue] = event.paused
            case ev.Cordon() | ev.Uncordon() | ev.Drain():
                self._operated(event)
            case _:
                pass
        self._rules()
        self._workers(event, commands)

    def _submit(self, event: ev.Submit, commands: Sequence[ev.Command], now: float) -> None:
        core, spec = self._core, event.spec
        (answer,) = [c for c in commands if isinstance(c, ev.Submitted)]
        for asked, given in zip(event.tasks, answer.results, strict=True):
            check(isinstance(given, ev.Rejection) or given.request_id == asked.request_id, "another's task was given")
        if not answer.fresh:
            return
        limits, queue = core.ledger.limits, core.ledger.queue(spec.queue)
        check(core.ledger.unsettled <= limits.tasks_max, "the master holds %s tasks", core.ledger.unsettled)
        if core.ledger.unsettled_bytes > limits.bytes_max:
            raise ViolationError(f"the master holds {core.ledger.unsettled_bytes} bytes")
        held = queue.queued + queue.leased
        check(not queue.tasks_max or held <= queue.tasks_max, "queue %s holds %s tasks", queue.name, held)
        size = queue.queued_bytes + queue.leased_bytes
        check(not queue.bytes_max or size <= queue.bytes_max, "queue %s holds %s bytes", queue.name, size)
        check(spec.deadline_s is None or spec.deadline_s > now, "a task was taken whose deadline has passed")
        workers = core.fleet.workers.values()
        unknown = spec.wait_for_worker or not core.fleet.sessions
        placeable = unknown or any(core.fleet.ineligibility(w, shape_of(spec)) is None for w in workers)
        check(placeable, "a task was taken that nobody could run")

    def _fits(self, dispatch: ev.Dispatch) -> None:
        """What the worker is given it said that it takes, and the strategy lets it have."""
        core = self._core
        worker = core.fleet.sessions[dispatch.session]
        info = worker.info
        barred = worker.cordon or worker.draining or worker.stopping
        check(not barred, "%s is to get no work, and got it", worker.worker_id)
        for lease in dispatch.leases:
            spec = lease.task.spec
            models = [c.models for c in info.capabilities if c.kind == spec.kind]
            able = any(not spec.model or not some or spec.model in some for some in models)
            check(able, "%s does not run %s on %r", info.worker_id, spec.kind, spec.model)
            apart = [(key, value) for key, value in spec.labels if info.labels.get(key) != value]
            check(not apart, "%s got a task for %s", info.worker_id, apart)
            check(spec.memory_bytes <= info.memory_total_bytes, "%s has not so much memory", info.worker_id)
            strategy = core.ledger.strategy_of(core.ledger.queues[spec.queue])
            why_not = strategy.excludes(shape_of(spec), worker, core.fleet)
            check(why_not is None, "%s excludes %s: %s", strategy.name, info.worker_id, why_not)
            used = worker.memory_fraction() if strategy.name == "memory_usage" else None
            if not (used is None or used <= core.ledger.limits.memory_threshold):
                raise ViolationError(f"{info.worker_id} uses {used} of its memory")

    def _observed(self, event: ev.Hello | ev.Heartbeat, now: float) -> None:
        """What a worker says of its leases is known."""
        worker = self._core.fleet.sessions.get(event.session)
        if worker is None:
            return
        for held in event.leases:
            lease = worker.leases.get(held.lease_id)
            if lease is None:
                continue
            check(lease.running == held.running, "lease %s runs: %s; it is not known", lease.lease_id, held.running)
            if held.running:
                since_s = self._run_s.setdefault(lease, now)
                check(
                    lease.running_since_s == since_s,
                    "lease %s runs since %s, not %s",
                    lease.lease_id,
                    since_s,
                    lease.running_since_s,
                )

    def _operated(self, event: ev.Cordon | ev.Uncordon | ev.Drain) -> None:
        worker = self._core.fleet.workers[event.worker_id]
        is_so = worker.cordon is not None, worker.draining, worker.drain_deadline_s
        if isinstance(event, ev.Cordon):
            check(worker.cordon, "%s is not cordoned", worker.worker_id)
        elif isinstance(event, ev.Drain):
            if is_so != (True, True, event.deadline_s):
                raise ViolationError(f"{worker.worker_id} is not drained as it should be: {is_so}")
        elif is_so != (False, False, None):
            raise ViolationError(f"{worker.worker_id} is not free: {is_so}")

    def _rules(self) -> None:
        core = self._core
        check(
            core.ledger.strategy == self._strategy, "the strategy is %s, not %s", core.ledger.strategy, self._strategy
        )
        for name, queue in core.ledger.queues.items():
            check(queue.strategy == self._strategies.get(name, ""), "queue %s has strategy %r", name, queue.strategy)
            check(queue.paused == self._paused.get(name, False), "queue %s is paused: %s", name, queue.paused)

    def _workers(self, event: ev.Event, commands: Sequence[ev.Command]) -> None:
        sessions = self._core.fleet.sessions
        if isinstance(event, ev.Heartbeat) and self._idle and event.session in sessions:
            self._loading[sessions[event.session]] = {}
        for command in commands:
            if isinstance(command, ev.Dispatch):
                self._fits(command)
                keys = {(x.task.spec.kind, x.task.spec.model): None for x in command.leases}
                self._loading.setdefault(sessions[command.session], {}).update(keys)
        for session in [s for s in self._reported if s not in sessions]:
            del self._reported[session]
        for session, worker in sessions.items():
            known = worker.resident_models, worker.stopping
            if known != self._reported[session]:
                raise ViolationError(f"{worker.worker_id} said {self._reported[session]}, known is {known}")
            for lease in worker.leases.values():
                check(
                    lease.dispatch_number <= worker.dispatches_sent,
                    "lease %s came in a dispatch that was not sent yet",
                    lease.lease_id,
                )
                key = lease.task.spec.kind, lease.task.spec.model
                self._loading.setdefault(worker, {})[key] = None
            extra = [key for key in worker.residency.granted_without_id if key not in self._loading.get(worker, {})]
            check(not extra, "%s counts as loading %s", worker.worker_id, extra)
