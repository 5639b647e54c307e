"""Thousands of power cuts under the real journal, from few runs of it.

A run of `journal_process.py` under the layer leaves a log of everything it did to the disk. Each moment of that log is
a moment at which the power could have been lost: the disk is made as it could have been then, a new journal is opened
on it, and what it finds is compared to what had been acknowledged by then. The disk of the last moment is what the next
run of the chain begins with. Meanwhile the disk fills up, or a sync or a write fails, or the process is killed while
the power stays, and has a successor.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.disk.image import CREATE, SYNC_BEGIN, SYNC_END, WRITE, Disk, Record, read_log
from tests.disk.journal_process import EVENTS_NAME, EXIT_FATAL
from tests.disk.layer import FaultInjector
from tests.disk.truth import Contents, LostError, Truth

FAULTS = ("power", "kill", "full", "eio")
GENERATIONS = 4  # runs in a chain
STEPS = 250
RUN_TIMEOUT_S = 120
_FILES = ("/data/", "-wal", "journal.sqlite3", "/segments")  # what an error may be confined to


@dataclass(slots=True)
class Figures:
    """What a trial came to."""

    cuts: int = 0
    runs: int = 0
    acknowledged: int = 0
    faults: Counter[str] = field(default_factory=Counter)  # how many of each sort were met
    lost: list[str] = field(default_factory=list)

    def table(self) -> str:
        rows = {"power cuts": self.cuts, "runs of the journal": self.runs, "acknowledged": self.acknowledged}
        rows |= {f"faults met: {name}": count for name, count in sorted(self.faults.items())} | {"lost": len(self.lost)}
        return "\n".join(f"  {name:<22}{value:>10}" for name, value in rows.items())


def run_journal(layer: FaultInjector, root: Path, seed: int, steps: int = STEPS) -> int:
    """One run of the journal on the disk; its exit code. A disk that is full has room again soon after."""
    argv = [sys.executable, "-m", "tests.disk.journal_process", str(root), str(seed), str(steps)]
    rng = random.Random(seed)
    with subprocess.Popen(argv, env=os.environ | layer.env, stderr=subprocess.PIPE, text=True) as process:
        try:
            end_s = time.monotonic() + RUN_TIMEOUT_S
            faults = layer.read("faults")
            while process.poll() is None and time.monotonic() < end_s:
                time.sleep(0.02)
                if layer.read("room_bytes") >= 0 and layer.read("faults") > faults + rng.randrange(50):
                    layer.schedule(room_bytes=-1)
        finally:
            process.kill()
        assert process.stderr is not None
        stderr = process.stderr.read()
    assert process.returncode in (0, -9, EXIT_FATAL), stderr
    assert "Traceback" not in stderr, stderr
    return process.returncode


class JournalTrial:
    """See the module. `folder` is on a fast file system if there is one: what lies there never needs a real sync."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.figures = Figures()
        self._folder = folder
        self._seed = seed

    def run(self, cuts: int, cuts_per_run: int = 40) -> Figures:
        chain = 0
        began_s = time.monotonic()
        while self.figures.cuts < cuts and not self.figures.lost:
            chain += 1
            self._chain(chain, cuts_per_run)
            f = self.figures
            print(f"chain {chain}: {f.cuts} cuts, {f.acknowledged} entries acknowledged, {dict(f.faults)}, "
                 f"lost {len(f.lost)}, {time.monotonic() - began_s:.0f} s", flush=True)  # fmt: skip
        return self.figures

    def _chain(self, chain: int, cuts_per_run: int) -> None:
        rng = random.Random(f"{self._seed} {chain}")
        root = self._folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        contents = Contents()
        for generation in range(1, GENERATIONS + 1):
            name = f"chain {chain}, run {generation}"
            disk = Disk(root, rng)
            log = self._folder / "log"
            log.unlink(missing_ok=True)
            with FaultInjector(root, log) as layer:
                met = self._run(layer, root, rng)
                self.figures.runs += 1
                self.figures.faults.update(met)
            try:
                contents = self._cut(disk, list(read_log(log)), Truth(contents), root, rng, cuts_per_run)
            except LostError as error:
                self.figures.lost.append(f"{name} ({', '.join(met) or 'no fault'}): {error}")
                return

    def _run(self, layer: FaultInjector, root: Path, rng: random.Random) -> list[str]:
        """Lets the journal run, and run again if it ended for a fault while the power stays. Which faults it met."""
        met = []
        layer.schedule(sync_delay_us=rng.choice([0, 500, 3000]))
        for _ in range(3):
            fault = rng.choice(FAULTS)
            layer.heal()
            layer.schedule(match=rng.choice(_FILES))
            if fault == "eio" and rng.random() < 0.7:
                layer.schedule(eio_sync_in=rng.randint(1, 60))
            elif fault == "eio":
                layer.schedule(eio_write_in=rng.randint(1, 200))
            elif fault == "full":
                layer.schedule(match="/data/", room_bytes=rng.randrange(1_000_000))
            elif fault == "kill":
                layer.schedule(match="/data/", cut_in=rng.randint(1, rng.choice([100, 1000, 4000])))
            faults = layer.read("faults")
            code = run_journal(layer, root, rng.getrandbits(32))
            if layer.read("faults") > faults:
                met.append(fault)
            if code == -9:
                met.append("kill")
            elif code == 0:
                break
        return met

    def _cut(self, disk: Disk, log: list[Record], truth: Truth, root: Path, rng: random.Random, cuts: int) -> Contents:
        """Loses the power at `cuts` moments of the log; leaves in `root` what the last of them left on the disk."""
        # Half of the moments anywhere, half of them just where something was being made certain.
        syncs = [i for i, record in enumerate(log) if record.op in (SYNC_BEGIN, SYNC_END)]
        moments = [rng.randrange(len(log)) for _ in range(cuts // 2)]
        moments += [
            min(len(log) - 1, max(0, rng.choice(syncs) + rng.randint(-2, 2))) for _ in range(cuts - len(moments))
        ]
        wanted = Counter(moments)
        wanted[len(log) - 1] += 1
        events_inode = -1
        last: Contents | None = None
        for i, record in enumerate(log):
            disk.apply(record)
            if record.op == CREATE and record.data == EVENTS_NAME.encode():
                events_inode = record.inode
            if record.op == WRITE and record.inode == events_inode:
                truth.observe(record.data)
            for _ in range(wanted[i]):
                image = disk.lost_power()
                image.files.pop(EVENTS_NAME, None)
                image.write(root)
                judged = truth.copy()
                kept = self._folder / "cut"
                if i == len(log) - 1:
                    shutil.rmtree(kept, ignore_errors=True)
                    shutil.copytree(root, kept)
                try:
                    judged.check(root / "data")
                except LostError:
                    raise
                except Exception as error:
                    raise LostError(f"at {i} of {len(log)}: {type(error).__name__}: {error}") from error
                self.figures.cuts += 1
                last = judged.certain
        self.figures.acknowledged += truth.acknowledged
        assert last is not None
        # The journal that checked has written to its copy: the chain goes on with what the cut left.
        shutil.rmtree(root)
        shutil.copytree(self._folder / "cut", root)
        return last
