"""The processes of a chaos run: a fleet with failpoints on a simulated network, and clients."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.client import durable_names, names_of
from tests.chaos.failpoints import ON_PURPOSE
from tests.chaos.network import Network
from tests.chaos.records.history import CLIENTS, History, records_of
from tests.fleet import QUICK, Daemon, Fleet

ROOT = Path(__file__).resolve().parent.parent.parent
HANDLERS = Path(__file__).resolve().parent / "handlers"
PORT = 50051


class ChaosFleet(Fleet):
    """A fleet whose next process of some name can be armed with a failpoint; each is in a place of the network."""

    def __init__(self, folder: Path, history: History, *, workers: int, network: Network | None = None) -> None:
        super().__init__(
            folder, workers=workers, handlers=["chaos_handlers"], handlers_dir=HANDLERS,
            worker_flags=["--window-tasks", "64"],
            # The network is made of namespaces of this host, and goes nowhere else.
            master_flags=[*QUICK, *(["--insecure"] if network is not None else [])],
        )  # fmt: skip
        self._env["PYTHONPATH"] += f":{ROOT}"
        # A file of this folder has the engines of the worker of that pid unable to import their handlers.
        self.broken_handlers = folder / "broken"
        self.broken_handlers.mkdir(parents=True, exist_ok=True)
        self._env["CHAOS_BROKEN"] = str(self.broken_handlers)
        self.env = self._env
        self._history = history
        self.network = network
        self.armed: dict[str, dict[str, str]] = {}  # for the next process of this name: the environment
        if network is not None:
            self.address = f"{network.address('master')}:{PORT}"

    def faults(self) -> list[str]:
        return [line for line in super().faults() if ON_PURPOSE not in line]

    def launch(self, name: str, module: str, arguments: Sequence[str]) -> Daemon:
        arguments = [*arguments, "--log-format", "json"]
        variable = self.armed.pop(name, {})
        if variable:
            module, arguments = "tests.chaos.failpoints", [module, *arguments]
        prefix = self.network.prefix(name) if self.network is not None else []
        log = self.folder / f"{name}.log"
        daemon = Daemon(module, arguments, log, {**self._env, **variable}, prefix)
        self._history.add("master" if name == "master" else "worker", name=name, pid=daemon.pid)
        return daemon


class ClientProcess:
    """One client, over all its processes."""

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
        # A watcher continues its file; others begin anew.
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
        """Whether it ended with success. AssertionError: it failed."""
        if self.alive or self.killed:
            return False
        code = self.process.process.returncode
        assert code == 0, f"the client {self._name} ended with {code}: {self.process.log()[-4000:]}"
        return True

    def kill(self) -> None:
        self.killed = True
        self.process.kill()


class Seen:
    """What the watcher has seen: its file up to the last cursor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._names: set[str] = set()

    def all_of(self, number: int, tasks: int) -> bool:
        """Whether every durable task of a round has ended."""
        self._read()
        return durable_names(names_of(number, tasks)) <= self._names

    def all_answered(self, number: int, tasks: int) -> bool:
        """Whether every durable task of a round has ended, or its client was told so: such a one need not be on the
        disk, and nobody asks for it again, if the master died just then. The checker says whether it did.
        """
        told = {
            record["request_id"]
            for path in self._path.parent.glob(f"client-work-{number}-*.jsonl")
            for record, _ in records_of(path, 0)
            if record["what"] in ("outcome", "streamed")
        }
        return durable_names(names_of(number, tasks)) <= self._names | told

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
