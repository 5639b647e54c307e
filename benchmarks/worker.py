"""What a worker costs: CPU time of agent and engine for a no-op task, latency of one task, and of a hop to the engine.

    python benchmarks/worker.py

A real worker process against a bare gRPC peer in this process; and beside it the bare limit, a process that answers
each frame as soon as it comes, with no session, no batcher and no engine. CPU time is read from /proc, so it is the
worker's alone, whatever else the machine does. Each figure is the best of several rounds, since noise only ever adds.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop
from multigpu.v1 import task_pb2
from multigpu.v1 import worker_service_pb2 as pb
from multigpu.v1.worker_service_pb2_grpc import (
    WorkerServiceServicer,
    WorkerServiceStub,
    add_WorkerServiceServicer_to_server,
)
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.processes.child import ChildProcess, ProcessSettings
from multigpu_worker.processes.death import Death
from multigpu_worker.processes.ipc import frames
from multigpu_worker.session.payload_sharing import Sharing

FRAME_TASKS = 256
IN_FLIGHT = 1024
TASKS = 50_000
ROUNDS = 3
SINGLES = 1000
PAYLOAD = b"x" * 100
TICKS = os.sysconf("SC_CLK_TCK")
HANDLERS = """
import multigpu
from multigpu.handlers import handler

@handler("noop")
def noop(value):
    return value
