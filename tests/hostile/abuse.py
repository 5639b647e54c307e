"""Resource exhaustion of a real master: its memory stays bounded, and another client is served meanwhile.

Each abuse is a function that uses `size` of a resource. CI runs small sizes; `python -m tests.hostile abuse` runs large
ones and prints their cost. Memory is the master's proportional share (PSS). Limits are generous: the tests assert that
memory is bounded.
"""

import contextlib
import itertools
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import click
import grpc
import multigpu
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2
from multigpu.v1 import worker_service_pb2 as worker_pb
from multigpu_master.rpc.worker_service import PROTOCOL_VERSION

from tests.fleet import Fleet, until
from tests.integration.streams import Feed

MIB = 1 << 20
# File descriptors of the master and the worker. Neither may end when none is left.
DESCRIPTORS = 1024
# Limit of a task of the other client, on a busy host.
PATIENCE_S = 30.0
OPTIONS = [
    ("grpc.max_send_message_length", 64 * MIB),
    ("grpc.max_receive_message_length", 64 * MIB),
    ("grpc.use_local_subchannel_pool", 1),
]
RESOURCE_EXHAUSTED, INVALID_ARGUMENT = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Abuse:
    """`memory_max_bytes`: how much the master may have grown afterwards."""

    name: str
    spend: Callable[[Fleet, int], str]
    short: int
    long: int
    memory_max_bytes: int = 150 * MIB


@dataclass(slots=True)
class Cost:
    """The cost of an abuse."""

    name: str
    size: int
    answer: str
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    seconds: float
    served: int
    slowest_s: float


def pss_bytes(pid: int) -> int:
    """The process's proportional share of memory."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss")


@dataclass(slots=True)
class Neighbour:
    """Another client that runs one task after the other and samples the master's memory."""

    fleet: Fleet
    times_s: list[float] = field(default_factory=list)
    failure: str = ""
    peak_bytes: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._live)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(2 * PATIENCE_S)

    def _live(self) -> None:
        try:
            with multigpu.Client(self.fleet.address) as client:
                for n in itertools.count():
                    began_s = time.monotonic()
                    assert client.run("echo", b"%d" % n, priority=1) == b"%d" % n
                    self.times_s.append(time.monotonic() - began_s)
                    self.peak_bytes = max(self.peak_bytes, pss_bytes(self.fleet.master.pid))
                    if self._stop.wait(0.05):
                        return
        except BaseException as error:
            self.failure = repr(error)


def suffer(fleet: Fleet, abuse: Abuse, size: int) -> Cost:
    """Runs one abuse. AssertionError: the master or its other client suffered."""
    before = pss_bytes(fleet.master.pid)
    began_s = time.monotonic()
    with Neighbour(fleet) as neighbour:
        until(lambda: neighbour.times_s or neighbour.failure)
        answer = abuse.spend(fleet, size)
        count = len(neighbour.times_s)
        until(lambda: len(neighbour.times_s) > count + 1 or neighbour.failure, PATIENCE_S, "the other client's task")
    after = pss_bytes(fleet.master.pid)
    cost = Cost(
        abuse.name, size, answer, before, neighbour.peak_bytes, after, time.monotonic() - began_s,
        len(neighbour.times_s), max(neighbour.times_s, default=PATIENCE_S),
    )  # fmt: skip
    assert fleet.master.alive, fleet.master.log()[-3000:]
    assert not neighbour.failure, neighbour.failure
    assert cost.slowest_s < PATIENCE_S, cost
    assert after - before < abuse.memory_max_bytes, cost
    assert not [line for line in fleet.faults() if '"logger": "grpc.' not in line], fleet.faults()[0]
    return cost


@contextlib.contextmanager
def channel_to(fleet: Fleet) -> Iterator[grpc.Channel]:
    """A new connection."""
    with grpc.insecure_channel(fleet.address, options=OPTIONS) as channel:
        yield channel


def ended(call: Callable[[], object]) -> str:
    """The status that a call ends with."""
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def run_stub(channel: grpc.Channel) -> Any:
    return channel.stream_stream("/multigpu.v1.TaskService/Run")


def frame(count: int, *, prefix: str, payload: bytes = b"x", **spec: Any) -> bytes:
    """A Run frame with this many echo tasks."""
    inputs = [task_pb2.TaskInput(request_id=f"{prefix}{n}", payload=payload) for n in range(count)]
    batch = task_pb2.TaskBatch(spec=task_pb2.TaskSpec(kind="echo", **spec), inputs=inputs)
    data: bytes = task_service_pb2.RunRequest(batches=[batch]).SerializeToString()
    return data


