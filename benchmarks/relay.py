"""The limit: client -> relay -> worker -> relay -> client over bare grpc.aio, with frames of repeated messages, and
without queue, leases, windows or engine processes.

    python -m benchmarks.relay relay|worker|... is run by the other modules; `Relay` starts it.

Modes: "message": the relay forwards messages unread. "engine": as "message", and each worker passes every message
through a process of its own and back, over a socket pair: the six hops of a task of multigpu, one at a time. "frames":
the relay parses each frame of tasks, keeps a record for each task, and builds the frame for the worker, and the same on
the way back. "log": as "frames", and each frame is appended to a file and synced (fdatasync), in a thread, before it is
forwarded.
"""

import asyncio
import contextlib
import functools
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
from multigpu.v1 import task_pb2, task_service_pb2

from benchmarks.measure import cpu_seconds

# As in the daemons. Must be set before gRPC opens a channel.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
FRAME = 256
UNREAD = ("message", "engine")
SUCCEEDED = task_pb2.OUTCOME_STATE_SUCCEEDED


@functools.cache
def _runner(kind: str) -> asyncio.Runner:
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop if kind == "uvloop" else None)


def loop_runner(kind: str) -> Callable[[Any], Any]:
    """Runs coroutines on the process' one loop of this kind. It is never closed: grpc's poller would complain."""
    return _runner(kind).run


class Forward:
    """The relay's own work on a frame."""

    def __init__(self, mode: str) -> None:
        self.parse = mode not in UNREAD
        self.file = tempfile.TemporaryFile(dir=".") if mode == "log" else None  # noqa: SIM115  it lives as long as we
        self.records: dict[int, tuple[str, bytes, float]] = {}
        self.ids = itertools.count(1)

    def down(self, data: bytes) -> bytes:
        if not self.parse:
            return data
        now = time.monotonic()
        out = task_service_pb2.RunResponse()
        add = out.outcomes.add
        for batch in task_service_pb2.RunRequest.FromString(data).batches:
            for given in batch.inputs:
                task_id = next(self.ids)
                self.records[task_id] = (given.request_id, given.payload, now)
                add(task_id=task_id, attempts=1, result=given.payload)
        return out.SerializeToString()

    def up(self, data: bytes) -> bytes:
        if not self.parse:
            return data
        out = task_service_pb2.RunResponse()
        add = out.outcomes.add
        for report in task_service_pb2.RunResponse.FromString(data).outcomes:
            task_id = report.task_id
            request_id, _, _ = self.records.pop(task_id)
            add(task_id=task_id, request_id=request_id, state=SUCCEEDED, result=report.result)
        return out.SerializeToString()

    def save(self, data: bytes) -> None:
        assert self.file is not None
        os.write(self.file.fileno(), data)
        os.fdatasync(self.file.fileno())


