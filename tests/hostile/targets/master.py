"""A target for each RPC method of the master, in this process: real services, core, driver and SQLite journal.

Only gRPC is left out, for speed: a fake context passes frames in and parses the responses, which are serialized as in
gRPC.
"""

import asyncio
import contextlib
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from multigpu.config.config import MasterConfig
from multigpu.v1 import admin_service_pb2, task_pb2, task_service_pb2, worker_service_pb2
from multigpu_master.clock import Clock
from multigpu_master.core import events as ev
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.rpc.worker_service import PROTOCOL_VERSION
from multigpu_master.server import Master
from multigpu_master.wire import workers as wire_workers

from tests.hostile.targets.base import Crash, Target, mute
from tests.hostile.targets.inputs import Maker, pack, unpack

BLAMES_THE_MASTER = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
# A call that takes longer counts as hanging. On a busy host, reading the journal takes seconds.
CALL_TIMEOUT_S = 60.0
# Methods that wait for an event, and the time after which their calls are cancelled here.
MAY_WAIT, PATIENCE_S = {"TaskService/Get", "TaskService/Watch", "AdminService/WatchWorkers"}, 0.02
SERVICES = [
    task_service_pb2.DESCRIPTOR.services_by_name["TaskService"],
    worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"],
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
]
METHODS: dict[str, MethodDescriptor] = {f"{s.name}/{m.name}": m for s in SERVICES for m in s.methods}
TASKS_MAX = 2_000  # unsettled tasks; above that, all are cancelled


class Context:
    """A fake gRPC context: its peer sends the frames and disconnects, at the latest after 4 responses."""

    def __init__(self, frames: list[bytes], response_type: Any, ids: deque[int]) -> None:
        self._frames = deque(frames)
        self._response_type = response_type
        self._ids = ids
        self._written = 0
        self.status = grpc.StatusCode.OK
        self.details = ""

    async def read(self) -> Any:
        for _ in range(3):
            await asyncio.sleep(0)
        if self._frames:
            return self._frames.popleft()
        raise asyncio.CancelledError

    async def write(self, message: Any) -> None:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        self._ids.extend(ids_in(self._response_type.FromString(data)))
        self._written += 1
        await asyncio.sleep(0)
        if self._written >= 4:
            raise asyncio.CancelledError

    async def send_initial_metadata(self, _metadata: object) -> None:
        """Ignored."""

    def code(self) -> grpc.StatusCode:
        return self.status

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self.status, self.details = code, details
        raise grpc.aio.AbortError


def ids_in(message: Message) -> Iterator[int]:
    """All task and lease ids in a message."""
    for field, value in message.ListFields():
        if field.name.startswith(("task_id", "lease_id")):
            yield from value if field.is_repeated else (value,)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for child in value if field.is_repeated else (value,):
                yield from ids_in(child)


