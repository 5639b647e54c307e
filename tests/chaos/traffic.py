"""The clients of a chaos run: they hand tasks over, wait for outcomes through whatever happens, and write it down."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import multigpu
from multigpu.v1 import task_pb2, task_service_pb2, task_service_pb2_grpc

from tests.chaos.history import History

KIND = "trial.logged"
# How a call may end when the master dies in the middle of it. Anything else is a finding.
KILLED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
# Attempts are charged to tasks whose engine is killed: none of these deserves to become a dead letter for it.
PATIENCE = {"attempts_max": 100, "backoff_initial_s": 0.01, "backoff_max_s": 0.1}
OPTIONS = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]


def _stub(channel: grpc.Channel) -> Any:
    untyped: Any = task_service_pb2_grpc
    return untyped.TaskServiceStub(channel)


def record_outcome(history: History, by: str, outcome: task_pb2.Outcome) -> None:
    state = task_pb2.OutcomeState.Name(outcome.state).removeprefix("OUTCOME_STATE_")
    history.add(
        "outcome", by=by, task_id=outcome.task_id, request_id=outcome.request_id, state=state,
        result=outcome.result.decode(), attempts=outcome.attempts, worker_id=outcome.worker_id,
        error=f"{outcome.error.type}: {outcome.error.message}" if outcome.HasField("error") else "",
    )  # fmt: skip


class Watcher(threading.Thread):
    """Follows every outcome by one cursor; now and then forgets all but the cursor, as a client that died."""

    def __init__(self, address: str, history: History, seed: int) -> None:
        super().__init__(name="watcher", daemon=True)
        self._address = address
        self._history = history
        self._random = random.Random(seed)
        self._ending = threading.Event()
        self.seen: set[str] = set()  # request_ids whose outcome has come
        self.resumed = 0

    def run(self) -> None:
        cursor = ""
        while not self._ending.is_set():
            with grpc.insecure_channel(self._address, options=OPTIONS) as channel:
                stub = _stub(channel)
                call = stub.Watch(task_service_pb2.WatchRequest(cursor=cursor), timeout=5 * self._random.random() + 0.5)
                try:
                    for frame in call:
                        for outcome in frame.outcomes:
                            record_outcome(self._history, "watch", outcome)
                            self.seen.add(outcome.request_id)
                        cursor = frame.cursor
                        if self._ending.is_set() or self._random.random() < 0.02:
                            call.cancel()
                            break
                except grpc.RpcError as error:
                    note_error(self._history, error)
                self.resumed += 1
                time.sleep(0.02)

    def finish(self) -> None:
        self._ending.set()
        self.join(20)
        assert not self.is_alive(), "the watcher did not end"


def note_error(history: History, error: Any) -> None:
    if error.code() not in KILLED:
        history.add("refusal", code=str(error.code()), message=error.details())


def submit_all(address: str, history: History, names: list[str], spec: task_pb2.TaskSpec, seed: int) -> None:
    """Hands tasks over by Submit, some at a time, each until it is acknowledged; some once more for good measure."""
    dice = random.Random(seed)
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        stub = _stub(channel)
        start = 0
        while start < len(names):
            some = names[start : start + dice.randint(1, 100)]
            start += len(some)
            for name in some:
                history.add("submit", by="submit", request_id=name, payload=payload_of(name))
            _until_acknowledged(stub, history, some, spec)
            if dice.random() < 0.3:
                again = dice.sample(names[:start], min(10, start))
                _until_acknowledged(stub, history, again, spec)
            time.sleep(dice.random() * 0.05)


def payload_of(name: str) -> str:
    return f"payload of {name}"


def _until_acknowledged(stub: Any, history: History, names: list[str], spec: task_pb2.TaskSpec) -> None:
    left = names
    while left:
        inputs = [task_pb2.TaskInput(request_id=n, payload=payload_of(n).encode()) for n in left]
        request = task_service_pb2.SubmitRequest(batches=[task_pb2.TaskBatch(spec=spec, inputs=inputs)])
        try:
            answer = stub.Submit(request, timeout=5, wait_for_ready=True)
        except grpc.RpcError as error:
            note_error(history, error)
            time.sleep(0.02)
            continue
        refused = []
        for name, result in zip(left, answer.results, strict=True):
            if result.HasField("task_id"):
                history.add("ack", request_id=name, task_id=result.task_id)
            else:
                refused.append(name)
                history.add("refusal", code=result.rejection.code, message=result.rejection.message)
        left = refused


def map_all(address: str, history: History, names: list[str], options: dict[str, Any]) -> None:
    """Runs tasks by the Python client's own map, which is to see nothing of what goes on."""
    # Made while the master may be dying again and again: it must not take that for a wrong address.
    with multigpu.Client(address, connect_timeout_s=60) as client:

        def inputs() -> Any:
            for name in names:
                history.add("submit", by="map", request_id=name, payload=payload_of(name))
                yield multigpu.Input(payload=payload_of(name).encode(), request_id=name)

        for outcome in client.map_outcomes(KIND, inputs(), ordered=False, **options):
            # The call hides acceptance: an outcome stands for it.
            history.add("ack", request_id=outcome.request_id, task_id=outcome.task_id)
            record_outcome(history, "map", outcome.message)


class Caller(threading.Thread):
    """Runs a function and keeps what it raised."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        super().__init__(name=function.__name__, daemon=True)
        self._function = function
        self._arguments = arguments
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._function(*self._arguments)
        except BaseException as error:
            self.error = error
