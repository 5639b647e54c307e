"""Random deaths of engines under the simulated MPS: is one ever killed before terminate_client was answered?

    python -m tests.fakes.mps_trial --runs 200 [--seed N]

Real workers (agent and engine processes) on simulated GPUs. Every run does a few random things at once: engines that
have to be ended for a run timeout, a cancellation or memory, with children of their own or not, engines that crash,
faults, workers that stop and start, on GPUs whose servers are quick or slow. After each run every task has the outcome
that it deserves: the innocent succeed, as their first attempt; and nothing has changed on GPUs without a fault.
"""

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from multigpu.v1 import worker_service_pb2 as pb

from tests.fakes.mps_host import MpsHost, MpsWorker
from tests.worker.scripted_master import SUCCEEDED

# Which GPU each worker has.
WORKERS = (0, 0, 1)
# After so many runs the host is built anew.
RUNS_PER_HOST = 25
TIMEOUT_S = 90.0
FLAGS = (
    *("--cancel-grace-s", "0.1", "--drain-timeout-s", "0.1", "--engine-memory-bytes", "320MiB"),
    # A host that is short of processors must not look like a server that does not let go.
    *("--mps-terminate-timeout-s", "100"),
    # A canary loads torch, for which the engine's memory is too little here.
    *("--canary-interval-s", "0"),
)
# Starting a worker takes longest, so it is the rarest.
DEEDS = 2 * ("stuck", "children", "hoard", "crash", "cancel", "fault", "work", "work") + ("restart",)
# What a task does, and how its attempt ends: its error's type, or none.
ENDS = {"stuck": "RunTimeout", "children": "RunTimeout", "hoard": "OutOfMemory", "crash": "EngineDied"}


@dataclass
class Tally:
    """What came of it."""

    runs: int = 0
    deeds: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    terminated: int = 0
    faults: int = 0
    forced: int = 0

    def add(self, host: MpsHost) -> None:
        for gpu in set(WORKERS):
            counts = host.counts(gpu)
            self.violations += counts["violations"]
            self.terminated += counts["terminated"]
            self.faults += counts["faults"]
            self.forced += counts["forced"]


class Trial:
    def __init__(self, host: MpsHost, rng: random.Random, tally: Tally) -> None:
        self.host = host
        self.rng = rng
        self.tally = tally
        self.lease_id = 0

    async def run(self) -> None:
        """One run; what is wrong goes to the tally."""
        rng, workers = self.rng, [worker for worker in self.host.workers if worker.process.returncode is None]
        for gpu in set(WORKERS):
            self.host.control(gpu, f"fake terminate_s {rng.choice((0, 0.05, 0.3))}")
        self.host.control(1, f"fake mute {int(rng.random() < 0.2)}")  # its one client is to blame without being named
        before = {gpu: self.host.counts(gpu) for gpu in set(WORKERS)}
        engines = {worker.stream: worker.engine_pid() for worker in workers}
        deeds = [rng.choice(DEEDS) for _ in workers]
        for deed in deeds:
            self.tally.deeds[deed] = self.tally.deeds.get(deed, 0) + 1
        await asyncio.gather(*(self._do(worker, deed) for worker, deed in zip(workers, deeds, strict=True)))
        for gpu in set(WORKERS):
            faulty = any(deed == "fault" for worker, deed in zip(workers, deeds, strict=True) if worker.gpu == gpu)
            if not faulty and self.host.counts(gpu)["servers"] != before[gpu]["servers"]:
                self.tally.wrong.append(f"GPU {gpu} had no fault, and its server was started again")
            for worker, deed in zip(workers, deeds, strict=True):
                untouched = worker.gpu == gpu and not faulty and deed == "work"
                if untouched and worker.engine_pid() != engines[worker.stream]:
                    self.tally.wrong.append(f"GPU {gpu} had no fault, and an engine of it was ended")
        self.tally.runs += 1

    async def _do(self, worker: MpsWorker, deed: str) -> None:
        stream = worker.stream
        first = self.lease_id = self.lease_id + 10
        timeout = pb.LeaseBatch().spec.run_timeout
        timeout.FromMilliseconds(self.rng.randrange(100, 500))
        await asyncio.sleep(self.rng.random() / 2)
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
                TIMEOUT_S,
            )
        if deed == "cancel":
            stream.revoke(first + 1)
        for word in await stream.reported(*wanted, timeout_s=TIMEOUT_S):
            self._judge(deed, word.state == SUCCEEDED, wanted[word.lease_id], word.error.type)
        if deed == "restart":
            code = await worker.stop()
            if code:
                self.tally.wrong.append(f"a worker that was told to stop ended with {code}: {worker.log[-500:]}")
            await self.host.worker(worker.gpu, *FLAGS)

    def _judge(self, deed: str, succeeded: bool, wanted: str, error_type: str) -> None:
        right = succeeded if not wanted else (error_type in ("SimulatedCudaError", "MpsFault", wanted))
        if not right:
            self.tally.wrong.append(f"{deed}: wanted {wanted or 'success'}, got {error_type or 'success'}")


async def trial(runs: int, seed: int, *, aloud: bool = False) -> Tally:
    """So many runs."""
    tally = Tally()
    rng = random.Random(seed)
    while tally.runs < runs:
        async with MpsHost(gpus=len(set(WORKERS))) as host:
            for gpu in WORKERS:
                await host.worker(gpu, *FLAGS)
            for gpu in set(WORKERS):
                (host.pipe_dir(gpu) / "begun-by-worker").unlink()  # the daemons outlive the workers, to be asked
            one = Trial(host, rng, tally)
            try:
                for _ in range(min(RUNS_PER_HOST, runs - tally.runs)):
                    start_s = time.monotonic()
                    await one.run()
                    if aloud:
                        print(f"run {tally.runs}: {time.monotonic() - start_s:.1f} s, wrong {tally.wrong}", flush=True)
                await asyncio.gather(*(w.stop() for w in host.workers if w.process.returncode is None))
            finally:
                tally.add(host)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    tally = asyncio.run(trial(arguments.runs, arguments.seed, aloud=True))
    print(
        f"simulated MPS: {tally.runs} runs (seed {arguments.seed}): {len(tally.violations)} violations, "
        f"{tally.terminated} clients terminated, {tally.faults} faults, {tally.forced} servers shut down by force, "
        f"{len(tally.wrong)} wrong outcomes; deeds {tally.deeds}"
    )
    sys.exit("\n".join(tally.violations + tally.wrong) or 0)


if __name__ == "__main__":
    main()
