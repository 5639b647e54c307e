"""Recalled leases return if they have not begun, wherever they wait in the worker. More urgent leases run first."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from multigpu.v1 import worker_service_pb2 as pb

from tests.worker.conftest import Start
from tests.worker.scripted_master import SUCCEEDED, Stream

LONG, SHORT = b"60", b"0"
RETURNED = pb.REPORT_STATE_RETURNED


@pytest.mark.parametrize("fast", [False, True], ids=["batches of one", "one batch"])
async def test_a_recall_returns_unstarted_leases_and_running_ones_continue(stream: Stream, fast: bool) -> None:
    if fast:  # the worker learns that these tasks are fast, and sends the next ones as one batch
        stream.lease([(n, SHORT) for n in range(1001, 1601)], kind="sleep")
        await stream.reported(*range(1001, 1601))
    stream.lease([(1, LONG), *((n, SHORT) for n in range(2, 40))], kind="sleep")
    await stream.running(1)
    stream.send(recalled_lease_ids=[*range(1, 40), 77])
    words = await stream.reported(*range(2, 40))
    assert {(word.state, word.error.type) for word in words} == {(RETURNED, "Recalled")}
    stream.lease([(50, SHORT)], kind="sleep")
    await asyncio.sleep(0.2)
    assert not {1, 50} & stream.reports.keys()
    stream.revoke(1)
    (last,) = await stream.reported(50)
    assert last.state == SUCCEEDED


async def test_a_slot_with_a_cancelled_running_call_is_reported_and_gets_no_lease(start_handlers: Start) -> None:
    worker, stream = await start_handlers("--cancel-grace-s", "600")
    stream.lease([(1, b"")], kind="t.deaf")  # the engine process handles no message meanwhile
    await stream.running(1)
    assert stream.heartbeats[-1].occupied_slots == 0
    stream.revoke(1)
    await stream.until(lambda: stream.heartbeats[-1].occupied_slots == 1)
    stream.lease([(2, b"x"), (3, b"x")], kind="t.upper", run_timeout={"seconds": 1})
    stream.send(recalled_lease_ids=[2])
    (word,) = await stream.reported(2)
    assert (word.state, word.error.type) == (RETURNED, "Recalled")
    await asyncio.sleep(1.2)  # longer than its run timeout, which does not count yet
    assert 3 not in stream.reports
    assert [(held.lease_id, held.running) for held in stream.heartbeats[-1].leases] == [(3, False)]
    (engine,) = worker.engine_pids()
    os.kill(engine, signal.SIGKILL)
    (word,) = await stream.reported(3)
    assert word.state == SUCCEEDED
    await stream.until(lambda: stream.heartbeats[-1].occupied_slots == 0)


async def test_a_more_urgent_lease_goes_before_what_the_engine_holds(stream: Stream) -> None:
    stream.lease([(1, LONG), (2, SHORT), (3, SHORT)], kind="sleep", priority=5)
    await stream.running(1)
    stream.lease([(4, SHORT)], kind="sleep", priority=1)
    stream.lease([(5, SHORT)], kind="sleep", priority=5)
    await asyncio.sleep(0.2)  # the engine gives back what it has prepared
    stream.revoke(1)
    await stream.reported(2, 3, 4, 5)
    assert [event for event in stream.events if event != "heartbeat"] == [("report", n) for n in (4, 2, 3, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_a_returned_lease_has_not_run(stream: Stream, tmp_path: Path, seed: int) -> None:
    """Recalls and urgent leases at random moments while fast tasks run: each lease either runs or is returned."""
    rng = random.Random(seed)
    log = tmp_path / "log"
    parameters, last = {"log": str(log)}, 0
    for _ in range(300):
        count = rng.randrange(1, 40)
        leases = [(last + n, b"x") for n in range(1, count + 1)]
        last += count
        stream.lease(leases, kind="t.note", parameters=parameters, priority=rng.choice((1, 3, 5)))
        if rng.random() < 0.5:
            stream.send(recalled_lease_ids=rng.sample(range(max(1, last - 100), last + 1), min(20, last)))
        await asyncio.sleep(rng.choice((0, 0, 0.001, 0.005)))
    await stream.reported(*range(1, last + 1))
    ran = [int(line) - 1000 for line in log.read_text().split()]
    succeeded = {n for n, word in stream.reports.items() if word.state == SUCCEEDED}
    assert sorted(ran) == sorted(succeeded)
    assert len(succeeded) < last


async def test_a_recalled_lease_in_an_engine_that_dies_is_returned(start_handlers: Start) -> None:
    """It ran here after all, and perhaps at the same time elsewhere."""
    worker, stream = await start_handlers()
    (engine,) = worker.engine_pids()
    os.kill(engine, signal.SIGSTOP)
    stream.lease([(2, b"x")], kind="t.upper")
    stream.send(recalled_lease_ids=[2])
    beats = len(stream.heartbeats)
    await stream.until(lambda: len(stream.heartbeats) > beats + 1)  # by now the worker has read both
    assert 2 not in stream.reports, "it is in the engine"
    os.kill(engine, signal.SIGKILL)
    (word,) = await stream.reported(2)
    assert (word.state, word.error.type) == (RETURNED, "Recalled")
