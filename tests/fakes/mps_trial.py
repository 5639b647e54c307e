"""Random deaths of engines under the simulated MPS: is one ever killed before terminate_client was answered?

    python -m tests.fakes.mps_trial --runs 200 [--seed N] [--first N] [--hosts N]

Real workers (agent and engine processes) on simulated GPUs. Every run does a few random things at once: engines that
have to be ended for a run timeout, a cancellation or memory, with children of their own or not, engines that crash,
faults, workers that stop and start, on GPUs whose servers are quick or slow. After each run every task has the outcome
that it deserves: the innocent succeed, as their first attempt; and nothing has changed on GPUs without a fault.

What a run does depends on the seed and its number alone, so `--first 38 --runs 1` is the 38th again, but for the
machine's speed. A run that does not end in time is a wrong outcome, and the next one has a new
host.
"""

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from multigpu.v1 import worker_service_pb2 as pb

from tests.fakes.mps_host import MpsHost, MpsWorker
from tests.worker.scripted_master import SUCCEEDED

# Which GPU each worker has.
WORKERS = (0, 0, 1)
GPUS = sorted(set(WORKERS))
# After so many runs the host is built anew.
RUNS_PER_HOST = 25
RUN_TIMEOUT_S = 120.0
START_TIMEOUT_S = 120.0
FLAGS = (
    *("--cancel-grace-s", "0.1", "--drain-timeout-s", "0.1", "--engine-memory-bytes", "320MiB"),
    # A host that is short of processors must not look like a server that does not let go.
    *("--mps-terminate-timeout-s", "60"),
)
# Starting a worker takes longest, so it is the rarest.
DEEDS = 2 * ("stuck", "children", "hoard", "crash", "cancel", "fault", "work", "work") + ("restart",)
# What a task does, and how its attempt ends: its error's type, or none.
ENDS = {"stuck": "RunTimeout", "children": "RunTimeout", "hoard": "OutOfMemory", "crash": "EngineDied"}


@dataclass
class Tally:
    """What came of it."""

    runs: int = 0
    deeds: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    terminated: int = 0
    faults: int = 0

    def __str__(self) -> str:
        return (
            f"{self.runs} runs, {len(self.violations)} violations, {len(self.wrong)} wrong outcomes, "
            f"{self.terminated} clients terminated, {self.faults} faults"
        )


@dataclass(frozen=True)
class Plan:
    """What one worker has to go through in a run."""

    deed: str
    wait_s: float
    timeout_ms: int


