"""Connections, streams and workers that are opened and not read."""

import contextlib
import socket
import time

from multigpu.v1 import task_pb2, task_service_pb2
from multigpu.v1 import worker_service_pb2 as worker_pb
from multigpu_master.rpc.worker_service import PROTOCOL_VERSION

from tests.fleet import Fleet, until
from tests.hostile.abuses.base import MIB, channel_to, frame, run_stub, unique
from tests.integration.streams import Feed


def idle_connections(fleet: Fleet, size: int) -> str:
    """TCP connections that send HTTP/2's preface and nothing else."""
    host, _, port = fleet.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(size):
            sock = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            with contextlib.suppress(ConnectionError):  # those beyond the limit are closed as they come
                sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        (task_id,) = fleet.submit("echo", b"among many")
        (large,) = fleet.submit("echo", bytes(MIB), durability=task_pb2.DURABILITY_DURABLE)
        fleet.outcome(large)
        assert fleet.outcome(task_id).result == b"among many"
    return f"{size} held"


def dropped_streams(fleet: Fleet, size: int) -> str:
    """Run streams that are opened, used and cancelled."""
    name = unique()
    with channel_to(fleet) as channel:
        for at in range(0, size, 100):
            calls = [run_stub(channel)(Feed(frame(1, prefix=f"{name}-{at}-{n}-")), timeout=60) for n in range(100)]
            for call in calls[::2]:
                next(call)
            for call in calls:
                call.cancel()
    return "cancelled"


def open_watches(fleet: Fleet, size: int) -> str:
    """Unread Watch streams over large outcomes."""
    fleet.submit("echo", *[bytes(64 << 10)] * 64, durability=task_pb2.DURABILITY_DURABLE)
    with channel_to(fleet) as channel:
        watch = channel.unary_stream("/multigpu.v1.TaskService/Watch")
        calls = [watch(b"", timeout=300) for _ in range(size)]
        time.sleep(2 + size / 500)
        for call in calls:
            call.cancel()
    return "cancelled"


def silent_workers(fleet: Fleet, size: int) -> str:
    """Workers that join, accept leases and never read again."""
    capability = worker_pb.Capability(kind="nobody.reads")
    with channel_to(fleet) as channel:
        session = channel.stream_stream("/multigpu.v1.WorkerService/Session")
        calls = []
        for n in range(size):
            hello = worker_pb.Hello(
                protocol_version=PROTOCOL_VERSION, worker_id=f"deaf-{n}", capabilities=[capability], slots=8,
                window_tasks=1000, window_bytes=1 << 30,
            )  # fmt: skip
            calls.append(session(Feed(worker_pb.SessionRequest(hello=hello).SerializeToString()), timeout=300))
        until(lambda: len(fleet.list_workers()) > min(size, 90))
        ids = fleet.submit("nobody.reads", *[bytes(256 << 10)] * 100, priority=5, attempts_max=1)
        time.sleep(3)
        for call in calls:
            call.cancel()
        request = task_service_pb2.CancelRequest(task_ids=ids)
        fleet.tasks.Cancel(request, timeout=30)
    return "cancelled"