def unique() -> str:
    return os.urandom(5).hex()


# --- connections and streams -----------------------------------------------------------------------------------------


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


# --- messages --------------------------------------------------------------------------------------------------------


def large_metadata(fleet: Fleet, size: int) -> str:
    """Metadata beyond the limit of a header."""
    with channel_to(fleet) as channel:
        stats = channel.unary_unary("/multigpu.v1.AdminService/GetStats")
        codes = {ended(lambda: stats(b"", metadata=[("x-much", "x" * 60_000)], timeout=20)) for _ in range(size)}
    assert codes <= {"RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL"}, codes
    return " ".join(sorted(codes))


def large_messages(fleet: Fleet, size: int) -> str:
    """Messages beyond the size limit, and names of a megabyte."""
    codes = set()
    with channel_to(fleet) as channel:
        submit = channel.unary_unary("/multigpu.v1.TaskService/Submit")
        get = channel.unary_unary("/multigpu.v1.TaskService/Get")
        cordon = channel.unary_unary("/multigpu.v1.AdminService/CordonWorker")
        long_name = task_service_pb2.GetRequest(request_id="x" * MIB).SerializeToString()
        long_worker = admin_pb.CordonWorkerRequest(worker_id="\0" * MIB).SerializeToString()
        for _ in range(size):
            with grpc.insecure_channel(fleet.address, options=[("grpc.max_send_message_length", -1)]) as other:
                big = other.unary_unary("/multigpu.v1.TaskService/Submit")
                codes.add("larger: " + ended(lambda big=big: big(bytes(65 * MIB), timeout=60)))  # type: ignore[misc]
            codes.add("1 MiB of request_id: " + ended(lambda: get(long_name, timeout=20)))
            codes.add("1 MiB of worker_id: " + ended(lambda: cordon(long_worker, timeout=20)))
            request = task_service_pb2.SubmitRequest()
            request.batches.add(spec=task_pb2.TaskSpec(kind="echo")).inputs.add(request_id="x" * MIB)
            answer = task_service_pb2.SubmitResponse.FromString(submit(request.SerializeToString(), timeout=20))
            assert answer.results[0].rejection.code == INVALID_ARGUMENT.value[0]
    assert codes == {
        "larger: RESOURCE_EXHAUSTED", "1 MiB of request_id: NOT_FOUND", "1 MiB of worker_id: NOT_FOUND",
    }, codes  # fmt: skip
    return "rejected"


def many_in_one_frame(fleet: Fleet, size: int) -> str:
    """As many invalid tasks as fit into one frame of a Run stream."""
    data = frame(size, prefix="", payload=b"", priority=5, queue="many")
    with channel_to(fleet) as channel:
        call = run_stub(channel)(Feed(data), timeout=120)
        code = ended(lambda: next(call))
        call.cancel()
    _cancel_queue(fleet, "many")
    return code


def empty_batches(fleet: Fleet, size: int) -> str:
    """Many empty Submit calls."""
    data = b"\x0a\x00" * size
    with channel_to(fleet) as channel:
        return ended(lambda: channel.unary_unary("/multigpu.v1.TaskService/Submit")(data, timeout=120))


