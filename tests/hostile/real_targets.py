"""The same inputs for real daemons: over gRPC, over TCP, and a real worker whose master sends random frames.

After every batch the daemons must run without faults in their logs, no state may be left of rejected inputs, and a
normal task must succeed.
"""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2
from multigpu.v1 import worker_service_pb2 as worker_pb

from tests.fleet import Fleet, until
from tests.hostile.inputs import Maker, unpack
from tests.hostile.master_targets import BLAMES_THE_MASTER, METHODS, frames_for
from tests.hostile.target import Crash
from tests.hostile.worker_targets import session_frames

HANDLERS = Path(__file__).resolve().parent / "handlers"
AT_ONCE = 64
CALL_TIMEOUT_S, STREAM_TIMEOUT_S = 20.0, 0.2
MAY_WAIT = {"TaskService/Get"}
OPTIONS = [("grpc.max_send_message_length", 64 << 20), ("grpc.max_receive_message_length", 64 << 20)]
# gRPC's services on the same port.
FOREIGN = {
    "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest.DESCRIPTOR,
    "/multigpu.v1.TaskService/Nothing": health_pb2.HealthCheckRequest.DESCRIPTOR,
    "/": health_pb2.HealthCheckRequest.DESCRIPTOR,
}
FOREIGN_STREAMS = {
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": reflection_pb2.ServerReflectionRequest.DESCRIPTOR,
}


