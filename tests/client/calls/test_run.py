"""AsyncClient.run and its relatives against a scripted master over real gRPC."""

import asyncio
import time
import zlib
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import multigpu
import pytest
from multigpu import AsyncClient
from multigpu._transport import run_stream
from multigpu._transport.payloads import LARGE_BYTES
from multigpu._transport.run_stream import _PAUSE_S
from multigpu.v1 import task_pb2, task_service_pb2

from tests.client.scripted_master import Reply, ScriptedMaster, Spec, Task, echo, failed
from tests.waiting import until_async


async def test_bytes_travel_as_they_are_and_other_values_as_json(master: ScriptedMaster, client: AsyncClient) -> None:
    assert await client.run("echo", b"\x00\xff") == b"\x00\xff"
    assert await client.run("echo", memoryview(b"view")) == b"view"
    assert await client.run("echo", {"text": "żółw", "none": None}) == {"text": "żółw", "none": None}
    assert [spec.content_type for spec in master.specs] == ["", "", "application/json"]


@pytest.mark.parametrize("payload", [object(), {1, 2}, "\ud800"])
async def test_a_payload_that_cannot_be_encoded_is_not_sent(payload: Any) -> None:
    client = multigpu.AsyncClient("127.0.0.1:1")
    with pytest.raises(multigpu.InvalidTaskError, match="must be bytes, a JSON value"):
        await client.run("echo", payload)
    await client.close()


async def test_concurrent_runs_share_frames(master: ScriptedMaster, client: AsyncClient) -> None:
    results = await asyncio.gather(*(client.run("echo", i) for i in range(64)))
    assert results == list(range(64))
    assert sum(master.frames) == 64
    assert len(master.frames) <= 4, master.frames
    assert master.streams == 1


