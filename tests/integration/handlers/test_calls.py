"""Handlers with arguments, called from a client: binding, type hints, arrays, options, batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import multigpu
import numpy as np
import pytest

from tests.fleet import Fleet
from tests.worker.handlers import call_handlers as calls

FLEET: dict[str, Any] = {
    "handlers": ["tests.worker.handlers.call_handlers"], "handlers_dir": Path(__file__).parents[3]
}  # fmt: skip
# mypy takes a decorated class for the class.
Vectors: Any = calls.Vectors


@pytest.fixture
def client(fleet: Fleet) -> Iterator[multigpu.Client]:
    with fleet.client() as client:
        yield client


def test_arguments_arrive_as_they_were_given(client: multigpu.Client) -> None:
    array = np.arange(4, dtype=np.float32).reshape(2, 2)
    local = calls.scale(array, 3.0, offset=1)
    found = calls.scale.run(client, array, 3.0, offset=1)
    assert found.dtype == np.float32
    assert np.array_equal(found, local)
    assert np.array_equal(calls.scale.run(client, array), array * 2)  # one argument: the task's value
    assert np.array_equal(client.run(calls.scale.kind, array), array * 2)
    assert calls.nothing.run(client) == "done"
    for empty in (b"", None):  # as other clients call it
        assert client.run("calls.nothing", empty) == "done"
    described = calls.describe.run(client, "long", (1, "x"), 7, 8, a=[0.5])
    assert described == ["long", [1, "x"], "tuple", [7, 8], {"a": [0.5]}]
    assert calls.describe.submit(client, mode="short", pair=(1, "x")).result(120)[0] == "short"


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        (("long",), {}, "missing a required argument: 'pair'"),
        (("odd", (1, "x")), {}, "the argument 'mode' must be typing.Literal['short', 'long']"),
        (("long", (1, 2)), {}, "'pair' must be tuple[int, str]: item 1 of tuple is not an instance of str"),
        (("long", (1, "x"), "no"), {}, "the argument 'rest' must be int"),
        (("long", (1, "x")), {"a": ["no"]}, "the argument 'more' must be list[float]"),
        ((), {"pair": (1, "x")}, "missing a required argument: 'mode'"),
    ],
)
def test_arguments_that_do_not_fit_name_the_one(client: multigpu.Client, args: Any, kwargs: Any, says: str) -> None:
    with pytest.raises(multigpu.TaskFailed) as caught:
        calls.describe.run(client, *args, **kwargs)
    assert caught.value.outcome.error_type == "BadInput"
    assert says in str(caught.value)
    assert caught.value.attempts == 1


def test_a_batched_class_is_called_like_a_function(client: multigpu.Client) -> None:
    texts = ["a" * n for n in range(1, 41)]
    found = list(Vectors.map(client, texts))
    assert [vector.tolist() for vector in found] == [[n] * 3 for n in range(1, 41)]
    handles = [Vectors.submit(client, text) for text in texts[:3]]
    assert [vector[0] for vector in multigpu.gather(handles, timeout=60)] == [1, 2, 3]
    with pytest.raises(multigpu.TaskFailed, match="the argument 'texts' must be str"):
        Vectors.run(client, 7)
    assert [vector.tolist() for vector in Vectors()(["xy"])] == [[2] * 3]  # here, without a worker


def test_a_slow_batched_handler_gets_whole_batches(tmp_path: Path) -> None:
    """The pace of a worker that has run nothing else, a few tasks a second, says nothing of what it runs together."""
    options = {**FLEET, "workers": 1}
    with Fleet(tmp_path, **options) as fleet, fleet.client() as client:
        sizes = list(calls.size_of_batch.map(client, range(24)))
    assert sizes.count(8) >= 8


def test_calls_of_an_asynchronous_handler_run_concurrently(client: multigpu.Client) -> None:
    assert max(calls.running_together.map(client, range(40))) >= 4


def test_options_belong_to_a_copy(client: multigpu.Client) -> None:
    urgent = calls.nothing.options(priority=1, queue="urgent")
    handle = urgent.submit(client)
    assert (handle.result(120), handle.status().message.spec.queue) == ("done", "urgent")
    assert calls.nothing.submit(client).status().message.spec.queue in ("", "default")
    assert calls.describe.submit(client, "long", (1, "x")).status().message.spec.attempts_max in (0, 7)


async def test_an_asynchronous_client_awaits(fleet: Fleet) -> None:
    async with multigpu.AsyncClient(fleet.address) as client:
        handle = await calls.nothing.submit(client)
        assert await handle == "done"
        assert await calls.nothing.run(client) == "done"
        assert [vector[0] async for vector in Vectors.map(client, ["a", "bb"])] == [1, 2]


def test_a_handler_says_what_it_is() -> None:
    assert calls.scale.kind == "tests.worker.handlers.call_handlers.scale"
    assert repr(calls.describe) == "<handler calls.describe>"
    assert Vectors.__name__ == "Vectors"
