"""Every target with a few inputs: from hypothesis, which shrinks failing inputs, and from one round of the long run.

Long runs: `python -m tests.hostile --inputs 1000000`.
"""

import asyncio
import socket
from collections.abc import Iterator
from random import Random

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile import run
from tests.hostile.targets import master
from tests.hostile.targets.base import Target
from tests.hostile.targets.inputs import Maker

INPUTS = 6_000


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    with run.all_targets() as targets:
        yield {target.name: target for target in targets}


@pytest.mark.slow
def test_one_round_finds_nothing() -> None:
    tally = run.Tally()
    run.one_round("ci", 0, INPUTS, tally)
    assert tally.total == INPUTS
    assert [(f.target, f.what) for f in tally.found] == []


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=200) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_random_bytes(targets: dict[str, Target], data: bytes) -> None:
    for target in targets.values():
        if "Watch" not in target.name:  # slow: each call waits
            target.feed(data)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 62), pick=st.integers(0, 1 << 30))
def test_random_messages(targets: dict[str, Target], seed: int, pick: int) -> None:
    chosen = [target for name, target in sorted(targets.items()) if "Watch" not in name]
    target = chosen[pick % len(chosen)]
    target.feed(target.make(Maker(Random(seed))))


def test_every_target_still_works(targets: dict[str, Target]) -> None:
    for check in {target.check for target in targets.values()}:
        check()


def test_a_call_of_a_loop_that_was_closed_is_no_fault_of_the_master() -> None:
    """gRPC's one poller hands the end of such a call to the master's loop."""

    async def call(address: str) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(address)
        unanswered = channel.unary_unary("/x/y")(b"", timeout=0.5)
        waiting = asyncio.ensure_future(unanswered.wait_for_connection())
        await asyncio.wait([waiting], timeout=0.2)
        return channel

    local = master.LocalMaster()
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            closed = asyncio.new_event_loop()
            _channel = closed.run_until_complete(call(f"127.0.0.1:{silent.getsockname()[1]}"))
            closed.close()
            local.loop.run_until_complete(asyncio.sleep(1))
        assert local.faults == []
    finally:
        local.close()