class Trial:
    """One host's runs."""

    def __init__(self, host: MpsHost, tally: Tally, *, aloud: bool) -> None:
        self.host = host
        self.tally = tally
        self.aloud = aloud
        self.lease_id = 0
        # As far as they were counted.
        self.counts: list[dict[str, Any]] = [
            {"violations": [], "terminated": 0, "faults": 0, "forced": 0} for _ in GPUS
        ]

    async def begin(self) -> None:
        await asyncio.gather(*(self.host.worker(gpu, *FLAGS) for gpu in WORKERS))

    async def run(self, seed: int, number: int) -> bool:
        """One run. False: it did not come to its end, and the host is of no use any more."""
        rng, start_s = random.Random(f"{seed} {number}"), time.monotonic()
        knobs = [f"fake terminate_s {rng.choice((0, 0.05, 0.3))}" for _ in GPUS]
        mute = f"fake mute {int(rng.random() < 0.2)}"
        plans = [Plan(rng.choice(DEEDS), rng.random() / 2, rng.randrange(100, 500)) for _ in WORKERS]
        found: list[str] = []
        ended = False
        try:
            async with asyncio.timeout(RUN_TIMEOUT_S):
                for gpu, knob in zip(GPUS, knobs, strict=True):
                    await self._control(gpu, knob)
                await self._control(1, mute)  # its one client is to blame without being named
                await self._deeds(plans, found)
            ended = True
        except Exception as error:  # whatever it is, the run failed
            found.append(f"the run did not come to its end: {error!r}")
        violations = await self._count(found)
        deeds = [plan.deed for plan in plans]
        self.tally.runs += 1
        self.tally.deeds.update(deeds)
        self.tally.wrong += [f"run {number}: {what}" for what in found]
        self.tally.violations += [f"run {number}: {what}" for what in violations]
        if self.aloud:
            words = "; ".join(["fine"] if not found + violations else [*violations, *found])
            print(
                f"run {number} ({', '.join(deeds)}): {time.monotonic() - start_s:.1f} s, {words} [{self.tally}]",
                flush=True,
            )
        return ended

    async def end(self) -> None:
        """Stop the workers: nothing may be killed there either."""
        found: list[str] = []
        codes = await asyncio.gather(*(worker.stop(RUN_TIMEOUT_S) for worker in self._living()), return_exceptions=True)
        found += [f"a worker that was told to stop at the end: {code!r}" for code in codes if code != 0]
        self.tally.violations += [f"at the end of a host: {what}" for what in await self._count(found)]
        self.tally.wrong += found

    def _living(self) -> list[MpsWorker]:
        return [worker for worker in self.host.workers if worker.process.returncode is None]

    async def _control(self, gpu: int, command: str) -> str:
        return await asyncio.to_thread(self.host.control, gpu, command)

    async def _counts(self) -> list[dict[str, Any]]:
        return await asyncio.gather(*(asyncio.to_thread(self.host.counts, gpu) for gpu in GPUS))

    async def _count(self, found: list[str]) -> list[str]:
        """Adds what the daemons have counted since the last time. Returns new violations."""
        try:
            counts = await self._counts()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            found.append(f"the simulated daemon does not answer: {error!r}")
            return []
        violations = []
        for gpu, now, before in zip(GPUS, counts, self.counts, strict=True):
            violations += [f"GPU {gpu}: {what}" for what in now["violations"][len(before["violations"]) :]]
            self.tally.terminated += now["terminated"] - before["terminated"]
            self.tally.faults += now["faults"] - before["faults"]
            if now["forced"] > before["forced"]:
                found.append(f"GPU {gpu}'s server was shut down by force")
        self.counts = counts
        return violations

    async def _deeds(self, plans: list[Plan], found: list[str]) -> None:
        workers = self._living()
        before = await self._counts()
        engines = {worker.stream: worker.engine_pid() for worker in workers}
        async with asyncio.TaskGroup() as group:
            for worker, plan in zip(workers, plans, strict=True):
                group.create_task(self._do(worker, plan, found))
        after = await self._counts()
        for gpu in GPUS:
            mine = [(w, plan.deed) for w, plan in zip(workers, plans, strict=True) if w.gpu == gpu]
            if any(deed == "fault" for _, deed in mine):
                continue
            if after[gpu]["servers"] > max(before[gpu]["servers"], 1):  # the first client starts the first
                found.append(f"GPU {gpu} had no fault, and its server was started again")
            if any(deed == "work" and worker.engine_pid() != engines[worker.stream] for worker, deed in mine):
                found.append(f"GPU {gpu} had no fault, and an engine of it was ended")

    async def _do(self, worker: MpsWorker, plan: Plan, found: list[str]) -> None:
        stream, deed = worker.stream, plan.deed
        first = self.lease_id = self.lease_id + 10
        timeout = pb.LeaseBatch().spec.run_timeout
        timeout.FromMilliseconds(plan.timeout_ms)
        await asyncio.sleep(plan.wait_s)
        stream.lease([(first, b"0.1")], kind="m.work")
        wanted = {first: ""}
        if deed in ENDS:
            limit: dict[str, Any] = {"run_timeout": timeout} if deed in ("stuck", "children") else {}
            stream.lease([(first + 1, b"")], kind=f"m.{deed}", **limit)
            wanted[first + 1] = ENDS[deed]
        elif deed in ("cancel", "restart"):
            stream.lease([(first + 1, b"")], kind="m.stuck")
        elif deed == "fault":
            stream.lease([(first + 1, b"")], kind="m.fault")
            wanted[first + 1] = "fault"
        if deed != "restart":
            stream.lease([(first + 2, b"0.2")], kind="m.work")
            wanted[first + 2] = ""
        if deed in ("cancel", "restart"):
            await stream.until(
                lambda: any(
                    h.lease_id == first + 1 and h.running for beat in stream.heartbeats[-1:] for h in beat.leases
                ),
                RUN_TIMEOUT_S,
            )
        if deed == "cancel":
            stream.revoke(first + 1)
        for word in await stream.reported(*wanted, timeout_s=RUN_TIMEOUT_S):
            want, got = wanted[word.lease_id], "" if word.state == SUCCEEDED else word.error.type
            # A fault under it, or beside it, may be how it ends.
            if got != want and not (want and got in ("simulated_mps.SimulatedCudaError", "MpsFault")):
                found.append(f"{deed}: wanted {want or 'success'}, got {got or 'success'}")
        if deed == "restart":
            code = await worker.stop(RUN_TIMEOUT_S)
            if code:
                found.append(f"a worker that was told to stop ended with {code}: {worker.log[-500:]}")
            await self.host.worker(worker.gpu, *FLAGS)


async def _work_off(seed: int, numbers: Iterator[int], tally: Tally, *, aloud: bool) -> None:
    """Runs, one after another, on one host at a time, until there is none left to do."""
    number = next(numbers, None)
    while number is not None:
        async with MpsHost(gpus=len(GPUS)) as host:
            trial = Trial(host, tally, aloud=aloud)
            async with asyncio.timeout(START_TIMEOUT_S):
                await trial.begin()
            sound, runs = True, 0
            while sound and number is not None and runs < RUNS_PER_HOST:
                sound = await trial.run(seed, number)
                number, runs = next(numbers, None), runs + 1
            if sound:
                await trial.end()


async def run_trial(runs: int, seed: int, *, first: int = 1, hosts: int = 1, aloud: bool = False) -> Tally:
    """So many runs, on so many hosts at once."""
    tally, numbers = Tally(), iter(range(first, first + runs))
    await asyncio.gather(*(_work_off(seed, numbers, tally, aloud=aloud) for _ in range(hosts)))
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=1, help="the first run's number")
    parser.add_argument("--hosts", type=int, default=1, help="so many hosts work at once")
    given = parser.parse_args()
    start_s = time.monotonic()
    tally = asyncio.run(run_trial(given.runs, given.seed, first=given.first, hosts=given.hosts, aloud=True))
    took_s = time.monotonic() - start_s
    print(f"simulated MPS: seed {given.seed}, runs from {given.first} on, {took_s:.0f} s: {tally}")
    print(f"deeds: {dict(tally.deeds)}")
    sys.exit("\n".join(what.partition("\n")[0] for what in tally.violations + tally.wrong) or 0)


if __name__ == "__main__":
    main()
