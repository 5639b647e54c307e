"""CPU µs of the Python client for each task, against an echo that does nothing else.

The echo master is another process that answers every frame of tasks with a frame of outcomes, without journal and
workers. CPU figures are the client's; rates are those of client and echo together.

    python benchmarks/client.py            # all of it, about ten seconds
    python benchmarks/client.py --profile  # the bulk map under cProfile
"""

import argparse
import asyncio
import contextlib
import cProfile
import gc
import multiprocessing
import pstats
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio
import multigpu
from multigpu.v1 import task_pb2, task_service_pb2, task_service_pb2_grpc

MIB = 1 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", 64 * MIB),
    ("grpc.max_send_message_length", 64 * MIB),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
)


class EchoMaster(task_service_pb2_grpc.TaskServiceServicer):
    async def Run(self, requests: Any, context: Any) -> None:  # noqa: N802  gRPC names it
        succeeded = task_pb2.OUTCOME_STATE_SUCCEEDED
        async for request in requests:
            response = task_service_pb2.RunResponse()
            add = response.outcomes.add
            for batch in request.batches:
                assert not batch.inputs, "they are in columns"
                for request_id, payload in zip(batch.request_ids, batch.payloads, strict=True):
                    add(task_id=1, request_id=request_id, state=succeeded, result=payload, attempts=1)
            await context.write(response)

    async def Submit(self, request: Any, context: Any) -> Any:  # noqa: N802  as above
        response = task_service_pb2.SubmitResponse()
        for batch in request.batches:
            for _ in batch.inputs:
                response.results.add(task_id=1)
        return response


def serve(pipe: Connection) -> None:
    async def main() -> None:
        server = grpc.aio.server(options=OPTIONS)
        task_service_pb2_grpc.add_TaskServiceServicer_to_server(EchoMaster(), server)  # type: ignore[no-untyped-call]
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await server.stop(None)

    asyncio.run(main())


@contextlib.contextmanager
def echo_master() -> Iterator[str]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    process.start()
    try:
        yield f"127.0.0.1:{ours.recv()}"
    finally:
        ours.send(None)
        process.join(10)


def measure(what: str, tasks: int, work: Callable[[], object], rounds: int = 5) -> None:
    """Prints the best rate and the median CPU cost of several rounds."""
    rates, costs = [], []
    for _ in range(rounds):
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        costs.append((time.process_time() - cpu) / tasks * 1e6)
        rates.append(tasks / (time.perf_counter() - wall))
    print(f"{what:44} {statistics.median(costs):8.2f} µs CPU a task {max(rates):12,.0f} tasks/s")


def print_times(what: str, times: list[float]) -> None:
    times.sort()
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    print(f"{what:44} p50 {p50 * 1e6:.0f} µs, p99 {p99 * 1e6:.0f} µs")


class Bench:
    def __init__(self, address: str) -> None:
        self.client = multigpu.AsyncClient(address)
        self.loop = asyncio.new_event_loop()
        self.payload = b"x" * 100

    def go(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    async def map(self, tasks: int, **how: Any) -> None:
        count = 0
        async for _ in self.client.map("echo", (self.payload for _ in range(tasks)), ephemeral=True, **how):
            count += 1
        assert count == tasks

    async def map_async(self, tasks: int) -> None:
        async def items() -> AsyncIterator[bytes]:
            for _ in range(tasks):
                yield self.payload

        async for _ in self.client.map("echo", items(), ephemeral=True):
            pass

    async def concurrent_runs(self, tasks: int, at_once: int) -> None:
        left = iter(range(tasks))

        async def caller() -> None:
            for _ in left:
                await self.client.run("echo", self.payload, ephemeral=True)

        await asyncio.gather(*(caller() for _ in range(at_once)))

    async def latency(self, rounds: int) -> None:
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            await self.client.run("echo", self.payload, ephemeral=True)
            times.append(time.perf_counter() - begin)
        times.sort()
        print(
            f"{'one at a time':44} p50 {times[rounds // 2] * 1e6:.0f} µs, p99 {times[rounds * 99 // 100] * 1e6:.0f} µs"
        )

    async def large(self, tasks: int) -> None:
        payload = b"x" * MIB
        async for result in self.client.map("echo", (payload for _ in range(tasks)), ephemeral=True):
            assert len(result) == MIB


async def bare_latency(address: str, rounds: int) -> None:
    """The same frames on a plain stream: the limit for one at a time."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stream = task_service_pb2_grpc.TaskServiceStub(channel).Run()  # type: ignore[no-untyped-call]
        times = []
        for i in range(rounds):
            request = task_service_pb2.RunRequest()
            request.batches.add().inputs.add(payload=b"x" * 100, request_id=str(i))
            begin = time.perf_counter()
            await stream.write(request)
            await stream.read()
            times.append(time.perf_counter() - begin)
        stream.cancel()
        print_times("one at a time on a plain stream", times)


def synchronous(address: str) -> None:
    with multigpu.Client(address) as client:
        payload = b"x" * 100

        def bulk() -> None:
            assert sum(1 for _ in client.map("echo", (payload for _ in range(20_000)), ephemeral=True)) == 20_000

        def in_threads() -> None:
            def caller() -> None:
                for _ in range(100):
                    client.run("echo", payload, ephemeral=True)

            threads = [threading.Thread(target=caller) for _ in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        measure("Client.map, 20,000 tasks of 100 bytes", 20_000, bulk)
        measure("Client.run in 16 threads", 1_600, in_threads)
        measure("Client.submit_many, 20,000 tasks", 20_000, lambda: client.submit_many("echo", [payload] * 20_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--profile", action="store_true")
    profile = parser.parse_args().profile
    with echo_master() as address:
        bench = Bench(address)
        bench.go(bench.map(20_000))
        if profile:
            profiler = cProfile.Profile()
            profiler.runcall(lambda: bench.go(bench.map(50_000)))
            pstats.Stats(profiler).sort_stats("tottime").print_stats(28)
        else:
            measure("map, 20,000 tasks of 100 bytes", 20_000, lambda: bench.go(bench.map(20_000)))
            measure("map, as completed", 20_000, lambda: bench.go(bench.map(20_000, ordered=False)))
            measure("map over an async iterable", 20_000, lambda: bench.go(bench.map_async(20_000)))
            measure("run, 64 at once", 6_400, lambda: bench.go(bench.concurrent_runs(6_400, 64)))
            bench.go(bench.latency(1_000))
            bench.go(bare_latency(address, 1_000))
            measure("map, 64 tasks of 1 MiB, in and out", 64, lambda: bench.go(bench.large(64)), rounds=3)
        bench.go(bench.client.close())
        if not profile:
            synchronous(address)


if __name__ == "__main__":
    main()
