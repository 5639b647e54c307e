"""One seed: a fleet and clients, with faults for a while; then the faults stop, and the world must come to rest.

During the faults, safety is checked: the invariants after every event, and what clients are sent. After them, liveness:
the queue must become empty, every client must have its outcomes, the journal must be idle, and in some worlds every
worker must be back.

Most worlds are small, since most defects need a worker or two, a few tasks and a few faults in a certain order, and
small worlds are fast. The few large ones have full windows, long resource classes and rankings.
"""

from dataclasses import dataclass, replace
from random import Random

from multigpu_master.core.model import Outcome
from multigpu_master.core.scheduler import Limits
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, Model, WorkerInfo
from multigpu_master.journal.protocol import SettleRecord

from tests.sim.actors.client import Client, Request, repaired
from tests.sim.actors.master import STRATEGIES, Master
from tests.sim.actors.worker import SimWorker
from tests.sim.faults import Faults
from tests.sim.small import small_limits
from tests.sim.world import ViolationError, World

REST_S = 900.0
# Some worlds have tasks that several workers run at the same time: this share, and every one from this seed on.
GANGS, ALL_GANGS = 0.06, 10**12
ELASTIC = 0.4  # of those: they take from some to more workers
SHARED_DEVICES = 0.2  # share of the worlds in which workers share devices
EVENTS_MAX = 90_000  # in which no task ends
# The faults of worlds in which tasks make devices sick: the master learns of each run, and why it ended.
GENTLE = frozenset({
    "client crash", "client pause", "client break", "duplicate", "attach", "cancel", "disk slow", "disk full",
    "pause", "limits", "strategy", "queue strategy", "reset breaker", "discard letter",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a world."""

    share: float  # of the seeds
    timeout_s: float  # the master's session_timeout
    heartbeat_s: float
    faults_s: float  # for how long there are faults
    faults: tuple[int, ...]
    workers: tuple[int, ...]
    clients: tuple[int, ...]
    submits: tuple[int, int]
    batch: tuple[int, ...]


SIZES = (
    Size(
        share=0.94, timeout_s=2.0, heartbeat_s=0.6, faults_s=2.0, faults=(1, 2, 3, 4, 6),
        workers=(1, 1, 2), clients=(1, 1, 1, 2), submits=(1, 3), batch=(1, 1, 1, 2, 3),
    ),
    Size(
        share=0.055, timeout_s=5.0, heartbeat_s=1.0, faults_s=8.0, faults=(3, 8, 16),
        workers=(1, 2, 2, 3), clients=(1, 1, 2), submits=(2, 6), batch=(1, 1, 2, 5, 12),
    ),
    Size(
        share=0.005, timeout_s=5.0, heartbeat_s=1.0, faults_s=8.0, faults=(8, 20, 40),
        workers=(2, 4, 6), clients=(2, 3), submits=(4, 9), batch=(2, 5, 12, 40),
    ),
)  # fmt: skip


@dataclass(slots=True)
class Result:
    events: int
    checks: int
    submitted: int
    sim_s: float


class Simulation:
    def __init__(self, seed: int, *, trace: bool = False) -> None:
        world = self.world = World(seed, trace=trace)
        random = world.random
        at = random.random()
        self.size = size = SIZES[(at > SIZES[0].share) + (at > SIZES[0].share + SIZES[1].share)]
        self.timeout_s = size.timeout_s
        # Whether workers report models and their memory. Own generators: worlds without these faults do not change.
        self.models_dice = Random(f"models {seed}")
        self.batch_dice = Random(f"batches {seed}")
        self.planned = self.models_dice.random() < 0.4
        # Whether a worker stops starting its tasks.
        self._inert_dice = Random(f"inert {seed}")
        # Whether some tasks make the device of their worker sick.
        self._sicken_dice = Random(f"sicken {seed}")
        self.sickening = self._sicken_dice.random() < 0.04
        self.heartbeat_s = size.heartbeat_s
        self.ids_dice = Random(f"ids {seed}")
        self._check_dice = Random(f"checks {seed}")
        limits = Limits(
            session_timeout_s=size.timeout_s, ephemeral_bytes_max=random.choice((1_000, 20_000)),
            tasks_max=random.choice((2 * size.batch[-1] + 2, 400, 400, 400)),
            bytes_max=random.choice((100 * size.batch[-1], *[1 << 20] * 5)),
            uncommitted_bytes_max=random.choice((600, 5_000, 1 << 20)),
        )  # fmt: skip
        grace_s = 0.5 * size.timeout_s
        self.master = Master(world, limits, random.choice(("auto", "auto", *STRATEGIES)), grace_s)
        if self.ids_dice.random() < 0.1:
            self.master.ids_left = self.ids_dice.randint(2, 60)
        # Each seed has its own mix of faults, so that rare combinations occur.
        self.faults = [f for f in Faults.names if random.random() < 0.3 and (f in GENTLE or not self.sickening)]
        self._faults = Faults(self)
        self.breaker_dice = Random(f"breaker {seed}")
        self.master.on_trip = self._tripped
        self.workers = [
            SimWorker(world, self.master, self._info(i), self.heartbeat_s) for i in range(random.choice(size.workers))
        ]
        self.clients = [Client(world, self.master, f"c{i}") for i in range(random.choice(size.clients))]
        self.specs = [self._spec(i) for i in range(random.randint(1, 4))]
        # Whether some tasks run on several workers at the same time.
        self._gang_dice = Random(f"gangs {seed}")
        self.ganging = (seed >= ALL_GANGS or self._gang_dice.random() < GANGS) and not self.sickening
        if self.ganging:
            self._add_gang(seed)
        self.master.specs = {s.wire: s for spec in self.specs for s in (spec, repaired(spec))}
        # Whether every worker must be back in the end, which takes longer.
        self._thorough = world.chance(0.1)
        self._healed_s = 0.0
        self._rest_s = 0.0
        self._inert_s = 0.0  # how long a worker may stay inert after the other faults
        self._submitted = 0
        self._settled = 0  # how often tasks have ended, as the coverage counts
        self._settled_at = 0  # the number of the event in which tasks ended last

    def _add_gang(self, seed: int) -> None:
        """Tasks of one kind run on several workers at the same time; some of them accept fewer workers."""
        at = self._gang_dice.randrange(len(self.specs))
        self.specs[at] = replace(
            self.specs[at], kind="sim", model="", labels=(), memory_bytes=0, world_size=2,
            wire=self.specs[at].wire + b" gang",
        )  # fmt: skip
        elastic = Random(f"elastic {seed}")
        if elastic.random() < ELASTIC:
            sizes = elastic.choice(((2, 1), (3, 1), (3, 2), (4, 2)))
            self.specs[at] = replace(
                self.specs[at], world_size=sizes[0], world_size_min=sizes[1], spread_ranks=elastic.random() < 0.5
            )
            # Its leases have ids of one range, of which the next one is requested half-way.
            self.master.ids_left = max(self.master.ids_left, 2 * sizes[0])

    def _info(self, i: int) -> WorkerInfo:
        random = self.world.random
        kinds = ("sim", "other") if random.random() < 0.7 or i == 0 else ("sim",)
        models = random.choice(((), (), ("m1", "m2"), ("m1",)))
        offered = tuple(Model(name=m, memory_bytes=300) for m in models) if i and self.planned else ()
        # Workers of two share a device in some worlds, in which gangs must not have two ranks there.
        shared = Random(f"devices {self.world.seed}").random() < SHARED_DEVICES
        return WorkerInfo(
            worker_id=f"w{i}", memory_total_bytes=1000, store_address="sim:1",
            host=f"h{i // 3}", device_id=f"GPU-{i // 2}" if shared else "cpu", nvlink_peers=(f"GPU-{i // 2 ^ 1}",),
            capabilities=tuple(
                Capability(kind=k, models=models if i else (), concurrency=self.batch_dice.choice((1, 1, 1, 4)))
                for k in kinds
            ),
            models=offered, model_memory_bytes=self.models_dice.choice((0, 400, 900)) if offered else 0,
            labels=random.choice(({}, {"zone": "a"}, {"task_type": "sim"}, {"task_type": "other+sim"})),
            slots=random.choice((1, 1, 2)), window_tasks=random.choice((1, 2, 8, 64)),
            window_bytes=random.choice((40, 200, 1 << 20)),
        )  # fmt: skip

    def _spec(self, i: int) -> Spec:
        random = self.world.random

        def some(share: float, value: float) -> float | None:
            return value if random.random() < share else None

        return Spec(
            kind=random.choice(("sim", "sim", "other")), model=random.choice(("", "", "m1", "m2")),
            queue=random.choice(("default", "default", "q2")), priority=random.randint(1, 5),
            labels=(("zone", "a"),) if random.random() < 0.1 else (),
            memory_bytes=random.choice((0, 0, 0, 300)),
            deadline_s=some(0.1, self.world.now + random.uniform(0.3, 1.5 * self.size.faults_s)),
            queue_timeout_s=some(0.1, random.uniform(0.05, self.timeout_s)),
            run_timeout_s=some(0.2, random.uniform(0.05, 0.4) * self.timeout_s),
            attempts_max=random.choice((1, 2, 3, 3)), backoff_initial_s=random.choice((0.01, 0.1, 0.5)),
            backoff_max_s=random.choice((0.5, 2.0)), durable=random.random() < 0.75,
            result_ttl_s=random.choice((0.5, 100.0)),
            wait_for_worker=random.random() < 0.8, wire=f"spec {i}".encode(),
        )  # fmt: skip

    # --- work --------------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        world, random = self.world, self.world.random
        client, spec = random.choice(self.clients), random.choice(self.specs)
        requests = []
        for _ in range(random.choice(self.size.batch)):
            self._submitted += 1
            request_id = f"r{self._submitted}"
            extra = random.choice(("", "", "", "", "fail", "fatal", "flaky", "save flaky", "stream", "stream flaky"))
            if world.chance(0.02):
                extra = "poison"
            elif spec.run_timeout_s is not None and world.chance(0.2):
                extra = random.choice(("stuck", "stuck", "stuck", "deaf"))
            if self.sickening:
                extra = f"sicken {spec.attempts_max}" if self._sicken_dice.random() < 0.3 else "innocent"
            if spec.world_size > 1 and self._gang_dice.random() < 0.4:
                extra = f"uneven {extra}"
            run_s = random.choice((0.0005, 0.005, 0.02, 0.1, 0.4)) * world.between(0.5, 1.5) * self.timeout_s
            key = random.choice(("", "", "a", "b", "c"))
            requests.append(Request(request_id, spec, f"{request_id} run {run_s:.4f} {extra}".encode(), key))
        client.request(requests)

    def _fault(self) -> None:
        if self.faults:
            self._faults.happen(self.world.random.choice(self.faults))

    def _tripped(self) -> None:
        """Half of the time the master dies soon after its breaker trips, and the next one has to restore it."""
        if not self._healed_s and not self.sickening and self.breaker_dice.random() < 0.5:
            self.world.after(self.breaker_dice.random() * self.timeout_s, self._crash_master)

    def _crash_master(self) -> None:
        if not self._healed_s:
            self._faults.happen("master crash")

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Runs to the end. ViolationError: a promise was broken."""
        with small_limits():
            return self._run()

    def _run(self) -> Result:
        world, random, size = self.world, self.world.random, self.size
        self.master.start()
        for worker in self.workers:
            world.after(world.between(0.0, 0.1) * self.timeout_s, worker.start)
        for client in self.clients:
            client.connect()
        for _ in range(random.randint(*size.submits)):
            world.after(world.between(0.0, size.faults_s), self._submit)
        if self.faults:
            for _ in range(random.choice(size.faults)):
                world.after(world.between(0.0, size.faults_s), self._fault)
        if self._inert_dice.random() < 0.15 and not self.sickening:
            world.after(self._inert_dice.random() * size.faults_s, self._inert_dice.choice(self.workers).stall)
            self._inert_s = self._inert_dice.choice((0.5, 10.0)) * self.timeout_s
            world.coverage["fault: worker begins nothing"] += 1
        if self.ids_dice.random() < 0.15 and not self.sickening:
            self._faults.lose_data(self.ids_dice)
        if self._check_dice.random() < 0.05 and not self.sickening:
            self._faults.check_device(self._check_dice)
        world.after(size.faults_s + 0.01, self._heal)
        while not self._at_rest():
            if not world.step() or world.now > world.start + REST_S or self._stuck():
                raise ViolationError(f"the world did not come to rest: {self._unrest()}")
        self._judge()
        self.master.tally()
        return Result(world.events, self.master.invariants.checks, self._submitted, world.now - world.start)

    def _heal(self) -> None:
        """Ends the faults. A worker that accepts every task joins, at once or later."""
        world = self.world
        world.trace("the faults stop")
        self.faults = []
        self._healed_s = world.now
        self.master.journal.disk_full = False
        for worker in self.workers:
            worker.memory_used = 0
            if worker.inert:
                world.after(self._inert_s, worker.resume)
            worker.resident = ()  # what was to be unloaded is
        later = not world.chance(0.5)
        for name in ("healer", "other healer") if self.ganging else ("healer",):
            info = WorkerInfo(
                worker_id=name, memory_total_bytes=1000, labels={"zone": "a"}, store_address="sim:1",
                capabilities=(Capability(kind="sim"), Capability(kind="other")),
            )  # fmt: skip
            healer = SimWorker(world, self.master, info, self.heartbeat_s)
            self.workers.append(healer)
            if later:  # the present workers have to run the tasks until then, if they can
                world.after(1.2 * self.timeout_s, healer.start)
            else:
                healer.start()

    def _at_rest(self) -> bool:
        core = self.master.core
        if not self._healed_s or core is None or core.ledger.unsettled or core.ledger.uncommitted_bytes:
            return False
        if not self.master.journal.idle or self.master.write_buffer._pending:
            return False
        if any(request.open for client in self.clients for request in client.requests.values()):
            return False
        if not self._thorough:
            return True
        self._rest_s = self._rest_s or self.world.now
        # Late messages have arrived by then, also from workers that were frozen.
        if self.world.now < max(self._healed_s + self.timeout_s, self._rest_s) + self.timeout_s + 3.0:
            return False
        self._judge_workers()
        return True

    def _stuck(self) -> bool:
        """Whether no task has ended for many events. All events of a world are no measure: while a queue is full, each
        client that was rejected submits again every second, however well the workers do.
        """
        world = self.world
        settled = world.coverage["Settled"]
        if settled != self._settled:
            self._settled, self._settled_at = settled, world.events
        return world.events > self._settled_at + EVENTS_MAX

    def _unrest(self) -> str:
        core = self.master.core
        tasks = [t for t in core.ledger.tasks.values() if t.outcome is None][:3] if core is not None else []
        open_ = [a.request_id for c in self.clients for a in c.requests.values() if a.open][:5]
        held = [f"{t.request_id} {t.payload!r} {t.attempts} {t.lease} {t.extra}" for t in tasks]
        return f"{core and core.ledger.unsettled} unsettled, asked {open_}, {held}"

    # --- conditions at the end --------------------------------------------------------------------------------

    def _judge(self) -> None:
        journal = self.master.journal
        core = self.master.core
        assert core is not None, "it is at rest"
        if any(t.spec.durable for t in core.ledger.tasks.values()):
            raise ViolationError("the core remembers what the journal has")
        if journal.tasks:
            raise ViolationError(f"the journal still has tasks {list(journal.tasks)[:5]}")
        for client in self.clients:
            for request in client.requests.values():
                if client.promised(request) and request.request_id not in journal.by_request:
                    raise ViolationError(f"{request.request_id} was acknowledged, and lost")
                self._judge_outcomes(request, [o for _, _, o in request.outcomes])
        self._judge_letters()

    def _judge_workers(self) -> None:
        """Every worker is back, and none holds a lease."""
        core = self.master.core
        assert core is not None, "it is at rest"
        for worker in self.workers:
            if not worker.alive and not worker.primary:
                continue
            if not worker.alive:
                raise ViolationError(f"{worker.info.worker_id} did not start again")
            known = core.fleet.workers.get(worker.info.worker_id)
            if not worker.held.connected:
                raise ViolationError(f"{worker.info.worker_id} did not come back")
            if worker.held.leases:
                raise ViolationError(f"{worker.info.worker_id} holds leases {list(worker.held.leases)} for ever")
            if known is not None and known.session and known.quarantined:
                raise ViolationError(f"{worker.info.worker_id} is quarantined for ever")
            if known is not None and known.session and known.cordon:
                raise ViolationError(f"{worker.info.worker_id} is {known.cordon.reason} for ever")

    def _judge_outcomes(self, request: Request, outcomes: list[Outcome]) -> None:
        states = {o.state.name for o in outcomes}
        options = request.payload.decode().split()[3:]
        if "SUCCEEDED" in states and not {"fail", "fatal", "stuck", "deaf", "poison", "sicken"}.isdisjoint(options):
            raise ViolationError(f"{request.request_id} succeeded, which is impossible")
        errors = {o.error.type for o in outcomes if o.error is not None}
        charged = ("WorkerLost", "RunTimeout", "DeviceFellSick")  # for attempts that ended before their own error
        if "fatal" in options and "DEAD_LETTERED" in states and errors.isdisjoint(charged):
            raise ViolationError(f"{request.request_id} is a dead letter, although its error is not retryable")

    def _judge_letters(self) -> None:
        """A dead letter is in the journal, was discarded, gave way to another task with its request_id, or was requeued
        and has one outcome more for each time.
        """
        master, journal = self.master, self.master.journal
        ends: dict[int, list[SettleRecord]] = {}
        for record in journal.outcomes:
            ends.setdefault(record.task_id, []).append(record)
        for task_id, records in ends.items():
            *former, newest = records
            if any(record.dead is None for record in former):
                raise ViolationError(f"task {task_id} was run again, although it was no dead letter")
            gone = newest.dead is not None and task_id not in journal.dead
            replaced = newest.request_id and journal.by_request[newest.request_id].task_id != task_id
            if replaced and task_id in journal.dead:
                raise ViolationError(f"task {task_id} is still a dead letter, although {newest.request_id} ran again")
            if gone and task_id not in master.discarded and not replaced:
                raise ViolationError(f"dead letter {task_id} is gone")
            if len(former) + gone != journal.deleted[task_id] or master.requeued[task_id] > len(former):
                raise ViolationError(
                    f"dead letter {task_id} was deleted {journal.deleted[task_id]} times, told of as requeued "
                    f"{master.requeued[task_id]} times, and has ended {len(records)} times"
                )


def check(seed: int) -> None:
    """The checker of the mutations."""
    Simulation(seed).run()


def check_gangs(seed: int) -> None:
    """The checker of the mutations of gangs."""
    Simulation(ALL_GANGS + seed).run()
