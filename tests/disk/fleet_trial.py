"""Power cuts under a real master and its worker, with clients that continue after each cut.

The master's data directory is on the fault layer (layer.c). A round lets the fleet work, cuts the power (before a file
system call that the layer counts down to, or at any moment), and replaces the directory by what the disk may have kept.
Before a new master starts on it, SQLite alone reads the files: they must have every task that was acknowledged to a
client, as a task or as an outcome, and every outcome that Watch delivered. The clients continue with the new master;
the watcher keeps its cursor. At the end of a chain of rounds, each acknowledged task must have one outcome.

In some rounds another fault comes before the cut: a kill -9 while the power stays, a disk that is full for a while, a
failed sync or write (the master must report it and end with code 1), or slow syncs.
"""

import contextlib
import random
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.disk.clients import Submitter, Watcher
from tests.disk.image import Disk, read_log
from tests.disk.journal_trial import Figures
from tests.disk.layer import FaultInjector
from tests.fleet import Daemon, Fleet, until

FAULTS = ("power", "kill", "full", "eio", "slow")
ROUNDS_CHAIN = 10  # at most, with one journal
WORK_S = (0.1, 0.8)
SLOW_SYNC_US = 100_000
DRAIN_TIMEOUT_S = 120.0
EXIT_FAILED = 1
_HANDLERS = Path(__file__).with_name("handlers")
_FILES = ("/data/", "-wal", "journal.sqlite3", "/segments")


class LayeredFleet(Fleet):
    """A fleet on the layer: one host, whose processes all end with the power."""

    layer: FaultInjector

    def lose_power(self) -> None:
        self.master.kill()
        for worker in self.workers.values():
            engines = worker.children()
            worker.kill()
            until(partial(_all_ended, engines), what="the engines to end")

    def launch(self, name: str, module: str, arguments: Sequence[str]) -> Daemon:
        before = self._env
        # A worker on the master's host writes large results to this directory: its writes are logged. Only the master's
        # calls fail.
        self._env = {**before, **self.layer.env, **({} if name == "master" else {"DISK_LAYER_WITNESS": "1"})}
        try:
            return super().launch(name, module, arguments)
        finally:
            self._env = before


