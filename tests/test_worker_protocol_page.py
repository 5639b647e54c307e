"""docs/worker-protocol.md tells the truth: its example serves a real master and survives kills of either side."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2

from tests.fleet import Daemon, Fleet, until

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "worker-protocol.md").read_text("utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SUCCEEDED, FAILED = task_pb2.OUTCOME_STATE_SUCCEEDED, task_pb2.OUTCOME_STATE_FAILED


class ExampleFleet(Fleet):
    """A master, and the page's worker."""

    def start_worker(self, name: str, *flags: str) -> Daemon:
        (self.folder / "reverse_worker.py").write_text(EXAMPLE, "utf-8")
        log = self.folder / f"{name}.log"
        self.workers[name] = Daemon("reverse_worker", [self.address, name, *flags], log, self._env)
        return self.workers[name]

    def begun(self, task_id: int) -> int:
        """How many attempts of the task the worker has begun."""
        log = self.workers["w0"].log_path.read_text("utf-8").splitlines()
        return log.count(f"begins {task_id}")

    def is_running(self, task_id: int) -> bool:
        return self.get(task_id).state == task_pb2.TASK_STATE_LEASED and self.begun(task_id) > 0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ExampleFleet]:
    with ExampleFleet(tmp_path / "fleet", workers=1, handlers_dir=tmp_path / "fleet") as running:
        yield running
        assert not running.faults()


def test_the_example_serves_tasks(fleet: ExampleFleet) -> None:
    texts = [f"text {number}" for number in range(200)]
    ids = fleet.submit("reverse", *(text.encode() for text in texts))
    outcomes = [fleet.outcome(task_id) for task_id in ids]
    assert [o.result.decode() for o in outcomes] == [text[::-1] for text in texts]
    assert {(o.state, o.attempts, o.worker_id) for o in outcomes} == {(SUCCEEDED, 1, "w0")}


def test_the_example_reports_errors(fleet: ExampleFleet) -> None:
    outcome = fleet.outcome(*fleet.submit("reverse", b"\xff"))
    assert (outcome.state, outcome.error.type, outcome.attempts) == (FAILED, "BadInput", 1)
    assert "can't decode" in outcome.error.message


def test_tasks_of_a_killed_example_run_when_it_is_back(fleet: ExampleFleet) -> None:
    ids = fleet.submit("reverse", *[b"abc"] * 20, parameters={"seconds": "0.2"})
    until(lambda: fleet.is_running(ids[1]))
    fleet.workers["w0"].kill()
    fleet.start_worker("w0")
    outcomes = [fleet.outcome(task_id) for task_id in ids]
    assert {(o.state, o.result) for o in outcomes} == {(SUCCEEDED, b"cba")}
    assert max(fleet.begun(task_id) for task_id in ids) == 2


@pytest.mark.parametrize("ends_meanwhile", [False, True])
def test_the_example_keeps_its_task_when_the_master_restarts(fleet: ExampleFleet, ends_meanwhile: bool) -> None:
    seconds = 0.5 if ends_meanwhile else 3.0
    (task_id,) = fleet.submit("reverse", b"abc", parameters={"seconds": str(seconds)})
    until(lambda: fleet.is_running(task_id))
    fleet.master.kill()
    if ends_meanwhile:
        time.sleep(2 * seconds)
    fleet.start_master()
    outcome = fleet.outcome(task_id)
    assert (outcome.state, outcome.result, fleet.begun(task_id)) == (SUCCEEDED, b"cba", 1)


def test_the_example_stops_a_cancelled_task_and_goes_on(fleet: ExampleFleet) -> None:
    first, second = fleet.submit("reverse", b"abc", b"def", parameters={"seconds": "0.5"})
    until(lambda: fleet.is_running(first))
    with fleet.client() as client:
        client.cancel(first)
    assert fleet.outcome(first).state == task_pb2.OUTCOME_STATE_CANCELLED
    assert fleet.outcome(second).result == b"fed"


def test_the_example_finishes_its_leases_when_it_is_told_to_stop(fleet: ExampleFleet) -> None:
    ids = fleet.submit("reverse", b"abc", b"def", parameters={"seconds": "0.5"})
    until(lambda: fleet.is_running(ids[0]))
    assert fleet.workers["w0"].stop() == 0
    outcome = fleet.outcome(ids[0])
    assert (outcome.state, outcome.attempts) == (SUCCEEDED, 1)
    assert fleet.worker("w0").state == admin_pb.WORKER_STATE_LOST


def test_a_second_process_of_the_example_waits_for_the_first(fleet: ExampleFleet) -> None:
    first = fleet.workers["w0"]
    second = fleet.start_worker("w0")
    until(lambda: grpc.StatusCode.ALREADY_EXISTS.name in second.log())
    first.kill()
    fleet.wait_for_workers("w0")
    assert fleet.outcome(*fleet.submit("reverse", b"abc")).result == b"cba"
    assert second.alive