class HostileCallers:
    """Hostile callers of a fleet's master."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.tried: Counter[str] = Counter()
        self._maker = Maker(Random(f"{seed}/real"))

    def batch(self, count: int) -> None:
        """Makes this many calls and checks the fleet. Crash: it failed."""
        codes = asyncio.run(self._batch(count))
        for name, code, details in codes:
            # gRPC's own health service answers a message that it can't parse with INTERNAL.
            # "Internal error from Core" is the client's error for a write on an ended stream.
            own = name.startswith("/grpc.") or details == "Internal error from Core"
            if code in BLAMES_THE_MASTER and not own:
                raise Crash(f"{name}: {code.name}: {details}")
        for _ in range(count // 50):
            self._tcp()
        self.check()

    async def _batch(self, count: int) -> list[tuple[str, grpc.StatusCode, str]]:
        found = []
        async with grpc.aio.insecure_channel(self.fleet.address, options=OPTIONS) as channel:
            for at in range(0, count, AT_ONCE):
                calls = [self._call(channel) for _ in range(min(AT_ONCE, count - at))]
                found += await asyncio.gather(*calls)
        return found

    async def _call(self, channel: Any) -> tuple[str, grpc.StatusCode, str]:
        maker = self._maker
        if maker.rng.random() < 0.05:
            return await self._foreign_call(channel)
        name = maker.rng.choice(list(METHODS))
        method = METHODS[name]
        self.tried[f"real {name}"] += 1
        data = frames_for(method, maker)
        path = f"/{method.containing_service.full_name}/{method.name}"
        if method.client_streaming:
            return name, *await _stream(channel.stream_stream(path), unpack(data))
        if method.server_streaming:
            return name, *await _read(channel.unary_stream(path)(data, timeout=STREAM_TIMEOUT_S))
        code, details = await _unary(channel.unary_unary(path), data, STREAM_TIMEOUT_S if name in MAY_WAIT else None)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and name not in MAY_WAIT:
            raise Crash(f"{name} did not answer within {CALL_TIMEOUT_S:g} s")
        return name, code, details

    async def _foreign_call(self, channel: Any) -> tuple[str, grpc.StatusCode, str]:
        maker = self._maker
        if maker.rng.random() < 0.5:
            path, descriptor = maker.rng.choice(list(FOREIGN_STREAMS.items()))
            self.tried[f"real {path}"] += 1
            return path, *await _stream(channel.stream_stream(path), [maker.wire(descriptor)])
        path, descriptor = maker.rng.choice(list(FOREIGN.items()))
        self.tried[f"real {path}"] += 1
        return path, *await _unary(channel.unary_unary(path), maker.wire(descriptor), None)

    def _tcp(self) -> None:
        """Bytes that are not HTTP/2, or end within it."""
        rng = self._maker.rng
        self.tried["real TCP"] += 1
        host, _, port = self.fleet.address.rpartition(":")
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        settings = b"\0\0\0\4\0\0\0\0\0"
        head = rng.choice((b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", preface, preface + settings, b"\x16\x03\x01\x02"))
        with socket.create_connection((host, int(port)), timeout=10) as sock, contextlib.suppress(OSError):
            sock.sendall(head + rng.randbytes(rng.choice((0, 1, 9, 100, 5000))))

    def check(self) -> None:
        """Crash: a daemon has died, a task is left, or a normal task fails."""
        fleet = self.fleet
        for daemon in (fleet.master, *fleet.workers.values()):
            if not daemon.alive:
                raise Crash(f"a daemon ended with {daemon.process.returncode}: {daemon.log()[-2000:]}")
        admin = fleet.admin
        admin.SetStrategy(admin_pb.SetStrategyRequest(strategy="auto"), timeout=20)
        admin.ResumeQueue(admin_pb.ResumeQueueRequest(queue="default"), timeout=20)
        admin.SetQueueLimits(admin_pb.SetQueueLimitsRequest(queue="default"), timeout=20)
        self._cancel_all()
        (task_id,) = fleet.submit("echo", b"still there", priority=1, required_labels={"real": "yes"})
        outcome = fleet.outcome(task_id)
        if outcome.result != b"still there":
            raise Crash(f"a task is no longer served: {outcome}")
        # gRPC logs a traceback for messages that it cannot parse.
        if faults := [line for line in fleet.faults() if '"logger": "grpc.' not in line]:
            raise Crash(f"the log has a fault: {faults[0]}")

    def _cancel_all(self) -> None:
        tasks = self.fleet.tasks

        def none_left() -> bool:
            filter_ = task_service_pb2.TaskFilter(states=[task_pb2.TASK_STATE_QUEUED, task_pb2.TASK_STATE_LEASED])
            page = tasks.List(task_service_pb2.ListRequest(filter=filter_, page_size=1000), timeout=20).tasks
            if page:
                tasks.Cancel(task_service_pb2.CancelRequest(task_ids=[t.task_id for t in page]), timeout=20)
            return not page

        until(none_left, what="the end of every hostile task")


async def _unary(call: Any, data: bytes, timeout_s: float | None) -> tuple[grpc.StatusCode, str]:
    try:
        await call(data, timeout=timeout_s or CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    return grpc.StatusCode.OK, ""


async def _stream(call: Any, frames: Sequence[bytes]) -> tuple[grpc.StatusCode, str]:
    async def given() -> Any:
        for frame in frames:
            yield frame

    return await _read(call(given(), timeout=STREAM_TIMEOUT_S))


async def _read(call: Any) -> tuple[grpc.StatusCode, str]:
    """Reads the first messages of a stream. Returns how it ended."""
    try:
        for _ in range(4):
            if await call.read() is grpc.aio.EOF:
                break
        else:
            call.cancel()
        return await call.code(), str(await call.details())
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    except asyncio.CancelledError:
        return grpc.StatusCode.CANCELLED, ""


class RandomMaster:
    """A fake master that sends random frames to a worker."""

    def __init__(self, address: str, seed: int) -> None:
        self.tried = 0
        self._maker = Maker(Random(f"{seed}/master"))
        self._server: Any = None
        self.address = address

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(self._session)
        name = worker_pb.DESCRIPTOR.services_by_name["WorkerService"].full_name
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Session": handler}),))
        port = self._server.add_insecure_port(self.address)
        self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await self._server.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._server.stop(0)

    async def _session(self, _frames: Any, context: Any) -> None:
        await context.read()
        for data in unpack(session_frames(self._maker)):
            await context.write(data)
            self.tried += 1
        await asyncio.sleep(0.01)


def random_master(fleet: Fleet, count: int, seed: int) -> int:
    """Replaces the fleet's master by a random one, then restores it. Returns the number of frames."""
    (name,) = fleet.workers
    fleet.master.kill()

    async def serve() -> int:
        async with RandomMaster(fleet.address, seed) as master:
            async with asyncio.timeout(60 + count / 5):
                while master.tried < count:
                    await asyncio.sleep(0.05)
                    if not fleet.workers[name].alive:
                        raise Crash(f"the worker ended: {fleet.workers[name].log()[-3000:]}")
            return master.tried

    tried = asyncio.run(serve())
    fleet.start_master()
    fleet.wait_for_workers(name)
    return tried


@contextlib.contextmanager
def hostile_fleet(folder: Path, seed: int) -> Iterator[HostileCallers]:
    """Hostile callers of a new fleet with one worker."""
    with Fleet(
        folder, workers=1, worker_flags=["--labels", "real=yes"], handlers=["babbling"], handlers_dir=HANDLERS
    ) as fleet:
        callers = HostileCallers(fleet, seed)
        callers.check()
        yield callers
