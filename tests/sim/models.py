"""Models that share too little memory, in a world without faults, to check what decision 11 promises:

- the models in use on a worker fit into its memory, or are one model alone;
- a worker with other leases begins a loading that evicts others only after a rest as long as its last loading;
- no lease is granted on a model that is being unloaded;
- a waiting model is placed within the stated time;
- when no more tasks come, all are done.

The core is the real one. The workers load, unload and rest as the real ones do: a lease makes its model load, and the
least recently used models without leases are evicted for it. `python -m tests.sim.models --seeds N`.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, Task, TaskError
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, Model, ModelState, Resident, Telemetry, WorkerInfo
from multigpu_master.strategies.registry import load_strategies

from tests.sim.world import ViolationError

STRATEGIES = load_strategies()
BEAT_S = 0.5


@dataclass
class Host:
    """One worker's memory and engines. Each loaded model runs its leases one by one, beside the others."""

    session: int
    worker_id: str
    limit_bytes: int
    resident: dict[str, Resident] = field(default_factory=dict)
    used_s: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, list[Lease]] = field(default_factory=dict)  # by model; the first runs if it is loaded
    pinned: list[str] = field(default_factory=list)
    unwanted: list[str] = field(default_factory=list)
    frame: int = 0


class ModelWorld:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.now = self.start = 1000.0
        self.core = Core(STRATEGIES, Limits(), 1, random.random, random.choice(("auto", "auto", *STRATEGIES)))
        self.coverage: Counter[str] = Counter()
        self._heap: list[tuple[float, int, object]] = []
        self._tickets = 0
        count = random.choice((2, 3, 5, 9))
        self.sizes = {f"m{i}": random.choice((1, 2, 3)) for i in range(count)}
        self.load_s = {m: random.choice((0.05, 0.3, 1.0)) for m in self.sizes}
        self.run_s = random.choice((0.001, 0.02, 0.1))
        # Figures that are wrong until a model was loaded once.
        self.guessed = random.random() < 0.3
        self.calm = random.random() < 0.7  # nobody pins or unloads anything, and all tasks have one priority
        self.hosts = [self._join(i) for i in range(random.choice((1, 1, 2, 3)))]
        self.live: dict[int, Lease] = {}
        self.waiting_since_s: dict[str, float] = {}  # since when a model waits that is in place nowhere
        self.drains_s = 0.0  # the longest that a turn took to get its room
        self._turns: dict[int, float] = {}
        self._loading: dict[tuple[int, str], float] = {}
        self._rest: dict[int, float] = {}
        self.loads = 0

    def _join(self, i: int) -> Host:
        room = max(*self.sizes.values(), self.random.choice((3, 4, 6)))
        per_size = 1 if self.guessed else 100
        models = tuple(
            Model(
                name=model,
                files_bytes=size * per_size,
                memory_bytes=0 if self.guessed else 100 * size,
                load_s=self.random.choice((0.0, self.load_s[model])),
            )
            for model, size in self.sizes.items()
        )
        info = WorkerInfo(
            worker_id=f"w{i}", capabilities=(Capability(kind="run", models=tuple(self.sizes)),), models=models,
            model_memory_bytes=100 * room, window_tasks=self.random.choice((2, 8, 64)), slots=2,
        )  # fmt: skip
        host = Host(i + 1, f"w{i}", 100 * room)
        self.after(0.0, lambda: self.handle(ev.Hello(host.session, info)))
        self.after(0.001, lambda: self._beat(host, again=True))
        return host

    # --- the clock ---------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, what: object) -> None:
        self._tickets += 1
        heappush(self._heap, (self.now + delay_s, self._tickets, what))

    def run(self) -> None:
        """ViolationError: a promise was broken."""
        random = self.random
        until_s = random.choice((2.0, 6.0))
        for model in self.sizes:
            self.after(random.uniform(0.0, until_s / 2), lambda m=model: self._stream(m, self.start + until_s))
        if not self.calm:
            for _ in range(random.randint(1, 4)):
                self.after(random.uniform(0.0, until_s), self._operate)
            self.after(until_s, self._unpin_all)
        while self._heap:
            if self.now > self.start + 600.0:
                waits = [f"{t.spec.model} {t.lease}" for t in self.core.ledger.tasks.values() if t.outcome is None][:5]
                raise ViolationError(f"it never came to rest: {waits}")
            due_s = self.core.next_timer_s()
            if due_s is not None and due_s < self._heap[0][0]:
                self.now = max(self.now, due_s)
                self.handle(ev.Tick())
                continue
            when, _, what = heappop(self._heap)
            self.now = max(self.now, when)
            assert callable(what), "something to do"
            what()
            if not self.core.ledger.unsettled and self.now > self.start + until_s + 2.0:
                return

    def handle(self, event: ev.Event) -> None:
        before = {s.session: self._in_use(s) for s in self.hosts}
        for command in self.core.handle(event, self.now):
            if isinstance(command, ev.Dispatch):
                self._granted(self.hosts[command.session - 1], command, before[command.session])
            elif isinstance(command, ev.SendDesiredState):
                self._desired(self.hosts[command.session - 1])
            elif isinstance(command, ev.Settled):
                self.core.handle(ev.SettlesDone(command.tasks), self.now)
        self._watch_waits()

    # --- work and operators ------------------------------------------------------------------------------------------

    def _stream(self, model: str, until_s: float) -> None:
        random = self.random
        if self.now > until_s:
            return
        spec = Spec(kind="run", model=model, durable=False, priority=3 if self.calm else random.choice((2, 3)))
        if random.random() < 0.1:
            self.after(random.uniform(0.5, 2.0), lambda: self._stream(model, until_s))
            return
        self.handle(ev.Submit(spec, [Task(spec, "", b"x") for _ in range(random.choice((1, 1, 4)))]))
        self.after(random.expovariate(1.0) * self.run_s * len(self.sizes) * random.choice((0.5, 2.0)) + 1e-4,
                   lambda: self._stream(model, until_s))  # fmt: skip

    def _operate(self) -> None:
        random, worker_id = self.random, self.random.choice(self.hosts).worker_id
        model = random.choice(list(self.sizes))
        residency = self.core.fleet.workers[worker_id].residency
        pinned = sum(residency.memory_of(m) for m in residency.operator_pinned_ids() if m != model)
        if random.random() < 0.5 and pinned + 300 <= residency.limit_bytes:
            self.coverage["pinned"] += 1
            self.handle(ev.LoadModel(worker_id, model))
        else:
            self.coverage["unloaded"] += 1
            self.handle(ev.UnloadModel(worker_id, model))

    def _unpin_all(self) -> None:
        for host in self.hosts:
            for model in list(self.core.fleet.workers[host.worker_id].residency.operator_pins):
                self.handle(ev.UnloadModel(host.worker_id, model))

    # --- the workers -------------------------------------------------------------------------------------------------

    def _beat(self, host: Host, *, again: bool = False) -> None:
        worker = self.core.fleet.workers[host.worker_id]
        held = [ev.HeldLease(x.lease_id, x.task.task_id, x.attempt) for x in worker.leases.values()]
        for model, resident in host.resident.items():
            if resident.state is ModelState.READY and (key := (host.session, model)) in self._loading:
                self._rested_from(host, key)
        self.handle(ev.Heartbeat(host.session, held, host.frame, Telemetry(), tuple(host.resident.values())))
        if again:
            self.after(BEAT_S, lambda: self._beat(host, again=True))

    def _rested_from(self, host: Host, key: tuple[int, str]) -> None:
        took_s = self.now - self._loading.pop(key)
        self._rest[host.session] = max(self._rest.get(host.session, 0.0), self.now + took_s)

    def _desired(self, host: Host) -> None:
        residency = self.core.fleet.workers[host.worker_id].residency
        host.pinned, host.unwanted = list(residency.operator_pinned_ids()), list(residency.unwanted)
        self.after(0.001, lambda: self._arrange(host))

    def _arrange(self, host: Host) -> None:
        """Loads what leases wait for and what is pinned; unloads what is unwanted."""
        for model in [m for m in host.unwanted if m in host.resident and not host.waiting.get(m)]:
            if host.resident[model].state is ModelState.READY:
                del host.resident[model]
                self._beat(host)
        for model in [*[m for m, leases in host.waiting.items() if leases], *host.pinned]:
            if model not in host.resident and (host.waiting.get(model) or model not in host.unwanted):
                self._load(host, model)

    def _load(self, host: Host, model: str) -> None:
        size = 100 * self.sizes[model]
        idle = [m for m, r in host.resident.items()
                if r.state is ModelState.READY and not host.waiting.get(m) and m not in host.pinned]  # fmt: skip
        idle.sort(key=lambda m: host.used_s.get(m, 0.0))
        while sum(r.memory_bytes for r in host.resident.values()) + size > host.limit_bytes and idle:
            del host.resident[idle.pop(0)]
            self.coverage["evicted"] += 1
        if sum(r.memory_bytes for r in host.resident.values()) + size > host.limit_bytes:
            # Only where the figures were wrong, or a pin came later than the leases, is there not enough to evict.
            if self.calm and not self.guessed:
                raise ViolationError(f"{model} has no room on {host.worker_id}: {list(host.resident)}")
            self.coverage["waits for room on its worker"] += 1
            self._give_back(host, model)
            return
        self.loads += 1
        host.resident[model] = Resident(model=model, state=ModelState.LOADING, memory_bytes=size)

        def ready() -> None:
            host.resident[model] = Resident(model=model, memory_bytes=size)
            self._beat(host)
            self._next(host, model)
            self._arrange(host)

        self.after(self.load_s[model], ready)
        if self.random.random() < 0.5:
            self._beat(host)

    def _give_back(self, host: Host, model: str) -> None:
        leases = host.waiting.pop(model, [])
        if leases:
            error = TaskError("ModelMakesRoom", "no room")
            failures = [ev.Failure(x.lease_id, error, returned=True) for x in leases]
            self.handle(ev.Reports(host.session, failures=failures))
        self.after(0.1, lambda: self._arrange(host))

    def _begin(self, host: Host, model: str) -> None:
        self._arrange(host)
        self._next(host, model)

    def _next(self, host: Host, model: str) -> None:
        resident = host.resident.get(model)
        leases = host.waiting.get(model)
        if resident is None or resident.state is not ModelState.READY or not leases:
            return
        lease = leases[0]

        def done() -> None:
            if not leases or leases[0] is not lease:
                return
            leases.pop(0)
            host.used_s[model] = self.now
            if (key := (host.session, model)) in self._loading:
                self._rested_from(host, key)
            began_s = self.now - self.run_s
            self.handle(ev.Reports(host.session, [lease.lease_id], [b""], "", (), began_s, self.now))
            self._next(host, model)
            self._arrange(host)

        self.after(self.run_s * self.random.uniform(0.5, 1.5), done)

    # --- what must hold ----------------------------------------------------------------------------------------------

    def _in_use(self, host: Host) -> set[str]:
        worker = self.core.fleet.workers.get(host.worker_id)
        return {x.task.spec.model for x in worker.leases.values()} if worker is not None else set()

    def _granted(self, host: Host, command: ev.Dispatch, before: set[str]) -> None:
        worker = self.core.fleet.workers[host.worker_id]
        residency = worker.residency
        host.frame = command.number
        fresh = [m for m in dict.fromkeys(x.task.spec.model for x in command.leases) if m not in before]
        for lease in command.leases:
            if lease.task.spec.model in residency.unwanted:
                raise ViolationError(f"a lease on {lease.task.spec.model}, which is to go")
        used = self._in_use(host)
        size = sum(residency.memory_of(m) for m in used)
        if fresh and len(used) > 1 and size > residency.limit_bytes:
            raise ViolationError(f"{sorted(used)} take {size} of {residency.limit_bytes} bytes on {host.worker_id}")
        self._check_rest(host, fresh, len(worker.leases) - len(command.leases))
        for lease in command.leases:
            model = lease.task.spec.model
            leases = host.waiting.setdefault(model, [])
            leases.append(lease)
            if len(leases) == 1:
                self.after(0.0005, lambda m=model: self._begin(host, m))

    def _check_rest(self, host: Host, fresh: list[str], held: int) -> None:
        """A busy worker begins a loading that makes others go only when it has rested."""
        loading = [m for m in fresh if m not in host.resident]
        taken = sum(r.memory_bytes for r in host.resident.values())
        on_way = sum(100 * self.sizes[m] for m in host.waiting if host.waiting[m] and m not in host.resident)
        used = self._in_use(host)
        idle = [m for m in sorted(host.resident, key=lambda m: host.used_s.get(m, 0.0)) if m not in used]
        while taken + on_way > host.limit_bytes and idle:  # for those before
            taken -= host.resident[idle.pop(0)].memory_bytes
        for n, model in enumerate(loading):
            taken += 100 * self.sizes[model]
            evicts = taken + on_way > host.limit_bytes
            while taken + on_way > host.limit_bytes and idle:
                taken -= host.resident[idle.pop(0)].memory_bytes
            busy = held or n
            late = any(session == host.session for session, _ in self._loading)
            if evicts and busy and not self.guessed and self.calm:
                self.coverage["made others go while busy"] += 1
                if late or self.now < self._rest.get(host.session, 0.0) - 1e-6:
                    raise ViolationError(f"{host.worker_id} begins to load {model} without a rest")
            self._loading[host.session, model] = self.now

    def _watch_waits(self) -> None:
        """How long models wait that are in place nowhere."""
        fleet, now = self.core.fleet, self.now
        for host in self.hosts:
            worker = fleet.workers.get(host.worker_id)
            if worker is not None and worker.residency.reserved_model:
                self._turns.setdefault(host.session, now)
            elif host.session in self._turns:
                self.coverage["turns"] += 1
                self.drains_s = max(self.drains_s, now - self._turns.pop(host.session))
        waiting = {
            resource_class.shape.model: resource_class
            for resource_class in self.core.ledger.classes.by_key.values()
            if resource_class.size
        }
        served = {x.task.spec.model for w in fleet.workers.values() for x in w.leases.values()}
        for model in [m for m in self.waiting_since_s if m not in waiting or m in served]:
            self._judge(model, now - self.waiting_since_s.pop(model))
        for model in waiting:
            if model not in served:
                self.waiting_since_s.setdefault(model, now)

    def _judge(self, model: str, waited_s: float) -> None:
        """Its own loading time; then a rest, a drain and a loading for each model before it and for itself, and the
        master may hear of each a heartbeat late.
        """
        if not self.calm or self.guessed:
            return
        slowest_s = max(3.0 if any(w.residency.load_s(m) == 3.0 for w in self.core.fleet.workers.values()) else 0.0
                        for m in self.sizes)  # fmt: skip
        slowest_s = max(slowest_s, *self.load_s.values())
        real_s = max(self.load_s.values()) + BEAT_S
        bound_s = slowest_s + len(self.sizes) * (2 * real_s + self.drains_s + BEAT_S)
        self.coverage["waits"] += 1
        if waited_s > bound_s:
            raise ViolationError(f"{model} waited {waited_s:.2f} s, more than {bound_s:.2f} s")


def check(seed: int) -> None:
    """The checker of the mutations."""
    ModelWorld(seed).run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.models", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    args = parser.parse_args()
    coverage: Counter[str] = Counter()
    failed, loads, began = 0, 0, time.process_time()
    for seed in range(args.first, args.first + args.seeds):
        world = ModelWorld(seed)
        try:
            world.run()
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}")
            if failed >= 10:
                break
        coverage.update(world.coverage)
        loads += world.loads
    print(f"{args.seeds:,} seeds, {failed} failed, {loads:,} loadings, {time.process_time() - began:.1f} s of CPU")
    print(*(f"{name}: {count:,}" for name, count in sorted(coverage.items())), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
