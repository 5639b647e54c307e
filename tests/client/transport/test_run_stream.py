"""No call waits on a stream that is gone: values that no message can carry, and errors of a stream's own tasks."""

import asyncio
import random
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import multigpu
import pytest
from multigpu import AsyncClient, Input
from multigpu._transport.call import Answer, Call
from multigpu.outcome import Outcome
from multigpu.v1 import task_pb2

from tests.client.scripted_master import ScriptedMaster

LIMIT_S = 120.0
UNFIT: list[tuple[str, Any]] = [
    ("request_id", 5),
    ("request_id", b"bytes"),
    ("request_id", "\ud800"),
    ("partition_key", 5),
    ("partition_key", "\udfff"),
    ("units", -1),
    ("units", 1 << 70),
    ("units", 1.5),
    ("units", "3"),
]
UNFIT_OF_CALL: list[tuple[str, Any]] = [
    ("priority", 0),
    ("attempts_max", 0),
    ("labels", 5),
    ("labels", ["zone"]),
    ("labels", {"zone": 1}),
    ("labels", {"zone": ["x"]}),
    ("labels", {"zone": "\ud800"}),
    ("parameters", {1: "x"}),
    ("queue", []),
    ("model", None),
]


async def stream_of(client: multigpu.AsyncClient, options: Any) -> None:
    async for _ in client.stream("echo", b"x", **options):
        pass


async def map_of(client: multigpu.AsyncClient, options: Any) -> None:
    own = {name: options.pop(name) for name in ("request_id", "partition_key", "units") if name in options}
    async for _ in client.map("echo", [Input(payload=b"x", **own)], **options):
        pass


async def submit_many_of(client: multigpu.AsyncClient, options: Any) -> None:
    own = {name: options.pop(name) for name in ("request_id", "partition_key", "units") if name in options}
    await client.submit_many("echo", [Input(payload=b"x", **own)], **options)


CALLS: dict[str, Callable[[multigpu.AsyncClient, Any], Coroutine[Any, Any, Any]]] = {
    "run": lambda client, options: client.run("echo", b"x", **options),
    "stream": stream_of,
    "map": map_of,
    "submit": lambda client, options: client.submit("echo", b"x", **options),
    "submit_many": submit_many_of,
}


@pytest.mark.parametrize(("name", "value"), [*UNFIT, *UNFIT_OF_CALL], ids=repr)
async def test_a_value_that_fits_no_message_is_rejected_by_the_call(name: str, value: Any) -> None:
    async with ScriptedMaster() as master, multigpu.AsyncClient(master.address) as client:
        for call in CALLS.values():
            with pytest.raises(multigpu.InvalidTaskError, match=f"task option {name}=.*(give|begins|can't encode)"):
                await asyncio.wait_for(call(client, {name: value}), LIMIT_S)
        assert await asyncio.wait_for(client.run("echo", b"after"), LIMIT_S) == b"after"


async def test_a_uuid_is_a_request_id(master: ScriptedMaster, client: AsyncClient) -> None:
    name = uuid.uuid4()
    for call in CALLS.values():
        await asyncio.wait_for(call(client, {"request_id": name}), LIMIT_S)
    assert {task.request_id for task in master.inputs} == {str(name)}
    assert (await client.get(name)).task_id == (await client.get(str(name))).task_id
    await client.cancel(name)
    assert master.cancelled[-1:] == [str(name)]
    with pytest.raises(TypeError, match="str or UUID"):
        await client.cancel(1.5)  # type: ignore[arg-type]  # on purpose


class Probe(Call):
    """A call below the checks of the SDK's own: its fields may be unfit, and taking its outcome may fail."""

    def __init__(self, request_id: str, own: dict[str, Any] | None = None, *, unsettling: bool = False) -> None:
        super().__init__(task_pb2.TaskSpec(kind="echo"), b"x", request_id, own)
        self.future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.unsettling = unsettling

    def settle(self, answer: Answer) -> None:
        if self.unsettling and isinstance(answer, Outcome):
            raise RuntimeError("planted")
        self.future.set_result(answer)


async def test_an_error_of_the_streams_writer_fails_its_calls(master: ScriptedMaster, client: AsyncClient) -> None:
    master.gate.clear()  # the task stays unanswered
    before = asyncio.create_task(client.run("echo", b"before"))
    while not master.inputs:
        await asyncio.sleep(0.005)
    await client._core.stream.start((Probe("unfit", {"units": -1}),))
    with pytest.raises(multigpu.TransportError, match="internal error: ValueError"):
        await asyncio.wait_for(before, LIMIT_S)
    master.gate.set()
    assert await asyncio.wait_for(client.run("echo", b"after"), LIMIT_S) == b"after"
    assert client._core.window.tasks == 0


async def test_an_error_of_the_streams_reader_fails_its_calls(master: ScriptedMaster, client: AsyncClient) -> None:
    master.gate.clear()
    await client._core.stream.start((Probe("unsettling", unsettling=True),))
    behind = asyncio.create_task(client.run("echo", b"behind"))
    while len(master.inputs) < 2:
        await asyncio.sleep(0.005)
    master.gate.set()
    with pytest.raises(multigpu.TransportError, match="planted"):
        await asyncio.wait_for(behind, LIMIT_S)
    assert await asyncio.wait_for(client.run("echo", b"after"), LIMIT_S) == b"after"


def run_seed(seed: int) -> None:
    """AssertionError: a call of a client had no answer, or a value that no message can carry met the stream."""
    asyncio.run(_run_seed(random.Random(seed)))


async def _run_seed(dice: random.Random) -> None:
    loop = asyncio.get_running_loop()
    async with ScriptedMaster() as master, multigpu.AsyncClient(master.address) as client:
        master.breaks_after.extend(dice.choice((None, 0, 3)) or 100 for _ in range(3))
        tasks: list[asyncio.Task[Any]] = []
        for number in range(40):
            name, value = dice.choice([*UNFIT, *UNFIT_OF_CALL]) if dice.random() < 0.3 else ("priority", 2)
            tasks.append(loop.create_task(dice.choice(list(CALLS.values()))(client, {name: value}), name=name))
            if dice.random() < 0.1:
                await asyncio.sleep(0.002)
            if number == 20 and dice.random() < 0.5:
                await asyncio.wait(tasks, timeout=60)
                probe = Probe("unfit", {"units": -1})
                await client._core.stream.start((probe,))
                await asyncio.wait([probe.future], timeout=60)
                assert probe.future.done(), "the stream's writer is dead, and its call waits"
        _, waiting = await asyncio.wait(tasks, timeout=60)
        assert not waiting, f"{len(waiting)} calls have no answer"
        for task in tasks:
            error = task.exception()
            assert not isinstance(error, multigpu.TransportError), f"{task.get_name()} met the stream: {error}"
            assert error is None or isinstance(error, multigpu.InvalidTaskError), error
        assert await asyncio.wait_for(client.run("echo", b"after"), 120) == b"after"


@pytest.mark.parametrize("seed", range(5))
def test_every_call_is_answered_with_random_options(seed: int) -> None:
    run_seed(seed)
