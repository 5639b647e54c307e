"""Rounds of chaos on one fleet: clients use every kind of call while random faults strike.

At the end of each round all faults end, and every task must have its outcome. One journal, one watch and one history
last through all rounds; after them a new reader reads all outcomes once more.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from multigpu.v1 import task_service_pb2
from multigpu.v1.admin_service_pb2 import WORKER_STATE_ACTIVE
from multigpu_master.journal.sqlite.journal import SWEEP_AFTER_S

from tests.chaos import failpoints
from tests.chaos.client import durable_names, names_of
from tests.chaos.failpoints import Failpoint
from tests.chaos.faults import KINDS, Faults
from tests.chaos.network import Network, NotAllowedError
from tests.chaos.processes import ChaosFleet, ClientProcess, Seen
from tests.chaos.records.history import CLIENTS, History, Record, load
from tests.disk import layer
from tests.waiting import until

WORKERS = 3
LOOK_S = 2.0  # between two checks of the daemons' logs
PAUSE_MAX_S = 0.8  # between two strikes
DRAIN_TIMEOUT_S = 120.0
# How long the watch may take to deliver outcomes that the clients have already.
WATCH_LAG_S = 5.0
# The wall clock of the last master, which reads all outcomes: more than any result_ttl.
AHEAD_S = 10 * 86400
REACH_TIMEOUT_S = 240.0  # for a failpoint: with the traffic of a round, each is passed many times a second

Tell = Callable[[str], None]


class Chaos:
    """See the module. `kinds`: what may break, by default all that this machine allows."""

    def __init__(
        self, folder: Path, seed: int, *, tasks: int, strikes: tuple[int, int] = (4, 8), kinds: list[str] | None = None
    ) -> None:
        self.folder = folder / "history"
        self._tasks = tasks
        self._strikes = strikes  # in each round, at least; twice as many while tasks are still being handed over
        self._random = random.Random(seed)
        self.history = History(self.folder / "chaos.jsonl")
        names = [f"w{i}" for i in range(WORKERS)]
        self.no_network = ""  # why there is none
        self.network: Network | None = None
        if kinds is None or "network" in kinds:
            try:
                self.network = Network(["master", *names, CLIENTS], self._random.getrandbits(32))
            except NotAllowedError as error:
                self.no_network = str(error)
                kinds = [k for k in kinds or KINDS if k != "network"]
        if layer.missing_requirement():
            kinds = [k for k in kinds or KINDS if k != "clock"]
        self.fleet = ChaosFleet(folder / "fleet", self.history, workers=WORKERS, network=self.network)
        self.faults = Faults(self.fleet, self.history, self.folder, self._random.getrandbits(32), kinds or list(KINDS))
        self._round = 0
        self._look_at_s = 0.0
        self._watcher: ClientProcess
        self._seen = Seen(self.folder / "client-watch-0.jsonl")

    def __enter__(self) -> Self:
        try:
            self.fleet.__enter__()
            self._watcher = ClientProcess(self.fleet, self.folder, "watch", self._random.getrandbits(32))
        except BaseException:
            self._close()
            raise
        self.faults.clients.append(self._watcher)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._look_again()
        finally:
            self._close()
            for line in self.fleet.faults():
                self.history.add("fault", line=line)

    def _close(self) -> None:
        for client in self.faults.clients:
            client.kill()
        self.fleet.close()
        if self.network is not None:
            self.network.close()

    def records(self) -> list[Record]:
        return load(self.folder)

    # --- rounds -----------------------------------------------------------------------------------

    def random_rounds(self, rounds: int, tell: Tell = print) -> None:
        """Strikes at random. AssertionError: the fleet or a client came to a standstill."""
        for _ in range(rounds):
            began_s = time.monotonic()
            client = self.begin_round()
            strikes = 0
            least = self._random.randint(*self._strikes)
            while strikes < least or (client.alive and strikes < 2 * least):
                strikes += self.faults.strike()
                self.mend_for(self._random.uniform(0.02, PAUSE_MAX_S))
            self.end_round(client)
            took_s = time.monotonic() - began_s
            tell(f"round {self._round}: {self._tasks} tasks, {strikes} strikes, {took_s:.1f} s")

    def sweep(self, points: list[Failpoint], tell: Tell = print) -> None:
        """Arms each failpoint once, those of the master one after the other while those of the workers go their way on
        all workers at once. AssertionError: one was not reached.
        """
        for point in points:
            point.owner()  # or it says at once that it is gone
        queues = {"master": [p for p in points if p.process == failpoints.MASTER]}
        others = [p for p in points if p.process != failpoints.MASTER]
        for i in range(WORKERS):
            queues[f"w{i}"] = others[i::WORKERS]
        armed: dict[str, tuple[Failpoint, Path, float]] = {}
        client = self.begin_round()
        count = 0
        while queues or armed:
            for name in list(queues):
                if name in armed:
                    continue
                if not queues[name]:
                    del queues[name]
                    continue
                point = queues[name].pop(0)
                count += 1
                self.faults.kill(name, arm=(point, 1 if point.once else self._random.randint(1, 2)))
                armed[name] = (point, self.folder / f"failpoint-{count}.jsonl", time.monotonic() + REACH_TIMEOUT_S)
            for name, (point, record, end_s) in list(armed.items()):
                if failpoints.reached(record):
                    del armed[name]
                    tell(f"{name} ended: {point.name}")
                else:
                    assert time.monotonic() < end_s, f"failpoint not reached on {name}: {point.name} ({point.function})"
            self.mend_for(0.02)
            if client.done:
                self.end_round(client)
                client = self.begin_round()
        self.end_round(client)

    def begin_round(self) -> ClientProcess:
        self._round += 1
        client = ClientProcess(
            self.fleet, self.folder, "work", self._random.getrandbits(32), round=self._round, tasks=self._tasks
        )
        self.faults.clients.append(client)
        return client

    def end_round(self, client: ClientProcess) -> None:
        """No new faults: every task must have its outcome. Faults that last continue into the next round."""
        self.until_mended(lambda: client.done, "the clients")  # in spite of a worker whose handlers are broken
        self.faults.mend_handlers()
        self.faults.clients.remove(client)
        number, tasks = self._round, self._tasks
        late_s = time.monotonic() + WATCH_LAG_S

        def all_came() -> bool:
            late = time.monotonic() > late_s
            return self._seen.all_of(number, tasks) or (late and self._seen.all_answered(number, tasks))

        self.until_mended(all_came, "the outcomes")
        self.history.add("round", number=number, tasks=sum(map(len, names_of(number, tasks).values())))

    def mend_for(self, duration_s: float) -> None:
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            self.faults.mend()
            self._look_for_faults()
            time.sleep(0.01)

    def until_mended(self, condition: Callable[[], bool], what: str) -> None:
        def true() -> bool:
            self._look_for_faults()
            return self.faults.mended() and condition()

        until(true, DRAIN_TIMEOUT_S, what)

    def _look_for_faults(self) -> None:
        """AssertionError: a daemon logged a defect."""
        now = time.monotonic()
        if now >= self._look_at_s:
            self._look_at_s = now + LOOK_S
            faults = self.fleet.faults()
            assert not faults, f"a daemon's fault: {faults[0]}"

    @property
    def expected_outcomes(self) -> int:
        """How many outcomes a watch of all rounds has."""
        return sum(len(durable_names(names_of(n, self._tasks))) for n in range(1, self._round + 1))

    # --- after the rounds --------------------------------------------------------------------------------------------

    def whole(self) -> bool:
        """Whether everything runs and every worker has joined."""
        try:
            workers = self.fleet.list_workers()
        except grpc.RpcError:  # the master was killed while it answered
            return False
        active = {w.worker_id for w in workers if w.state == WORKER_STATE_ACTIVE and not w.quarantined}
        return self.faults.mended() and active == set(self.fleet.workers)

    def _look_again(self) -> None:
        """Waits for an empty queue, reads all outcomes once more, and some of them by id."""
        fleet = self.fleet
        if self.network is not None:
            self.network.heal()
        until(lambda: self.faults.mended() and self.whole(), DRAIN_TIMEOUT_S, "the fleet to be whole again")
        if "clock" in self.faults.kinds:
            self.faults.set_clock(AHEAD_S)
            until(lambda: self.faults.mended() and self.whole(), DRAIN_TIMEOUT_S, "the last master")
            time.sleep(SWEEP_AFTER_S + 2)  # it has begun to delete what it considers expired

        def zero() -> bool:
            left = fleet.tasks.Count(task_service_pb2.CountRequest(), timeout=10)
            return bool(left.queued == left.leased == 0)

        until(zero, DRAIN_TIMEOUT_S, "the queue to reach zero")
        left = fleet.tasks.Count(task_service_pb2.CountRequest(), timeout=10)
        self.history.add("zero", queued=left.queued, leased=left.leased)
        replay = ClientProcess(fleet, self.folder, "replay", self._random.getrandbits(32))
        self.faults.clients.append(replay)
        until(lambda: replay.done, DRAIN_TIMEOUT_S, "a reader of all outcomes")
        self._watcher.kill()
        outcomes = [r for r in self.records() if r["what"] == "outcome" and r["by"] == "watch"]
        for r in self._random.sample(outcomes, min(200, len(outcomes))):
            self.history.add("got", task_id=r["task_id"], result=fleet.outcome(r["task_id"]).result.decode())
