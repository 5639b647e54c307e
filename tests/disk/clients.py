"""The clients of a fleet on a disk that fails: one submits, one watches, and both write down what they were told."""

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
# How a call may end when the master does.
GONE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
RETRY_DELAY_MAX_S = 0.2
_LARGE_SHARE, _LARGE_BYTES = 0.03, 150_000


def payload_of(name: str) -> bytes:
    dice = random.Random(name)
    return dice.randbytes(_LARGE_BYTES if dice.random() < _LARGE_SHARE else dice.randrange(400))


class Client(threading.Thread):
    """A loop of calls that survives the master, and can be told to hold still."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.findings: list[str] = []
        self._address = address
        self._go = threading.Event()
        self._go.set()
        self._still = threading.Event()
        self._ending = False

    def run(self) -> None:
        while not self._ending:
            if not self._go.is_set():
                self._still.set()
                self._go.wait()
                self._still.clear()
                continue
            # A channel for each master: what the last one still sent must not be heard once its disk is looked at.
            with grpc.insecure_channel(self._address, options=OPTIONS) as channel:
                untyped: Any = task_service_pb2_grpc
                try:
                    self.calls(untyped.TaskServiceStub(channel))
                except grpc.RpcError as error:
                    status: Any = error
                    if status.code() not in GONE:
                        self.findings.append(f"{self.name}: {status.code()} {status.details()}")
                    time.sleep(0.02)

    def calls(self, stub: Any) -> None:
        raise NotImplementedError

    @property
    def going(self) -> bool:
        return self._go.is_set() and not self._ending

    def hold_still(self) -> None:
        """Returns when no call is under way."""
        self._go.clear()
        assert self._still.wait(30), f"{self.name} does not hold still"

    def go_on(self) -> None:
        self._still.clear()
        self._go.set()

    def end(self) -> None:
        self._ending = True
        self._go.set()
        self.join(30)
        assert not self.is_alive(), f"{self.name} did not end"


class Submitter(Client):
    """Submits tasks that have request_ids, each again until it is acknowledged."""

    def __init__(self, address: str, prefix: str, seed: int) -> None:
        super().__init__(address, "submitter")
        self.acknowledged: dict[str, int] = {}
        self.rejected = 0  # rejected with a delay because the disk was full
        self.enough = False  # only what is not acknowledged yet is still submitted
        self._prefix = prefix
        self._dice = random.Random(seed)
        self._owed: list[str] = []
        self._next = 0

    @property
    def owed(self) -> bool:
        return bool(self._owed)

    def calls(self, stub: Any) -> None:
        while self.going:
            if not self._owed and not self.enough:
                count = self._dice.randint(1, 20)
                self._owed = [f"{self._prefix}-{self._next + i}" for i in range(count)]
                self._next += count
            # What was acknowledged before is asked for again now and then: it must stay the task it was.
            again = self._dice.sample(sorted(self.acknowledged), 3) if len(self.acknowledged) > 100 else []
            self._submit(stub, [*self._owed, *again])
            time.sleep(self._dice.random() * 0.06)

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
            time.sleep(self._dice.random() * RETRY_DELAY_MAX_S)
        self._owed = [name for name in self._owed if name not in self.acknowledged]


class Watcher(Client):
    """Follows all outcomes by one cursor, which outlives the masters: each outcome once, and what came stays so."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "watcher")
        self.results: dict[int, bytes] = {}
        self.names: dict[int, str] = {}
        self._cursor = ""

    def calls(self, stub: Any) -> None:
        call = stub.Watch(task_service_pb2.WatchRequest(cursor=self._cursor), timeout=1.0)
        for frame in call:
            for outcome in frame.outcomes:
                self._note(outcome)
            self._cursor = frame.cursor
            if not self.going:
                call.cancel()
                return

    def _note(self, outcome: task_pb2.Outcome) -> None:
        task_id, name = outcome.task_id, outcome.request_id
        if task_id in self.results:
            self.findings.append(f"task {task_id}: its outcome came twice")
        if outcome.state != task_pb2.OUTCOME_STATE_SUCCEEDED:
            self.findings.append(f"task {task_id} ended {outcome.state}: {outcome.error.message}")
        elif outcome.result.partition(b":")[2] != payload_of(name):
            self.findings.append(f"task {task_id} of {name} has a wrong result of {len(outcome.result)} bytes")
        self.results[task_id] = outcome.result
        self.names[task_id] = name
