"""AsyncClient.map and embed: order, backpressure, and what breaks do to them."""

import asyncio
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import multigpu
import pytest
from multigpu import AsyncClient
from multigpu.v1 import task_service_pb2

from tests.client.scripted_master import Reply, ScriptedMaster, Spec, Task, echo, failed
from tests.waiting import until_async


def fail_threes(spec: Spec, task: Task) -> Reply:
    return failed("Three", "three is bad") if task.payload.endswith(b"3") else echo(spec, task)


async def test_an_unordered_map_yields_results_as_they_complete() -> None:
    slow = asyncio.Event()

    def answer(spec: Spec, task: Task) -> Reply:
        return echo(spec, task) if task.payload != b"0" or slow.is_set() else None

    async with ScriptedMaster(answer) as master, multigpu.AsyncClient(master.address) as client:
        results = client.map("echo", range(500), ordered=False)
        first = [await anext(results) for _ in range(499)]
        assert sorted(first) == list(range(1, 500))
        slow.set()
        await master.stop()  # the client comes back and asks for the last one again
        await master.start()
        assert [value async for value in results] == [0]


async def test_bytes_bound_what_is_pulled_ahead() -> None:
    pulled = taken = ahead = 0

    def items() -> Iterator[bytes]:
        nonlocal pulled, ahead
        for _ in range(100):
            pulled += 1
            ahead = max(ahead, pulled - taken)
            yield bytes(300_000)

    async with ScriptedMaster() as master, multigpu.AsyncClient(master.address, max_in_flight_bytes=1 << 20) as client:
        async for _ in client.map("echo", items()):
            taken += 1
            await asyncio.sleep(0.01)  # answers pile up unread, and count as their payloads did
        assert taken == 100
        assert 3 <= ahead <= 9  # a window, and a chunk of a mebibyte that finds a little capacity


@pytest.mark.parametrize("seed", range(8))
async def test_breaks_duplicates_and_rejections_leave_no_gap_and_no_repeat(seed: int) -> None:
    dice = random.Random(seed)
    rejected: set[str] = set()

    def answer(spec: Spec, task: Task) -> Reply:
        if task.request_id not in rejected and dice.random() < 0.05:
            rejected.add(task.request_id)
            rejection = task_service_pb2.Rejection(code=14, message="not now")
            rejection.retry_delay.FromMilliseconds(dice.randrange(1, 30))
            return rejection
        return echo(spec, task)

    async with ScriptedMaster(answer) as master, multigpu.AsyncClient(master.address) as client:
        master.breaks_after.extend(dice.randrange(0, 400) for _ in range(8))
        master.reversed = dice.random() < 0.5
        master.outcomes_per_frame = dice.choice([1, 10, 100, 1000])
        master.copies = dice.choice([1, 2])
        ordered = dice.random() < 0.5
        got = [value async for value in client.map("echo", range(2000), ordered=ordered, max_in_flight=300)]
        assert (got if ordered else sorted(got)) == list(range(2000)), f"seed {seed}"
        assert set(master.answered.values()) == {1}


async def test_an_error_ends_the_map_and_cancels_the_rest() -> None:
    async with ScriptedMaster(fail_threes) as master, multigpu.AsyncClient(master.address) as client:
        master.outcomes_per_frame = 1
        got = []
        with pytest.raises(multigpu.TaskFailed, match="three is bad"):
            async for value in client.map("echo", range(100)):
                got.append(value)
        assert got == [0, 1, 2]
        await until_async(lambda: len(master.cancelled) > 50)


async def test_errors_can_take_the_place_of_results() -> None:
    async with ScriptedMaster(fail_threes) as master, multigpu.AsyncClient(master.address) as client:
        payloads = [1, 3, object(), 5]
        got = [value async for value in client.map("echo", payloads, return_exceptions=True)]
        assert [type(value) for value in got] == [int, multigpu.TaskFailed, multigpu.InvalidTaskError, int]
        outcomes = [outcome async for outcome in client.map_outcomes("echo", [1, 3])]
        assert [outcome.succeeded for outcome in outcomes] == [True, False]


