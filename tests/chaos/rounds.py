"""Rounds of chaos on one fleet: tasks go in while a seeded dice kills the master, workers and engines with -9.

What is killed is started again at once or a moment later. Now and then a daemon is only stopped (SIGSTOP), for longer
than the master waits for a silent worker: one that was given up for lost and comes back, with its engine gone on
working meanwhile, is what reports too late. At the end of each round everything runs again, and what was submitted must
come out. One journal lives through all rounds.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from multigpu.options import SpecCache
from multigpu.v1 import task_service_pb2
from multigpu.v1.admin_service_pb2 import WORKER_STATE_ACTIVE, GetStatsRequest

from tests.chaos.history import History
from tests.chaos.traffic import KIND, PATIENCE, Caller, Watcher, map_all, submit_all
from tests.fleet import Fleet, until

WORKERS = 3
TARGETS = {"master": 2, "worker": 4, "engine": 4, "pause": 2}
STOPPED_S = (1.2, 2.0)  # the session timeout is 1 s
PAUSE_MAX_S = 0.8
DRAIN_TIMEOUT_S = 60.0


class Chaos:
    """See the module."""

    def __init__(self, folder: Path, seed: int, tasks: int, kills: tuple[int, int] = (4, 8)) -> None:
        self.history = History()
        self._tasks = tasks
        self._kills = kills  # in each round, at least; twice as many while tasks are still being handed over
        self._random = random.Random(seed)
        self._log = folder / "executions"
        self._log.touch()
        self._fleet = Fleet(
            folder / "fleet", workers=WORKERS, handlers=["trial_handlers"], worker_flags=["--window-tasks", "64"]
        )
        self._broken: dict[str, float] = {}  # what is dead, and when it is to be started again
        self._stopped: dict[int, float] = {}  # pids, and when they are to go on

    def run(self, rounds: int, tell: Callable[[str], None] = print) -> None:
        """All rounds; the history then holds everything. AssertionError: the fleet or a client came to a standstill."""
        try:
            self._run(rounds, tell)
        finally:
            self._read_executions()
            for line in self._fleet.faults():
                self.history.add("fault", line=line)

    def _run(self, rounds: int, tell: Callable[[str], None]) -> None:
        with self._fleet as fleet:
            for name, worker in fleet.workers.items():
                self.history.add("worker", name=name, pid=worker.pid)
            watcher = Watcher(fleet.address, self.history, self._random.getrandbits(32))
            watcher.start()
            for number in range(1, rounds + 1):
                began_s, kills = time.monotonic(), self._round(number, watcher)
                tell(f"round {number}: {self._tasks} tasks, {kills} kills, {time.monotonic() - began_s:.1f} s")
            self._look_again()
            watcher.finish()
            tell(f"the watch was resumed {watcher.resumed} times")
            self._note_stale_reports()

    def _round(self, number: int, watcher: Watcher) -> int:
        names = [f"r{number}-{i}" for i in range(self._tasks)]
        half = self._tasks // 2
        parameters = {"log": str(self._log), "seconds": "0.003"}
        options = {**PATIENCE, "parameters": parameters}
        spec = SpecCache().get(KIND, "", options)
        address = self._fleet.address
        callers = [
            Caller(submit_all, address, self.history, names[:half], spec, self._random.getrandbits(32)),
            Caller(map_all, address, self.history, names[half:], options),
        ]
        for caller in callers:
            caller.start()
        kills = 0
        least = self._random.randint(*self._kills)
        while kills < least or (any(c.is_alive() for c in callers) and kills < 2 * least):
            kills += self._kill()
            end_s = time.monotonic() + self._random.uniform(0.02, PAUSE_MAX_S)
            while time.monotonic() < end_s:
                self._mend()
                time.sleep(0.01)
        # The kills are over: all of it must come out.
        until(lambda: self._mended() and not any(c.is_alive() for c in callers), DRAIN_TIMEOUT_S, "the clients")
        for caller in callers:
            if caller.error is not None:
                raise caller.error
        wanted = set(names)
        until(lambda: self._mended() and wanted <= watcher.seen, DRAIN_TIMEOUT_S, "the outcomes")
        self.history.add("round", number=number)
        return kills

    # --- breaking and mending ----------------------------------------------------------------------------------------

    def _kill(self) -> int:
        """Kills something that lives; how many it were."""
        target = self._random.choices(list(TARGETS), list(TARGETS.values()))[0]
        back_s = time.monotonic() + self._random.choice([0.0, 0.0, self._random.uniform(0.0, 0.5)])
        name = self._random.choice(sorted(self._fleet.workers))
        worker = self._fleet.workers[name]
        if target == "master" and self._fleet.master.alive:
            pid = self._fleet.master.pid
            self._note_stale_reports()
            self._fleet.master.kill()
            self._broken["master"] = back_s
        elif target == "worker" and worker.alive:
            pid = worker.pid
            worker.kill()
            self._broken[name] = back_s
        elif target == "engine" and worker.alive and (engines := worker.children()):
            pid = engines[0]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        elif target == "pause":
            daemon = self._random.choice([worker, worker, worker, self._fleet.master])
            pid = daemon.pid
            daemon.signal(signal.SIGSTOP)
            self._stopped[pid] = time.monotonic() + self._random.uniform(*STOPPED_S)
        else:
            return 0
        self.history.add("kill", target=target, pid=pid)
        return 1

    def _mend(self) -> None:
        """Starts what is due. A worker whose engine was killed before it was ready has ended by itself."""
        for name, worker in self._fleet.workers.items():
            if not worker.alive:
                self._broken.setdefault(name, 0.0)
        for name, due_s in list(self._broken.items()):
            if time.monotonic() >= due_s:
                del self._broken[name]
                if name == "master":
                    self._fleet.start_master(wait=False)
                else:
                    self.history.add("worker", name=name, pid=self._fleet.start_worker(name).pid)
        for pid, due_s in list(self._stopped.items()):
            if time.monotonic() >= due_s:
                del self._stopped[pid]
                for daemon in (self._fleet.master, *self._fleet.workers.values()):
                    if daemon.pid == pid:  # else it was killed meanwhile
                        daemon.signal(signal.SIGCONT)

    def _mended(self) -> bool:
        self._mend()
        return not self._broken and not self._stopped

    def _whole(self) -> bool:
        """Whether everything runs and every worker has joined."""
        active = {w.worker_id for w in self._fleet.list_workers() if w.state == WORKER_STATE_ACTIVE}
        return self._mended() and active == set(self._fleet.workers)

    def _note_stale_reports(self) -> None:
        """What this master has refused as too late; it forgets when it dies."""
        with contextlib.suppress(grpc.RpcError):
            stats = self._fleet.admin.GetStats(GetStatsRequest(), timeout=1)
            self.history.add("stale", reports=stats.stale_reports, requeued=stats.requeued)

    # --- when all is over --------------------------------------------------------------------------------------------

    def _look_again(self) -> None:
        """Asks for outcomes by name, and whether anything is left."""
        fleet = self._fleet
        until(self._whole, what="the fleet to be whole again")
        outcomes = [r for r in self.history.records() if r["what"] == "outcome" and r["by"] == "watch"]
        for r in self._random.sample(outcomes, min(200, len(outcomes))):
            self.history.add("got", task_id=r["task_id"], result=fleet.outcome(r["task_id"]).result.decode())

        def zero() -> bool:
            left = fleet.tasks.Count(task_service_pb2.CountRequest(), timeout=10)
            return bool(left.queued == left.leased == 0)

        until(zero, DRAIN_TIMEOUT_S, "the queue to reach zero")
        left = fleet.tasks.Count(task_service_pb2.CountRequest(), timeout=10)
        self.history.add("zero", queued=left.queued, leased=left.leased)

    def _read_executions(self) -> None:
        for line in self._log.read_text().splitlines():
            task_id, attempt, pid, parent_pid, payload = line.split(" ", 4)
            self.history.add(
                "execution", task_id=int(task_id), attempt=int(attempt), pid=int(pid), parent_pid=int(parent_pid),
                payload=payload,
            )  # fmt: skip
