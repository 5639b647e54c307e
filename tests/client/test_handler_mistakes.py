"""Mistakes in the use of handlers are errors at once, which say what to write."""

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
    with pytest.raises(TypeError, match=r"@multigpu.batch\(max_size=8\)"):
        multigpu.batch(8)  # type: ignore[call-overload]


def test_an_option_that_does_not_exist_is_named() -> None:
    with pytest.raises(TypeError, match="no task option 'quee'; did you mean 'queue'"):
        add.options(quee="x")  # type: ignore[call-arg]
    with LocalClient() as client:
        assert add.options(queue="x", timeout=9, ordered=False).map(client, [1]) is not None


@pytest.mark.parametrize("method", ["run", "submit", "map"])
def test_the_first_argument_is_the_client(method: str) -> None:
    with pytest.raises(
        TypeError, match=rf"the first argument is the client: add.{method}\(client, …\), and this is of type int"
    ):
        getattr(add, method)(1, 2)
