"""dashboard: how long pages take with 1,000 workers and 100,000 waiting tasks.

    python -m benchmarks.load.dashboard [--workers 1000] [--queued 100000] [--rounds 20]

Master and gateway are real; the workers are fake (fake_workers.py) and idle, but for their heartbeats. For each page:
the median and the longest time to its last byte, and its size. Then the shares of a core that the gateway and the
master take while one person looks at the fleet, which a browser fetches every two seconds.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
import urllib.request
from typing import Any

from multigpu import AsyncClient

from benchmarks.load.scale import FakeFleet
from benchmarks.measure import cpu_seconds, table

PAGES = (
    "/", "/?state=free&from=950", "/ui/queues", "/ui/tasks", "/ui/tasks?queue=held&state=queued", "/ui/history",
    "/ui/tasks?queue=held&confirm=cancel", "/ui/models",
)  # fmt: skip
REFRESH_S, LOOK_S = 2.0, 20.0


async def submit(address: str, count: int) -> None:
    async with AsyncClient(address) as client:
        for begin in range(0, count, 10_000):
            payloads = [b"x"] * min(10_000, count - begin)
            await client.submit_many("nobody has this kind", payloads, queue="held", wait_for_worker=True)


def fetch(base: str, path: str) -> tuple[float, int]:
    """Seconds and bytes."""
    begun = time.perf_counter()
    with urllib.request.urlopen(base + path) as response:
        size = len(response.read())
    return time.perf_counter() - begun, size


def measure(base: str, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for path in PAGES:
        found = [fetch(base, path) for _ in range(rounds)]
        times = [1000 * seconds for seconds, _ in found]
        rows.append(
            {"page": path, "median ms": round(statistics.median(times), 1), "longest ms": round(max(times), 1),
             "KiB": round(found[0][1] / 1024, 1)}
        )  # fmt: skip
    return rows


def look(base: str, pids: dict[str, int]) -> dict[str, float]:
    """Shares of a core while one page of the fleet is refreshed."""
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    end = time.monotonic() + LOOK_S
    while time.monotonic() < end:
        seconds, _ = fetch(base, "/")
        time.sleep(max(0.0, REFRESH_S - seconds))
    return {name: round((cpu_seconds(pid) - before[name]) / LOOK_S, 3) for name, pid in pids.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--queued", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    with FakeFleet(asked.workers) as fleet:
        asyncio.run(submit(fleet.address, asked.queued))
        command = [sys.executable, "-m", "multigpu_gateway.main", "--master", fleet.address]
        command += ["--http", "127.0.0.1:8123", "--grpc", "", "--log-level", "error"]
        with subprocess.Popen(command) as gateway:
            try:
                base = "http://127.0.0.1:8123"
                wait(base)
                print(table(measure(base, asked.rounds)))
                print("shares of a core, one viewer:", look(base, {"gateway": gateway.pid, "master": fleet.master.pid}))
            finally:
                gateway.terminate()


def wait(base: str) -> None:
    while True:
        try:
            fetch(base, "/health")
        except OSError:
            time.sleep(0.1)
        else:
            return


if __name__ == "__main__":
    main()
