"""Tasks that several workers run at the same time, with real process groups of torch.distributed over Gloo."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

import multigpu
import pytest

from tests.fleet import Fleet, until

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytestmark = pytest.mark.slow
WORKERS = 3
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("gangs")
    with Fleet(folder, workers=WORKERS, handlers=["gang_handlers"], handlers_dir=Path(__file__).parent) as fleet:
        fleet.wait_for_workers()
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[multigpu.Client]:
    fleet.wait_for_workers()
    with fleet.client() as client:
        yield client


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_meet_and_the_result_is_that_of_rank_0(client: multigpu.Client, size: int) -> None:
    for _ in range(2):
        result = client.run("gang.sum", {}, world_size=size, timeout=180)
        assert result == {"sum": sum(range(1, size + 1)), "rank": 0, "world_size": size}


def test_the_example_of_the_page(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/gangs.md").read_text("utf-8"), re.DOTALL)
    handlers, _, program = block.partition("\n\nwith ")
    (tmp_path / "page.py").write_text(handlers)
    program = f"with {program}".replace("Client()", "Client(address)").replace("world_size=4", "world_size=2")
    folder = tmp_path / "fleet"
    with Fleet(folder, workers=2, handlers=["page"], handlers_dir=tmp_path) as own:
        own.wait_for_workers()
        code = f"from page import *\naddress = {own.address!r}\n{program}"
        env = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == ("2.0\n", 0), done.stderr


def test_other_tasks_run_beside_and_after_it(client: multigpu.Client) -> None:
    handles = [client.submit("gang.sum", {"seconds": 0.2}, world_size=2) for _ in range(4)]
    others = client.submit_many("echo", [b"%d" % n for n in range(200)])
    assert [handle.result(timeout=180)["sum"] for handle in handles] == [3.0] * 4
    assert [other.result(timeout=180) for other in others if isinstance(other, multigpu.TaskHandle)] == [
        b"%d" % n for n in range(200)
    ]


def pids(folder: Path, attempt: int, size: int) -> list[int]:
    until(lambda: all((folder / f"{attempt}-{rank}").exists() for rank in range(size)), 120)
    return [int((folder / f"{attempt}-{rank}").read_text()) for rank in range(size)]


def test_an_engine_that_is_killed_ends_the_attempt_of_all(client: multigpu.Client, tmp_path: Path) -> None:
    handle = client.submit("gang.sum", {"seconds": 1.0, "folder": str(tmp_path)}, world_size=2, backoff_initial_s=0.01)
    os.kill(pids(tmp_path, 1, 2)[1], signal.SIGKILL)
    assert handle.result(timeout=180)["sum"] == 3.0
    assert handle.outcome().message.attempts == 2


def test_a_worker_that_is_killed_ends_the_attempt_of_all_uncharged(
    fleet: Fleet, client: multigpu.Client, tmp_path: Path
) -> None:
    handle = client.submit("gang.sum", {"seconds": 1.0, "folder": str(tmp_path)}, world_size=2, attempts_max=1)
    pids(tmp_path, 1, 2)
    name = fleet.get(handle.id).worker_id
    fleet.workers[name].kill()
    assert handle.result(timeout=180)["sum"] == 3.0
    fleet.start_worker(name)


def test_a_rank_that_fails_fails_the_task_once(client: multigpu.Client) -> None:
    with pytest.raises(multigpu.TaskError) as error:
        client.run("gang.fails", {}, world_size=2, attempts_max=1, timeout=180)
    outcome = error.value.outcome
    assert outcome.attempts == 1
    assert (outcome.error_type, outcome.error_message) == ("ValueError", "rank 1 has had enough"), "not Gloo's error"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_ends_in_a_collective_is_the_cause_and_not_its_peers(
    client: multigpu.Client, tmp_path: Path, rank: int
) -> None:
    options = {"steps": 8, "seconds": 0.01, "kills": rank, "killed": str(tmp_path / "killed")}
    handle = client.submit("gang.train", options, world_size=WORKERS, backoff_initial_s=0.01)
    assert handle.result(timeout=180)["rank"] == 0
    assert handle.outcome().message.attempts == 2


def test_training_runs_again_and_again_on_the_same_engines(client: multigpu.Client) -> None:
    for _ in range(3):
        handle = client.submit("gang.train", {"steps": 2}, world_size=2, attempts_max=1)
        assert handle.result(timeout=180) == {"begun": 0, "rank": 0}
    log = handle.outcome().log
    assert "rank 0 begins at step 0" in log
    assert "rank 1" not in log


LISTENS = """
import socket
from multigpu._ranks import Place, destroy_process_group, init_process_group
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
for run_id in "12":  # the store's server stays
    init_process_group(Place(0, 1, f"127.0.0.1:{port}", run_id), "gloo")
    destroy_process_group()
