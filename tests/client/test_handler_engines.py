"""The engines that call handlers, with a scripted reporter."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import multigpu
import pytest
from multigpu import _ranks
from multigpu._handling.attempts import Batch, Item
from multigpu._handling.engine import Instances, engine_of
from multigpu.handlers import registered_handlers


class ScriptedReporter:
    """Keeps what ends each task. `asked(task_id)` is called by each question whether a task is cancelled."""

    def __init__(self, asked: Callable[[int], None] = lambda task_id: None) -> None:
        self._asked = asked
        self.gone: set[int] = set()
        self.ends: dict[int, Any] = {}

    def cancelled(self, item: Item) -> bool:
        gone = item.task_id in self.gone
        self._asked(item.task_id)
        return gone

    def begin(self, item: Item) -> None: ...

    def beat(self) -> None: ...

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        self.ends[item.task_id] = result

    def fail(self, item: Item, error_type: str, message: str, **_: Any) -> None:
        self.ends[item.task_id] = error_type


def run(kind: str, reporter: Any, payloads: dict[int, bytes]) -> None:
    run_on(engine_of(registered_handlers()[kind], Instances()), kind, reporter, payloads)


def run_on(engine: Any, kind: str, reporter: Any, payloads: dict[int, bytes]) -> None:
    items = [Item(number, number, 1, payload, 1, b"", 0) for number, payload in payloads.items()]
    batch = Batch(kind, "", {}, "application/json", items)
    engine.run(batch, engine.prepare(batch), reporter)


def test_a_task_that_is_cancelled_while_it_waits_for_its_turn_does_not_run() -> None:
    runs: list[int] = []
    first_runs, second_asked, second_cancelled = threading.Event(), threading.Event(), threading.Event()

    @multigpu.handler("engines.one", concurrency=1)
    def one(number: int) -> int:
        runs.append(number)
        first_runs.set()
        assert second_cancelled.wait(20)
        return number

    reporter = ScriptedReporter(lambda task_id: second_asked.set() if task_id == 2 else None)
    engine = engine_of(registered_handlers()["engines.one"], Instances())
    threads = [
        threading.Thread(target=run_on, args=(engine, "engines.one", reporter, {number: b"%d" % number}))
        for number in (1, 2)
    ]
    threads[0].start()
    assert first_runs.wait(20)
    threads[1].start()
    assert second_asked.wait(20)
    reporter.gone.add(2)
    second_cancelled.set()
    for thread in threads:
        thread.join(20)
    assert runs == [1]
    assert reporter.ends == {1: b"1"}


def successor(value: Any) -> Any:
    return value + 1


def test_a_lazy_result_of_a_batch_that_raises_fails_only_the_value_at_fault() -> None:
    @multigpu.handler("engines.mapped")
    @multigpu.batch
    def mapped(values: list[Any]) -> Any:
        return map(successor, values)

    @multigpu.handler("engines.generated")
    @multigpu.batch
    def generated(values: list[Any]) -> Iterator[Any]:
        return (value + 1 for value in values)

    for kind in ("engines.mapped", "engines.generated"):
        reporter = ScriptedReporter()
        run(kind, reporter, {1: b"1", 2: b'"a"', 3: b"3"})
        assert reporter.ends == {1: b"2", 2: "TypeError", 3: b"4"}


def test_a_batch_result_that_is_no_iterable_is_a_wrong_result() -> None:
    @multigpu.handler("engines.number")
    @multigpu.batch
    def number(values: list[int]) -> Any:
        return len(values)

    reporter = ScriptedReporter()
    run("engines.number", reporter, {1: b"1", 2: b"2"})
    assert reporter.ends == {1: "WrongResultType", 2: "WrongResultType"}


def test_the_context_of_a_task_ends_with_it() -> None:
    """The thread that had run it kept it: what ran there next reported to a task that had ended."""

    @multigpu.handler("engines.context")
    def context(value: int) -> int:
        return multigpu.context().attempt

    @multigpu.handler("engines.batch_context")
    @multigpu.batch
    def batch_context(values: list[int]) -> list[str]:
        return [multigpu.context().device for _ in values]

    before = multigpu.context()
    for kind, result in (("engines.context", b"1"), ("engines.batch_context", b'"cpu"')):
        reporter = ScriptedReporter()
        run(kind, reporter, {1: b"1"})
        assert reporter.ends == {1: result}
        assert multigpu.context() is before


@pytest.mark.parametrize("kind", ["engines.rank", "engines.async_rank"])
def test_the_process_group_of_a_rank_ends_before_the_attempt(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """That of an asynchronous handler stayed, and its error did not wait for that of the rank which was the cause."""
    reporter = ScriptedReporter()
    ended: list[str] = []

    def note(what: str) -> Callable[..., None]:
        return lambda *_: ended.append(f"{what}, {len(reporter.ends)} reported")

    monkeypatch.setattr(_ranks, "init_process_group", lambda *_: None)
    monkeypatch.setattr(_ranks, "hold_back", note("held back"))
    monkeypatch.setattr(_ranks, "destroy_process_group", note("no group"))

    @multigpu.handler("engines.rank")
    def rank(value: int) -> int:
        multigpu.context().init_process_group()
        return 1 // value

    @multigpu.handler("engines.async_rank")
    async def async_rank(value: int) -> int:
        multigpu.context().init_process_group()
        return 1 // value

    run(kind, reporter, {1: b"1"})
    run(kind, reporter, {2: b"0"})
    assert ended == ["no group, 0 reported", "held back, 1 reported", "no group, 1 reported"]
    assert reporter.ends == {1: b"1", 2: "ZeroDivisionError"}
