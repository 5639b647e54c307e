"""scale: what the master pays for a large fleet: 10, 100 and 1,000 fake workers, and a long queue.

    python -m benchmarks.load.scale [--workers 10,100,1000] [--queued 1000,10000,100000] [--seconds 15]

The master is real, and so are gRPC, the sessions and the heartbeats (at the default interval); the workers are fake:
see fake_workers.py. They run in a few processes beside master and client, so that rates are of the whole machine;
the master's CPU is its own. For each size of fleet:

idle      the master's CPU with heartbeats alone, as a share of a core and for each heartbeat; and how much more of a
          core it takes when one operator watches the workers
singles   some tasks a second, one at a time and at random instants: submit to outcome at the client; and from the
          master's taking the task to the lease's arrival at a worker, by the clock that both share
bulk      20,000 durable tasks by `map`: rate, and the master's CPU and the messages it exchanges with workers, a task
drain     tasks that wait in a paused queue when it is resumed: the master's CPU for each, until all are done. What
          does not change with the queue's length is the cost of a dispatch, a report and an outcome

The share of bulk and drain that is the heartbeats' own is taken out, by the idle figure.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import grpc
from multigpu import AsyncClient
from multigpu.v1 import admin_service_pb2, admin_service_pb2_grpc

from benchmarks.measure import cpu_seconds, payloads, percentile, resident_bytes, table
from benchmarks.relay import loop_runner

FLEETS, QUEUES, SECONDS = (10, 100, 1000), (1_000, 10_000, 100_000), 15.0
PROCESSES, N_BULK, SINGLES_A_SECOND = 4, 20_000, 40.0
JOIN_TIMEOUT_S, DRAIN_TIMEOUT_S = 120.0, 300.0
HELD = "held"
Row = dict[str, Any]


class FakeFleet:
    """A real master and fake workers, as processes, for as long as the block runs."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.processes: list[subprocess.Popen[bytes]] = []
        self.dir = Path(tempfile.mkdtemp(prefix=".bench-", dir="."))
        self.joined_s = 0.0

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        log = self.dir / "log"
        with log.open("wb") as file:
            self.master = subprocess.Popen(
                [sys.executable, "-m", "multigpu_master.main", "--listen", "127.0.0.1:0", "--data-dir",
                 str(self.dir / "data"), "--log-format", "json"], stderr=file,
            )  # fmt: skip
            self.processes.append(self.master)
            self.address = str(self._ready(log)["address"])
            self.channel = grpc.insecure_channel(self.address, options=[("grpc.max_receive_message_length", 64 << 20)])
            untyped: Any = admin_service_pb2_grpc
            self.admin = untyped.AdminServiceStub(self.channel)
            start = time.perf_counter()
            cuts = [self.workers * i // PROCESSES for i in range(PROCESSES + 1)]
            for first, last in itertools.pairwise(cuts):
                arguments = [self.address, str(first), str(last - first)]
                self.processes.append(
                    subprocess.Popen([sys.executable, "-m", "benchmarks.load.fake_workers", *arguments], stderr=file)
                )
        while (active := self.stats().workers_active) < self.workers:
            ended = any(process.poll() is not None for process in self.processes)
            if ended or time.perf_counter() > start + JOIN_TIMEOUT_S:
                tail = log.read_text("utf-8", "replace")[-3000:]
                raise RuntimeError(f"{active} of {self.workers} fake workers joined; the log ends so: {tail}")
            time.sleep(0.1)
        self.joined_s = time.perf_counter() - start

    def _ready(self, log: Path) -> Any:
        """What the master says when it is."""
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s and self.master.poll() is None:
            for line in log.read_bytes().splitlines():
                if b'"master ready"' in line:
                    return json.loads(line)
            time.sleep(0.05)
        raise RuntimeError(f"the master did not start: {log.read_text()}")

    def stats(self) -> Any:
        return self.admin.GetStats(admin_service_pb2.GetStatsRequest(), timeout=30)

    def cpu_s(self) -> float:
        return cpu_seconds(self.master.pid)

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGKILL)
            process.wait()
        if hasattr(self, "channel"):
            self.channel.close()
        shutil.rmtree(self.dir, ignore_errors=True)


