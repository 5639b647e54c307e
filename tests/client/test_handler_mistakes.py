"""Mistakes in the use of handlers are errors at once, which say what to write."""

import asyncio
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import multigpu
import pytest
from multigpu.handlers import registered_handlers
from multigpu.testing import LocalClient


@multigpu.handler("mistakes.add")
def add(a: int, b: int = 0) -> int:
    return a + b


def test_batch_without_parentheses_batches() -> None:
    @multigpu.handler("mistakes.sizes")
    @multigpu.batch
    def sizes(values: list[int]) -> list[int]:
        return [len(values)] * len(values)

    batching = registered_handlers()["mistakes.sizes"].batching
    assert batching is not None
    assert batching.max_size == 64
    with LocalClient() as client:
        assert sizes.map(client, [1, 2]) is not None
    with pytest.raises(TypeError, match="below the class's own decorator"):
        multigpu.batch(type("Model", (), {}))
    with pytest.raises(TypeError, match=r"handler above @multigpu\.batch"):
        multigpu.batch(sizes)
    with pytest.raises(TypeError, match=r"@multigpu.batch\(max_size=8\)"):
        multigpu.batch(8)  # type: ignore[call-overload]


def test_an_option_that_does_not_exist_is_named() -> None:
    with pytest.raises(TypeError, match="no task option 'quee'; did you mean 'queue'"):
        add.options(quee="x")  # type: ignore[call-arg]
    with LocalClient() as client:
        assert add.options(queue="x", timeout=9, ordered=False).map(client, [1]) is not None


def test_an_option_is_no_argument() -> None:
    with LocalClient() as client:
        with pytest.raises(TypeError, match=r"write add\.options\(priority=1\)\.run\(client, …\)"):
            add.run(client, 1, priority=1)  # type: ignore[call-overload]
        assert add.run(client, 1, b=2) == 3
        assert client.run("mistakes.add", multigpu.Arguments(1, b=2)) == 3
        with pytest.raises(TypeError, match=r"write add\.run\(client, …\)"):
            client.run(add, 1)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="an Input is an item of map"):
            client.run("mistakes.add", multigpu.Input(payload=1))


def test_a_method_is_no_handler_and_a_batch_is_a_list() -> None:
    with pytest.raises(TypeError, match="run is a method: decorate its class"):

        class Model:
            @multigpu.handler
            def run(self, value: int) -> int:
                return value

    with pytest.raises(TypeError, match=r"gets a list: write list\[…\] for float"):

        @multigpu.handler
        @multigpu.batch
        def half(values: float) -> list[float]:
            return [values]

    with pytest.raises(TypeError, match=r"gets a list: write list\[…\] for list\[int\] \| None"):

        @multigpu.handler
        @multigpu.batch
        def optional(values: list[int] | None = None) -> list[int]:
            return values or []


@pytest.mark.parametrize("method", ["run", "submit", "map"])
def test_the_first_argument_is_the_client(method: str) -> None:
    with pytest.raises(
        TypeError, match=rf"the first argument is the client: add.{method}\(client, …\), and this is of type int"
    ):
        getattr(add, method)(1, 2)


def test_map_takes_an_iterable_for_each_argument() -> None:
    with LocalClient() as client:
        assert list(add.map(client, [1, 2], [10, 20, 30])) == [11, 22]
        with pytest.raises(TypeError, match="one iterable for each argument"):
            add.map(client)


def test_the_item_that_cannot_be_sent_is_numbered() -> None:
    with LocalClient() as client:
        for call in (client.submit_many, client.map):
            with pytest.raises(multigpu.InvalidTaskError) as caught:
                call("mistakes.add", [1, 2, object(), 3])
            assert caught.value.__notes__ == ["The item is number 2, counted from 0."]


@pytest.mark.parametrize("name", [-1, 0, 1 << 64])
def test_a_number_that_no_task_has_is_not_found(name: int) -> None:
    with LocalClient() as client, pytest.raises(multigpu.NotFoundError, match=str(name)):
        client.handle(name)
    with LocalClient() as client, pytest.raises(TypeError, match="task_id"):
        client.handle(True)


def test_a_handler_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(add)) is add


def test_a_handler_of_a_program_has_the_kind_that_workers_give_it(tmp_path: Path) -> None:
    program = tmp_path / "my_program.py"
    program.write_text("import multigpu\n\n@multigpu.handler\ndef work(value): ...\n\nprint(work.kind)\n", "utf-8")
    for arguments in ([program], ["-m", "my_program"]):
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=True)
        assert done.stdout == "my_program.work\n"


def test_a_decorated_asynchronous_function_is_awaited_and_cancelled() -> None:
    cancelled = threading.Event()

    async def wait_for_ever(_value: object) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    @multigpu.handler("mistakes.decorated")
    def decorated(value: object) -> object:  # as a decorator that is not asynchronous makes it
        return wait_for_ever(value)

    with LocalClient() as client:
        with pytest.raises(multigpu.CallTimeoutError):
            decorated.options(timeout=0.2).run(client, 1)
        assert cancelled.wait(10)