class LocalMaster:
    """A master in this process with its event loop. `faults`: exceptions that no call raised."""

    def __init__(self) -> None:
        mute()
        memory = Path("/dev/shm")  # the disk is not tested here
        self._folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        self.loop = asyncio.new_event_loop()
        self.faults: list[str] = []
        self._handlers: dict[str, Any] = {}  # by "Service/Method"
        self.ids: deque[int] = deque([1], maxlen=64)
        self.loop.set_exception_handler(lambda _loop, context: self._fault(context))
        self.loop.run_until_complete(self._start())

    def _fault(self, context: dict[str, Any]) -> None:
        # gRPC has one poller in a process: any loop may handle the last events of a loop that another test has closed.
        closed = "loop is closed" in str(context.get("exception"))
        if not (closed and "PollerCompletionQueue" in context["message"]):
            self.faults.append(repr(context))

    async def _start(self) -> None:
        folder = Path(self._folder.name) / "data"
        config = MasterConfig(listen="127.0.0.1:0", data_dir=folder, queue_tasks_max=5000, submit_tasks_max=1000)
        self.master = Master(config, SqliteJournal(folder, size_max_bytes=1 << 30), Clock())
        server = self.master._server
        register = server.add_registered_method_handlers

        def collect(service: str, handlers: dict[str, Any]) -> None:
            self._handlers |= {f"{service.rpartition('.')[2]}/{name}": each for name, each in handlers.items()}
            register(service, handlers)

        server.add_registered_method_handlers = collect
        await self.master.start()

    def close(self) -> None:
        self.loop.run_until_complete(self.master.stop())
        self.loop.close()
        self._folder.cleanup()

    def send(self, name: str, data: bytes) -> None:
        """Make one call. Crash: it showed a fault of the master."""
        code, details = self.loop.run_until_complete(self._call(name, data))
        core = self.master.driver.core
        if code in BLAMES_THE_MASTER:
            raise Crash(f"{code.name}: {details}")
        if self.faults:
            raise Crash(f"an exception outside of any call: {self.faults.pop()}")
        if self.master.fatal is not None:
            raise Crash(f"the master would have ended: {self.master.fatal}")
        if core.ledger.unsettled > TASKS_MAX:
            self.tidy()

    async def _call(self, name: str, data: bytes, *, to_its_end: bool = False) -> tuple[grpc.StatusCode, str]:
        """The status and its details. A call that may wait is cancelled after PATIENCE_S, unless `to_its_end`."""
        handler, method = self._handlers[name], METHODS[name]
        frames = unpack(data) if method.client_streaming else [data]
        context = Context(frames, GetMessageClass(method.output_type), self.ids)
        waits = name in MAY_WAIT and not to_its_end
        with contextlib.suppress(grpc.aio.AbortError, asyncio.CancelledError, *([TimeoutError] if waits else [])):
            async with asyncio.timeout(PATIENCE_S if waits else CALL_TIMEOUT_S):
                answer = await (handler.stream_stream or handler.stream_unary)(None, context)
                if answer is not None:
                    answer.SerializeToString()
                    self.ids.extend(ids_in(answer))
        if context.status is grpc.StatusCode.OK:
            await asyncio.sleep(0)
        return context.status, context.details

    def tidy(self) -> None:
        """Cancels every task and checks that the master keeps no state of them."""
        self.loop.run_until_complete(self._tidy())

    async def _tidy(self) -> None:
        driver = self.master.driver
        core = driver.core
        driver.handle(ev.Cancel([t for t in core.ledger.tasks.values() if t.outcome is None]))
        await driver.write_buffer.flush_and_wait()
        await asyncio.sleep(0)
        left = {
            "unsettled": core.ledger.unsettled,
            "bytes": core.ledger.unsettled_bytes,
            "leased": core.ledger.leased,
            "uncommitted": core.ledger.uncommitted_bytes,
            "resource classes": len(core.ledger.classes.by_key),
            "backlogs": len(core.ledger.classes.backlogs),
            "queued": sum(q.queued + q.leased + q.queued_bytes + q.leased_bytes for q in core.ledger.queues.values()),
            "streams": len(driver._streams),
            "sessions": len(driver.workers),
            "waiters": len(driver._waiters),
            "durable tasks": sum(t.spec.durable for t in core.ledger.tasks.values()),
        }
        if any(left.values()):
            raise Crash(f"state is left of settled tasks: {left}")
        if self.faults:
            raise Crash(f"an exception outside of any call: {self.faults.pop()}")

    def serves(self) -> None:
        """Checks that the master still serves: its methods answer, a task gets a lease on a new worker, and the outcome
        of its cancellation is in the journal.
        """
        self.tidy()
        self.loop.run_until_complete(self._serve_one())

    async def _serve_one(self) -> None:
        driver = self.master.driver
        for request, name in (
            (admin_service_pb2.ResumeQueueRequest(queue="served"), "AdminService/ResumeQueue"),
            (admin_service_pb2.SetStrategyRequest(strategy="auto"), "AdminService/SetStrategy"),
            (admin_service_pb2.UncordonWorkerRequest(worker_id="good"), "AdminService/UncordonWorker"),
            (admin_service_pb2.ListWorkersRequest(page_size=1000), "AdminService/ListWorkers"),
            (admin_service_pb2.ListQueuesRequest(page_size=1000), "AdminService/ListQueues"),
            (task_service_pb2.ListRequest(page_size=1000), "TaskService/List"),
            (task_service_pb2.CountRequest(), "TaskService/Count"),
        ):
            code, details = await self._call(name, request.SerializeToString())
            if code not in (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND):
                raise Crash(f"{name} is no longer served: {code} {details}")
        hello = worker_service_pb2.Hello(worker_id="good", slots=1, window_tasks=4, window_bytes=1 << 20)
        hello.capabilities.add(kind="good.kind")
        session = 1 << 40
        outbox = driver.workers.open(session, "p")
        driver.handle(ev.Hello(session, wire_workers.worker_info(hello), []))
        submit = task_service_pb2.SubmitRequest()
        submit.batches.add(spec=task_pb2.TaskSpec(kind="good.kind", queue="served")).inputs.add(payload=b"in")
        code, details = await self._call("TaskService/Submit", submit.SerializeToString())
        leased = [lease.task for w in driver.core.fleet.workers.values() for lease in w.leases.values()]
        if code is not grpc.StatusCode.OK or [t.payload for t in leased] != [b"in"]:
            raise Crash(f"a task is no longer dispatched: {code} {details} {leased}")
        while not any(ids_in(worker_service_pb2.SessionResponse.FromString(_bytes_of(await outbox.next())))):
            await asyncio.sleep(0)
        driver.workers.close(session)
        driver.handle(ev.Cancel(leased))
        await driver.write_buffer.flush_and_wait()
        stored = driver.journal.get_outcome(leased[0].task_id)
        if stored is None or stored.state != task_pb2.OUTCOME_STATE_CANCELLED:
            raise Crash(f"an outcome is no longer kept: {stored}")


