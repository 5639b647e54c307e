"""The option `timeout`, errors in the middle of calls, and wrong arguments."""

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import multigpu
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from multigpu._calls.calls import ThreadCall
from multigpu.v1 import classify_pb2, infer_pb2, task_pb2, task_service_pb2

from tests.client.scripted_master import Reply, ScriptedMaster, Spec, Task, ThreadedMaster, echo
from tests.waiting import until_async

SECONDS = 0.2


def only_even(spec: Spec, task: Task) -> Reply:
    """Odd numbers are never answered."""
    return None if int(task.payload) % 2 else echo(spec, task)


CALLS: dict[str, Callable[[multigpu.Client], Any]] = {
    "run": lambda client: client.run("echo", 1, timeout=SECONDS),
    "run_outcome": lambda client: client.run_outcome("echo", 1, timeout=SECONDS),
    "map": lambda client: list(client.map("echo", [0, 1, 2], timeout=SECONDS)),
    "map, unordered": lambda client: list(client.map("echo", [0, 1, 2], timeout=SECONDS, ordered=False)),
    "map_outcomes": lambda client: list(client.map_outcomes("echo", [1], timeout=SECONDS)),
    "stream": lambda client: list(client.stream("echo", 1, timeout=SECONDS)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_timeout_ends_the_call_and_cancels_its_tasks(name: str) -> None:
    with ThreadedMaster(only_even) as master, multigpu.Client(master.address) as client:
        with pytest.raises(multigpu.CallTimeoutError, match=re.escape(f"within {SECONDS:g} s")) as raised:
            CALLS[name](client)
        assert isinstance(raised.value, TimeoutError)
        assert isinstance(raised.value, multigpu.TransportError)
        assert client.run("echo", 2, timeout=30.0) == 2
        odd = {task.request_id for task in master.inputs if task.payload == b"1"}
        while not odd <= set(master.cancelled):
            time.sleep(0.01)


def never(_spec: Spec, _task: Task) -> Reply:
    return None


def test_a_call_that_ends_before_the_window_admits_it_is_never_sent() -> None:
    with ThreadedMaster(never) as master, multigpu.Client(master.address, max_in_flight=1) as client:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.run, "echo", "first", timeout=2.0)
            while not master.inputs:
                time.sleep(0.01)
            with pytest.raises(multigpu.CallTimeoutError):
                client.run("echo", "second", timeout=0.1)
            with pytest.raises(multigpu.CallTimeoutError):
                running.result()
        with pytest.raises(multigpu.CallTimeoutError):
            client.run("echo", "third", timeout=0.5)
        assert [task.payload for task in master.inputs] == [b'"first"', b'"third"']


async def test_a_call_that_ends_as_the_window_admits_it_is_withdrawn() -> None:
    async with ScriptedMaster(never) as master, multigpu.AsyncClient(master.address, max_in_flight=1) as client:
        core = client._core
        first, second = (ThreadCall(Spec(kind="echo"), b"x", name, None) for name in ("first", "second"))
        core.start(first)
        core.start(second)
        await until_async(lambda: master.inputs)
        core.stream.withdraw(first)  # the window admits the second one in the iteration in which its caller leaves
        await asyncio.create_task(core.withdraw(second))
        await until_async(lambda: second.done and not core.window.tasks, 10.0)
        assert [task.request_id for task in master.inputs] == ["first"]


@pytest.mark.parametrize("waiting", [1, 2])
def test_a_client_that_is_closed_ends_the_calls_of_its_threads(waiting: int) -> None:
    """One is in flight; a second one waits for the window."""
    with ThreadedMaster(never) as master, ThreadPoolExecutor(2) as pool:
        client = multigpu.Client(master.address, max_in_flight=1)
        calls = [pool.submit(client.run, "echo", n) for n in range(waiting)]
        while not master.inputs:
            time.sleep(0.01)
        time.sleep(0.1)
        client.close()
        for call in calls:
            with pytest.raises(multigpu.ClientClosedError):
                call.result(timeout=10.0)
        with pytest.raises(multigpu.ClientClosedError):
            client.run("echo", 1)


class SilentMaster(ScriptedMaster):
    """Answers neither Count nor Watch."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def Count(self, request: Any, context: Any) -> Any:  # noqa: N802  the method's name
        self.asked += 1
        await asyncio.Event().wait()

    async def _watch(self, position: int, context: Any) -> None:
        self.asked += 1
        await asyncio.Event().wait()


async def test_calls_that_wait_while_another_task_closes_the_client_say_so() -> None:
    """They raised CancelledError, although nobody had cancelled them."""
    async with SilentMaster() as master, multigpu.AsyncClient(master.address) as client:
        calls = [asyncio.create_task(call) for call in (client.count(), client.current_cursor(), client.count())]
        await until_async(lambda: master.asked == len(calls))
        calls[-1].cancel()
        await client.close()
        *closed, cancelled = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in closed] == [multigpu.ClientClosedError] * 2
        assert isinstance(cancelled, asyncio.CancelledError)


def only_first(spec: Spec, task: Task) -> Reply:
    """The queue has space for the task 0 alone."""
    if int(task.payload) == 0:
        return echo(spec, task)
    return task_service_pb2.Rejection(code=8, message="queue 'q' is full", retry_delay=Duration(seconds=3600))


@pytest.mark.parametrize("name", CALLS)
def test_a_timeout_at_a_full_queue_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadedMaster(only_first) as master, multigpu.Client(master.address) as client:
        assert client.run("echo", 0) == 0
        with pytest.raises(multigpu.CallTimeoutError, match=f"no answer within {SECONDS:g} s.*'q' is full"):
            CALLS[name](client)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "multigpu"]
    assert warning.endswith("until it accepts them: queue 'q' is full")


async def test_a_timeout_does_not_give_the_reason_of_another_call() -> None:
    def answer(spec: Spec, task: Task) -> Reply:
        return None if int(task.payload) == 2 else only_first(spec, task)

    async with ScriptedMaster(answer) as master, multigpu.AsyncClient(master.address) as client:
        rejected = asyncio.create_task(client.run("echo", 1, timeout=2 * SECONDS))
        with pytest.raises(multigpu.CallTimeoutError, match=r"^no answer within"):
            await client.run("echo", 2, timeout=SECONDS)
        with pytest.raises(multigpu.CallTimeoutError, match=r"queue 'q' is full$"):
            await rejected


async def test_timeouts_of_the_asynchronous_client() -> None:
    async with ScriptedMaster(only_even) as master, multigpu.AsyncClient(master.address) as client:
        with pytest.raises(multigpu.CallTimeoutError):
            await client.run("echo", 1, timeout=SECONDS)
        with pytest.raises(multigpu.CallTimeoutError):
            async for _ in client.map("echo", [0, 1], timeout=SECONDS):
                pass
        with pytest.raises(multigpu.CallTimeoutError):
            async for _ in client.stream("echo", 1, timeout=SECONDS):
                pass
        with pytest.raises(multigpu.CallTimeoutError):
            async for _ in client.generate("1", stream=True, timeout=SECONDS):
                pass

        async def one() -> AsyncIterator[int]:
            yield 1

        with pytest.raises(multigpu.CallTimeoutError):
            async for _ in client.map("echo", one(), timeout=SECONDS):
                pass


async def test_an_error_of_submit_many_has_the_answers_until_then() -> None:
    def payloads() -> Iterator[Any]:
        yield from range(15_000)
        yield object()  # no payload

    async with ScriptedMaster() as master, multigpu.AsyncClient(master.address) as client:
        with pytest.raises(multigpu.InvalidTaskError) as raised:
            await client.submit_many("echo", payloads())
        assert master.submits == 1
        assert [handle.id for handle in raised.value.submitted] == list(range(1, 10_001))
    with ThreadedMaster() as threaded, multigpu.Client(threaded.address) as synchronous:
        with pytest.raises(multigpu.InvalidTaskError) as raised:
            synchronous.submit_many("echo", payloads())
        assert len(raised.value.submitted) == 10_000


def answer_models(spec: Spec, _task: Task) -> task_pb2.Outcome:
    kinds: dict[str, Any] = {"infer": infer_pb2.InferResult(), "classify": classify_pb2.ClassifyResult()}
    return task_pb2.Outcome(state=task_pb2.OUTCOME_STATE_SUCCEEDED, result=kinds[spec.kind].SerializeToString())


async def test_a_wrong_input_of_a_map_becomes_an_error_in_its_place(tmp_path: Path) -> None:
    arrays: list[Any] = [{"x": np.zeros(2)}, {}, {"x": np.array([object()])}, "no dict", {"x": np.zeros(2)}]
    subjects: list[Any] = [b"picture", tmp_path / "nowhere", b"", 7, "text"]
    async with ScriptedMaster(answer_models) as master, multigpu.AsyncClient(master.address) as client:
        inferred: list[Any] = [each async for each in client.infer_map(arrays, model="m", return_exceptions=True)]
        assert [type(each) for each in inferred] == [
            dict, multigpu.InvalidTaskError, multigpu.InvalidTaskError, TypeError, dict
        ]  # fmt: skip
        classified: list[Any] = [
            each async for each in client.classify_map(subjects, model="m", return_exceptions=True)
        ]
        assert [type(each) for each in classified] == [
            list, FileNotFoundError, multigpu.InvalidTaskError, TypeError, list
        ]  # fmt: skip
        with pytest.raises(FileNotFoundError):
            async for _ in client.classify_map(subjects, model="m"):
                pass
    with ThreadedMaster(answer_models) as threaded, multigpu.Client(threaded.address) as synchronous:
        assert len(list(synchronous.infer_map(arrays, model="m", return_exceptions=True))) == len(arrays)
        with pytest.raises(multigpu.InvalidTaskError):
            list(synchronous.infer_map(arrays, model="m"))


def test_every_error_is_exported_and_a_multigpu_error() -> None:
    from multigpu import errors, outcome
    from multigpu.config import config

    names = vars(errors) | vars(outcome)
    raised = {n: e for n, e in names.items() if isinstance(e, type) and issubclass(e, Exception)}
    assert raised.pop("RemoteError") is multigpu.RemoteError, "never raised: a cause"
    for name, error in raised.items():
        assert issubclass(error, multigpu.MultigpuError)
        assert getattr(multigpu, name) is error
    assert issubclass(config.ConfigError, multigpu.MultigpuError)
    assert multigpu.ConfigError is config.ConfigError
    with pytest.raises(multigpu.MultigpuError):
        multigpu.Client(max_in_flight=0)


@pytest.mark.parametrize("kind", ["classify", "echo", "embed", "fail", "generate", "infer", "rerank", "sleep"])
def test_a_handler_for_a_reserved_kind_is_rejected(kind: str) -> None:
    with pytest.raises(ValueError, match="multigpu's own"):
        multigpu.handler(kind)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf, 1e300, "3", -1, -0.001])
@pytest.mark.parametrize("name", ["run", "map", "stream", "submit"])
def test_a_wrong_timeout_is_rejected(name: str, wrong: Any) -> None:
    with multigpu.Client("127.0.0.1:1") as client:
        call = getattr(client, name)
        with pytest.raises(multigpu.InvalidTaskError, match=r"timeout=.*give seconds"):
            list(call("echo", [1], timeout=wrong))


@pytest.mark.parametrize(
    "wrong",
    [{"master": 5}, {"master": "nowhere"}, {"max_in_flight_bytes": "64MiB"}, {"max_in_flight": 1.5},
     {"max_in_flight": 0}, {"connect_timeout_s": "3"}],
)  # fmt: skip
def test_a_wrong_setting_is_an_error(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*( is not a |not an address|too small)"):
        multigpu.Client(**wrong)