socket.create_connection(("127.0.0.1", port)).close()
try:
    socket.create_connection(("127.0.0.2", port)).close()
except ConnectionRefusedError:
    print("refused")
"""


def test_rank_0_listens_at_its_own_address_alone() -> None:
    done = subprocess.run([sys.executable, "-c", LISTENS], capture_output=True, text=True, check=False, timeout=400)
    assert done.stdout == "refused\n", done.stderr


# The engine of rank 0 in an earlier run: it says when a rank has come to its store.
EARLIER = """
import time
from multigpu._ranks import serve_store
store = serve_store("127.0.0.1")
print(store.port, flush=True)
while not store.num_keys():
    time.sleep(0.01)
print("came", flush=True)
time.sleep(600)
"""
RANK = """
import sys
import torch.distributed
from multigpu._ranks import Place, init_process_group
port, rank = sys.argv[1:]
init_process_group(Place(int(rank), 2, f"127.0.0.1:{port}", "run"), "gloo")
torch.distributed.barrier()
print("met")
"""


def test_a_rank_whose_meeting_place_ends_with_an_earlier_engine_meets_the_next_one() -> None:
    def python(*arguments: str) -> "subprocess.Popen[str]":
        return ended.enter_context(subprocess.Popen([sys.executable, "-c", *arguments], stdout=PIPE, text=True))

    with ExitStack() as ended:
        earlier = python(EARLIER)
        ended.callback(earlier.kill)
        assert earlier.stdout is not None
        port = earlier.stdout.readline().strip()
        ranks = [python(RANK, port, "1")]
        ended.callback(ranks[0].kill)
        assert earlier.stdout.readline() == "came\n"
        earlier.kill()
        earlier.wait()
        ranks.append(python(RANK, port, "0"))
        ended.callback(ranks[1].kill)
        assert [rank.communicate(timeout=240)[0] for rank in ranks] == ["met\n"] * 2


def test_a_handler_that_takes_batches_is_no_rank(client: multigpu.Client) -> None:
    with pytest.raises(multigpu.TaskError, match="can't run on several workers"):
        client.run("gang.batched", b"x", world_size=2, timeout=180)


def test_a_master_that_dies_runs_it_again_from_the_checkpoint(
    fleet: Fleet, client: multigpu.Client, tmp_path: Path
) -> None:
    handle = client.submit("gang.train", {"seconds": 0.1, "steps": 60, "folder": str(tmp_path)}, world_size=2)
    pids(tmp_path, 1, 2)
    time.sleep(3.0)
    fleet.restart_master()
    assert handle.result(timeout=180)["begun"] > 0, "it goes on from the last checkpoint"


def test_more_ranks_than_workers_are_rejected_and_explained(fleet: Fleet, client: multigpu.Client) -> None:
    with pytest.raises(
        multigpu.UnplaceableError,
        match=f"4 workers, each on its own device, have to run this task .*, and {WORKERS} could",
    ):
        client.run("gang.sum", {}, world_size=4)
    handle = client.submit("gang.sum", {}, world_size=4, wait_for_worker=True)
    assert "4 workers, each on its own device, have to run this task" in handle.explain().summary
    fleet.start_worker("w3")
    assert handle.result(timeout=180)["sum"] == 10.0


def test_the_place_of_a_rank_is_no_parameter_of_the_task(client: multigpu.Client) -> None:
    assert client.run("gang.parameters", {}, world_size=2, parameters={"a": "b"}) == {"a": "b"}
    with pytest.raises(multigpu.InvalidTaskError, match=r"parameter 'multigpu\.rank' is reserved"):
        client.run("gang.parameters", {}, parameters={"multigpu.rank": "1"})
