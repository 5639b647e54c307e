"""The processes of a chaos run: the fleet, with failpoints and perhaps on a simulated network, and the clients."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.client import durable_names, names_of
from tests.chaos.failpoints import ON_PURPOSE
from tests.chaos.network import Network
from tests.chaos.records.history import CLIENTS, History, records_of
from tests.disk import layer
from tests.fleet import QUICK, Daemon, Fleet

ROOT = Path(__file__).resolve().parent.parent.parent
HANDLERS = Path(__file__).resolve().parent / "handlers"
WALL_CLOCK = ROOT / "tests" / "integration" / "restart" / "wall_clock.c"
PORT = 50051


class ChaosFleet(Fleet):
    """A fleet whose processes can be started with a failpoint. With a network, each runs in its network namespace."""

    def __init__(self, folder: Path, history: History, *, workers: int, network: Network | None = None) -> None:
        super().__init__(
            folder, workers=workers, handlers=["chaos_handlers"], handlers_dir=HANDLERS,
            worker_flags=["--window-tasks", "64"],
            # The simulated network does not leave this host, so plain connections are safe.
            master_flags=[*QUICK, *(["--insecure"] if network is not None else [])],
        )  # fmt: skip
        self._env["PYTHONPATH"] += f":{ROOT}"
        # While this folder has a file named after a worker's pid, engines of that worker cannot import their handlers.
        self.broken_handlers = folder / "broken"
        self.broken_handlers.mkdir(parents=True, exist_ok=True)
        self._env["CHAOS_BROKEN"] = str(self.broken_handlers)
        self.env = self._env
        self._history = history
        self.network = network
        # By how many seconds the wall clock of the master's process is ahead.
        self._step = folder / "step"
        self.armed: dict[str, dict[str, str]] = {}  # by name: environment variables of its next process
        if network is not None:
            self.address = f"{network.address('master')}:{PORT}"

    def faults(self) -> list[str]:
        return [line for line in super().faults() if ON_PURPOSE not in line]

    def set_clock(self, step_s: int) -> None:
        """The next process of the master has a wall clock that is ahead by this. Call it while none runs."""
        self._step.write_text(str(step_s))

    def launch(self, name: str, module: str, arguments: Sequence[str]) -> Daemon:
        arguments = [*arguments, "--log-format", "json"]
        variable = self.armed.pop(name, {})
        if variable:
            module, arguments = "tests.chaos.failpoints", [module, *arguments]
        if name == "master" and self._step.exists():
            variable = {**variable, "LD_PRELOAD": str(layer.build(WALL_CLOCK)), "CLOCK_STEP": str(self._step)}
        prefix = self.network.prefix(name) if self.network is not None else []
        log = self.folder / f"{name}.log"
        daemon = Daemon(module, arguments, log, {**self._env, **variable}, prefix)
        self._history.add("master" if name == "master" else "worker", name=name, pid=daemon.pid)
        return daemon


class ClientProcess:
    """A client, restarted in a new process after a kill. `way`: what it does, see client.py."""

    def __init__(self, fleet: ChaosFleet, folder: Path, way: str, seed: int, **arguments: Any) -> None:
        self._fleet = fleet
        self._folder = folder
        self._arguments = {"way": way, "seed": seed, "history": str(folder), "address": fleet.address, **arguments}
        self._name = f"client-{way}-{arguments.get('round', 0)}"
        self.way = way
        self.life = 0
        self.killed = False
        self.process: Daemon
        self.start()

    def start(self) -> None:
        self.life += 1
        self.killed = False
        # A restarted watcher appends to its file; other clients write a new one.
        file = f"{self._name}.jsonl" if self.way == "watch" else f"{self._name}-{self.life}.jsonl"
        arguments = {**self._arguments, "life": self.life, "file": file}
        network = self._fleet.network
        prefix = network.prefix(CLIENTS) if network is not None else []
        log = self._fleet.folder / f"{self._name}.log"
        self.process = Daemon("tests.chaos.client", [json.dumps(arguments)], log, self._fleet.env, prefix)

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def done(self) -> bool:
        """Whether it ended with success. Raises AssertionError if it failed."""
        if self.alive or self.killed:
            return False
        code = self.process.process.returncode
        assert code == 0, f"the client {self._name} ended with {code}: {self.process.log()[-4000:]}"
        return True

    def kill(self) -> None:
        self.killed = True
        self.process.kill()


class Seen:
    """The outcomes in the watcher's file, up to its last cursor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._names: set[str] = set()

    def all_of(self, number: int, tasks: int) -> bool:
        """Whether the watcher has received the outcomes of all durable tasks of a round."""
        self._read()
        return durable_names(names_of(number, tasks)) <= self._names

    def all_answered(self, number: int, tasks: int) -> bool:
        """Whether the watcher or a client has received the outcome of each durable task of a round. If the master dies
        right after it has sent an outcome to the client, the outcome may not be on the disk; as the client does not
        resend the task, the watcher never receives it. The checker verifies that the master died.
        """
        delivered = {
            record["request_id"]
            for path in self._path.parent.glob(f"client-work-{number}-*.jsonl")
            for record, _ in records_of(path, 0)
            if record["what"] in ("outcome", "streamed")
        }
        return durable_names(names_of(number, tasks)) <= self._names | delivered

    def _read(self) -> None:
        if not self._path.exists():
            return
        fresh: set[str] = set()
        for record, offset in records_of(self._path, self._offset):
            if record["what"] == "outcome":
                fresh.add(record["request_id"])
            elif record["what"] == "cursor":
                self._names |= fresh
                fresh.clear()
                self._offset = offset