async def test_frames_of_a_client_with_many_calls_are_some_time_apart(
    master: ScriptedMaster, client: AsyncClient
) -> None:
    """So that calls that begin one after the other share them."""
    master.gate.clear()
    first = [asyncio.create_task(client.run("echo", i)) for i in range(16)]
    await until_async(lambda: len(master.inputs) == 16)
    frames, began_s, others = len(master.frames), time.perf_counter(), []
    for i in range(50):
        others.append(asyncio.create_task(client.run("echo", i)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await until_async(lambda: len(master.inputs) == 66)
    assert len(master.frames) - frames <= (time.perf_counter() - began_s) / _PAUSE_S + 1
    assert len(master.frames) - frames <= 25, master.frames
    master.gate.set()
    await asyncio.gather(*first, *others)


async def test_a_single_call_is_sent_at_once(
    master: ScriptedMaster, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_stream, "_PAUSE_S", 60.0)
    for i in range(20):
        assert await client.run("echo", i) == i


async def test_options_reach_the_spec_and_the_input(master: ScriptedMaster, client: AsyncClient) -> None:
    deadline = datetime.now(UTC) + timedelta(hours=1)
    await client.run(
        "echo",
        b"",
        model="m",
        queue="q",
        priority=2,
        parameters={"a": "1"},
        labels={"zone": "x"},
        device_memory_bytes=5,
        deadline=deadline,
        queue_timeout_s=1.5,
        run_timeout_s=2,
        attempts_max=7,
        backoff_initial_s=0.25,
        backoff_max_s=9,
        ephemeral=True,
        result_ttl_s=60,
        wait_for_worker=True,
        request_id="mine",
        partition_key="key",
        units=4,
    )
    spec, task = master.specs[0], master.inputs[0]
    assert (spec.kind, spec.model, spec.queue, spec.priority) == ("echo", "m", "q", 2)
    assert dict(spec.parameters) == {"a": "1"}
    assert dict(spec.required_labels) == {"zone": "x"}
    assert spec.required_device_memory_bytes == 5
    assert spec.deadline.ToDatetime(tzinfo=UTC) == deadline
    assert spec.queue_timeout.ToNanoseconds() == 1_500_000_000
    assert spec.run_timeout.seconds == 2
    assert (spec.attempts_max, spec.backoff_initial.nanos, spec.backoff_max.seconds) == (7, 250_000_000, 9)
    assert spec.durability == task_pb2.DURABILITY_EPHEMERAL
    assert spec.result_ttl.seconds == 60
    assert spec.wait_for_worker
    assert (task.request_id, task.partition_key, task.units) == ("mine", "key", 4)


async def test_tasks_of_other_options_have_other_specs(master: ScriptedMaster, client: AsyncClient) -> None:
    for labels in ({"zone": "a"}, {"zone": "b"}):
        for priority in (1, 2):
            await client.run("echo", b"", priority=priority)
            await client.run("echo", b"", labels=labels)
    assert [spec.priority for spec in master.specs[::2]] == [1, 2, 1, 2]
    assert [spec.required_labels["zone"] for spec in master.specs[1::2]] == ["a", "a", "b", "b"]


async def test_a_large_payload_with_a_request_id_has_a_checksum(master: ScriptedMaster, client: AsyncClient) -> None:
    payload = bytes(LARGE_BYTES)
    await client.run("echo", payload)
    await client.run("echo", payload, request_id="mine")
    assert [task.payload_crc32 for task in master.inputs] == [0, zlib.crc32(payload)]


def test_a_missing_result_is_an_error() -> None:
    missing = task_pb2.Outcome(state=task_pb2.OUTCOME_STATE_RESULT_MISSING, error=task_pb2.TaskError(type="ResultLost"))
    with pytest.raises(multigpu.ResultLostError):
        print(multigpu.Outcome(missing).result)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"prioriti": 1}, TypeError, "did you mean 'priority'"),
        ({"priority": "high"}, multigpu.InvalidTaskError, "priority='high'"),
        ({"run_timeout_s": -1}, multigpu.InvalidTaskError, "0 or more"),
        ({"deadline": datetime(2030, 1, 1)}, multigpu.InvalidTaskError, "time zone"),
        ({"deadline": 60}, multigpu.InvalidTaskError, "run_timeout_s"),
        ({"parameters": {"a": 1}}, multigpu.InvalidTaskError, "parameters"),
    ],
)
async def test_a_wrong_option_is_not_sent(options: Any, error: type[Exception], says: str) -> None:
    client = multigpu.AsyncClient("127.0.0.1:1")
    with pytest.raises(error, match=says):
        await client.run("echo", b"", **options)
    await client.close()


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (task_pb2.OUTCOME_STATE_FAILED, multigpu.TaskFailed),
        (task_pb2.OUTCOME_STATE_CANCELLED, multigpu.TaskCancelled),
        (task_pb2.OUTCOME_STATE_EXPIRED, multigpu.TaskExpired),
        (task_pb2.OUTCOME_STATE_DEAD_LETTERED, multigpu.TaskFailed),
    ],
)
async def test_each_outcome_but_success_has_its_error(state: Any, error: type[multigpu.TaskError]) -> None:
    def answer(spec: Spec, task: Task) -> Reply:
        return task_pb2.Outcome(
            state=state, error=task_pb2.TaskError(type="Boom", message="it broke"), attempts=3, worker_id="w0"
        )

    async with ScriptedMaster(answer) as master, multigpu.AsyncClient(master.address) as client:
        with pytest.raises(error, match=r"Boom: it broke \(3 attempts, the last on w0\)") as caught:
            await client.run("echo", b"")
        assert caught.value.outcome.attempts == 3
        outcome = await client.run_outcome("echo", b"")
        assert not outcome.succeeded
        assert outcome.error_type == "Boom"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (3, multigpu.InvalidTaskError),
        (4, multigpu.InvalidTaskError),
        (9, multigpu.UnplaceableError),
        (8, multigpu.ResourceExhaustedError),
        (14, multigpu.RejectedError),
    ],
)
async def test_a_rejection_is_an_error(code: int, error: type[multigpu.RejectedError]) -> None:
    def answer(spec: Spec, task: Task) -> Reply:
        return task_service_pb2.Rejection(code=code, message="no, because")

    async with ScriptedMaster(answer) as master, multigpu.AsyncClient(master.address) as client:
        with pytest.raises(error, match="no, because") as caught:
            await client.run("echo", b"")
        assert caught.value.code == code
        assert len(master.inputs) == 1


async def test_a_rejection_with_a_delay_is_retried_after_it() -> None:
    rejections: Counter[str] = Counter()

    def answer(spec: Spec, task: Task) -> Reply:
        rejections[task.request_id] += 1
        if rejections[task.request_id] <= 2:
            rejection = task_service_pb2.Rejection(code=8, message="the queue is full")
            rejection.retry_delay.FromMilliseconds(50)
            return rejection
        return echo(spec, task)

    async with ScriptedMaster(answer) as master, multigpu.AsyncClient(master.address) as client:
        begin = asyncio.get_running_loop().time()
        assert await asyncio.gather(*(client.run("echo", i) for i in range(50))) == list(range(50))
        assert asyncio.get_running_loop().time() - begin >= 0.1
        assert set(rejections.values()) == {3}


