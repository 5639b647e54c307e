"""The faults of a simulated world and the actions of clients and operators, each with a name for trace and coverage.

A fault is a method of `Faults`: it draws what it needs, and begins something that ends by itself. Durations are
fractions and multiples of the master's session_timeout, so that small worlds with short timeouts see all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from multigpu_master.core import events as ev
from multigpu_master.core.scheduler import Core

from tests.sim.actors import letters
from tests.sim.actors.client import Client, Request
from tests.sim.actors.master import STRATEGIES, Master
from tests.sim.actors.worker import SimWorker
from tests.sim.journal import Rows

if TYPE_CHECKING:
    from tests.sim.sim import Simulation

QUEUES = ("default", "q2")


class Faults:
    """See the module. `names` lists them; `happen` begins one of them now."""

    names: tuple[str, ...]

    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation
        self._world = simulation.world
        self._random = simulation.world.random
        self._master = simulation.master
        self._timeout_s = simulation.timeout_s

    def happen(self, name: str) -> None:
        self._world.trace("fault: %s", name)
        self._world.coverage[f"fault: {name}"] += 1
        getattr(self, name.replace(" ", "_"))()

    def lose_data(self, dice: Random) -> None:
        """At some time the journal is lost, or replaced by an older copy. Drawn with a generator of its own."""
        faults_s, backup = self._sim.size.faults_s, Rows()
        copied_s = dice.random() * faults_s
        lost_s = copied_s + dice.random() * (faults_s - copied_s)
        if dice.random() < 0.7:
            self._world.after(copied_s, lambda: backup.restore(self._master.journal))
        self._world.after(lost_s, lambda: self._lose_data(backup))

    def check_device(self, dice: Random) -> None:
        """At some time an operator has a device checked. Drawn with a generator of its own."""
        event = ev.CheckDevice(dice.choice(self._sim.workers).info.worker_id)
        self._world.after(dice.random() * self._sim.size.faults_s, lambda: self._operate(event))

    def _worker(self) -> SimWorker:
        return self._random.choice(self._sim.workers)

    def _client(self) -> Client:
        return self._random.choice(self._sim.clients)

    def _some(self, *shares: float) -> float:
        """One of these multiples of the session timeout."""
        return self._random.choice(shares) * self._timeout_s

    def _later(self, low: float, high: float, what: Callable[[], None]) -> None:
        self._world.after(self._world.between(low, high), what)

    def _operate(self, event: ev.Event, undo: ev.Event | None = None) -> None:
        """An operator's call to the master, repeated while the master is down, and undone later."""
        master = self._master
        if master.core is None:
            self._later(0.3, 0.3, lambda: self._operate(event, undo))
            return
        done = False

        def answered() -> None:
            nonlocal done
            done = True

        def call() -> None:
            assert master.core is not None, "it is awake"
            if self._knows(master.core, event):
                master.operate(event, answered)
            else:
                answered()

        def later() -> None:
            if not done:
                self._operate(event, undo)  # the master died before it answered, or is slow
            elif undo is not None:
                self._operate(undo)

        master.when_awake(call)
        self._later(0.3, 2.0, later)

    def _knows(self, core: Core, event: ev.Event) -> bool:
        """The check of the admin service before it passes the event to the core."""
        if not isinstance(
            event, ev.Cordon | ev.Uncordon | ev.Drain | ev.Forget | ev.CheckDevice | ev.LoadModel | ev.UnloadModel
        ):
            return True
        worker = core.fleet.workers.get(event.worker_id)
        if worker is None or isinstance(event, ev.CheckDevice):
            return worker is not None and bool(worker.session)
        return not (isinstance(event, ev.Forget) and worker.session)

    # --- processes ---------------------------------------------------------------------------------------------------

    def worker_crash(self) -> None:
        self._worker().crash(self._world.between(0.02, 0.6) * self._timeout_s)

    def worker_freeze(self) -> None:
        self._worker().frozen_until = self._world.now + self._some(0.04, 0.4, 1.4)

    def worker_leave(self) -> None:
        self._worker().leave(self._world.between(0.1, 2.0))

    def worker_twin(self) -> None:
        """Another process with the same worker_id."""
        worker = self._worker()
        twin = SimWorker(self._world, self._master, worker.info, self._sim.heartbeat_s, primary=False)
        self._sim.workers.append(twin)
        twin.start()

    def worker_clock(self) -> None:
        self._worker().skew_s = self._random.choice((-90_000.0, -2.0, 2.0, 90_000.0))

    def client_crash(self) -> None:
        self._client().crash()

    def client_pause(self) -> None:
        self._client().paused_until = self._world.now + self._some(0.1, 0.6)

    def master_crash(self) -> None:
        master = self._master
        if master.core is not None:
            master.crash()
            for worker in self._sim.workers:
                worker.master_died()
            self._later(0.01, 2.0, master.start)

    def _lose_data(self, backup: Rows) -> None:
        """The journal is replaced by this copy of it, or by an empty one."""
        master = self._master
        self._world.trace("fault: the journal is %s", "an older copy" if backup.incarnations else "lost")
        self._world.coverage["fault: older copy" if backup.incarnations else "fault: data lost"] += 1
        master.restore(backup)
        for worker in self._sim.workers:
            worker.master_died()
        self._later(0.01, 1.0, master.start)
        # What operators have undone since the copy was made.
        for queue in QUEUES:
            self._operate(ev.ConfigureQueue(queue, paused=False, tasks_max=0, bytes_max=0))
        for worker in self._sim.workers:
            self._operate(ev.Uncordon(worker.info.worker_id))
            for model in worker.info.models:
                self._operate(ev.UnloadModel(worker.info.worker_id, model.name))

    def master_stall(self) -> None:
        self._master.stalled_until = self._world.now + self._some(0.02, 0.3, 1.4)

    def clock_jump(self) -> None:
        """The wall clock of the master's host is set. Only the next master reads it."""
        self._master.wall_skew_s += self._random.choice((-4000.0, -1.0, 1.0, 4000.0))

    # --- streams -----------------------------------------------------------------------------------------------------

    def stream_break(self) -> None:
        self._worker().break_stream(self._world.between(0.0, 0.3))

    def silent_break(self) -> None:
        heard_s = self._random.choice((None, 0.6, 1.6))
        self._worker().break_stream(heard_s and heard_s * self._timeout_s)

    def stream_stall(self) -> None:
        self._worker().stall_stream(self._some(0.1, 0.5, 1.5), up=self._world.chance(0.5))

    def client_break(self) -> None:
        self._client().stream_broke()

    # --- the disk ----------------------------------------------------------------------------------------------------

    def disk_full(self) -> None:
        journal = self._master.journal
        journal.disk_full = True
        self._later(0.1, 2.0, lambda: setattr(journal, "disk_full", False))

    def disk_slow(self) -> None:
        journal = self._master.journal
        journal.slow = self._random.choice((5.0, 50.0))
        self._later(0.1, 2.0, lambda: setattr(journal, "slow", 1.0))

    # --- reports of workers -------------------------------------------------------------------------------------------

    def memory(self) -> None:
        worker = self._worker()
        worker.memory_used = self._random.choice((0, 500, 790, 810, 950))
        worker.utilization = self._random.random()

    def models(self) -> None:
        worker = self._worker()
        worker.resident = self._random.choice(((), ("m1",), ("m1", "m2")))
        if worker.info.models:
            dice, name = self._sim.models_dice, worker.info.worker_id
            model = dice.choice(("m1", "m2"))
            unload = ev.UnloadModel(name, model)
            self._operate(dice.choice((ev.LoadModel(name, model), unload)), unload)

    def sick(self) -> None:
        first, unusable, well_after_s = self._worker(), self._world.chance(0.5), self._some(0.05, 0.5, 1.5)
        common_cause = self._sim.breaker_dice.random() < 0.5  # such as the host's power: the breaker may trip
        for worker in self._sim.workers if common_cause else [first]:
            worker.fall_sick(unusable=unusable, well_after_s=well_after_s)

    def false_reports(self) -> None:
        worker, core = self._worker(), self._master.core
        if core is not None:
            name = worker.info.worker_id
            others = [x for w in core.fleet.workers.values() if w.worker_id != name for x in w.leases]
            worker.report_falsely(others + worker.reported)
            foreign = [x for w in self._sim.workers if w.info.worker_id != name for x in w.held.leases.values()]
            waiting = [task.task_id for task in core.ledger.tasks.values() if task.waiting]
            worker.claims = [(x.lease_id, x.task_id, x.attempt, x.proof) for x in foreign[:3]]
            worker.claims += [(task_id, task_id, 1, 0) for task_id in waiting[:3]]  # no lease has a task's id
            worker.break_stream(0.0)

    # --- clients ---------------------------------------------------------------------------------------------

    def _open_request(self) -> tuple[Client, Request] | None:
        client = self._client()
        requests = [a for a in client.requests.values() if a.open]
        return (client, self._random.choice(requests)) if requests else None

    def duplicate(self) -> None:
        """The same request_id once more on the same stream."""
        if (found := self._open_request()) is not None:
            found[0].submit([found[1]])

    def attach(self) -> None:
        """Another client requests for the same request_id."""
        if (found := self._open_request()) is not None:
            request, other = found[1], self._client()
            if request.request_id not in other.requests:
                same = Request(request.request_id, request.spec, request.payload, request.partition_key)
                same.repaired = request.repaired
                other.request([same])

    def cancel(self) -> None:
        master = self._master
        if (found := self._open_request()) is not None and master.core is not None:
            request_id = found[1].request_id
            master.when_awake(lambda: master.cancel(request_id) if master.core else None)

    # --- operators -------------------------------------------------------------------------------------------

    def cordon(self) -> None:
        name = self._worker().info.worker_id
        self._operate(ev.Cordon(name, "a test"), ev.Uncordon(name))

    def drain(self) -> None:
        name = self._worker().info.worker_id
        deadline_s = self._random.choice((None, self._master.now + self._world.between(-0.1, 2.0)))
        self._operate(ev.Drain(name, deadline_s), ev.Uncordon(name))

    def reset_breaker(self) -> None:
        self._operate(ev.ResetBreaker())

    def forget(self) -> None:
        self._operate(ev.Forget(self._worker().info.worker_id))

    def pause(self) -> None:
        queue = self._random.choice(QUEUES)
        self._operate(ev.ConfigureQueue(queue, paused=True), ev.ConfigureQueue(queue, paused=False))

    def limits(self) -> None:
        queue, tasks_max, bytes_max = self._random.choice(QUEUES), *self._random.choice(((1, 0), (5, 0), (0, 60)))
        self._operate(
            ev.ConfigureQueue(queue, tasks_max=tasks_max, bytes_max=bytes_max),
            ev.ConfigureQueue(queue, tasks_max=0, bytes_max=0),
        )

    def strategy(self) -> None:
        self._operate(ev.SetStrategy(self._random.choice(list(STRATEGIES))))

    def queue_strategy(self) -> None:
        self._operate(ev.SetStrategy(self._random.choice((*STRATEGIES, "", "")), self._random.choice(QUEUES)))

    def requeue_letter(self) -> None:
        self._letter(letters.requeue)

    def discard_letter(self) -> None:
        self._letter(letters.discard)

    def _letter(self, what: Callable[[Master, int], None]) -> None:
        master = self._master
        found = list(master.journal.dead)
        if found and master.core is not None:
            letter = self._random.choice(found)
            master.when_awake(lambda: what(master, letter) if master.core is not None else None)
            if self._world.chance(0.2):  # two operators at once
                master.when_awake(lambda: what(master, letter) if master.core is not None else None)


Faults.names = tuple(
    n.replace("_", " ")
    for n, f in vars(Faults).items()
    if not n.startswith("_") and n not in {"happen", "lose_data", "check_device"} and callable(f)
)
