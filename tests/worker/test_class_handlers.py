"""Handler classes and handlers that take batches, in the real engine process."""

import json
from pathlib import Path
from typing import Any

import multigpu
import pytest
from multigpu.handlers import registered_handlers

from tests.worker.conftest import HANDLERS, Start, StartWorker
from tests.worker.scripted_master import ScriptedMaster, Stream, Word

JSON = "application/json"


@pytest.fixture
async def stream(start: Start) -> Stream:
    return (await start("--handlers", "class_handlers", pythonpath=HANDLERS))[1]


async def run(stream: Stream, kind: str, *values: Any) -> list[Word]:
    return await stream.run_all(kind, *[json.dumps(value).encode() for value in values], content_type=JSON)


async def answers(stream: Stream, kind: str, *values: Any) -> list[Any]:
    return [json.loads(report.result) for report in await run(stream, kind, *values)]


async def test_a_class_is_instantiated_once_and_called_in_every_slot(start: Start) -> None:
    _, stream = await start("--handlers", "class_handlers", "--slots", "3", pythonpath=HANDLERS)
    kinds = {capability.kind for capability in stream.hello.capabilities}
    assert {"class_handlers.Counter", "one.at.a.time", "class_handlers.Batched", "batch.function"} <= kinds
    results = await answers(stream, "class_handlers.Counter", *range(12))
    assert [result["value"] for result in results] == [2 * n for n in range(12)]
    assert {(result["made"], result["device"], result["attempt"]) for result in results} == {(2, "cpu", 1)}
    assert len({result["pid"] for result in results}) == 1
    assert results[-1]["most"] > 1
    assert (await answers(stream, "one.at.a.time", *range(6)))[-1]["most"] == 1


async def test_values_come_in_batches_of_the_size_that_the_handler_wants(stream: Stream) -> None:
    results = await answers(stream, "class_handlers.Batched", *range(24))
    assert [value for value, _ in results] == list(range(24))
    assert {size for _, size in results} == {8}
    # One that comes alone waits for others, but not for ever.
    assert await answers(stream, "class_handlers.Batched", "alone") == [["alone", 1]]
    assert all(1 <= size <= 4 for size in await answers(stream, "batch.function", *range(8)))


async def test_in_a_batch_each_task_fails_alone_and_a_function_may_not_return_anything(stream: Stream) -> None:
    good, bad, odd, last = await run(stream, "class_handlers.Batched", 1, "bad", "odd", 2)
    assert json.loads(good.result) == [1, 4]
    assert (bad.error.type, bad.error.message, bad.error.retryable) == ("KeyError", "'bad'", False)
    assert odd.error.type == "WrongResultType"
    assert json.loads(last.result) == [2, 4]
    # The call raises: each is run alone, and one fails.
    first, poison, other = await run(stream, "class_handlers.Batched", 3, "poison", 4)
    assert (poison.error.type, poison.error.message) == ("ValueError", "poison among 1")
    assert "class_handlers.py" in poison.error.traceback
    assert [json.loads(report.result) for report in (first, other)] == [[3, 1], [4, 1]]
    assert await answers(stream, "class_handlers.Batched", "one by one", 5) == [["one by one", 1], [5, 1]]
    unreadable = await stream.run(801, b"{", kind="class_handlers.Batched", content_type=JSON)
    assert unreadable.error.type == "BadInput"
    (short,) = await run(stream, "batch.function", "short")
    assert short.error.message.startswith("the batched handler gave 0 results for a batch of 1; return a list")
    (text,) = await run(stream, "batch.function", "text")
    assert "gave a str for a batch of 1" in text.error.message
    (again,) = await run(stream, "batch.function", "again")
    assert (again.error.type, again.error.retryable) == ("ConnectionError", True)
    last = await stream.run(901, b'"again"', attempt=2, kind="batch.function", content_type=JSON)
    assert not last.error.retryable


async def test_log_lines_carry_the_task(start: Start) -> None:
    worker, stream = await start("--handlers", "class_handlers", pythonpath=HANDLERS)
    await stream.run(7, b"it", attempt=2, kind="logs")
    await stream.until(lambda: "working on it" in worker.log)
    (line,) = [line for line in worker.log.splitlines() if "working on it" in line]
    assert "attempt 2: working on it" in line


async def test_a_broken_class_ends_the_worker_with_its_error(master: ScriptedMaster, start_worker: StartWorker) -> None:
    worker = await start_worker(master.address, "--handlers", "broken_class", pythonpath=HANDLERS)
    assert await worker.wait() != 0
    assert "no weights in /models/m" in worker.log
    assert "broken_class.py" in worker.log


def test_what_cannot_be_a_handler() -> None:
    with pytest.raises(ValueError, match="needs a method __call__"):
        multigpu.handler(type("Empty", (), {}))

    class Wanting:
        def __init__(self, name: str, size: int = 1) -> None: ...
        def __call__(self, value: bytes) -> bytes:
            return value

    with pytest.raises(ValueError, match="without arguments: give name of its __init__ defaults"):
        multigpu.handler(Wanting)
    with pytest.raises(ValueError, match="must take one list"):

        @multigpu.handler("two.lists")
        @multigpu.batch()
        def two(values: list[int], others: list[int]) -> list[int]:
            return values

    with pytest.raises(TypeError, match="can't be a generator"):

        @multigpu.batch()
        def generator(values: list[int]) -> Any:
            yield values

    with pytest.raises(TypeError, match=r"write @multigpu\.handler above @multigpu\.batch"):
        multigpu.batch()(multigpu.handler("a.handler")(run))

    for wrong in ({"max_size": 0}, {"max_size": 1.5}, {"max_wait_ms": -1}, {"max_wait_ms": float("nan")}):
        with pytest.raises(ValueError, match="give "):
            multigpu.batch(**wrong)
    with pytest.raises(ValueError, match="one batch at a time"):

        @multigpu.handler("many.batches", concurrency=2)
        @multigpu.batch()
        def many(values: list[int]) -> list[int]:
            return values

    for options in ({"retries": -1}, {"retries": "2"}, {"concurrency": -1}):
        with pytest.raises(ValueError, match="whole number"):
            multigpu.handler("k", **options)
    with pytest.raises(TypeError, match="a class of exceptions, or a tuple of them"):
        multigpu.handler("k", retry_on=("ValueError",))  # type: ignore[arg-type]
    assert not {"two.lists", "many.batches", "k"} & registered_handlers().keys()


def test_outside_a_worker_a_handler_is_what_it_was(tmp_path: Path) -> None:
    @multigpu.handler("local.function")
    def double(value: int) -> int:
        multigpu.context().progress(0.5)
        return 2 * value

    assert double(2) == 4
    assert multigpu.context().attempt == 1
    assert multigpu.context().device in ("cpu", "cuda:0")
    assert not multigpu.context().cancelled
