"""python -m benchmarks.compare CASE … --base DIR [--bursts N]: this working tree and another one, in turns.

DIR is a checkout of the commit before (`git worktree add --detach DIR COMMIT`). Fleets of both live at the same time
and get short bursts of work in random order, so that a host whose speed changes is as fast for one as for the other.
Each tree has two fleets: the difference between fleets of one tree is what chance does. Printed is the median of the
bursts' ratios, and the range in which that median lies with 95 % probability (bootstrap); above 1: this tree is faster.

bulk     4,000 no-op tasks of 100 bytes, durable, by one map
window   2,000 of them, one a call, 64 in flight
threads  2,000 of them, one a call, by 64 threads with one Client
latency  500 of them, one at a time: the median
embed    200 sentences on the CPU
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

# Runs in a tree: says "ready" after a warm-up, and then answers each line with a measure that is small if it is fast.
_FLEET = """
import asyncio, statistics, sys, time
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from multigpu import AsyncClient, Client
from benchmarks.fleet import Fleet
from benchmarks.measure import payloads
from benchmarks.relay import loop_runner

blocking = pool = None

async def bulk(client):
    tasks = payloads(4000)
    assert [result async for result in client.map("echo", tasks)] == tasks

async def window(client):
    todo = iter(payloads(2000))
    async def caller():
        for payload in todo:
            assert await client.run("echo", payload) == payload
    await asyncio.gather(*(caller() for _ in range(64)))

async def threads(client):
    global blocking, pool
    if blocking is None:
        blocking, pool = Client(client.master), ThreadPoolExecutor(64)
    todo, lock = iter(payloads(2000)), Lock()
    def caller(_):
        while True:
            with lock:
                payload = next(todo, None)
            if payload is None:
                return
            assert blocking.run("echo", payload) == payload
    await asyncio.to_thread(lambda: list(pool.map(caller, range(64))))

async def latency(client):
    taken = []
    for payload in payloads(500):
        start = time.perf_counter()
        await client.run("echo", payload)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)

async def embed(client):
    from benchmarks.engines.embed_engine import sentences
    assert len(await client.embed(sentences(200))) == 200

async def main(fleet, case):
    async with AsyncClient(fleet.address) as client:
        await case(client)
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            start = time.perf_counter()
            measured = await case(client)
            print(measured or time.perf_counter() - start, flush=True)
        if blocking is not None:
            blocking.close()

with Fleet() as fleet:
    loop_runner("uvloop")(main(fleet, globals()[sys.argv[1]]))
"""
BURSTS = {"bulk": 60, "window": 150, "threads": 150, "latency": 60, "embed": 60}


class Subject:
    """A client and its fleet, of one tree."""

    def __init__(self, tree: Path, case: str) -> None:
        paths = os.pathsep.join(str(tree / part) for part in ("client", "master", "worker"))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FLEET, case],
            cwd=tree, env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.taken: list[float] = []
        if self._answer() != "ready":
            raise SystemExit(f"the fleet of {tree} did not start")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def burst(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.taken.append(float(self._answer()))

    def close(self) -> None:
        self._process.communicate()


def compare(case: str, base: Path, bursts: int) -> dict[str, object]:
    fleets = [Subject(tree, case) for tree in (base, Path.cwd()) for _ in range(2)]
    try:
        for number in range(bursts + 2):
            for fleet in random.sample(fleets, len(fleets)):
                fleet.burst()
            if number < 2:  # warm-up
                for fleet in fleets:
                    fleet.taken.clear()
    finally:
        for fleet in fleets:
            fleet.close()
    before, before_again, now, now_again = (fleet.taken for fleet in fleets)
    pairs = [*zip(before, now, strict=True), *zip(before_again, now_again, strict=True)]
    ratios = [base_s / now_s for base_s, now_s in pairs]
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    chance = statistics.median(a / b for a, b in zip(before, before_again, strict=True))
    return {
        "case": case, "speed against the base": round(statistics.median(ratios), 3),
        "95 %": [round(medians[50], 3), round(medians[-51], 3)],
        "base against base": round(chance, 3), "bursts": len(ratios),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=BURSTS, metavar="CASE")
    parser.add_argument("--base", type=Path, required=True, metavar="DIR")
    parser.add_argument("--bursts", type=int, metavar="N", help="Of each fleet.")
    arguments = parser.parse_args()
    for case in arguments.cases:
        row = compare(case, arguments.base.resolve(), arguments.bursts or BURSTS[case])
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
