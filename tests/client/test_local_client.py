"""LocalClient runs the handlers of this process as a worker would: one behaviour, one test."""

import asyncio
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import multigpu
import numpy as np
import pytest
from multigpu._handling.attempts import Item
from multigpu._handling.engine import HandlerEngine, WrongResultTypeError, _drive_async
from multigpu.testing import AsyncLocalClient, LocalClient, _master
from multigpu.testing._tasks import LocalReporter

from tests.waiting import until

SEEN: list[Any] = []
OPEN = threading.Event()


@multigpu.handler("local.area", retries=1, retry_on=ConnectionError)
def area(width: float, height: float = 1) -> float:
    if width < 0:
        raise (ConnectionError if multigpu.context().attempt < -width else ValueError)(f"{width}")
    return width * height


@multigpu.handler("local.flaky", retries=5)
def flaky(value: bytes) -> bytes:
    ctx = multigpu.context()
    ctx.save_checkpoint(ctx.checkpoint + b"x")
    if ctx.attempt < 3:
        raise RuntimeError("again")
    return ctx.checkpoint


@multigpu.handler("local.batch")
@multigpu.batch(max_size=4, max_wait_ms=50)
def batched(numbers: list[int]) -> list[Any]:
    return [ValueError("odd one") if number == 13 else [number, len(numbers)] for number in numbers]


@multigpu.handler("local.count", retries=1)
def count(up_to: int) -> Iterator[int]:
    for number in range(up_to):
        yield number
        if number == 1 and multigpu.context().attempt == 1:
            raise OSError("once")


@multigpu.handler("local.alone", concurrency=1)
def alone(number: int) -> int:
    SEEN.append(("begin", number))
    time.sleep(0.5)
    SEEN.append(("end", number))
    return number


@multigpu.handler("local.wait")
def wait(seconds: float) -> str:
    ctx = multigpu.context()
    ctx.progress(0.25, "waiting")
    for _ in range(int(seconds * 100)):
        if ctx.cancelled:
            SEEN.append("cancelled")
            return "cancelled"
        time.sleep(0.01)
    return "waited"


@multigpu.handler("local.gate")
def gate(number: int) -> int:
    SEEN.append(number)
    OPEN.wait(60)
    return number


@multigpu.handler("local.speak")
def speak(text: str) -> None:
    raise ValueError(text)


@multigpu.handler("local.twice")
async def twice(array: np.ndarray) -> np.ndarray:
    await asyncio.sleep(0)
    return array * 2


@multigpu.handler("local.model")
class Model:
    def __init__(self) -> None:
        self.device = multigpu.context().device
        SEEN.append("made")

    def __call__(self, value: str) -> list[str]:
        return [value, self.device]

    def close(self) -> None:
        SEEN.append("closed")


@pytest.fixture
def client() -> Iterator[LocalClient]:
    SEEN.clear()
    with LocalClient(timeout=20) as client:
        yield client


def test_arguments_are_bound_checked_and_encoded(client: LocalClient) -> None:
    assert client.run("local.area", 3) == 3
    assert area.run(client, 3, height=2.5) == 7.5
    with pytest.raises(multigpu.TaskFailed, match="'width' must be float") as failed:
        client.run("local.area", "wide")
    assert failed.value.outcome.error_type == "BadInput"
    np.testing.assert_array_equal(client.run("local.twice", np.arange(3)), [0, 2, 4])
    with pytest.raises(multigpu.InvalidTaskError, match="must be bytes, a JSON value"):
        client.run("local.area", object())


def test_exceptions_are_retried_as_the_handler_says(client: LocalClient) -> None:
    with pytest.raises(ValueError, match="-2") as failed:
        area.run(client, -2)
    assert (failed.value.attempts, failed.value.dead_lettered) == (2, False)  # type: ignore[attr-defined]
    outcome = client.run_outcome("local.area", -9)
    assert (outcome.state, outcome.attempts) == (multigpu.OutcomeState.FAILED, 2)
    outcome = client.run_outcome("local.flaky", b"", attempts_max=2)
    assert (outcome.state, outcome.attempts) == (multigpu.OutcomeState.DEAD_LETTERED, 2)


def test_a_retried_attempt_sees_the_last_checkpoint(client: LocalClient) -> None:
    assert client.run("local.flaky", b"") == b"xx"


def test_a_batched_handler_gets_lists_and_one_value_fails_alone(client: LocalClient) -> None:
    assert list(client.map("local.batch", range(8))) == [[number, 4] for number in range(8)]
    assert client.run("local.batch", 5) == [5, 1]
    good, bad = client.map("local.batch", [1, 13], return_exceptions=True)
    assert (good, type(bad.__cause__), isinstance(bad, ValueError)) == ([1, 2], multigpu.RemoteError, True)


def test_a_stream_yields_each_output_once_also_after_a_retry(client: LocalClient) -> None:
    parts = client.stream("local.count", 4)
    assert list(parts) == [0, 1, 2, 3]
    assert parts.outcome.attempts == 2


def test_handles_follow_list_and_count_tasks(client: LocalClient) -> None:
    handle = client.submit("local.area", 3, request_id="mine", queue="night")
    assert (handle.result(), handle.done()) == (3, True)
    assert client.submit("local.area", 3, request_id="mine").id == handle.id
    with pytest.raises(multigpu.AlreadyExistsError):
        client.run("local.area", 4, request_id="mine")
    assert client.handle("mine").result() == 3
    handles = client.submit_many("local.area", [1, 2])
    assert multigpu.gather([each for each in handles if isinstance(each, multigpu.TaskHandle)]) == [1, 2]
    assert client.count(queue="night").succeeded == 1
    (task,) = client.list_tasks(queue="night")
    assert (task.task_id, task.state) == (handle.id, multigpu.TaskState.SETTLED)
    assert client.list_page(queue="night")[0][0].task_id == handle.id
    with pytest.raises(multigpu.NotFoundError):
        client.get(99)