async def relay(mode: str) -> None:
    forward, to_client = Forward(mode), asyncio.Queue[bytes]()
    workers: list[asyncio.Queue[bytes]] = []
    pool, loop = ThreadPoolExecutor(1), asyncio.get_running_loop()

    async def pump(queue: asyncio.Queue[bytes], context: Any) -> None:
        while True:
            await context.write(await queue.get())

    async def pass_on(queue: asyncio.Queue[bytes], data: bytes) -> None:
        if forward.file is not None:
            await loop.run_in_executor(pool, forward.save, data)
        queue.put_nowait(data)

    async def on_client(_: object, context: Any) -> None:
        writer = asyncio.ensure_future(pump(to_client, context))
        while len(workers) < 2:
            await asyncio.sleep(0.05)
        for turn in itertools.count():
            data = await context.read()
            if data is grpc.aio.EOF:
                break
            await pass_on(workers[turn % 2], forward.down(data))
        writer.cancel()

    async def on_worker(_: object, context: Any) -> None:
        queue = asyncio.Queue[bytes]()
        workers.append(queue)
        writer = asyncio.ensure_future(pump(queue, context))
        while (data := await context.read()) is not grpc.aio.EOF:
            await pass_on(to_client, forward.up(data))
        writer.cancel()

    server = grpc.aio.server(options=OPTIONS)
    handlers = {
        "Client": grpc.stream_stream_rpc_method_handler(on_client),
        "Worker": grpc.stream_stream_rpc_method_handler(on_worker),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def start_engine() -> socket.socket:
    """Starts a process that sends back what it receives, until its socket is closed."""
    ours, theirs = socket.socketpair()
    code = f"import socket; s = socket.socket(fileno={theirs.fileno()})\nwhile data := s.recv(65536): s.sendall(data)"
    subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
    theirs.close()
    ours.setblocking(False)
    return ours


async def worker(mode: str, port: str) -> None:
    engine, loop = start_engine() if mode == "engine" else None, asyncio.get_running_loop()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        call = channel.stream_stream("/bench/Worker")()
        while (data := await call.read()) is not grpc.aio.EOF:
            if engine is not None:
                await loop.sock_sendall(engine, data)
                data = await loop.sock_recv(engine, 65536)
            elif mode != "message":
                out = task_service_pb2.RunResponse()
                add = out.outcomes.add
                for given in task_service_pb2.RunResponse.FromString(data).outcomes:
                    add(task_id=given.task_id, state=SUCCEEDED, result=given.result)
                data = out.SerializeToString()
            await call.write(data)


class Relay:
    """A relay and two workers, as processes, for as long as the block runs."""

    def __init__(self, mode: str, loop: str) -> None:
        self.mode = mode
        self.loop = loop
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        run = [sys.executable, "-m", "benchmarks.relay"]
        self.processes = [
            subprocess.Popen(
                [*run, self.loop, "relay", self.mode], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
            )
        ]
        assert self.processes[0].stdout is not None
        self.port = self.processes[0].stdout.readline().strip()
        self.processes += [
            subprocess.Popen([*run, self.loop, "worker", self.mode, self.port], text=True, stderr=subprocess.DEVNULL)
            for _ in range(2)
        ]
        time.sleep(1.0)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far of each room."""
        relay, *workers = (cpu_seconds(p.pid) for p in self.processes)
        return {"relay": relay, "workers": sum(workers), "client": time.process_time()}


def pack(mode: str, payloads: list[bytes], frame: int = FRAME) -> list[bytes]:
    """What the client sends."""
    if mode in UNREAD:
        return payloads
    ids = itertools.count()
    out = []
    for i in range(0, len(payloads), frame):
        request = task_service_pb2.RunRequest()
        batch = request.batches.add()
        batch.spec.kind = "echo"
        for payload in payloads[i : i + frame]:
            batch.inputs.add(request_id=f"bench-{next(ids):012d}", payload=payload)
        out.append(request.SerializeToString())
    return out


def results(mode: str, messages: list[bytes]) -> int:
    """How many results came back."""
    if mode in UNREAD:
        return len(messages)
    return sum(len(task_service_pb2.RunResponse.FromString(m).outcomes) for m in messages)


@contextlib.asynccontextmanager
async def client(port: str) -> Any:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        call = channel.stream_stream("/bench/Client")()
        yield call
        call.cancel()


async def throughput(port: str, mode: str, payloads: list[bytes], window: int, begin: Callable[[], None]) -> float:
    """Seconds for all payloads through the relay, packing and parsing included; with at most `window` messages in
    flight, if it isn't 0. `begin` is called when it is warm and the clock starts.
    """
    async with client(port) as call:
        messages = pack(mode, payloads[: FRAME * 2])
        for m in messages:  # warm up
            await call.write(m)
        for _ in messages:
            await call.read()
        room = asyncio.Semaphore(window or 1_000_000)
        begin()
        start = time.perf_counter()
        messages = pack(mode, payloads)

        async def send() -> None:
            for m in messages:
                await room.acquire()
                await call.write(m)

        sending = asyncio.ensure_future(send())
        got = []
        for _ in messages:
            got.append(await call.read())
            room.release()
        await sending
        assert results(mode, got) == len(payloads)
        return time.perf_counter() - start


async def latencies(port: str, payload: bytes, n: int) -> list[float]:
    """Seconds of each of n round trips, one at a time."""
    async with client(port) as call:
        out = []
        for _ in range(n):
            start = time.perf_counter()
            await call.write(payload)
            await call.read()
            out.append(time.perf_counter() - start)
        return out


if __name__ == "__main__":
    loop, role, *rest = sys.argv[1:]
    loop_runner(loop)(relay(*rest) if role == "relay" else worker(*rest))
