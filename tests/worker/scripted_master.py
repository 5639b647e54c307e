"""A peer for the worker: a WorkerService that does what a test tells it, and remembers what the worker said.

It is not a master: no queue, no journal, no policy. The worker in these tests is the real one.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import grpc.aio
from multigpu.v1 import task_pb2
from multigpu.v1 import worker_service_pb2 as pb
from multigpu.v1.worker_service_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server

from tests.waiting import BUSY_FACTOR


@dataclass(frozen=True, slots=True)
class Word:
    """The worker's word about one lease."""

    lease_id: int
    state: int  # SUCCEEDED, or a pb.ReportState
    result: bytes = b""
    content_type: str = ""
    error: task_pb2.TaskError = field(default_factory=task_pb2.TaskError)


SUCCEEDED = 1


def words_of(batch: pb.ReportBatch) -> list[Word]:
    """A batch, a lease at a time."""
    columns = zip(batch.succeeded_lease_ids, batch.results, strict=True)
    words = [Word(lease_id, SUCCEEDED, result, batch.content_type) for lease_id, result in columns]
    return words + [Word(report.lease_id, report.state, error=report.error) for report in batch.reports]


class Stream:
    """One session of one worker."""

    def __init__(self, hello: pb.Hello) -> None:
        self.hello = hello
        self.out: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        self.frame = 0
        self.end_code = grpc.StatusCode.OK
        self.heartbeats: list[pb.Heartbeat] = []
        self.reports: dict[int, Word] = {}
        self.batches: list[pb.ReportBatch] = []
        self.partials: list[pb.PartialOutput] = []
        # What came, in order: "heartbeat", ("partial", lease_id, index), ("report", lease_id).
        self.events: list[object] = []
        self.frames_up = 0
        self.ended = asyncio.Event()
        self.changed = asyncio.Condition()

    def send(self, **parts: Any) -> None:
        self.frame += 1
        self.out.put_nowait(pb.SessionResponse(frame=self.frame, **parts))

    def lease(
        self, leases: list[tuple[int, bytes]], attempt: int = 1, extra: pb.LeaseExtra | None = None, **spec: Any
    ) -> None:
        """Grant leases: (lease_id, payload) pairs. What is `extra` is the first one's."""
        batch = pb.LeaseBatch(
            spec=task_pb2.TaskSpec(**spec),
            lease_ids=[lease_id for lease_id, _ in leases],
            task_ids=[lease_id + 1000 for lease_id, _ in leases],
            attempts=[attempt for _ in leases],
            payloads=[payload for _, payload in leases],
            units=[1 for _ in leases],
            extras=[] if extra is None else [extra],
        )
        self.send(lease_batches=[batch])

    def revoke(self, *lease_ids: int) -> None:
        self.send(revocations=[pb.Revocation(lease_id=lease_id, reason="test") for lease_id in lease_ids])

    async def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s * BUSY_FACTOR):
            async with self.changed:
                await self.changed.wait_for(condition)

    async def reported(self, *lease_ids: int, timeout_s: float = 60.0) -> list[Word]:
        await self.until(lambda: all(lease_id in self.reports for lease_id in lease_ids), timeout_s)
        return [self.reports[lease_id] for lease_id in lease_ids]

    async def run(self, lease_id: int, payload: bytes = b"", *, timeout_s: float = 60.0, **spec: Any) -> Word:
        """Grant one lease, and wait for its report."""
        self.lease([(lease_id, payload)], **spec)
        return (await self.reported(lease_id, timeout_s=timeout_s))[0]

    async def run_all(self, kind: str, *payloads: bytes, **spec: Any) -> list[Word]:
        """Grant a lease for each payload, with the next ids, and wait for their reports."""
        first = max([*self.reports, 0]) + 1
        ids = range(first, first + len(payloads))
        self.lease(list(zip(ids, payloads, strict=True)), kind=kind, **spec)
        return await self.reported(*ids)

    async def running(self, *lease_ids: int) -> None:
        """Until the worker's last heartbeat lists these leases as running."""
        await self.until(
            lambda: set(lease_ids) <= {h.lease_id for beat in self.heartbeats[-1:] for h in beat.leases if h.running}
        )

    def take(self, request: pb.SessionRequest) -> None:
        self.frames_up += 1
        if request.HasField("heartbeat"):
            self.heartbeats.append(request.heartbeat)
            self.events.append("heartbeat")
        for partial in request.partials:
            self.partials.append(partial)
            self.events.append(("partial", partial.lease_id, partial.index))
        for batch in request.report_batches:
            self.batches.append(batch)
            for report in words_of(batch):
                assert report.lease_id not in self.reports, "reported twice in one session"
                self.reports[report.lease_id] = report
                self.events.append(("report", report.lease_id))

    def break_off(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """End the stream at once; by default as a dying master would."""
        self.end_code = code
        self.out.put_nowait(None)


class ScriptedMaster(WorkerServiceServicer):
    def __init__(self, *, heartbeat_s: float = 0.1) -> None:
        self.heartbeat_s = heartbeat_s
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.adopt: Callable[[pb.Hello], list[int]] = lambda hello: [lease.lease_id for lease in hello.leases]
        self.reject: tuple[grpc.StatusCode, str] | None = None
        self.rejections = 0
        self.server: Any = None
        self.port = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(None)

    async def start(self) -> None:
        size = 64 << 20
        options = [("grpc.max_receive_message_length", size), ("grpc.max_send_message_length", size)]
        options += [("grpc.so_reuseport", 0)]
        self.server = grpc.aio.server(options=options)
        add: Any = add_WorkerServiceServicer_to_server  # generated without types
        add(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(None)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def stream(self, timeout_s: float = 60.0) -> Stream:
        async with asyncio.timeout(timeout_s * BUSY_FACTOR):
            return await self.streams.get()

    async def Session(self, request_iterator: Any, context: Any) -> None:  # noqa: N802  the contract's name
        first = await context.read()
        assert first.HasField("hello")
        if self.reject is not None:
            self.rejections += 1
            await context.abort(*self.reject)
        stream = Stream(first.hello)
        welcome = pb.Welcome(session_id=f"s{time.monotonic_ns()}", version="scripted")
        welcome.heartbeat_interval.FromNanoseconds(int(self.heartbeat_s * 1e9))
        welcome.session_timeout.FromSeconds(20)
        welcome.adopted_lease_ids.extend(self.adopt(first.hello))
        stream.frame = 1
        await context.write(pb.SessionResponse(welcome=welcome, frame=1))
        self.streams.put_nowait(stream)
        writer = asyncio.create_task(self._write(stream, context))
        reader = asyncio.create_task(self._read(stream, context))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            writer.cancel()
            stream.ended.set()
        if writer.done() and not writer.cancelled() and writer.result() == "broken":
            await context.abort(stream.end_code, "told to break off")

    async def _write(self, stream: Stream, context: Any) -> str:
        while (response := await stream.out.get()) is not None:
            await context.write(response)
        return "broken"

    async def _read(self, stream: Stream, context: Any) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            stream.take(request)
            async with stream.changed:
                stream.changed.notify_all()