def milliseconds(values: Sequence[float]) -> str:
    return f"{percentile(values, 0.5) * 1e3:.2f} / {percentile(values, 0.99) * 1e3:.2f}"


def seconds_of(stamp: Any) -> float:
    return float(stamp.seconds + stamp.nanos / 1e9)


async def singles(client: AsyncClient, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds from submit to outcome, and from the master to a worker, of tasks at random instants."""
    dice, payload = random.Random(1), payloads(1)[0]
    took, leased = list[float](), list[float]()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        await asyncio.sleep(dice.expovariate(SINGLES_A_SECOND))
        start = time.perf_counter()
        stages = (await client.run_outcome("echo", payload)).message.stages
        took.append(time.perf_counter() - start)
        leased.append(seconds_of(stages.start_time) - seconds_of(stages.submit_time))
    return took, leased


async def bulk(client: AsyncClient) -> float:
    tasks = payloads(N_BULK)
    start = time.perf_counter()
    assert [r async for r in client.map("echo", tasks)] == tasks
    return time.perf_counter() - start


async def drain(client: AsyncClient, fleet: FakeFleet, queued: int) -> tuple[float, float]:
    """The master's CPU seconds, and the seconds, from the resuming of a queue of that length to its last outcome."""
    fleet.admin.PauseQueue(admin_service_pb2.PauseQueueRequest(queue=HELD))
    await client.submit_many("echo", payloads(queued), queue=HELD)
    await asyncio.sleep(1.0)
    done = fleet.stats().succeeded + queued
    cpu_s, start = fleet.cpu_s(), time.perf_counter()
    fleet.admin.ResumeQueue(admin_service_pb2.ResumeQueueRequest(queue=HELD))
    while fleet.stats().succeeded < done:
        if time.perf_counter() > start + DRAIN_TIMEOUT_S:
            raise RuntimeError(f"{queued} queued tasks were not done in {DRAIN_TIMEOUT_S:g} s")
        await asyncio.sleep(0.02)
    return fleet.cpu_s() - cpu_s, time.perf_counter() - start


async def watching(fleet: FakeFleet, seconds: float) -> float:
    """The master's CPU, as a share of a core, while one operator watches the workers."""
    watch = fleet.admin.WatchWorkers(admin_service_pb2.WatchWorkersRequest())
    seen = threading.Event()

    def read() -> None:
        with contextlib.suppress(grpc.RpcError):
            for _ in watch:
                seen.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert await asyncio.to_thread(seen.wait, 30), "the first list of workers does not come"
    cpu_s, start = fleet.cpu_s(), time.perf_counter()
    await asyncio.sleep(seconds)
    share = (fleet.cpu_s() - cpu_s) / (time.perf_counter() - start)
    watch.cancel()
    reader.join()
    return share


def list_workers_s(fleet: FakeFleet) -> float:
    """Seconds for a list of all workers, at best of three."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        seen = fleet.admin.ListWorkers(admin_service_pb2.ListWorkersRequest(), timeout=30)
        assert len(seen.workers) == fleet.workers or seen.next_page_token
        times.append(time.perf_counter() - start)
    return min(times)


async def measure(fleet: FakeFleet, queues: Sequence[int], seconds: float) -> list[Row]:
    n = fleet.workers
    row: Row = {"benchmark": "scale", "fake workers": f"{n:,}", "joined in s": f"{fleet.joined_s:.1f}"}
    await asyncio.sleep(2.0)
    cpu_s, start = fleet.cpu_s(), time.perf_counter()
    await asyncio.sleep(seconds)
    idle = (fleet.cpu_s() - cpu_s) / (time.perf_counter() - start)
    row |= {"idle CPU, % of a core": f"{idle * 100:.1f}", "us a heartbeat": f"{idle / n * 1e6:.0f}"}
    row["a watcher more, %"] = f"{(await watching(fleet, seconds / 2) - idle) * 100:.1f}"
    async with AsyncClient(fleet.address) as client:
        await bulk(client)  # the windows open
        took, leased = await singles(client, seconds)
        row |= {"outcome ms, p50 / p99": milliseconds(took), "at the worker ms, p50 / p99": milliseconds(leased)}
        cpu_s = fleet.cpu_s()
        bulk_s = await bulk(client)
        us = (fleet.cpu_s() - cpu_s - idle * bulk_s) / N_BULK * 1e6
        row |= {"bulk tasks/s": f"{N_BULK / bulk_s:,.0f}", "bulk CPU us a task": f"{us:.1f}"}
        row["list of workers, ms"] = f"{list_workers_s(fleet) * 1e3:.0f}"
        row["MiB"] = f"{resident_bytes(fleet.master.pid) / (1 << 20):.0f}"
        rows = [row]
        for queued in queues:
            drain_cpu_s, drain_s = await drain(client, fleet, queued)
            us = (drain_cpu_s - idle * drain_s) / queued * 1e6
            rows.append(
                {
                    "benchmark": "scale, drain",
                    "fake workers": f"{n:,}",
                    "queued": f"{queued:,}",
                    "tasks/s": f"{queued / drain_s:,.0f}",
                    "CPU us a task": f"{us:.1f}",
                }
            )
    return rows


def growth(rows: Sequence[Row], by: str, cost: str) -> str:
    """How a cost grew from the first row to the last, against the logarithm of what grew."""
    sizes = [float(r[by].replace(",", "")) for r in (rows[0], rows[-1])]
    ratio = float(rows[-1][cost]) / float(rows[0][cost])
    limit = math.log(sizes[1]) / math.log(sizes[0])
    verdict = "within" if ratio <= limit else "MORE THAN"
    return (
        f"{cost}: {ratio:.2f} times from {sizes[0]:,.0f} to {sizes[1]:,.0f} {by}, {verdict} the logarithm's {limit:.2f}"
    )


def scale(fleets: Sequence[int], queues: Sequence[int], seconds: float) -> list[Row]:
    rows: list[Row] = []
    for workers in fleets:
        print(f"{workers:,} fake workers …", file=sys.stderr, flush=True)
        with FakeFleet(workers) as fleet:
            rows += loop_runner("uvloop")(measure(fleet, queues, seconds))
        print(table(rows[-1 - len(queues) :][:1]), file=sys.stderr, flush=True)
    return rows


def summary(rows: Sequence[Row]) -> str:
    """The tables, and whether costs grow with the logarithm at most."""
    fleets = [r for r in rows if r["benchmark"] == "scale"]
    drains = [r for r in rows if r["benchmark"] != "scale"]
    lines = [table(fleets), "", table(drains), ""]
    if len(fleets) > 1:
        lines.append(growth(fleets, "fake workers", "bulk CPU us a task"))
        longest = [r for r in drains if r["queued"] == drains[-1]["queued"]]
        lines += [growth(longest, "fake workers", "CPU us a task")] if longest else []
    for workers in dict.fromkeys(r["fake workers"] for r in drains):
        own = [r for r in drains if r["fake workers"] == workers]
        lines += [f"{workers} fake workers: " + growth(own, "queued", "CPU us a task")] if len(own) > 1 else []
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load.scale", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )

    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser.add_argument("--workers", type=sizes, default=FLEETS, help="sizes of fleet")
    parser.add_argument("--queued", type=sizes, default=QUEUES, help="lengths of queue")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of idling, and of single tasks, each")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    options = parser.parse_args()
    rows = scale(options.workers, options.queued, options.seconds)
    print(summary(rows))
    if options.json is not None:
        with options.json.open("a") as out:
            out.writelines(json.dumps(r) + "\n" for r in rows)


if __name__ == "__main__":
    main()
