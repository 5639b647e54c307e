"""What the clients of a chaos run do: submit tasks, wait for outcomes through all faults, and record both.

Each kind of call is a function that ends when all its tasks have ended. A killed client begins again with the same
request_ids and without memory. Only a watch keeps its cursor, in the file of its records.
"""

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import multigpu
from multigpu.options import SpecCache
from multigpu.v1 import task_pb2, task_service_pb2, task_service_pb2_grpc

from tests.chaos.records.history import History, records_of

# How a call may end when the master dies in the middle of it. Anything else is a finding.
KILLED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
# Attempts are charged to tasks whose engine is killed: none of these deserves to become a dead letter for it.
PATIENCE = {"attempts_max": 100, "backoff_initial_s": 0.01, "backoff_max_s": 0.1}
OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
]
WORK, STREAM = "chaos.work", "chaos.stream"
SECONDS, SLOW_S, PART_S = 0.003, 0.03, 0.01  # that a task works, one to be cancelled, a streaming one for each part
PARTS = 6
LARGE, LARGE_BYTES = "large", 200_000  # names with this word have as large a payload, which goes beside the database
RETRY_S = 0.02
# Made while the master may be dying again and again: that must not be taken for a wrong address.
CONNECT_TIMEOUT_S = 120.0


@dataclass(slots=True, kw_only=True)
class Life:
    """One process of a client: the master's address, the history, and a random generator."""

    address: str
    folder: Path  # of the history
    history: History
    number: int
    dice: random.Random = field(default_factory=random.Random)

    def options(self, *, seconds: float = SECONDS, **more: Any) -> dict[str, Any]:
        parameters = {"history": str(self.folder), "seconds": str(seconds), "count": str(PARTS)}
        return {**PATIENCE, "parameters": parameters, **more}

    def submits(self, by: str, name: str) -> bytes:
        """Records that a task is about to be submitted; its payload."""
        payload = payload_of(name)
        self.history.add("submit", by=by, life=self.number, request_id=name, digest=hashlib.sha1(payload).hexdigest())
        return payload

    def outcome(self, by: str, outcome: task_pb2.Outcome) -> None:
        self.history.add(
            "outcome", by=by, life=self.number, task_id=outcome.task_id, request_id=outcome.request_id,
            state=task_pb2.OutcomeState.Name(outcome.state).removeprefix("OUTCOME_STATE_"),
            result=outcome.result.decode(), attempts=outcome.attempts, worker_id=outcome.worker_id,
            error=f"{outcome.error.type}: {outcome.error.message}" if outcome.HasField("error") else "",
            partials=[part.decode() for part in outcome.partials],
        )  # fmt: skip

    def partial(self, name: str, index: int, data: bytes) -> None:
        self.history.add("partial", life=self.number, request_id=name, index=index, data=data.decode())

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address, options=OPTIONS)

    def failed(self, error: Any) -> None:
        """A call ended with an error: a pause, and a finding if no kill explains it."""
        if error.code() not in KILLED:
            self.history.add("rejection", code=str(error.code()), message=error.details())
        time.sleep(RETRY_S)


def payload_of(name: str) -> bytes:
    return f"payload of {name}".encode() + bytes(LARGE_BYTES if LARGE in name else 0)


def stub_of(channel: grpc.Channel) -> Any:
    untyped: Any = task_service_pb2_grpc
    return untyped.TaskServiceStub(channel)


def submit(life: Life, names: Sequence[str]) -> None:
    """Submits tasks in batches, each until it is acknowledged, and some of them again."""
    dice = life.dice
    spec = SpecCache().get(WORK, "", life.options())
    with life.channel() as channel:
        start = 0
        while start < len(names):
            some = names[start : start + dice.randint(1, 100)]
            start += len(some)
            _until_acknowledged(life, stub_of(channel), "submit", some, spec)
            if dice.random() < 0.3:
                again = dice.sample(names[:start], min(10, start))
                _until_acknowledged(life, stub_of(channel), "submit", again, spec)
            time.sleep(dice.random() * 0.05)


