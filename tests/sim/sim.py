"""One seed: a fleet, clients, faults of some kinds for a while; then the faults stop, and everything must come to
rest.
"""

from dataclasses import dataclass

from multigpu_master.core import events as ev
from multigpu_master.core.model import Capability, Outcome, Spec, WorkerInfo

from tests.sim.client import Ask, Client
from tests.sim.master import STRATEGIES, Master
from tests.sim.worker import SimWorker
from tests.sim.world import ViolationError, World

FAULTS_S = 8.0
REST_S = 900.0
EVENTS_MAX = 60_000
FAULTS = (
    "worker crash", "worker freeze", "worker leave", "stream break", "silent break", "client break", "master crash",
    "master stall", "journal full", "cordon", "drain", "pause", "strategy", "queue strategy", "cancel", "duplicate",
    "memory", "models", "forget", "lie",
)  # fmt: skip


@dataclass(slots=True)
class Result:
    events: int
    checks: int
    asked: int
    sim_s: float


class Simulation:
    """See the module."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        world = self.world = World(seed, trace=trace)
        self.master = Master(world)
        random = world.random
        # A swarm: each seed has its own mix of faults, so that rare combinations get their turn.
        self.faults = [f for f in FAULTS if random.random() < 0.35]
        self.workers = [
            SimWorker(world, self.master, self._info(i)) for i in range(random.choice((1, 1, 2, 2, 2, 3, 4)))
        ]
        self.clients = [Client(world, self.master, f"c{i}") for i in range(random.choice((1, 1, 2)))]
        self.specs = [self._spec() for _ in range(random.randint(1, 4))]
        self._asked = 0

    def _info(self, i: int) -> WorkerInfo:
        random = self.world.random
        kinds = ("sim", "other") if random.random() < 0.7 or i == 0 else ("sim",)
        models = random.choice(((), (), ("m1", "m2"), ("m1",)))
        return WorkerInfo(
            worker_id=f"w{i}", memory_total_bytes=1000,
            capabilities=tuple(Capability(kind=k, models=models if i else ()) for k in kinds),
            labels=random.choice(({}, {"zone": "a"}, {"task_type": "sim"}, {"task_type": "other+sim"})),
            slots=random.choice((1, 1, 2)), window_tasks=random.choice((1, 2, 8, 64)),
            window_bytes=random.choice((40, 200, 1 << 20)),
        )  # fmt: skip

    def _spec(self) -> Spec:
        random = self.world.random

        def some(share: float, value: float) -> float | None:
            return value if random.random() < share else None

        return Spec(
            kind=random.choice(("sim", "sim", "other")), model=random.choice(("", "", "m1", "m2")),
            queue=random.choice(("default", "default", "q2")), priority=random.randint(1, 5),
            labels=(("zone", "a"),) if random.random() < 0.1 else (),
            memory_bytes=random.choice((0, 0, 0, 300)),
            deadline_s=some(0.1, self.world.now + random.uniform(0.5, 12)),
            queue_timeout_s=some(0.1, random.uniform(0.05, 5)), run_timeout_s=some(0.2, random.uniform(0.1, 2)),
            attempts_max=random.choice((1, 2, 3, 3)), backoff_initial_s=random.choice((0.01, 0.1, 0.5)),
            backoff_max_s=2.0, durable=random.random() < 0.75, result_ttl_s=random.choice((0.5, 100.0)),
            wait_for_worker=random.random() < 0.8,
        )  # fmt: skip

    # --- work --------------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        world, random = self.world, self.world.random
        client, spec = random.choice(self.clients), random.choice(self.specs)
        asks = []
        for _ in range(random.choice((1, 1, 2, 5, 12))):
            self._asked += 1
            request_id = f"r{self._asked}"
            extra = random.choice(("", "", "", "", "fail", "fatal", "flaky", "flaky", "stream", "stream flaky"))
            if world.chance(0.02):
                extra = "poison"
            elif spec.run_timeout_s is not None and world.chance(0.2):
                extra = "stuck"
            run_s = random.choice((0.001, 0.01, 0.05, 0.3, 1.5)) * world.between(0.5, 1.5)
            key = random.choice(("", "", "a", "b", "c"))
            asks.append(Ask(request_id, spec, f"{request_id} run {run_s:.4f} {extra}".encode(), key))
        client.ask(asks)

    def _fault(self) -> None:
        world, random, master = self.world, self.world.random, self.master
        fault, worker, core = random.choice(self.faults), random.choice(self.workers), master.core
        world.trace("fault: %s", fault)
        match fault:
            case "worker crash":
                worker.crash(world.between(0.1, 3.0))
            case "worker freeze":
                worker.frozen_until = world.now + random.choice((0.2, 2.0, 7.0))
            case "worker leave":
                worker.leave(world.between(0.1, 2.0))
            case "stream break":
                worker.break_stream(world.between(0.0, 0.3))
            case "silent break":
                worker.break_stream(random.choice((None, 3.0, 8.0)))
            case "client break":
                random.choice(self.clients).stream_broke()
            case "master crash":
                if core is not None:
                    master.crash()
                    for other in self.workers:
                        other.master_died()
                    world.after(world.between(0.01, 2.0), master.start)
            case "master stall":
                master.stalled_until = world.now + random.choice((0.1, 1.5, 7.0))
            case "journal full":
                master.journal.full = True
                world.after(world.between(0.1, 2.0), lambda: setattr(master.journal, "full", False))
            case "memory":
                worker.memory_used = random.choice((0, 500, 790, 810, 950))
                worker.utilization = random.random()
            case "models":
                worker.resident = random.choice(((), ("m1",), ("m1", "m2")))
            case "lie" if core is not None:
                worker.lie([x for w in core.fleet.workers.values() if w.worker_id != worker.info.worker_id
                            for x in w.leases])  # fmt: skip
            case "cancel" | "duplicate":
                self._meddle(fault)
            case _:
                if core is not None:
                    self._operate(fault, worker)

    def _meddle(self, fault: str) -> None:
        client = self.world.random.choice(self.clients)
        asks = [a for a in client.asks.values() if a.open]
        if not asks:
            return
        ask = self.world.random.choice(asks)
        if fault == "duplicate":
            client.submit([ask])
        elif self.master.core is not None:
            self.master.when_awake(lambda: self.master.cancel(ask.request_id) if self.master.core else None)

    def _operate(self, fault: str, worker: SimWorker) -> None:
        world, random, master = self.world, self.world.random, self.master
        assert master.core is not None, "the master is up"
        name = worker.info.worker_id
        known = master.core.fleet.workers.get(name)
        queue = random.choice(("default", "q2"))
        strategy = random.choice(list(STRATEGIES))
        match fault:
            case "cordon" if known is not None:
                master.handle(ev.Cordon(name, "a test"))
                world.after(world.between(0.1, 2.0), lambda: self._uncordon(name))
            case "drain" if known is not None:
                deadline_s = random.choice((None, world.now + world.between(-0.1, 2.0)))
                master.handle(ev.Drain(name, deadline_s))
                world.after(world.between(0.5, 3.0), lambda: self._uncordon(name))
            case "forget" if known is not None and not known.session:
                master.handle(ev.Forget(name))
            case "pause":
                self._configure(ev.ConfigureQueue(queue, paused=True, tasks_max=random.choice((0, 5))))
                world.after(
                    world.between(0.1, 2.0),
                    lambda: self._configure(ev.ConfigureQueue(queue, paused=False, tasks_max=0)),
                )
            case "strategy":
                master.strategy = strategy
                master.handle(ev.SetStrategy(strategy))
            case "queue strategy":
                strategy = random.choice((strategy, ""))
                master.queue_strategies[queue] = strategy
                master.handle(ev.SetStrategy(strategy, queue))
            case _:
                pass

    def _configure(self, rule: ev.ConfigureQueue) -> None:
        self.master.queue_rules[rule.queue] = rule
        if self.master.core is not None:
            self.master.handle(rule)

    def _uncordon(self, name: str) -> None:
        known = self.master.known.get(name)
        if known is not None:
            known.cordoned = False
        if self.master.core is not None and name in self.master.core.fleet.workers:
            self.master.handle(ev.Uncordon(name))

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Runs to the end. ViolationError: a promise was broken."""
        world, random = self.world, self.world.random
        self.master.strategy = random.choice(("auto", "auto", *STRATEGIES))
        self.master.start()
        for worker in self.workers:
            world.after(world.between(0.0, 0.5), worker.start)
        for client in self.clients:
            client.connect()
        for _ in range(random.randint(2, 9)):
            world.after(world.between(0.0, FAULTS_S), self._submit)
        if self.faults:
            for _ in range(random.choice((3, 8, 20))):
                world.after(world.between(0.0, FAULTS_S), self._fault)
        world.after(FAULTS_S + 0.01, self._heal)
        while not self._at_rest():
            if not world.step() or world.now > world.start + REST_S or world.events > EVENTS_MAX:
                raise ViolationError(f"it never came to rest: {self._unrest()}")
        self._judge()
        return Result(world.events, self.master.invariants.checks, self._asked, world.now - world.start)

    def _heal(self) -> None:
        """The faults stop; a worker that can take anything joins, so that nothing has an excuse."""
        self.world.trace("the faults stop")
        self.faults = []
        self.master.journal.full = False
        for worker in self.workers:
            worker.memory_used = 0
        info = WorkerInfo(
            worker_id="healer", memory_total_bytes=1000, labels={"zone": "a"},
            capabilities=(Capability(kind="sim"), Capability(kind="other")),
        )  # fmt: skip
        healer = SimWorker(self.world, self.master, info)
        self.workers.append(healer)
        healer.start()

    def _at_rest(self) -> bool:
        core = self.master.core
        if self.world.now < self.world.start + FAULTS_S + 4.0 or core is None or core.unsettled:
            return False
        if not self.master.journal.idle:
            return False
        return not any(ask.open for client in self.clients for ask in client.asks.values())

    def _unrest(self) -> str:
        core = self.master.core
        tasks = [t for t in core.tasks.values() if t.outcome is None][:3] if core is not None else []
        open_ = [a.request_id for c in self.clients for a in c.asks.values() if a.open][:5]
        held = [f"{t.request_id} {t.payload!r} {t.attempts} {t.lease} {t.extra}" for t in tasks]
        return f"{core and core.unsettled} unsettled, asked {open_}, {held}"

    def _judge(self) -> None:
        """What must be true in the end."""
        journal = self.master.journal
        core = self.master.core
        if core is not None and any(t.spec.durable for t in core.tasks.values()):
            raise ViolationError("the core remembers what the journal has")
        if journal.tasks:
            raise ViolationError(f"the journal still has tasks {list(journal.tasks)[:5]}")
        for client in self.clients:
            for ask in client.asks.values():
                if ask.task_id and ask.spec.durable and ask.request_id not in journal.by_request:
                    raise ViolationError(f"{ask.request_id} was acknowledged, and lost")
                self._judge_outcomes(ask, [o for _, _, o in ask.outcomes])

    def _judge_outcomes(self, ask: Ask, outcomes: list[Outcome]) -> None:
        states = {o.state.name for o in outcomes}
        words = ask.payload.decode().split()[3:]
        if "SUCCEEDED" in states and ("fail" in words or "fatal" in words or "stuck" in words or "poison" in words):
            raise ViolationError(f"{ask.request_id} succeeded, which it can't")
        if (
            "fatal" in words
            and "DEAD_LETTERED" in states
            and "WorkerLost" not in {o.error.type for o in outcomes if o.error is not None}
            and "RunTimeout" not in {o.error.type for o in outcomes if o.error is not None}
        ):
            raise ViolationError(f"{ask.request_id} is a dead letter, though it failed for good")
