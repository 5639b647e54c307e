"""Chaos in its short form. `python -m tests.chaos --sweep --rounds 50` is the long one; CHAOS_SEED repeats a run."""

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from multigpu.v1.admin_service_pb2 import WORKER_STATE_ACTIVE

from tests.chaos.failpoints import FAILPOINTS
from tests.chaos.network import Way
from tests.chaos.records.checker import check
from tests.chaos.records.report import Report, report
from tests.chaos.rounds import Chaos
from tests.disk import layer
from tests.waiting import until

# Both ends ping an idle connection every 10 s and wait 5 s for the answer; 10 s more for a busy machine.
NOTICED_S = 10.0 + 5.0 + 10.0
CUT = Way(loss=1.0)


def run(folder: Path, what: Callable[[Chaos], None], kinds: list[str] | None = None) -> Report:
    """Runs something on a fleet and checks its history."""
    seed = int(os.environ.get("CHAOS_SEED", "0")) or random.randrange(1, 2**32)
    print(f"CHAOS_SEED={seed}")
    chaos = Chaos(folder, seed, tasks=300, strikes=(2, 4), kinds=kinds)
    if chaos.no_network and kinds:
        pytest.skip(chaos.no_network)
    if chaos.no_network:
        print(f"without faults of the network: {chaos.no_network}")
    with chaos:
        what(chaos)
    records = chaos.records()
    result = report(records, check(records))
    print("\n".join(result.lines()))
    assert not result.broken, f"CHAOS_SEED={seed}"
    figures = result.figures
    assert figures["outcomes"] + figures["outcomes lost with their master"] == chaos.expected_outcomes
    return result


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_while_everything_breaks(tmp_path: Path) -> None:
    result = run(tmp_path, lambda chaos: chaos.random_rounds(3))
    assert sum(result.by_kind.values()) >= 6


@pytest.mark.slow
def test_nothing_is_lost_when_a_process_dies_at_any_failpoint(tmp_path: Path) -> None:
    result = run(tmp_path, lambda chaos: chaos.sweep(FAILPOINTS))
    assert sum(n for kind, n in result.by_kind.items() if "at a failpoint" in kind) == len(FAILPOINTS)


@pytest.mark.slow
@pytest.mark.skipif(bool(layer.missing_requirement()), reason=layer.missing_requirement())
def test_nothing_is_lost_when_the_master_restarts_with_a_wrong_clock(tmp_path: Path) -> None:
    result = run(tmp_path, lambda chaos: chaos.random_rounds(2), ["clock", "worker"])
    assert result.by_kind["clock set between two masters"]


def cut_one_way(chaos: Chaos) -> None:
    network, fleet = chaos.network, chaos.fleet
    assert network is not None
    client = chaos.begin_round()
    chaos.mend_for(0.5)
    broke = {name: len(fleet.workers[name].events("session broke")) for name in ("w0", "w1")}
    network.shape("w0", "master", CUT)  # the master receives nothing from w0, which receives from the master
    network.shape("master", "w1", CUT)  # w1 receives nothing; the master receives until w1's kernel ends the connection

    def lost(name: str) -> bool:
        with contextlib.suppress(grpc.RpcError):
            return bool(fleet.worker(name).state != WORKER_STATE_ACTIVE)
        return False

    def broken(name: str) -> bool:
        return len(fleet.workers[name].events("session broke")) > broke[name]

    until(lambda: all(map(lost, broke)), 2 * NOTICED_S, "the master to notice that w0 and w1 are lost")
    until(lambda: all(map(broken, broke)), 2 * NOTICED_S, "w0 and w1 to notice that their sessions are broken")
    chaos.until_mended(lambda: client.done, "the clients, which w2 serves")
    network.heal()
    until(chaos.whole, 60, "the fleet to be complete again")
    chaos.end_round(client)


@pytest.mark.slow
def test_a_cut_one_way_is_noticed_at_both_ends(tmp_path: Path) -> None:
    run(tmp_path, cut_one_way, ["network", "worker"])
