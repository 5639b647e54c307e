"""A program as a user writes it, whose types mypy and pyright must see. mypy checks it with all tests, and
test_types.py runs pyright.
"""

from collections.abc import AsyncGenerator, Generator
from typing import Any, assert_type

import multigpu
import numpy as np
from numpy.typing import NDArray


@multigpu.handler
def area(width: float, height: float = 1.0) -> float:
    return width * height


@multigpu.handler("my.fetch", retries=3, retry_on=OSError)
async def fetch(url: str) -> bytes:
    return url.encode()


@multigpu.handler
def count(n: int) -> Generator[int, None, str]:
    yield from range(n)
    return "done"


@multigpu.handler
@multigpu.batch(max_size=8)
def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@multigpu.handler
class Doubler:
    def __call__(self, value: int) -> int:
        return 2 * value


def synchronous(client: multigpu.Client) -> None:
    assert_type(area(2.0), float)
    handle = area.submit(client, 2.0, height=3.0)
    assert_type(handle, multigpu.TaskHandle[float])
    assert_type(handle.result(timeout=1), float)
    assert_type(area.options(queue="night").run(client, 2.0), float)
    assert_type(fetch.run(client, "a"), bytes)
    assert_type(count.run(client, 3), str)
    assert_type(lengths.run(client, "one text"), int)
    assert_type(list(area.map(client, [1.0, 2.0], [3.0, 4.0])), list[float])
    assert_type(multigpu.gather([handle]), list[float])
    assert_type(next(multigpu.as_completed([handle])), multigpu.TaskHandle[float])
    assert_type(client.submit("any.kind", 1), multigpu.TaskHandle[Any])
    assert_type(client.generate("Tell", max_tokens=3), str)
    with client.generate("Tell", stream=True) as stream:
        assert_type(next(stream), str)
        assert_type(stream.result.text, str)
    assert_type(client.embed(["a"]), NDArray[np.float32])
    assert_type(client.infer({"x": [1.0]}, model="m")["y"], NDArray[Any])
    assert_type(client.map("any.kind", [1]), Generator[Any, None, None])
    assert_type(client.with_options(timeout=3), multigpu.Client)


async def asynchronous(client: multigpu.AsyncClient) -> None:
    handle = await area.submit(client, 2.0)
    assert_type(handle, multigpu.AsyncTaskHandle[float])
    assert_type(await handle, float)
    assert_type(await fetch.run(client, "a"), bytes)
    assert_type(area.map(client, [1.0]), AsyncGenerator[float, None])
    assert_type(await client.generate("Tell"), str)
    async with client.generate("Tell", stream=True) as stream:
        assert_type(await anext(stream), str)


def of_a_class(client: multigpu.Client) -> None:
    # mypy ignores what a decorator makes of a class.
    handle = Doubler.submit(client, 3)  # type: ignore[attr-defined]
    assert handle.request_id
    assert_type(Doubler()(3), int)


def mistakes(client: multigpu.Client) -> None:
    area.submit(client, "two")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    area.run(client, 2.0, heigth=3.0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    client.run("any.kind", 1, quee="night")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    client.classify("a text")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
