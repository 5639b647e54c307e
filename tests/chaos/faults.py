"""The faults of a chaos run, drawn from a seed, and their repair.

Killed processes are started again, at once or a moment later, and a master perhaps with a wall clock that is wrong.
Stopped ones (SIGSTOP) continue after up to twice the session timeout: a worker that is lost and returns, while its
engine went on working, reports too late. Network faults end after a while.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos import failpoints
from tests.chaos.failpoints import Failpoint, usable
from tests.chaos.network import Way
from tests.chaos.processes import ChaosFleet, ClientProcess
from tests.chaos.records.history import CLIENTS, History

# How often each kind is chosen.
KINDS = {
    "master": 2, "worker": 4, "engine": 4, "pause": 3, "client": 2, "watcher": 1, "failpoint": 3, "network": 3,
    "handlers": 2, "clock": 2,
}  # fmt: skip
# By how much the master's wall clock is ahead after a restart; it may also be right again.
CLOCK_STEPS_S = (-3600, 3600, -25 * 3600, 25 * 3600, 10 * 86400, 0)
STOPPED_S = (1.2, 2.2)  # the session timeout is 1 s
NETWORK_S = (0.3, 2.5)


class Faults:
    """See the module. `kinds` are some of KINDS; `clients` are those that may be killed now."""

    def __init__(self, fleet: ChaosFleet, history: History, folder: Path, seed: int, kinds: list[str]) -> None:
        assert kinds, "there must be a kind of fault"
        self._fleet = fleet
        self._history = history
        self._folder = folder
        self._random = random.Random(seed)
        self.kinds = kinds
        self.clients: list[ClientProcess] = []
        self._broken: dict[str, float] = {}  # dead daemons, and when to start them again
        self._stopped: dict[int, tuple[float, Callable[[], None]]] = {}  # by pid: until when, and how to continue it
        self._shaped: list[tuple[float, Callable[[], None]]] = []  # until when, and how to end it
        self._armed = 0

    # --- breaking ----------------------------------------------------------------------------------------------------

    def strike(self) -> int:
        """Begins a fault; how many processes were killed or stopped, or places disconnected."""
        kind = self._random.choices(self.kinds, [KINDS[k] for k in self.kinds])[0]
        worker = self._random.choice(sorted(self._fleet.workers))
        step_s = self._random.choice(CLOCK_STEPS_S)
        strikes: dict[str, Callable[[], int]] = {
            "master": self._kill_master, "worker": lambda: self._kill_worker(worker),
            "engine": lambda: self._kill_engine(worker), "pause": lambda: self._pause(worker),
            "client": lambda: self._kill_client("work"), "watcher": lambda: self._kill_client("watch"),
            "failpoint": lambda: self._arm(worker), "network": lambda: self._break_network(worker),
            "handlers": lambda: self._break_handlers(worker), "clock": lambda: self.set_clock(step_s),
        }  # fmt: skip
        return strikes[kind]()

    def kill(self, name: str, *, back_s: float = 0.0, arm: tuple[Failpoint, int] | None = None) -> None:
        """Kills a daemon, to be started again after `back_s`, with this failpoint if any."""
        daemon = self._fleet.master if name == "master" else self._fleet.workers[name]
        if arm is not None:
            self._armed += 1
            point, call = arm
            record = self._folder / f"failpoint-{self._armed}.jsonl"
            self._fleet.armed[name] = failpoints.variable(point, call, record)
            self._history.add("armed", name=point.name, call=call, record=record.name)
        self._broken[name] = time.monotonic() + back_s
        if daemon.alive:
            self._note("master" if name == "master" else "worker", daemon.pid)
            daemon.kill()

    def _note(self, target: str, pid: int, **more: object) -> None:
        self._history.add("kill", target=target, pid=pid, **more)

    def _kill_master(self) -> int:
        if not self._fleet.master.alive:
            return 0
        self.kill("master", back_s=self._later_s())
        return 1

    def set_clock(self, step_s: int) -> int:
        """Kills the master, and the next one's wall clock is ahead by this."""
        killed = self._kill_master()
        if killed:
            self._fleet.set_clock(step_s)
            self._history.add("clock", step_s=step_s)
        return killed

    def _kill_worker(self, name: str) -> int:
        if not self._fleet.workers[name].alive:
            return 0
        self.kill(name, back_s=self._later_s())
        return 1

    def _later_s(self) -> float:
        return self._random.choice([0.0, 0.0, self._random.uniform(0.0, 0.5)])

    def _kill_engine(self, name: str) -> int:
        engines = self._fleet.workers[name].children()
        if not engines:
            return 0
        self._note("engine", engines[0])
        with contextlib.suppress(ProcessLookupError):
            os.kill(engines[0], signal.SIGKILL)
        return 1

    def _break_handlers(self, name: str) -> int:
        """Kills a worker's engine, and no other starts until all clients have their outcomes: its handlers can't be
        imported. One worker at a time.
        """
        worker = self._fleet.workers[name]
        if not worker.events("engine ready") or not worker.alive or any(self._fleet.broken_handlers.iterdir()):
            return 0
        self._fleet.broken_handlers.joinpath(str(worker.pid)).touch()
        self._history.add("handlers", worker=name, pid=worker.pid)
        return self._kill_engine(name)

    def _kill_client(self, way: str) -> int:
        living = [client for client in self.clients if client.way == way and client.alive]
        if not living:
            return 0
        client = self._random.choice(living)
        self._note("client" if way == "work" else "watcher", client.process.pid)
        client.kill()
        return 1

    def _arm(self, worker: str) -> int:
        point = self._random.choice(usable())
        name = "master" if point.process == failpoints.MASTER else worker
        if name in self._broken:
            return 0
        self.kill(name, arm=(point, 1 if point.once else self._random.choice([1, 2, 5, 20])))
        return 1

    def _pause(self, worker: str) -> int:
        """Stops an agent, an engine or the master."""
        target = self._random.choice(["agent", "agent", "engine", "master"])
        daemon = self._fleet.master if target == "master" else self._fleet.workers[worker]
        pids = daemon.children() if target == "engine" else [daemon.pid] if daemon.alive else []
        if not pids:
            return 0
        self.stop(pids[0], target, self._random.uniform(*STOPPED_S))
        return 1

    def stop(self, pid: int, target: str, duration_s: float) -> None:
        """SIGSTOP, and SIGCONT after `duration_s`."""
        try:
            pidfd = os.pidfd_open(pid)  # the pid may be reused by then
        except ProcessLookupError:
            return
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        self._history.add("pause", target=target, pid=pid, duration_s=duration_s)

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)

        self._go_on(pid)
        self._stopped[pid] = (time.monotonic() + duration_s, go_on)

    def _go_on(self, pid: int) -> None:
        if pid in self._stopped:
            self._stopped.pop(pid)[1]()

    def _break_network(self, worker: str) -> int:
        """A fault between the master and another place."""
        network = self._fleet.network
        assert network is not None, "kinds without a network have no network faults"
        place = self._random.choice([worker, worker, CLIENTS])
        how = self._random.choice(["delay", "loss", "cut up", "cut down", "cut", "reset"])
        duration_s = 0.0 if how == "reset" else self._random.uniform(*NETWORK_S)
        self._history.add("network", place=place, how=how, duration_s=duration_s)
        if how == "reset":
            network.reset("master", place)
            return 1
        ways = {"delay": Way(delay_s=0.05, jitter_s=0.1), "loss": Way(delay_s=0.005, loss=0.1)}
        way = ways.get(how, Way(loss=1.0))
        if how != "cut up":
            network.shape("master", place, way)
        if how != "cut down":
            network.shape(place, "master", way)
        self._shaped.append((time.monotonic() + duration_s, lambda: network.shape_both("master", place, None)))
        return 1

    # --- mending -----------------------------------------------------------------------------------------------------

    def mend(self, *, all_now: bool = False) -> None:
        """Ends the faults that are due, and starts workers that have ended by themselves: their failpoint triggered, or
        their engine was killed before it was ready.
        """
        now = time.monotonic()
        for name, daemon in (("master", self._fleet.master), *self._fleet.workers.items()):
            if not daemon.alive:
                self._broken.setdefault(name, 0.0)
        for name, due_s in list(self._broken.items()):
            if now >= due_s or all_now:
                del self._broken[name]
                if name == "master":
                    self._fleet.start_master(wait=False)
                else:
                    self._fleet.start_worker(name)
        for pid, (due_s, _) in list(self._stopped.items()):
            if now >= due_s or all_now:
                self._go_on(pid)
        for shaped in [s for s in self._shaped if now >= s[0] or all_now]:
            self._shaped.remove(shaped)
            shaped[1]()
        for client in self.clients:
            if client.killed:
                client.start()

    def mend_handlers(self) -> None:
        for broken in self._fleet.broken_handlers.iterdir():
            broken.unlink()

    def mended(self) -> bool:
        """Ends the faults that are due; whether none is left."""
        self.mend()
        return not self._broken and not self._stopped and not self._shaped
