"""AsyncClient.watch: cursors that lose and repeat nothing."""

import asyncio
from contextlib import aclosing
from typing import Any

import grpc
import multigpu
import pytest
from multigpu import AsyncClient
from multigpu.v1 import task_pb2

from tests.client.scripted_master import ScriptedMaster
from tests.waiting import until_async


def scripted_outcomes(count: int) -> list[task_pb2.Outcome]:
    return [task_pb2.Outcome(task_id=i, state=task_pb2.OUTCOME_STATE_SUCCEEDED) for i in range(1, count + 1)]


async def test_watch_continues_after_breaks_and_from_any_cursor(master: ScriptedMaster, client: AsyncClient) -> None:
    master.watched = scripted_outcomes(20)
    master.watch_break_after = 4
    cursors = {}
    async with aclosing(client.watch()) as outcomes:
        async for outcome, cursor in outcomes:
            cursors[outcome.task_id] = cursor
            if outcome.task_id == 20:
                break
    assert list(cursors) == list(range(1, 21))
    for task_id, cursor in cursors.items():
        master.watched = scripted_outcomes(22)
        rest = []
        async with aclosing(client.watch(cursor=cursor)) as outcomes:
            async for outcome, _ in outcomes:
                rest.append(outcome.task_id)
                if outcome.task_id == 22:
                    break
        assert rest == list(range(task_id + 1, 23))


async def test_a_cursor_inside_a_frame_skips_no_other_outcomes(master: ScriptedMaster, client: AsyncClient) -> None:
    """After a restore of an older copy the frame has other outcomes."""
    master.watched = scripted_outcomes(20)
    async with aclosing(client.watch(cursor="3#2.5")) as outcomes:
        assert (await anext(outcomes))[0].task_id == 6
    for cursor in ("3#8.99", "3#2.6"):
        with pytest.raises(multigpu.CursorExpiredError, match="begin with an empty cursor"):
            await anext(client.watch(cursor=cursor))


async def test_watch_survives_a_restart_and_reports_a_lost_cursor(master: ScriptedMaster, client: AsyncClient) -> None:
    master.watched = scripted_outcomes(2)
    async with aclosing(client.watch()) as outcomes:
        assert (await anext(outcomes))[0].task_id == 1
        assert (await anext(outcomes))[0].task_id == 2
        third = asyncio.ensure_future(anext(outcomes))
        await asyncio.sleep(0.05)
        await master.stop()
        master.watched = scripted_outcomes(3)
        await master.start()
        assert (await asyncio.wait_for(third, 120))[0].task_id == 3
    with pytest.raises(multigpu.CursorExpiredError, match="removed"):
        await anext(client.watch(cursor="-1"))


async def test_watch_survives_an_odd_status_in_a_long_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multigpu._transport.connection._BACKOFF_MAX_S", 0.01)
    statuses = [*[grpc.StatusCode.UNAVAILABLE] * 10, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE]

    class Returning(ScriptedMaster):
        async def Watch(self, request: Any, context: Any) -> Any:  # noqa: N802  the method's name
            if statuses:
                await context.abort(statuses.pop(0), "scripted")
            await super().Watch(request, context)

    async with Returning() as master, multigpu.AsyncClient(master.address) as client:
        master.watched = scripted_outcomes(1)
        assert (await asyncio.wait_for(anext(client.watch()), 120))[0].task_id == 1


@pytest.mark.parametrize("cursor", ["x#².5", "x#1.²", "x#" + "1" * 5000 + ".5"], ids=["count", "task", "long"])
async def test_a_cursor_of_other_digits_is_the_masters_to_judge(cursor: str) -> None:
    asked = []

    class Judging(ScriptedMaster):
        async def Watch(self, request: Any, context: Any) -> Any:  # noqa: N802  the method's name
            asked.append(request.cursor)
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "no such cursor")

    async with Judging() as master, multigpu.AsyncClient(master.address) as client:
        with pytest.raises(multigpu.CursorExpiredError, match="no such cursor"):
            await anext(client.watch(cursor=cursor))
    assert asked == [cursor]


async def test_closing_the_client_ends_a_watch(master: ScriptedMaster) -> None:
    client = multigpu.AsyncClient(master.address)
    watch = asyncio.ensure_future(anext(client.watch()))
    await until_async(lambda: master.watches)
    await client.close()
    with pytest.raises(multigpu.ClientClosedError):
        await asyncio.wait_for(watch, 120)
