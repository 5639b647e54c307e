"""Resource exhaustion of a real master: its memory stays bounded, and another client is served meanwhile.

Each abuse is a function that uses `size` of a resource. CI runs small sizes; `python -m tests.hostile abuse` runs large
ones and prints their cost. Memory is the master's proportional share (PSS). Limits are generous: the tests assert that
memory is bounded.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import multigpu
from multigpu.v1 import task_pb2, task_service_pb2

from tests.fleet import Fleet, until

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


@dataclass(frozen=True, slots=True)
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
        answer, before, neighbour.peak_bytes, after, time.monotonic() - began_s,
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


def cancel_queue(fleet: Fleet, queue: str) -> None:
    states = [task_pb2.TASK_STATE_QUEUED, task_pb2.TASK_STATE_LEASED]
    list_request = task_service_pb2.ListRequest(
        filter=task_service_pb2.TaskFilter(queue=queue, states=states), page_size=1000
    )
    while tasks := fleet.tasks.List(list_request, timeout=60).tasks:
        fleet.tasks.Cancel(task_service_pb2.CancelRequest(task_ids=[t.task_id for t in tasks]), timeout=60)


@contextlib.contextmanager
def abused(folder: Path) -> Iterator[Fleet]:
    """A master with small limits and few file descriptors, and one worker."""
    flags = ["--queue-bytes-max", "128MiB", "--stream-bytes-max", "16MiB", "--ephemeral-bytes-max", "32MiB"]
    flags += ["--queue-tasks-max", "100000"]
    with Fleet(folder, workers=1, master_flags=flags, prefix=("prlimit", f"--nofile={DESCRIPTORS}")) as fleet:
        yield fleet