"""


class Peer(WorkerServiceServicer):
    """Takes one worker and hands its stream to the benchmark."""

    def __init__(self) -> None:
        self.call: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def Session(self, _requests: Any, context: Any) -> None:  # noqa: N802  the contract's name
        hello = await context.read()
        assert hello.HasField("hello")
        welcome = pb.Welcome(session_id="benchmark")
        welcome.heartbeat_interval.FromSeconds(1)
        await context.write(pb.SessionResponse(welcome=welcome, frame=1))
        self.call.set_result(context)
        await asyncio.Event().wait()


def leases(first: int, count: int, kind: str, payload: bytes) -> pb.SessionResponse:
    ids = range(first, first + count)
    batch = pb.LeaseBatch(spec=task_pb2.TaskSpec(kind=kind), lease_ids=ids, task_ids=ids)
    batch.attempts.extend([1] * count)
    batch.payloads.extend([payload] * count)
    batch.units.extend([1] * count)
    return pb.SessionResponse(lease_batches=[batch])


async def settle(context: Any, count: int) -> int:
    """Read until so many reports are there; returns how many came."""
    settled = 0
    while settled < count:
        request = await context.read()
        for batch in request.report_batches:
            assert not batch.reports, "none fails"
            settled += len(batch.succeeded_lease_ids)
    return settled


class Driver:
    def __init__(self, context: Any, agent_pid: int, engine_pid: int) -> None:
        self.context = context
        self.pids = (agent_pid, engine_pid)
        self.next_id = 1

    async def many(self, kind: str, tasks: int, payload: bytes, in_flight: int, frame: int = FRAME_TASKS) -> float:
        """Keep a window full; returns tasks per second. Reads and writes at once: large frames block one another."""
        began_s = time.perf_counter()
        window = asyncio.Semaphore(in_flight // frame)

        async def write() -> None:
            for at in range(0, tasks, frame):
                await window.acquire()
                count = min(frame, tasks - at)
                await self.context.write(leases(self.next_id, count, kind, payload))
                self.next_id += count

        writer = asyncio.create_task(write())
        settled = released = 0
        while settled < tasks:
            settled += await settle(self.context, 1)
            while (released + 1) * frame <= settled:
                released += 1
                window.release()
        await writer
        return tasks / (time.perf_counter() - began_s)

    async def one(self, kind: str, payload: bytes) -> float:
        began_s = time.perf_counter()
        await self.context.write(leases(self.next_id, 1, kind, payload))
        self.next_id += 1
        await settle(self.context, 1)
        return time.perf_counter() - began_s

    def cpu_s(self) -> list[float]:
        return [cpu_s(pid) for pid in self.pids]


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, from its scheduler statistics (nanoseconds), over all threads."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


async def measure_worker() -> None:
    peer = Peer()
    size = ("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)
    server = grpc.aio.server(options=[*size, ("grpc.so_reuseport", 0)])
    add: Any = add_WorkerServiceServicer_to_server  # generated without types
    add(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "benchmark_handlers.py").write_text(HANDLERS, encoding="utf-8")
        began_s = time.perf_counter()
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "multigpu_worker.main", "--master", f"127.0.0.1:{port}", "--device", "cpu"),
            *("--log-level", "warning", "--handlers", "benchmark_handlers"),
            env=dict(os.environ, PYTHONPATH=folder),
        )
        context = await peer.call
        print(f"{'from start to welcome':42} {time.perf_counter() - began_s:8.3f} s")
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text(encoding="ascii").split()
        try:
            await report(Driver(context, worker.pid, int(children[0])))
        finally:
            worker.terminate()
            await server.stop(None)
            await worker.wait()


async def report(driver: Driver) -> None:
    for kind in ("echo", "noop"):
        await driver.many(kind, 5000, PAYLOAD, IN_FLIGHT)
        rates, agent_us, engine_us = [], [], []
        for _ in range(ROUNDS):
            before = driver.cpu_s()
            rates.append(await driver.many(kind, TASKS, PAYLOAD, IN_FLIGHT))
            after = driver.cpu_s()
            agent_us.append((after[0] - before[0]) / TASKS * 1e6)
            engine_us.append((after[1] - before[1]) / TASKS * 1e6)
        print(f"{kind + ', frames of 256: tasks/s, peer included':42} {max(rates):8.0f}")
        print(f"{kind + ': CPU us a task, agent + engine':42} {min(agent_us):8.2f} + {min(engine_us):.2f}")
        latencies_us = sorted([await driver.one(kind, PAYLOAD) * 1e6 for _ in range(SINGLES)])
        p50, p99 = latencies_us[SINGLES // 2], latencies_us[SINGLES * 99 // 100]
        print(f"{kind + ', one at a time: p50, p99':42} {p50:8.0f}, {p99:.0f} us")
    rate = max([await driver.many("echo", 128, b"x" * (1 << 20), 32, 4) for _ in range(ROUNDS)])
    print(f"{'echo, 1 MiB: MB/s in and out':42} {rate * 1.048576:8.0f}")


async def bare(address: str) -> None:
    """The limit: what the stream alone costs."""
    options = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub: Any = WorkerServiceStub  # generated without types
        call = stub(channel).Session()
        await call.write(pb.SessionRequest(hello=pb.Hello(protocol_version=2)))
        await call.read()
        while (response := await call.read()) is not grpc.aio.EOF:
            for batch in response.lease_batches:
                reports = pb.ReportBatch(succeeded_lease_ids=batch.lease_ids, results=batch.payloads)
                await call.write(pb.SessionRequest(report_batches=[reports]))


async def measure_bare() -> None:
    peer = Peer()
    size = ("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)
    server = grpc.aio.server(options=[*size, ("grpc.so_reuseport", 0)])
    add: Any = add_WorkerServiceServicer_to_server  # generated without types
    add(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, f"127.0.0.1:{port}")
    driver = Driver(await peer.call, process.pid, process.pid)
    try:
        await driver.many("echo", 5000, PAYLOAD, IN_FLIGHT)
        before_s = driver.cpu_s()[0]
        rate = await driver.many("echo", TASKS, PAYLOAD, IN_FLIGHT)
        print(f"{'bare: tasks/s':42} {rate:8.0f}")
        print(f"{'bare: CPU us a task':42} {(driver.cpu_s()[0] - before_s) / TASKS * 1e6:8.2f}")
        latencies_us = sorted([await driver.one("echo", PAYLOAD) * 1e6 for _ in range(SINGLES)])
        p50, p99 = latencies_us[SINGLES // 2], latencies_us[SINGLES * 99 // 100]
        print(f"{'bare, one at a time: p50, p99':42} {p50:8.0f}, {p99:.0f} us")
        rate = max([await driver.many("echo", 128, b"x" * (1 << 20), 32, 4) for _ in range(ROUNDS)])
        print(f"{'bare, 1 MiB: MB/s in and out':42} {rate * 1.048576:8.0f}")
    finally:
        process.kill()
        await server.stop(None)
        await process.wait()


class HopEvents:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.reply: asyncio.Future[None] = loop.create_future()
        self.death: asyncio.Future[Death] = loop.create_future()

    def apply_frame(self, message: frames.Message, blobs: list[bytes]) -> None:
        del blobs
        if message[0] == "ready":
            self.ready.set_result(None)
        elif message[0] == "reports" and message[10]:
            self.reply.set_result(None)


async def measure_hop() -> None:
    """To the engine and back with one task: no gRPC, no session."""
    events = HopEvents()
    settings = EngineSettings(device="cpu", slots=1, threads=0)
    child = ChildProcess(
        ProcessSettings(
            engine=settings, memory_bytes=0, result_bytes_max=1 << 26, device_environment={}, sharing=Sharing(),
            progress_timeout_s=0.0, cancel_grace_s=1.0,
        ),
        1, os.open(os.devnull, os.O_WRONLY), events.apply_frame, events.death.set_result,
    )  # fmt: skip
    await events.ready
    for size, rounds in ((100, SINGLES), (1 << 20, 100)):
        latencies_us = []
        payload = b"x" * size
        for n in range(rounds):
            events.reply = asyncio.get_running_loop().create_future()
            began_s = time.perf_counter()
            blobs: list[bytes] = []
            row = (n, n, 1, frames.put(payload, blobs), 1, b"", 0, ())
            child.channel.send(("batch", n + 1, "echo", "", (), "", True, [row]), blobs)
            await events.reply
            latencies_us.append((time.perf_counter() - began_s) * 1e6)
        print(f"{f'to the engine and back, {size} bytes: p50':42} {statistics.median(latencies_us):8.0f} us")
    child.kill()
    await events.death


if __name__ == "__main__":
    if len(sys.argv) == 2:
        uvloop.run(bare(sys.argv[1]))
        sys.exit()
    uvloop.run(measure_bare())
    uvloop.run(measure_hop())
    uvloop.run(measure_worker())