def test_a_task_is_compared_also_while_a_handle_waits_for_its_request_id(client: LocalClient) -> None:
    OPEN.clear()
    handle = client.submit("local.gate", 1, request_id="one")
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(handle.result)
        stream = client._core._core.stream
        until(lambda: stream._state.in_flight)
        same = pool.submit(client.run, "local.gate", 1, request_id="one")
        other = pool.submit(client.run, "local.gate", 2, request_id="one")
        until(lambda: len(stream._state.unsettled()) == 3)
        OPEN.set()
        assert waiting.result(120) == same.result(120) == 1
        with pytest.raises(multigpu.AlreadyExistsError):
            other.result(120)
    assert SEEN == [1]


def test_the_end_of_a_long_traceback_is_kept(client: LocalClient) -> None:
    with pytest.raises(multigpu.TaskFailed) as raised:
        client.run("local.speak", "ö" * 20_000 + "the end")
    assert raised.value.remote.traceback.endswith("the end\n")


async def test_an_asynchronous_generator_is_closed_when_its_output_cannot_be_sent() -> None:
    SEEN.clear()

    async def outputs() -> AsyncGenerator[Any, None]:
        try:
            yield object()
        finally:
            SEEN.append("closed")

    class Silent(LocalReporter):
        def __init__(self) -> None:
            pass

    generator = outputs()
    item = Item(lease_id=1, task_id=1, attempt=1, payload=b"", units=1, checkpoint=b"", partials_received=0)
    with pytest.raises(WrongResultTypeError):
        await _drive_async(generator, item, Silent())
    assert SEEN == ["closed"]


def test_cancellation_and_progress(client: LocalClient) -> None:
    handle, behind = client.submit("local.wait", 20), client.submit("local.area", 1)
    while not (progress := handle.status().progress):
        time.sleep(0.01)
    assert progress == 0.25
    assert handle.cancel("enough")
    with pytest.raises(multigpu.TaskCancelled, match="enough"):
        handle.result()
    assert behind.result() == 1, "the slot is free again"
    assert SEEN == ["cancelled"]


def test_a_call_that_times_out_withdraws_its_task(client: LocalClient) -> None:
    with pytest.raises(multigpu.CallTimeoutError):
        client.run("local.wait", 20, request_id="late", timeout=0.1)
    assert client.run("local.wait", 0.01, request_id="late") == "waited"
    parts = client.stream("local.wait", 20, request_id="late too")
    with pytest.raises(multigpu.CallTimeoutError):
        list(client.stream("local.wait", 20, timeout=0.1))
    parts.close()


def test_a_class_is_made_once_and_closed_with_the_client() -> None:
    SEEN.clear()
    with LocalClient(device="cuda:7", slots=3) as client:
        assert SEEN == []
        assert list(client.map("local.model", "abc")) == [[letter, "cuda:7"] for letter in "abc"]
    assert SEEN == ["made", "closed"]
    with pytest.raises(multigpu.ClientClosedError):
        client.run("local.area", 1)


def test_slots_run_calls_at_a_time() -> None:
    with LocalClient(slots=4) as client:
        began_s = time.monotonic()
        assert list(client.map("local.wait", [0.5] * 4)) == ["waited"] * 4
        assert time.monotonic() - began_s < 1.5
    with pytest.raises(ValueError, match="slots=0"):
        LocalClient(slots=0)


def test_kinds_that_it_does_not_have(client: LocalClient) -> None:
    with pytest.raises(multigpu.UnplaceableError, match=r"did you mean 'local.area'\? \(it has .*local.batch"):
        client.run("local.aera", 1)
    for call in (lambda: client.embed(["a"]), lambda: list(client.generate("a")), lambda: client.submit("echo", 1)):
        with pytest.raises(multigpu.UnplaceableError, match="LocalClient runs handlers only"):
            call()
    with pytest.raises(multigpu.InvalidRequestError, match="LocalClient runs handlers only: it has no workers"):
        client.submit("local.area", 1).explain()
    with pytest.raises(multigpu.InvalidRequestError, match="LocalClient runs handlers only: it has no stream"):
        next(client.watch())


async def test_the_async_client() -> None:
    async with AsyncLocalClient() as client:
        assert await area.run(client, 3) == 3
        assert [result async for result in client.map("local.area", [1, 2])] == [1, 2]


def test_no_setting_of_a_master_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_TLS_CA", "/nowhere")
    monkeypatch.setenv("MGPU_WINDOW_TASKS", "none")
    with LocalClient() as client:
        assert client.run("local.area", 1) == 1


def test_a_missing_typeguard_names_its_extra(client: LocalClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typeguard", None)
    with pytest.raises(ImportError, match=r"typeguard, which is not installed; run `pip .*multigpu\[testing\]"):
        client.run("local.area", "3")


def test_the_concurrency_of_a_handler_holds_for_its_first_tasks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots made an engine each, because neither had yet."""
    both = threading.Barrier(2)

    def engine_of(handler: Any, instances: Any) -> Any:
        if both.wait(10):
            until(lambda: SEEN, what="the first task to begin, before this slot has its engine")
        return HandlerEngine(handler, instances)

    monkeypatch.setattr(_master, "engine_of", engine_of)
    SEEN.clear()
    with LocalClient(slots=2) as client:
        assert list(client.map("local.alone", range(2))) == [0, 1]
    assert [what for what, _ in SEEN] == ["begin", "end"] * 2
