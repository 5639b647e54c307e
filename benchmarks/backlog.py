"""backlog: a million queued tasks of 100 bytes: the master's memory and CPU for each.

The tasks wait in a paused queue. Memory is the growth of the master's resident memory. Recovery is the time from the
start of a new master, with all tasks in the journal, until it is ready.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from typing import Any

import grpc
from multigpu import AsyncClient
from multigpu.v1 import admin_service_pb2, admin_service_pb2_grpc

from benchmarks.fleet import Fleet
from benchmarks.measure import cpu_seconds, payloads, resident_bytes
from benchmarks.relay import loop_runner

N = 1_000_000
CHUNK = 50_000
Row = dict[str, Any]


async def _fill(fleet: Fleet) -> list[Row]:
    rows: list[Row] = []
    async with AsyncClient(fleet.address) as client:
        await client.submit_many("echo", payloads(1000), queue="held")
        empty = resident_bytes(fleet.master.pid)
        done, steps = 0, [1_000, 10_000, 100_000, N]
        for step in steps:
            before, start = cpu_seconds(fleet.master.pid), time.perf_counter()
            n = step - done
            while done < step:
                chunk = min(CHUNK, step - done)
                await client.submit_many("echo", payloads(chunk), queue="held")
                done += chunk
            cpu, seconds = cpu_seconds(fleet.master.pid) - before, time.perf_counter() - start
            await asyncio.sleep(0.5)
            grown = resident_bytes(fleet.master.pid) - empty
            rows.append(
                {
                    "benchmark": "backlog",
                    "queued": f"{done:,}",
                    "bytes of memory each": f"{grown / done:.0f}",
                    "master CPU us each": f"{cpu / n * 1e6:.1f}",
                    "submitted/s": f"{n / seconds:,.0f}",
                }
            )
    return rows


def bench_backlog(_rounds: int) -> list[Row]:
    with Fleet(1) as fleet:
        with grpc.insecure_channel(fleet.address) as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
            admin.PauseQueue(admin_service_pb2.PauseQueueRequest(queue="held"))
        rows: list[Row] = loop_runner("uvloop")(_fill(fleet))
        fleet.master.send_signal(signal.SIGKILL)
        fleet.master.wait()
        start = time.perf_counter()
        again = subprocess.Popen(
            [sys.executable, "-m", "multigpu_master.main", "--listen", "127.0.0.1:0", "--data-dir", str(fleet.dir /
            "data"),
             "--log-format", "json"],
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert again.stderr is not None
        ready = next(json.loads(x) for x in again.stderr if b"master ready" in x)
        seconds = time.perf_counter() - start
        again.kill()
        again.wait()
        again.stderr.close()
        rows.append(
            {"benchmark": "backlog, recovery", "queued": f"{ready['recovered_tasks']:,}", "seconds": f"{seconds:.1f}"}
        )
    return rows
