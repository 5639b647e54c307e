"""soak: hours of a day in half an hour: mixed load on a fleet whose workers come and go, and nothing may grow.

    python -m benchmarks.load.soak --minutes 30 [--restarts 2] [--seed N] [--json FILE]

Master, three workers and the client are real processes; soak_load.py has the load. All the time one of two workers is
killed, stopped or drained and comes back; the third, w0, is left alone, so that its memory can be judged. The master is
killed and started again in the first tenth only, for the same reason; a burst of tasks then fills its caches. Every ten
seconds a line says how it goes. It takes about half a core.

The verdict, on the last two thirds of the run:
- memory (proportional share, PSS), open files and threads of master, w0's agent and engine, and client: the slope of a
  straight line through all samples, over that time, is no more than MEMORY_SHARE of the mean or MEMORY_MIN_MIB (files,
  threads: COUNT_MAX);
- the journal: outcomes lose their body after result_ttl, which is short here; a row stays for a day, so that a repeated
  request_id is known. It may grow by JOURNAL_BYTES_A_TASK for each task that ended;
- lost 0: every call was answered, and each of two readers saw the outcome of every durable task, but perhaps for those
  that were answered in the half second before the master died (an outcome is delivered before it is on the disk);
- duplicates 0: none saw one twice;
- findings 0: no wrong result or outcome, no part of a stream missing or repeated, no error of the master's in its log.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from multigpu import AsyncClient
from multigpu.v1 import admin_service_pb2 as admin_pb

from benchmarks.load.soak_load import CHURNED, Account, Load
from benchmarks.measure import children
from benchmarks.relay import loop_runner
from tests.fleet import Fleet

MIB = 1 << 20
SAMPLE_S, CHURN_S = 10.0, 12.0
MEMORY_SHARE, MEMORY_MIN_MIB, COUNT_MAX = 0.05, 4.0, 2.0
JOURNAL_BYTES_A_TASK = 400.0
END_TIMEOUT_S = 90.0
# What has a bound (SQLite's pages in memory, the filter of known request_ids) is to reach it before it is judged.
WARM_TASKS = 300_000
# What a fleet has by default; the tests' are quicker.
STEADY = ("--heartbeat-interval-s", "1", "--session-timeout-s", "5", "--reconnect-grace-s", "3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """One process at one time."""

    mib: float
    files: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    t_s: float
    done: int
    queued: int
    leased: int
    outcomes_retained: int
    journal_mib: float
    rooms: dict[str, Room]


def look_at(pid: int | str) -> Room:
    folder = Path("/proc") / str(pid)
    fields = dict(line.split(":", 1) for line in (folder / "smaps_rollup").read_text().splitlines() if ":" in line[:20])
    threads = len(list((folder / "task").iterdir()))
    files = len(list((folder / "fd").iterdir()))
    return Room(mib=int(fields["Pss"].split()[0]) / 1024, files=files, threads=threads)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line with the least squared distance to the points."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


class Soak:
    """One run."""

    def __init__(self, fleet: Fleet, seconds: float, restarts: int, seed: int) -> None:
        self.fleet = fleet
        self.seconds = seconds
        self.restarts = restarts
        self.dice = random.Random(seed)
        self.account = Account()
        self.samples: list[Sample] = []
        self.churn: dict[str, int] = {}
        self.start_s = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self.start_s

    async def run(self) -> None:
        async with AsyncClient(self.fleet.address, connect_timeout_s=60) as client:
            load = Load(client, self.account, self.dice.randrange(1 << 30))
            load.start()
            begin = self._begin(load)
            chores = [asyncio.ensure_future(c) for c in (begin, self._sample(), self._churn(), self._sweep_dead())]
            try:
                done, _ = await asyncio.wait(chores, timeout=self.seconds, return_when=asyncio.FIRST_EXCEPTION)
                for chore in done:
                    chore.result()
            finally:
                for chore in chores:
                    chore.cancel()
                await asyncio.gather(*chores, return_exceptions=True)
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.to_thread(self.fleet.wait_for_workers)
                await load.stop(END_TIMEOUT_S)

    # --- what happens to the fleet -----------------------------------------------------------------------------------

    async def _churn(self) -> None:
        while True:
            await asyncio.sleep(self.dice.expovariate(1 / CHURN_S))
            name = self.dice.choice(("w1", "w2"))
            what = self.dice.choice(("killed", "stopped", "drained", "engine killed"))
            self.churn[what] = self.churn.get(what, 0) + 1
            try:
                await asyncio.to_thread(self._trouble, name, what)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:  # the master is being started again
                    raise

    def _trouble(self, name: str, what: str) -> None:
        """Makes trouble for one worker, and has it back when this returns."""
        fleet = self.fleet
        worker = fleet.workers[name]
        if what == "drained":
            request = admin_pb.DrainWorkerRequest(worker_id=name)
            request.timeout.FromSeconds(2)
            fleet.admin.DrainWorker(request, timeout=20)
            time.sleep(2)
            fleet.admin.UncordonWorker(admin_pb.UncordonWorkerRequest(worker_id=name), timeout=20)
        elif what == "engine killed":
            for pid in worker.children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            if what == "killed":
                worker.kill()
            else:
                worker.stop(30)
            fleet.start_worker(name, "--labels", ",".join(f"{k}={v}" for k, v in CHURNED.items()))
            # A worker whose engine is killed before it was ever ready gives up, and none starts it again here.
            fleet.wait_for_workers(name)

    async def _begin(self, load: Load) -> None:
        """What happens in the first tenth only."""
        for n in range(self.restarts):
            await asyncio.sleep(max(0.0, self.seconds * 0.1 * (n + 1) / (self.restarts + 1) - self.elapsed_s()))
            killed_s = time.monotonic()
            await asyncio.to_thread(self.fleet.restart_master)
            self.account.master_died(killed_s)
            self.churn["master killed"] = self.churn.get("master killed", 0) + 1
        await load.warm(min(WARM_TASKS, int(self.seconds * 200)))

    async def _sweep_dead(self) -> None:
        """As an operator does who has read them."""
        while True:
            await asyncio.sleep(30)
            with contextlib.suppress(grpc.RpcError):
                request = admin_pb.DeleteDeadLettersRequest(queue="default")
                await asyncio.to_thread(self.fleet.admin.DeleteDeadLetters, request, timeout=20)

    # --- how it goes -------------------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        for turn in range(1, 1 << 30):
            await asyncio.sleep(max(0.0, turn * SAMPLE_S - self.elapsed_s()))
            with contextlib.suppress(grpc.RpcError, OSError, IndexError):  # the master is being started again
                sample = await asyncio.to_thread(self._look)
                self.samples.append(sample)
                print(self._line(sample), flush=True)

    def _look(self) -> Sample:
        fleet = self.fleet
        stats = fleet.admin.GetStats(admin_pb.GetStatsRequest(), timeout=10)
        agent = fleet.workers["w0"].pid
        pids: dict[str, int | str] = {
            "master": fleet.master.pid,
            "agent": agent,
            "engine": children(agent)[0],
            "client": "self",
        }
        return Sample(
            t_s=self.elapsed_s(), done=self.account.answered, queued=stats.queued, leased=stats.leased,
            outcomes_retained=stats.outcomes_retained, journal_mib=stats.journal_bytes / MIB,
            rooms={name: look_at(pid) for name, pid in pids.items()},
        )  # fmt: skip

    def _line(self, s: Sample) -> str:
        rooms = "  ".join(f"{name} {r.mib:.1f} MiB {r.files} fd {r.threads} th" for name, r in s.rooms.items())
        churn = sum(self.churn.values())
        return (
            f"{s.t_s:6.0f} s  done {s.done:,}  under way {self.account.asked - s.done}  queued {s.queued} leased "
            f"{s.leased}  {rooms}  journal {s.journal_mib:.1f} MiB, {s.outcomes_retained:,} outcomes  churn {churn}  "
            f"findings {len(self.account.findings)}"
        )

    # --- the verdict -------------------------------------------------------------------------------------------------

    def verdict(self) -> list[tuple[bool, str]]:
        """What was asked of the run, and whether it holds."""
        found = []
        judged = [s for s in self.samples if s.t_s >= self.seconds / 3]
        if len(judged) < 3:
            return [(False, "too short: fewer than three samples to judge")]
        span_s = judged[-1].t_s - judged[0].t_s
        for name in judged[0].rooms:
            for unit in ("mib", "files", "threads"):
                points = [(s.t_s, float(getattr(s.rooms[name], unit))) for s in judged]
                grown = slope(points) * span_s
                mean = sum(y for _, y in points) / len(points)
                bound = max(MEMORY_MIN_MIB, MEMORY_SHARE * mean) if unit == "mib" else COUNT_MAX
                told = f"{name}: {unit} {mean:.1f}, {grown:+.2f} in {span_s:.0f} s (bound {bound:.1f})"
                found.append((grown <= bound, told))
        tasks = judged[-1].done - judged[0].done
        grown = slope([(s.t_s, s.journal_mib) for s in judged]) * span_s * MIB / max(1, tasks)
        told = f"journal: {judged[-1].journal_mib:.1f} MiB, {grown:.0f} bytes a task (bound {JOURNAL_BYTES_A_TASK:.0f})"
        found.append((grown <= JOURNAL_BYTES_A_TASK, told))
        account = self.account
        missed = account.lost()
        told = "; ".join(f"{len(ids)} missed by {who}: {', '.join(ids[:5])}" for who, ids in missed.items())
        found.append((not missed, f"lost {max(map(len, missed.values()), default=0)} of {account.asked:,} {told}"))
        found.append((account.duplicates == 0, f"duplicates {account.duplicates}"))
        faults = self.fleet.faults()
        found.append((not account.findings, f"findings {len(account.findings)}: {'; '.join(account.findings)}"))
        found.append((not faults, f"errors in logs {len(faults)}: {'; '.join(faults)[:2000]}"))
        return found


def soak(seconds: float, restarts: int, seed: int, report: Path | None) -> bool:
    """Whether everything asked for held."""
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=".")).resolve()
    kept = True
    try:
        with Fleet(folder, workers=1, master_flags=STEADY, handlers=["trial_handlers"]) as fleet:
            for name in ("w1", "w2"):
                fleet.start_worker(name, "--labels", ",".join(f"{k}={v}" for k, v in CHURNED.items()))
            fleet.wait_for_workers()
            run = Soak(fleet, seconds, restarts, seed)
            loop_runner("uvloop")(run.run())
            verdict = run.verdict()
        print(f"\n{run.elapsed_s():.0f} s, seed {seed}; outcomes {dict(run.account.outcomes)}; churn {run.churn}")
        for held, told in verdict:
            print(f"{'ok  ' if held else 'FAIL'} {told}")
        kept = not all(held for held, _ in verdict)
        if report is not None:
            words: dict[str, Any] = {
                "seed": seed, "seconds": seconds, "outcomes": dict(run.account.outcomes), "churn": run.churn,
                "verdict": [{"ok": held, "what": told} for held, told in verdict],
                "samples": [asdict(s) for s in run.samples],
            }  # fmt: skip
            report.write_text(json.dumps(words, indent=1) + "\n")
    finally:
        if kept:
            print(f"the fleet's logs and journal are kept in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return not kept


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load.soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--restarts", type=int, default=2, help="of the master, in the first tenth")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--json", type=Path, help="write the samples and the verdict to this file")
    options = parser.parse_args()
    print(f"soak of {options.minutes:g} minutes, seed {options.seed}", flush=True)
    try:
        ok = soak(options.minutes * 60, options.restarts, options.seed, options.json)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