def _all_ended(pids: Sequence[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


class FleetTrial:
    """See the module."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.figures = Figures()
        self._folder = folder
        self._seed = seed

    def run(self, cuts: int) -> Figures:
        began_s = time.monotonic()
        chain = 0
        while self.figures.cuts < cuts and not self.figures.lost:
            chain += 1
            rounds = min(ROUNDS_CHAIN, cuts - self.figures.cuts)
            with contextlib.closing(
                _Chain(self._folder / str(chain), f"{self._seed} {chain}", self.figures)
            ) as running:
                for number in range(1, rounds + 1):
                    met = running.round()
                    took_s = time.monotonic() - began_s
                    print(
                        f"chain {chain}, round {number}: {', '.join(met)}; {running.progress()}, {took_s:.0f} s in all",
                        flush=True,
                    )
                    if self.figures.lost:
                        return self.figures
                running.drain()
                print(f"chain {chain}: all came out; {running.progress()}")
        return self.figures


class _Chain:
    """Rounds with one journal."""

    def __init__(self, folder: Path, seed: str, figures: Figures) -> None:
        self._rng = random.Random(seed)
        self._figures = figures
        self._root = folder / "root"
        self._root.mkdir(parents=True)
        self._logs = 0
        self._folder = folder
        self._begin_disk()
        self._fleet = LayeredFleet(
            folder / "fleet", workers=1, handlers=["disk_handlers"], handlers_dir=_HANDLERS,
            data_dir=self._root / "data", worker_flags=["--slots", "4"],
        )  # fmt: skip
        self._fleet.layer = self._layer
        self._fleet.__enter__()
        self._submitter = Submitter(self._fleet.address, folder.name, self._rng.getrandbits(32))
        self._watcher = Watcher(self._fleet.address)
        self._clients = (self._submitter, self._watcher)
        for client in self._clients:
            client.start()

    def _begin_disk(self) -> None:
        self._logs += 1
        (self._folder / "log").unlink(missing_ok=True)
        self._layer = FaultInjector(self._root, self._folder / "log")
        self._layer.schedule(sync_delay_us=self._rng.choice([0, 1000, 5000]))
        self._disk = Disk(self._root, self._rng)

    def progress(self) -> str:
        return f"{len(self._submitter.acknowledged)} acknowledged, {len(self._watcher.results)} outcomes"

    def close(self) -> None:
        for client in self._clients:
            client.end()
        self._fleet.close()
        self._layer.close()
        self._figures.acknowledged += len(self._submitter.acknowledged)

    # --- a round -----------------------------------------------------------------------------------------------------

    def round(self) -> list[str]:
        """Works, injects a fault in some rounds, cuts the power, and starts a master on what the disk kept. Returns the
        faults.
        """
        met = ["power"]
        fault = self._rng.choice(FAULTS)
        if fault != "power":
            met.insert(0, fault if self._meet(fault) else f"{fault} (not met)")
            self._figures.faults[fault] += "not met" not in met[0]
        self._kill()
        self._fleet.lose_power()
        for client in self._clients:
            client.pause()
        for record in read_log(self._layer.log):
            self._disk.apply(record)
        image = self._disk.lost_power()
        self._layer.close()
        image.write(self._root)
        self._figures.cuts += 1
        self._check_image()
        self._begin_disk()
        self._fleet.layer = self._layer
        for client in self._clients:
            client.resume()
            self._figures.lost += client.findings
        if not self._figures.lost:
            self._fleet.start_master()
            self._fleet.start_worker("w0")
            self._fleet.wait_for_workers("w0")
            self._figures.runs += 1
        return met

    def _work(self) -> None:
        """Waits for a while, or until the master has ended."""
        end_s = time.monotonic() + self._rng.uniform(*WORK_S)
        while time.monotonic() < end_s and self._fleet.master.alive:
            time.sleep(0.005)

    def _kill(self) -> None:
        """Kills the master, at one of its file system calls or at any moment."""
        if self._rng.random() < 0.7:
            self._layer.schedule(match=self._rng.choice(_FILES), cut_in=self._rng.randint(1, 150))
        self._work()
        self._fleet.master.kill()
        self._layer.heal()

    def _meet(self, fault: str) -> bool:
        """Injects a fault, and checks its consequences. False: the fault did not occur in time."""
        layer, fleet = self._layer, self._fleet
        faults = layer.read("faults")
        if fault == "slow":
            layer.schedule(sync_delay_us=SLOW_SYNC_US)
            self._work()
            return True
        if fault == "kill":
            self._kill()
        elif fault == "full":
            rejected = self._submitter.rejected
            layer.schedule(match="/data/", room_bytes=self._rng.randrange(200_000))
            with contextlib.suppress(AssertionError):
                until(lambda: self._submitter.rejected > rejected, 10)
            layer.heal()
            if not fleet.master.alive:
                self._figures.lost.append(f"the master ended on a full disk: {fleet.master.log()[-2000:]}")
                return True
            acknowledged = len(self._submitter.acknowledged)
            until(lambda: len(self._submitter.acknowledged) > acknowledged, 20, "tasks to be taken when there is room")
            return self._submitter.rejected > rejected
        else:
            kind = self._rng.choice(["eio_sync_in", "eio_write_in"])
            layer.schedule(match=self._rng.choice(_FILES[:2]), **{kind: self._rng.randint(1, 30)})
            self._work()
            with contextlib.suppress(AssertionError):
                until(lambda: layer.read("faults") > faults, 5)
            met = layer.read("faults") > faults
            layer.heal()
            if not met:
                return False
            with contextlib.suppress(AssertionError):  # SQLite tolerates a failed sync of a checkpoint
                until(lambda: not fleet.master.alive, 5)
            if fleet.master.alive:
                return True
            self._check_last_words()
        fleet.start_master()
        self._work()
        return True

    def _check_last_words(self) -> None:
        """A master that can't trust its journal logs the reason and the remedy, and ends with code 1."""
        master = self._fleet.master
        code, words = master.process.returncode, master.log()
        if code != EXIT_FAILED or "master ends" not in words or "starting the master again" not in words:
            self._figures.lost.append(f"after an error of the disk the master ended with {code}: {words[-2000:]}")
        if "multigpu_master/" in words:  # gRPC's own tracebacks of cancelled streams have no such frame
            self._figures.lost.append(f"a traceback: {words[-4000:]}")

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check_image(self) -> None:
        """Checks what the disk kept: SQLite alone reads a copy."""
        copy = self._folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for file in (self._root / "data").glob("journal.sqlite3*") if (self._root / "data").exists() else ():
            shutil.copy(file, copy)
        lost = self._figures.lost
        with contextlib.closing(sqlite3.connect(copy / "journal.sqlite3")) as database:
            if (verdict := database.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
                lost.append(f"the database is damaged: {verdict}")
                return
            try:
                tasks = dict(database.execute("SELECT task_id, request_id FROM task").fetchall())
                outcomes = dict(database.execute("SELECT task_id, request_id FROM outcome").fetchall())
            except sqlite3.OperationalError as error:
                if self._submitter.acknowledged:
                    lost.append(f"there is no journal left: {error}")
                return
        both = Counter(tasks.keys()) + Counter(outcomes.keys())
        lost += [f"task {task_id} is there as a task and as an outcome" for task_id, n in both.items() if n > 1]
        for name, task_id in self._submitter.acknowledged.items():
            if tasks.get(task_id, outcomes.get(task_id)) != name:
                lost.append(f"{name}, acknowledged as task {task_id}, is gone")
        for task_id, name in self._watcher.names.items():
            if outcomes.get(task_id) != name:
                lost.append(f"task {task_id} of {name} had an outcome, delivered by Watch, that is gone")

    def drain(self) -> None:
        """Ends the chain: every acknowledged task gets an outcome, and a second Watch delivers the same outcomes."""
        self._submitter.draining = True
        seen = self._watcher.results
        until(
            lambda: not self._submitter.has_unacknowledged and set(self._submitter.acknowledged.values()) <= set(seen),
            DRAIN_TIMEOUT_S,
            "everything acknowledged to come out",
        )
        again = Watcher(self._fleet.address)
        again.start()
        try:
            until(lambda: len(again.results) >= len(seen), DRAIN_TIMEOUT_S)
        except AssertionError:
            progress = f"{len(again.results)} of {len(seen)}, {again.findings[-3:]}"
            self._figures.lost.append(f"not all outcomes are delivered again: {progress}")
        again.end()
        lost = self._figures.lost
        lost += [f"task {i} has another outcome than before" for i in seen if again.results.get(i) != seen[i]]
        lost += [*again.findings, *self._watcher.findings, *self._submitter.findings]