async def test_a_bad_payload_or_source_ends_the_map(master: ScriptedMaster, client: AsyncClient) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    with pytest.raises(multigpu.InvalidTaskError):
        [value async for value in client.map("echo", [1, object()])]
    with pytest.raises(OSError, match="the disk is gone"):
        [value async for value in client.map("echo", broken())]
    with pytest.raises(TypeError, match=r"multigpu\.Input"):
        client.map("echo", [], request_id="one for all")  # type: ignore[call-arg]
    assert [value async for value in client.map("echo", [])] == []


async def test_closing_a_map_early_cancels_what_it_started(master: ScriptedMaster, client: AsyncClient) -> None:
    master.outcomes_per_frame = 2
    async with aclosing(client.map("echo", range(1000), max_in_flight=200)) as results:
        assert await anext(results) == 0
        master.gate.clear()
    asked = {task.request_id for task in master.inputs}
    await until_async(lambda: set(master.cancelled) | set(master.answered) >= asked)
    master.gate.set()
    assert await client.run("echo", 1) == 1


async def test_a_slow_source_does_not_hold_up_results(master: ScriptedMaster, client: AsyncClient) -> None:
    proceed = asyncio.Event()

    async def items() -> AsyncIterator[int]:
        yield 1
        yield 2
        await proceed.wait()
        yield 3

    results = client.map("echo", items())
    async with asyncio.timeout(120):
        assert [await anext(results), await anext(results)] == [1, 2]
        proceed.set()
        assert [value async for value in results] == [3]


async def test_an_asynchronous_source_is_bounded_too(master: ScriptedMaster, client: AsyncClient) -> None:
    pulled = 0

    async def items() -> AsyncIterator[int]:
        nonlocal pulled
        for i in range(1000):
            pulled += 1
            yield i

    master.gate.clear()
    results = client.map("echo", items(), max_in_flight=50)
    first = asyncio.ensure_future(anext(results))
    await until_async(lambda: pulled >= 38)
    await asyncio.sleep(0.05)
    assert pulled <= 51
    master.gate.set()
    assert [await first, *[value async for value in results]] == list(range(1000))


async def test_inputs_have_their_own_options(master: ScriptedMaster, client: AsyncClient) -> None:
    inputs = [multigpu.Input(payload=i, request_id=f"r{i}", partition_key="k", units=i) for i in range(1, 4)]
    outcomes = [outcome async for outcome in client.map_outcomes("echo", inputs, ordered=False, queue="q")]
    assert sorted(outcome.request_id for outcome in outcomes) == ["r1", "r2", "r3"]
    assert [(task.partition_key, task.units) for task in master.inputs] == [("k", 1), ("k", 2), ("k", 3)]
    assert {spec.queue for spec in master.specs} == {"q"}


@pytest.mark.slow
def test_a_big_map_holds_only_its_window() -> None:
    """200,000 items of 1 KiB would be 200 MB; resident memory may grow by a quarter of that."""
    program = textwrap.dedent("""
        import asyncio, resource, sys
        import multigpu

        async def main():
            async with multigpu.AsyncClient(sys.argv[1], max_in_flight=2048) as client:
                async def consume(count):
                    seen = 0
                    async for result in client.map("echo", (b"%1024d" % i for i in range(count)), ephemeral=True):
                        assert int(result) == seen
                        seen += 1
                    assert seen == count
                await consume(20_000)
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                await consume(200_000)
                print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

        asyncio.run(main())
    """)

    async def main() -> int:
        async with ScriptedMaster() as master:
            master.keep_inputs = False
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, master.address, stdout=subprocess.PIPE, env=dict(os.environ)
            )
            out, _ = await asyncio.wait_for(process.communicate(), 90)
            assert process.returncode == 0
            return int(out)

    grown_kib = asyncio.run(main())
    assert grown_kib < 50 * 1024, f"grew by {grown_kib} KiB"
