"""The clients of a fleet on a failing disk: one submits, one watches; both record what the master acknowledged."""

import random
import threading
import time
from typing import Any

import grpc
from multigpu.v1 import task_pb2, task_service_pb2, task_service_pb2_grpc

KIND = "disk.unique"
OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
]
# Statuses of a call whose master was killed.
MASTER_DOWN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
RETRY_DELAY_MAX_S = 0.2
_LARGE_SHARE, _LARGE_BYTES = 0.03, 150_000


def payload_of(name: str) -> bytes:
    rng = random.Random(name)
    return rng.randbytes(_LARGE_BYTES if rng.random() < _LARGE_SHARE else rng.randrange(400))


class Client(threading.Thread):
    """A loop of calls that survives the master, and can be paused."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.findings: list[str] = []
        self._address = address
        self._running = threading.Event()
        self._running.set()
        self._paused = threading.Event()
        self._ending = False

    def run(self) -> None:
        while not self._ending:
            if not self._running.is_set():
                self._paused.set()
                self._running.wait()
                self._paused.clear()
                continue
            # A new channel per master: it discards late responses of the killed one.
            with grpc.insecure_channel(self._address, options=OPTIONS) as channel:
                untyped: Any = task_service_pb2_grpc
                try:
                    self.loop(untyped.TaskServiceStub(channel))
                except grpc.RpcError as error:
                    status: Any = error
                    if status.code() not in MASTER_DOWN:
                        self.findings.append(f"{self.name}: {status.code()} {status.details()}")
                    time.sleep(0.02)

    def loop(self, stub: Any) -> None:
        raise NotImplementedError

    @property
    def running(self) -> bool:
        return self._running.is_set() and not self._ending

    def pause(self) -> None:
        """Returns when no call is in progress."""
        self._running.clear()
        assert self._paused.wait(120), f"{self.name} does not pause"

    def resume(self) -> None:
        self._paused.clear()
        self._running.set()

    def end(self) -> None:
        self._ending = True
        self._running.set()
        self.join(30)
        assert not self.is_alive(), f"{self.name} did not end"


class Submitter(Client):
    """Submits tasks with request_ids, and repeats each until it is acknowledged."""

    def __init__(self, address: str, prefix: str, seed: int) -> None:
        super().__init__(address, "submitter")
        self.acknowledged: dict[str, int] = {}
        self.rejected = 0  # with a retry delay, because the disk was full
        self.draining = False  # submit no new tasks, only unacknowledged ones
        self._prefix = prefix
        self._rng = random.Random(seed)
        self._unacknowledged: list[str] = []
        self._next = 0

    @property
    def has_unacknowledged(self) -> bool:
        return bool(self._unacknowledged)

    def loop(self, stub: Any) -> None:
        while self.running:
            if not self._unacknowledged and not self.draining:
                count = self._rng.randint(1, 20)
                self._unacknowledged = [f"{self._prefix}-{self._next + i}" for i in range(count)]
                self._next += count
            # Resubmit old ids; the task_id must not change.
            repeated = self._rng.sample(sorted(self.acknowledged), 3) if len(self.acknowledged) > 100 else []
            self._submit(stub, [*self._unacknowledged, *repeated])
            time.sleep(self._rng.random() * 0.06)

    def _submit(self, stub: Any, names: list[str]) -> None:
        if not names:
            return
        inputs = [task_pb2.TaskInput(request_id=n, payload=payload_of(n)) for n in names]
        batch = task_pb2.TaskBatch(spec=task_pb2.TaskSpec(kind=KIND, attempts_max=100), inputs=inputs)
        answer = stub.Submit(task_service_pb2.SubmitRequest(batches=[batch]), timeout=10)
        for name, result in zip(names, answer.results, strict=True):
            if result.HasField("task_id"):
                if self.acknowledged.setdefault(name, result.task_id) != result.task_id:
                    self.findings.append(f"{name} was task {self.acknowledged[name]} and is {result.task_id}")
            elif result.rejection.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]:
                self.rejected += 1
                if not result.rejection.HasField("retry_delay"):
                    self.findings.append(f"{name} was rejected without a delay: {result.rejection.message}")
            elif result.rejection.code != grpc.StatusCode.UNAVAILABLE.value[0]:
                self.findings.append(f"{name} was rejected: {result.rejection}")
        if any(result.HasField("rejection") for result in answer.results):
            time.sleep(self._rng.random() * RETRY_DELAY_MAX_S)
        self._unacknowledged = [name for name in self._unacknowledged if name not in self.acknowledged]


class Watcher(Client):
    """Follows all outcomes by one cursor across masters: each comes once, and delivered outcomes never change."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "watcher")
        self.results: dict[int, bytes] = {}
        self.names: dict[int, str] = {}
        self._cursor = ""

    def loop(self, stub: Any) -> None:
        call = stub.Watch(task_service_pb2.WatchRequest(cursor=self._cursor), timeout=1.0)
        for frame in call:
            for outcome in frame.outcomes:
                self._record(outcome)
            self._cursor = frame.cursor
            if not self.running:
                call.cancel()
                return

    def _record(self, outcome: task_pb2.Outcome) -> None:
        task_id, name = outcome.task_id, outcome.request_id
        if task_id in self.results:
            self.findings.append(f"task {task_id}: its outcome came twice")
        if outcome.state != task_pb2.OUTCOME_STATE_SUCCEEDED:
            self.findings.append(f"task {task_id} ended {outcome.state}: {outcome.error.message}")
        elif outcome.result.partition(b":")[2] != payload_of(name):
            self.findings.append(f"task {task_id} of {name} has a wrong result of {len(outcome.result)} bytes")
        self.results[task_id] = outcome.result
        self.names[task_id] = name