def _bytes_of(frame: Any) -> bytes:
    """The serialized frame of an outbox."""
    return bytes(frame.SerializeToString() if isinstance(frame, Message) else frame.serialize())


def frames_for(method: MethodDescriptor, local: LocalMaster, maker: Maker) -> bytes:
    """A random input for a method: a message, or several frames for a stream."""
    maker.ids.extend(local.ids)
    rng = maker.rng
    if not method.client_streaming:
        return maker.wire(method.input_type)
    frames = [maker.wire(method.input_type) for _ in range(rng.choice((1, 1, 2, 4)))]
    if method.name == "Session" and rng.random() < 0.8:
        hello = maker.message(
            worker_service_pb2.Hello.DESCRIPTOR, protocol_version=PROTOCOL_VERSION, worker_id=rng.choice("abc")
        )
        hello.capabilities.add(kind="echo")
        frames.insert(0, worker_service_pb2.SessionRequest(hello=hello).SerializeToString())
    elif method.name == "Run" and rng.random() < 0.8:
        frame = task_service_pb2.RunRequest()
        frame.ParseFromString(maker.message(task_service_pb2.RunRequest.DESCRIPTOR).SerializeToString())
        for number, given in enumerate(i for b in frame.batches for i in b.inputs):
            given.request_id = given.request_id or f"r{number}"
        frames.insert(0, frame.SerializeToString())
    return pack(frames)


def targets(local: LocalMaster) -> list[Target]:
    def target(name: str, method: MethodDescriptor) -> Target:
        return Target(
            name=f"master {name}",
            make=lambda maker: frames_for(method, local, maker),
            feed=lambda data: local.send(name, data),
            check=local.serves,
        )

    return [target(name, method) for name, method in METHODS.items()]