def _until_acknowledged(
    life: Life, stub: Any, by: str, names: Sequence[str], spec: task_pb2.TaskSpec
) -> dict[str, int]:
    """The task_ids, by request_id."""
    left = list(names)
    ids: dict[str, int] = {}
    payloads = {name: life.submits(by, name) for name in names}
    while left:
        inputs = [task_pb2.TaskInput(request_id=n, payload=payloads[n]) for n in left]
        request = task_service_pb2.SubmitRequest(batches=[task_pb2.TaskBatch(spec=spec, inputs=inputs)])
        try:
            answer = stub.Submit(request, timeout=5, wait_for_ready=True)
        except grpc.RpcError as error:
            life.failed(error)
            continue
        for name, result in zip(left, answer.results, strict=True):
            if result.HasField("task_id"):
                life.history.add("ack", by=by, request_id=name, task_id=result.task_id)
                ids[name] = result.task_id
            elif result.rejection.code != grpc.StatusCode.UNAVAILABLE.value[0]:
                life.history.add("rejection", code=result.rejection.code, message=result.rejection.message)
        left = [name for name in left if name not in ids]
    return ids


def cancel(life: Life, names: Sequence[str]) -> None:
    """Submits slow tasks and cancels every second one, waiting or running."""
    spec = SpecCache().get(WORK, "", life.options(seconds=SLOW_S, priority=4))
    with life.channel() as channel:
        stub = stub_of(channel)
        for start in range(0, len(names), 10):
            some = names[start : start + 10]
            ids = _until_acknowledged(life, stub, "cancel", some, spec)
            time.sleep(life.dice.random() * 0.2)
            unwanted = {ids[name]: name for name in some[::2]}
            for name in unwanted.values():
                life.history.add("cancel", request_id=name)
            answer = None
            while answer is None:
                try:
                    request = task_service_pb2.CancelRequest(task_ids=list(unwanted), reason="chaos")
                    answer = stub.Cancel(request, timeout=5, wait_for_ready=True)
                except grpc.RpcError as error:
                    life.failed(error)
            for what, task_ids in (
                ("cancelled", answer.cancelled_task_ids),
                ("settled", answer.settled_task_ids),
                ("unknown", map(int, answer.unknown)),
            ):
                for task_id in task_ids:
                    life.history.add("cancel answer", answer=what, request_id=unwanted[task_id], task_id=task_id)


def lend(life: Life, names: Sequence[str]) -> None:
    """Submits tasks that the master keeps in memory only, and asks for each how it ended: it may be gone."""
    spec = SpecCache().get(WORK, "", life.options(ephemeral=True))
    with life.channel() as channel:
        stub = stub_of(channel)
        for name, task_id in _until_acknowledged(life, stub, "lend", names, spec).items():
            request = task_service_pb2.GetRequest(task_id=task_id)
            request.wait.FromSeconds(2)
            while True:
                try:
                    task = stub.Get(request, timeout=7, wait_for_ready=True).task
                except grpc.RpcError as error:
                    if error.code() is grpc.StatusCode.NOT_FOUND:
                        life.history.add("gone", request_id=name, task_id=task_id)
                        break
                    life.failed(error)
                else:
                    if task.state == task_pb2.TASK_STATE_SETTLED:
                        life.outcome("lend", task.outcome)
                        break


def run(life: Life, names: Sequence[str]) -> None:
    """Runs tasks in batches, each on a Run stream of its own with acceptances; tasks without an outcome when the stream
    breaks are sent again.
    """
    spec = SpecCache().get(WORK, "", life.options())
    with life.channel() as channel:
        start = 0
        while start < len(names):
            some = names[start : start + life.dice.randint(1, 40)]
            start += len(some)
            left = {name: life.submits("run", name) for name in some}
            while left:
                inputs = [task_pb2.TaskInput(request_id=name, payload=payload) for name, payload in left.items()]
                frame = task_service_pb2.RunRequest(batches=[task_pb2.TaskBatch(spec=spec, inputs=inputs)])
                try:
                    for answer in stub_of(channel).Run(iter([frame]), timeout=20, wait_for_ready=True):
                        _run_answered(life, answer, left)
                except grpc.RpcError as error:
                    life.failed(error)


def _run_answered(life: Life, answer: task_service_pb2.RunResponse, left: dict[str, bytes]) -> None:
    for accepted in answer.accepted:
        life.history.add("ack", by="run", request_id=accepted.request_id, task_id=accepted.task_id)
    for outcome in answer.outcomes:  # after which no acceptance comes
        life.history.add("ack", by="run", request_id=outcome.request_id, task_id=outcome.task_id, settled=True)
        life.outcome("run", outcome)
        left.pop(outcome.request_id, None)
    for rejection in answer.rejected:
        if rejection.code != grpc.StatusCode.UNAVAILABLE.value[0]:
            life.history.add("rejection", code=rejection.code, message=rejection.message)


