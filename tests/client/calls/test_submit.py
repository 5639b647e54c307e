"""Submitting tasks, and calls about submitted tasks."""

import asyncio
from collections.abc import Iterator

import multigpu
import pytest
from multigpu import AsyncClient
from multigpu.v1 import task_service_pb2

from tests.client.scripted_master import Reply, ScriptedMaster, Spec, Task, as_json, echo


async def test_submit_returns_ids_and_rejections_in_order() -> None:
    def answer(spec: Spec, task: Task) -> Reply:
        if task.payload == b"3":
            return task_service_pb2.Rejection(code=3, message="not a three")
        return echo(spec, task)

    async with ScriptedMaster(answer) as master, multigpu.AsyncClient(master.address) as client:
        results = await client.submit_many("echo", range(25_000))
        assert len(results) == 25_000
        assert master.submits == 3
        assert isinstance(results[3], multigpu.InvalidTaskError)
        ids = [handle.id for handle in results if not isinstance(handle, multigpu.RejectedError)]
        assert len(set(ids)) == 24_999
        with pytest.raises(multigpu.InvalidTaskError, match="not a three"):
            await client.submit("echo", 3)
        handle = await client.submit("echo", 4, request_id="four", priority=1)
        assert (await client.get("four")).task_id == (await client.get(handle.id)).task_id == handle.id
        assert handle.request_id == "four"
        assert master.specs[-1].priority == 1


async def test_submit_calls_are_bounded_by_bytes(master: ScriptedMaster, client: AsyncClient) -> None:
    assert len(await client.submit_many("echo", (bytes(12 << 20) for _ in range(5)))) == 5
    assert master.submits == 3


async def test_get_cancel_count_and_list() -> None:
    def answer(spec: Spec, task: Task) -> Reply:
        return as_json([1])

    async with ScriptedMaster(answer) as master, multigpu.AsyncClient(master.address) as client:
        submitted = await client.submit_many("echo", range(2500))
        ids = [handle.id for handle in submitted if not isinstance(handle, multigpu.RejectedError)]
        task = await client.get(ids[0], wait_s=1)
        assert task.state is multigpu.TaskState.SETTLED
        assert task.outcome is not None
        assert task.outcome.value() == [1]
        with pytest.raises(multigpu.NotFoundError):
            await client.get(999_999)
        response = await client.cancel(ids[1], "unknown", reason="no need")
        assert list(response.cancelled_task_ids) == [ids[1]]
        assert list(response.unknown) == ["unknown"]
        assert (await client.count()).queued == 2500
        listed = [task async for task in client.list_tasks()]
        assert [task.task_id for task in listed] == ids
        assert listed[0].outcome is not None
        with pytest.raises(multigpu.MultigpuError, match="a list has no results"):
            listed[0].outcome.value()


async def test_a_cancelled_submit_cancels_its_tasks(master: ScriptedMaster, client: AsyncClient) -> None:
    def payloads() -> Iterator[int]:
        yield from range(10_000)  # as many as one call takes
        task.cancel()
        yield 0

    task = asyncio.create_task(client.submit_many("echo", payloads()))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(set(master.cancelled)) == 10_000


async def test_a_recorded_span_travels_with_its_tasks(master: ScriptedMaster, client: AsyncClient) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    tracer = TracerProvider().get_tracer("test")
    await client.run("echo", b"")
    with tracer.start_as_current_span("mine") as span:
        await client.run("echo", b"")
        assert [item async for item in client.map("echo", [b""])] == [b""]
        await client.submit("echo", b"")
    trace_id = f"{span.get_span_context().trace_id:032x}"
    parents = [task.traceparent for task in master.inputs]
    assert parents[0] == ""
    assert all(parent.split("-")[1] == trace_id for parent in parents[1:]), parents
    assert len(parents) == 4


async def test_an_empty_request_id_is_an_error(client: AsyncClient) -> None:
    """An empty order number would have run the task once for each call."""
    with pytest.raises(multigpu.InvalidTaskError, match="the request_id is empty"):
        await client.submit("k", b"", request_id="")
    with pytest.raises(multigpu.InvalidTaskError, match="the request_id is empty"):
        await client.submit_many("k", [multigpu.Input(payload=b"", request_id="")])
    assert (await client.submit("k", b"")).request_id


async def test_a_filter_takes_states_by_their_names_in_python(client: AsyncClient) -> None:
    with pytest.raises(TypeError, match=r"states takes members of multigpu\.TaskState, not 'queued'"):
        await client.count(states=["queued"])  # type: ignore[list-item]
