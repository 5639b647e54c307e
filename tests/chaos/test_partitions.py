"""A fleet on a bad network: cut one way only, which both ends have to notice; delayed, lossy, reset; healed at last."""

import contextlib
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from multigpu.v1.admin_service_pb2 import WORKER_STATE_ACTIVE

from tests.chaos.network import Way
from tests.chaos.records.checker import check
from tests.chaos.records.history import CLIENTS
from tests.chaos.records.report import report
from tests.chaos.rounds import Chaos
from tests.waiting import until

# Both ends ping an idle connection every 10 s, and wait 5 s for the answer; the rest is for a machine with much to do.
NOTICED_S = 10.0 + 5.0 + 10.0
CUT = Way(loss=1.0)


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    made = Chaos(tmp_path_factory.mktemp("partitions"), seed=1, tasks=300, kinds=["network", "worker"])
    if made.no_network:
        pytest.skip(made.no_network)
    with made:
        yield made
    records = made.records()
    result = report(records, check(records))
    print("\n".join(result.lines()))
    assert not result.broken
    assert result.figures["outcomes"] == made.expected_outcomes


def sees_lost(chaos: Chaos, name: str) -> Callable[[], bool]:
    def lost() -> bool:
        with contextlib.suppress(grpc.RpcError):
            return bool(chaos.fleet.worker(name).state != WORKER_STATE_ACTIVE)
        return False

    return lost


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cut_one_way_is_noticed_at_both_ends(chaos: Chaos) -> None:
    network, fleet = chaos.network, chaos.fleet
    assert network is not None
    client = chaos.begin_round()
    chaos.mend_for(0.5)
    broke = {name: len(fleet.workers[name].events("session broke")) for name in ("w0", "w1")}
    network.shape("w0", "master", CUT)  # the master hears nothing of w0, which hears the master
    network.shape("master", "w1", CUT)  # w1 hears nothing of the master, which hears w1 until its kernel gives up
    began_s = time.monotonic()
    for name, before in broke.items():
        until(sees_lost(chaos, name), NOTICED_S, f"the master to miss {name}")
        print(f"the master missed {name} within {time.monotonic() - began_s:.1f} s")
        daemon = fleet.workers[name]
        until(lambda: len(daemon.events("session broke")) > before, NOTICED_S, f"{name} to miss the master")  # noqa: B023  called at once
        print(f"{name} missed the master within {time.monotonic() - began_s:.1f} s")
    # w2 is there still: the work goes on.
    chaos.until_mended(lambda: client.done, "the clients")
    network.heal()
    until(chaos.whole, 60, "the fleet to be whole again")
    chaos.end_round(client)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_delay_loss_resets_and_cuts_between_clients_and_master_lose_nothing(chaos: Chaos) -> None:
    network = chaos.network
    assert network is not None
    client = chaos.begin_round()
    for place in ("w0", "w1", "w2", CLIENTS):
        network.shape_both("master", place, Way(delay_s=0.01, jitter_s=0.02, loss=0.05))
    chaos.mend_for(1.0)
    for place in ("w0", "w1", CLIENTS):
        network.reset("master", place)
    chaos.mend_for(1.0)
    network.shape(CLIENTS, "master", CUT)
    chaos.mend_for(1.0)
    network.heal()
    network.shape("master", CLIENTS, CUT)
    chaos.mend_for(1.0)
    network.heal()
    chaos.end_round(client)
    assert all(network.seen[what] for what in ("carried", "delayed", "lost", "reset")), network.seen