def small_fields(fleet: Fleet, size: int) -> str:
    """Messages of `size` MiB in fields of two bytes: a frame of a Run stream and one of a worker's session."""
    frame_of_run = frame(1, prefix="", payload=b"") + b"\x0a\x00" * (size * MIB // 2)
    with channel_to(fleet) as channel:
        call = run_stub(channel)(Feed(frame_of_run), timeout=120)
        codes = [ended(lambda: next(call))]
        call.cancel()
        hello = worker_pb.Hello(protocol_version=PROTOCOL_VERSION, worker_id="small", slots=1, window_tasks=5)
        hello.capabilities.add(kind="small")
        first = worker_pb.SessionRequest(hello=hello).SerializeToString()
        for reports in (b"\x1a\x00" * (size * MIB // 2), b"\x1a\x00" * (MIB // 2)):
            session = channel.stream_stream("/multigpu.v1.WorkerService/Session")(iter([first, reports]), timeout=120)
            codes.append(ended(lambda session=session: list(session)))  # type: ignore[misc]
    assert codes == ["INVALID_ARGUMENT"] * 3, codes
    return "rejected"


def own_specs(fleet: Fleet, size: int) -> str:
    """Concurrent Submit calls, each with thousands of batches with different specs and no task."""
    request = task_service_pb2.SubmitRequest()
    for n in range(10_000):
        request.batches.add(spec=task_pb2.TaskSpec(kind="echo", parameters={"n": str(n)}))
    with channel_to(fleet) as channel:
        submit = channel.unary_unary("/multigpu.v1.TaskService/Submit")
        calls = [submit.future(request.SerializeToString(), timeout=120) for _ in range(size)]
        return " ".join(sorted({ended(call.result) for call in calls}))


def unknown_cancels(fleet: Fleet, size: int) -> str:
    """Cancels of unknown tasks, by id, by request_id and on a Run stream."""
    with channel_to(fleet) as channel:
        cancel = channel.unary_unary("/multigpu.v1.TaskService/Cancel")
        ids = task_service_pb2.CancelRequest(task_ids=range(1 << 40, (1 << 40) + size)).SerializeToString()
        names = task_service_pb2.CancelRequest(request_ids=["n"] * size).SerializeToString()
        codes = [ended(lambda: cancel(ids, timeout=120)), ended(lambda: cancel(names, timeout=120))]
        run = task_service_pb2.RunRequest(cancel_request_ids=["n"] * size).SerializeToString()
        call = run_stub(channel)(Feed(run), timeout=120)
        codes.append(ended(lambda: next(call)))
        call.cancel()
    return " ".join(codes)


def huge_pages(fleet: Fleet, size: int) -> str:
    """Pages beyond the limit."""
    codes = set()
    for n in range(size):
        for page in (2**31 - 1, -(2**31), 1001 + n):
            request = task_service_pb2.ListRequest(page_size=page)
            codes.add(ended(lambda request=request: fleet.tasks.List(request, timeout=20)))  # type: ignore[misc]
    assert codes == {"INVALID_ARGUMENT"}, codes
    return "INVALID_ARGUMENT"


# --- endless submits and names
# -----------------------------------------------------------------------------------------------------


def endless_submits(fleet: Fleet, size: int) -> str:
    """A client that submits to a paused queue without end, until it is rejected. `size` in MiB."""
    fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="endless"), timeout=20)
    rejected = taken = 0
    payload = bytes(MIB)
    spec = task_pb2.TaskSpec(kind="echo", queue="endless", priority=5, durability=task_pb2.DURABILITY_EPHEMERAL)
    batch = task_pb2.TaskBatch(spec=spec, inputs=[task_pb2.TaskInput(payload=payload)] * 16)
    request = task_service_pb2.SubmitRequest(batches=[batch])
    with channel_to(fleet) as channel:
        submit = channel.unary_unary("/multigpu.v1.TaskService/Submit")
        data = request.SerializeToString()
        for _ in range(0, size, 16):
            answer = task_service_pb2.SubmitResponse.FromString(submit(data, timeout=60))
            rejected += sum(r.rejection.code == RESOURCE_EXHAUSTED.value[0] for r in answer.results)
            taken += sum(r.HasField("task_id") for r in answer.results)
    assert rejected, "nothing was rejected"
    _cancel_queue(fleet, "endless")
    return f"{taken} taken, {rejected} RESOURCE_EXHAUSTED"


def slow_reader(fleet: Fleet, size: int) -> str:
    """Clients that submit on Run streams and never read an outcome. `size` in MiB of outcomes, 8 MiB a stream."""
    name = unique()
    with channel_to(fleet) as channel:
        calls = []
        for n in range(size // 8):
            data = frame(128, prefix=f"{name}-{n}-", payload=bytes(64 << 10), durability=task_pb2.DURABILITY_EPHEMERAL)
            calls.append(run_stub(channel)(Feed(data), timeout=120))
        time.sleep(2 + size / 100)
        for call in calls:
            call.cancel()
    return "cancelled"


def distinct_names(fleet: Fleet, size: int) -> str:
    """A new kind, model, queue and label for each task: some are rejected, and no name is kept."""
    with channel_to(fleet) as channel:
        submit = channel.unary_unary("/multigpu.v1.TaskService/Submit")
        for at in range(0, size, 500):
            request = task_service_pb2.SubmitRequest()
            for n in range(at, at + 500):
                ephemeral = task_pb2.DURABILITY_EPHEMERAL
                kind, queue = ("echo", f"q{n}") if n % 2 else (f"k{n}", "")
                spec = task_pb2.TaskSpec(kind=kind, queue=queue, model=f"m{n}", durability=ephemeral, priority=5)
                spec.result_ttl.FromSeconds(1)
                request.batches.add(spec=spec).inputs.add(payload=b"x", partition_key=f"p{n}")
            submit(request.SerializeToString(), timeout=120)
    until(lambda: fleet.stats().queued == 0, 120)
    return "done"


def own_requirements(fleet: Fleet, size: int) -> str:
    """Tasks that each require a different amount of device memory, more than is free, with large parameters."""
    worker = next(w for w in fleet.admin.ListWorkers(admin_pb.ListWorkersRequest(), timeout=20).workers if w.session_id)
    queue, codes = unique(), set[int]()
    with channel_to(fleet) as channel:
        submit = channel.unary_unary("/multigpu.v1.TaskService/Submit")
        for at in range(0, size, 100):
            request = task_service_pb2.SubmitRequest()
            for n in range(at, at + 100):
                spec = task_pb2.TaskSpec(
                    kind="echo", queue=queue, parameters={"n": str(n), "pad": "x" * (60 << 10)}, wait_for_worker=True,
                    required_device_memory_bytes=worker.device.memory_total_bytes - n,
                )  # fmt: skip
                request.batches.add(spec=spec).inputs.add(payload=b"x")
            answer = task_service_pb2.SubmitResponse.FromString(submit(request.SerializeToString(), timeout=120))
            codes |= {result.rejection.code for result in answer.results}
    _cancel_queue(fleet, queue)
    return " ".join(map(str, sorted(codes)))


def settled_again(fleet: Fleet, size: int) -> str:
    """Clients that repeat request_ids of settled tasks with large results, and read nothing."""
    name, count = unique(), 32
    with channel_to(fleet) as channel:
        submit = channel.unary_unary("/multigpu.v1.TaskService/Submit")
        request = task_service_pb2.SubmitRequest()
        batch = request.batches.add(spec=task_pb2.TaskSpec(kind="echo", queue=name))
        for n in range(count):
            batch.inputs.add(payload=bytes(MIB), request_id=f"{name}-{n}")
        submit(request.SerializeToString(), timeout=120)
        counted = task_service_pb2.CountRequest(filter=task_service_pb2.TaskFilter(queue=name))
        until(lambda: fleet.tasks.Count(counted, timeout=20).succeeded == count, 120)
        again = task_service_pb2.RunRequest(batches=request.batches).SerializeToString()
        calls = [run_stub(channel)(Feed(again), timeout=120) for _ in range(size)]
        time.sleep(2.0)
        for call in calls:
            call.cancel()
    return "cancelled"


def distinct_workers(fleet: Fleet, size: int) -> str:
    """A worker that joins with a new id each time."""
    name = unique()
    with channel_to(fleet) as channel:
        session = channel.stream_stream("/multigpu.v1.WorkerService/Session")
        for n in range(size):
            hello = worker_pb.Hello(protocol_version=PROTOCOL_VERSION, worker_id=f"{name}-{n}", slots=1)
            hello.capabilities.add(kind=f"kind-{n}")
            call = session(iter([worker_pb.SessionRequest(hello=hello).SerializeToString()]), timeout=20)
            next(call)
            call.cancel()
    return "come and gone"


def distinct_admin_queues(fleet: Fleet, size: int) -> str:
    """A script that configures a new queue each time it runs."""
    codes = set()
    for n in range(size):
        request = admin_pb.PauseQueueRequest(queue=f"made-up-{n}")
        codes.add(ended(lambda request=request: fleet.admin.PauseQueue(request, timeout=20)))  # type: ignore[misc]
    for n in range(size):
        again = admin_pb.ResumeQueueRequest(queue=f"made-up-{n}")
        codes.add(ended(lambda again=again: fleet.admin.ResumeQueue(again, timeout=20)))  # type: ignore[misc]
    return " ".join(sorted(codes))


def _cancel_queue(fleet: Fleet, queue: str) -> None:
    states = [task_pb2.TASK_STATE_QUEUED, task_pb2.TASK_STATE_LEASED]
    list_request = task_service_pb2.ListRequest(
        filter=task_service_pb2.TaskFilter(queue=queue, states=states), page_size=1000
    )
    while tasks := fleet.tasks.List(list_request, timeout=60).tasks:
        fleet.tasks.Cancel(task_service_pb2.CancelRequest(task_ids=[t.task_id for t in tasks]), timeout=60)


ABUSES = [
    Abuse(name="idle connections", spend=idle_connections, short=1_500, long=5_000),
    Abuse(name="streams opened and dropped", spend=dropped_streams, short=400, long=10_000),
    Abuse(name="watches that nobody reads", spend=open_watches, short=50, long=1_000, memory_max_bytes=1200 * MIB),
    Abuse(name="workers that never read", spend=silent_workers, short=3, long=50),
    Abuse(name="large metadata", spend=large_metadata, short=10, long=100),
    Abuse(name="large messages and names", spend=large_messages, short=1, long=20, memory_max_bytes=300 * MIB),
    Abuse(name="tasks in one frame", spend=many_in_one_frame, short=20_000, long=1_000_000, memory_max_bytes=600 * MIB),
    Abuse(name="fields of two bytes, MiB", spend=small_fields, short=8, long=60, memory_max_bytes=500 * MIB),
    Abuse(name="specs without tasks", spend=own_specs, short=2, long=20),
    Abuse(name="empty batches", spend=empty_batches, short=100_000, long=5_000_000, memory_max_bytes=1200 * MIB),
    Abuse(
        name="cancels of unknown tasks", spend=unknown_cancels, short=50_000, long=2_000_000, memory_max_bytes=600 * MIB
    ),
    Abuse(name="huge pages", spend=huge_pages, short=5, long=1_000),
    Abuse(name="submits without end, MiB", spend=endless_submits, short=160, long=1_000, memory_max_bytes=300 * MIB),
    # Each stream has a limit; all streams together have none.
    Abuse(name="outcomes that nobody reads, MiB", spend=slow_reader, short=64, long=400, memory_max_bytes=1200 * MIB),
    Abuse(name="distinct names", spend=distinct_names, short=2_000, long=100_000),
    Abuse(name="own requirements", spend=own_requirements, short=2_400, long=10_000, memory_max_bytes=600 * MIB),
    Abuse(name="settled tasks again", spend=settled_again, short=8, long=16, memory_max_bytes=1200 * MIB),
    Abuse(name="distinct workers", spend=distinct_workers, short=100, long=5_000),
    Abuse(name="distinct queues by an operator", spend=distinct_admin_queues, short=100, long=20_000),
]


@contextlib.contextmanager
def abused(folder: Path) -> Iterator[Fleet]:
    """A master with small limits and few file descriptors, and one worker."""
    flags = ["--queue-bytes-max", "128MiB", "--stream-bytes-max", "16MiB", "--ephemeral-bytes-max", "32MiB"]
    flags += ["--queue-tasks-max", "100000"]
    with Fleet(folder, workers=1, master_flags=flags, prefix=("prlimit", f"--nofile={DESCRIPTORS}")) as fleet:
        yield fleet


@click.command(name="abuse")
@click.option("--only", default="", help="The abuses whose names contain this.")
@click.option("--short", is_flag=True, help="As in CI.")
def command(only: str, *, short: bool) -> None:
    """Exhausts the master's memory, time, streams and names. Exit code 1: it suffered."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="multigpu-abuse-") as folder, abused(Path(folder)) as fleet:
        print(
            f"{'abuse':34}{'size':>10}{'PSS MiB: before':>17}{'peak':>7}{'after':>7}{'s':>7}{'slowest s':>11}  answer"
        )
        for abuse in ABUSES:
            if only not in abuse.name:
                continue
            size = abuse.short if short else abuse.long
            try:
                cost = suffer(fleet, abuse, size)
            except (AssertionError, grpc.RpcError) as error:
                failed += 1
                print(f"{abuse.name:34}{size:>10,} FAILED: {str(error)[:700]}", flush=True)
                continue
            memory = [b // MIB for b in (cost.before_bytes, cost.peak_bytes, cost.after_bytes)]
            print(
                f"{abuse.name:34}{size:>10,}{memory[0]:>17}{memory[1]:>7}{memory[2]:>7}{cost.seconds:>7.1f}"
                f"{cost.slowest_s:>11.2f}  {cost.answer}",
                flush=True,
            )
    sys.exit(1 if failed else 0)
