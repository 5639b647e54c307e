"""Recovery after kill -9.

kill      1,000 tasks of 10 ms on two workers of `mgpuctl up`; at half, one is killed and started again by `up`. Ideal,
          with a replacement at once: half of the remaining tasks times 10 ms.
requeue   a task's worker is killed: the time until the task is dispatched to the other, idle worker.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from multigpu import AsyncClient

from benchmarks.fleet import Fleet
from benchmarks.measure import median, payloads, percentile
from benchmarks.relay import loop_runner

N_KILL, TASK_S, N_REQUEUE = 1000, 0.01, 10
Row = dict[str, Any]


async def _kill(address: str) -> tuple[float, int, int]:
    """Seconds from the kill to the last result, tasks left at the kill, results that came twice or not at all."""
    seen: dict[str, int] = {}
    killed_at, left = 0.0, 0
    async with AsyncClient(address) as client:
        await client.run("sleep", b"0.001", wait_for_worker=True)
        tasks = payloads(N_KILL)
        parameters = {"seconds": str(TASK_S), "append_pid": "1"}
        async for outcome in client.map_outcomes("sleep", tasks, ordered=False, parameters=parameters):
            payload, _, pid = outcome.result.rpartition(b":")
            seen[payload.decode()] = seen.get(payload.decode(), 0) + 1
            if not killed_at and len(seen) >= N_KILL // 2:
                left, killed_at = N_KILL - len(seen), time.perf_counter()
                os.kill(_parent(int(pid)), signal.SIGKILL)
        took = time.perf_counter() - killed_at
    wrong = sum(1 for t in tasks if seen.get(t.decode()) != 1)
    return took, left, wrong


def _parent(engine: int) -> int:
    """The agent that an engine belongs to."""
    return int(Path(f"/proc/{engine}/stat").read_text().rsplit(")", 1)[1].split()[1])


def bench_kill(rounds: int) -> list[Row]:
    took, left, wrong = [], 0, 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=".") as folder:
            up = subprocess.Popen(
                [sys.executable, "-m", "multigpu.cli", "up", "--no-gateway", "--workers", "2", "--device", "cpu",
                 "--listen", "127.0.0.1:0", "--data-dir", f"{folder}/data"],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            assert up.stdout is not None
            ready = next(line for line in up.stdout if line.startswith("ready:"))
            address = ready.split("master ")[1].split(",")[0]
            try:
                seconds, left, bad = loop_runner("uvloop")(_kill(address))
                took.append(seconds)
                wrong += bad
            finally:
                up.send_signal(signal.SIGTERM)
                up.wait(20)
    return [
        {
            "benchmark": "kill",
            "kill to last result, s": f"{median(took):.2f}",
            "spread": f"{min(took):.2f} to {max(took):.2f}",
            "ideal, s": f"{left * TASK_S / 2:.2f}",
            "lost or double": wrong,
        }
    ]


async def _requeue(fleet: Fleet) -> float:
    """Milliseconds from the kill of a worker to the dispatch of its task to the other."""
    async with AsyncClient(fleet.address) as client:
        running = asyncio.ensure_future(
            client.run_outcome("sleep", b"1.0", parameters={"append_pid": "1"}, wait_for_worker=True)
        )
        while True:
            await asyncio.sleep(0.05)
            leased = [t async for t in client.list_tasks() if t.worker_id and t.outcome is None]
            if leased:
                break
        await asyncio.sleep(0.2)
        victim = int(leased[0].worker_id.removeprefix("worker-"))
        fleet.workers[victim].kill()
        killed_s = time.time()
        outcome = await running
        assert outcome.worker_id != leased[0].worker_id
        assert outcome.dispatch_time is not None
        fleet.workers[victim].wait()
        return (outcome.dispatch_time.timestamp() - killed_s) * 1e3


def bench_requeue(rounds: int) -> list[Row]:
    found = []
    for _ in range(max(rounds, N_REQUEUE)):
        with Fleet() as fleet:
            found.append(loop_runner("uvloop")(_requeue(fleet)))
    return [
        {
            "benchmark": "requeue",
            "kill to dispatch elsewhere, ms": f"{median(found):.1f}",
            "p90": f"{percentile(found, 0.9):.1f}",
            "max": f"{max(found):.1f}",
            "kills": len(found),
        }
    ]