async def map_all(life: Life, names: Sequence[str], by: str, **options: Any) -> None:
    """Runs tasks by the client library, which must hide all faults, and by map, which hides acceptances."""

    async def inputs() -> AsyncIterator[multigpu.Input]:
        for name in names:
            yield multigpu.Input(payload=life.submits(by, name), request_id=name)

    async with multigpu.AsyncClient(life.address, connect_timeout_s=CONNECT_TIMEOUT_S) as client:
        async for outcome in client.map_outcomes(WORK, inputs(), ordered=False, **life.options(**options)):
            life.history.add("ack", by=by, request_id=outcome.request_id, task_id=outcome.task_id, settled=True)
            life.outcome(by, outcome.message)


def stream_raw(life: Life, names: Sequence[str]) -> None:
    """Runs streaming tasks by the bare protocol, and writes every partial output down as it comes: the client's own
    `stream` would hide a repetition.
    """
    spec = SpecCache().get(STREAM, "", life.options(seconds=PART_S))
    with life.channel() as channel:
        for name in names:
            payload, received, ended = life.submits("stream", name), 0, False
            while not ended:
                given = task_pb2.TaskInput(request_id=name, payload=payload, partials_received=received)
                frame = task_service_pb2.RunRequest(batches=[task_pb2.TaskBatch(spec=spec, inputs=[given])])
                try:
                    for answer in stub_of(channel).Run(iter([frame]), timeout=20, wait_for_ready=True):
                        for part in answer.partials:
                            life.partial(name, part.index, part.data)
                            received += 1
                        for outcome in answer.outcomes:
                            # What it yielded just before comes by the outcome alone, should a stream break then.
                            for index in range(received, len(outcome.partials)):
                                life.partial(name, index, outcome.partials[index])
                            life.history.add("streamed", life=life.number, request_id=name, parts=len(outcome.partials))
                            ended = True
                except grpc.RpcError as error:
                    life.failed(error)


async def stream_all(life: Life, names: Sequence[str]) -> None:
    """Runs streaming tasks and reads their partial outputs, some at a time."""
    options = life.options(seconds=PART_S)
    turns = asyncio.Semaphore(8)
    async with multigpu.AsyncClient(life.address, connect_timeout_s=CONNECT_TIMEOUT_S) as client:

        async def stream(name: str) -> None:
            async with turns:
                index = 0
                async for part in client.stream(STREAM, life.submits("stream", name), request_id=name, **options):
                    life.partial(name, index, part)
                    index += 1
                life.history.add("streamed", life=life.number, request_id=name, parts=index)

        await asyncio.gather(*map(stream, names))


def watch(life: Life, path: Path, *, by: str = "watch", until_quiet: bool = False) -> None:
    """Follows every outcome by one cursor, from where this file says that the last life was; for ever, or until all
    that is there now has come. Now and then it forgets all but the cursor of its own accord.
    """
    cursor = resume(path)
    life.history.add("watching", by=by, life=life.number, cursor=cursor)
    quiet = False
    while not quiet:
        with life.channel() as channel:
            request = task_service_pb2.WatchRequest(cursor=cursor)
            call = stub_of(channel).Watch(request, timeout=1.0 if until_quiet else 5 * life.dice.random() + 0.5)
            came, served = 0, False
            try:
                for frame in call:
                    served = True
                    for outcome in frame.outcomes:
                        life.outcome(by, outcome)
                    came += len(frame.outcomes)
                    if frame.cursor != cursor:
                        cursor = frame.cursor
                        life.history.add("cursor", by=by, cursor=cursor)
                    if life.dice.random() < 0.02:
                        call.cancel()
                        break
            except grpc.RpcError as error:
                # A first frame, with the cursor, says that it was served; and then nothing came until the end.
                quiet = until_quiet and served and not came and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                life.failed(error)


def resume(path: Path) -> str:
    """The last cursor in a watcher's file, without what may have been written behind it: that will come again."""
    cursor, end = "", 0
    if path.exists():
        for record, offset in records_of(path):
            if record["what"] == "cursor":
                cursor, end = record["cursor"], offset
        with path.open("r+b") as file:
            file.truncate(end)
    return cursor