async def test_cancelling_the_coroutine_cancels_the_task(master: ScriptedMaster, client: AsyncClient) -> None:
    master.gate.clear()
    run = asyncio.create_task(client.run("echo", b"", request_id="mine"))
    await until_async(lambda: master.inputs)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until_async(lambda: master.cancelled == ["mine"])
    master.gate.set()
    assert await client.run("echo", 1) == 1


async def test_one_request_id_is_one_task(master: ScriptedMaster, client: AsyncClient) -> None:
    master.gate.clear()
    runs = [asyncio.create_task(client.run("echo", b"x", request_id="same")) for _ in range(3)]
    await until_async(lambda: master.inputs)
    runs[0].cancel()  # the others still want it
    await asyncio.sleep(0.02)
    assert master.cancelled == []
    master.gate.set()
    assert await asyncio.gather(*runs[1:]) == [b"x", b"x"]
    assert set(master.answered) == {"same"}


async def test_the_window_bounds_unsettled_tasks() -> None:
    async with ScriptedMaster() as master, multigpu.AsyncClient(master.address, max_in_flight=4) as client:
        master.gate.clear()
        runs = [asyncio.create_task(client.run("echo", i)) for i in range(10)]
        await until_async(lambda: len(master.inputs) == 4)
        await asyncio.sleep(0.05)
        assert len(master.inputs) == 4
        runs[7].cancel()  # while it waits for the window
        master.gate.set()
        await asyncio.wait(runs)
        assert [run.result() for run in runs if not run.cancelled()] == [0, 1, 2, 3, 4, 5, 6, 8, 9]


async def test_the_window_bounds_bytes_too() -> None:
    async with ScriptedMaster() as master, multigpu.AsyncClient(master.address, max_in_flight_bytes=1 << 20) as client:
        master.gate.clear()
        runs = [asyncio.create_task(client.run("echo", bytes(400_000))) for _ in range(5)]
        await until_async(lambda: len(master.inputs) == 2)
        await asyncio.sleep(0.05)
        assert len(master.inputs) == 2
        master.gate.set()
        assert [len(result) for result in await asyncio.gather(*runs)] == [400_000] * 5
        assert len(await client.run("echo", bytes(3 << 20))) == 3 << 20  # larger than the window: alone


async def test_a_payload_larger_than_a_message_is_not_sent() -> None:
    client = multigpu.AsyncClient("127.0.0.1:1")
    with pytest.raises(multigpu.InvalidTaskError, match=r"the master's payload_bytes_max, 32 MiB by default: split it"):
        await client.run("echo", bytes(64 << 20))
    await client.close()


async def test_partial_outputs_arrive_once_each_over_a_break(master: ScriptedMaster, client: AsyncClient) -> None:
    parts = [b"%d" % i for i in range(20)]
    master.partials[b"go"] = parts
    assert [part async for part in client.stream("echo", b"go")] == parts
    master.breaks_after.extend([0])  # after the partials, before the outcome: they are not sent again
    await master.stop()
    await master.start()
    assert [part async for part in client.stream("echo", b"go")] == parts


async def test_partial_outputs_missing_from_the_stream_come_from_the_outcome() -> None:
    async with ScriptedMaster() as master, multigpu.AsyncClient(master.address) as client:
        master.partials[b"go"] = [b"a", b"b"]
        master.streams_partials = False
        parts = client.stream("echo", b"go")
        assert [part async for part in parts] == [b"a", b"b"]
        assert parts.outcome.value() == b"go"


async def test_partial_outputs_precede_the_error() -> None:
    def answer(spec: Spec, task: Task) -> Reply:
        return failed("Boom")

    async with ScriptedMaster(answer) as master, multigpu.AsyncClient(master.address) as client:
        master.partials[b"go"] = [b"a", b"b"]
        got = []
        with pytest.raises(multigpu.TaskFailed, match="Boom"):
            async for part in client.stream("echo", b"go"):
                got.append(part)
        assert got == [b"a", b"b"]


async def test_leaving_a_stream_early_cancels_its_task() -> None:
    def answer(spec: Spec, task: Task) -> Reply:
        return None  # runs for ever

    async with ScriptedMaster(answer) as master, multigpu.AsyncClient(master.address) as client:
        master.partials[b"go"] = [b"a", b"b"]
        stream = client.stream("echo", b"go", request_id="mine")
        assert await anext(stream) == b"a"
        await stream.aclose()
        await until_async(lambda: master.cancelled == ["mine"])
