"""What waits in a window doesn't wait for the window's sake: a free worker gets it, and the urgent go first."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from multigpu.v1 import task_pb2

from tests.fleet import Fleet, until

FLEET = {"handlers": ["trial_handlers"]}
LEASED, SUCCEEDED = task_pb2.TASK_STATE_LEASED, task_pb2.OUTCOME_STATE_SUCCEEDED


Gates = Callable[[str], Path]


@pytest.fixture
def gates(fleet: Fleet, tmp_path: Path) -> Iterator[Gates]:
    """Files for `trial.gate`. Every gate is open in the end, and the workers have nothing left to do."""
    made: list[Path] = []

    def gate(name: str) -> Path:
        made.append(tmp_path / name)
        return made[-1]

    yield gate
    for path in made:
        path.touch()
    until(lambda: all(w.leases == 0 for w in fleet.list_workers()))


def widen(fleet: Fleet, kind: str, payload: bytes, **spec: Any) -> None:
    """Fast tasks, so that both windows are wide."""
    for task_id in fleet.submit(kind, *[payload] * 30, **spec):
        assert fleet.outcome(task_id).state == SUCCEEDED


def until_read(fleet: Fleet, worker_id: str) -> None:
    """Wait for two heartbeats of a worker: between them it has read what the master had sent it."""
    for _ in range(2):
        beat_ns = fleet.worker(worker_id).last_heartbeat_time.ToNanoseconds()
        until(lambda: fleet.worker(worker_id).last_heartbeat_time.ToNanoseconds() > beat_ns)  # noqa: B023


def ended(fleet: Fleet, task_id: int) -> Any:
    assert fleet.outcome(task_id).state == SUCCEEDED
    return fleet.get(task_id)


def test_short_tasks_do_not_wait_behind_a_long_one_while_a_worker_is_idle(fleet: Fleet, gates: Gates) -> None:
    widen(fleet, "sleep", b"0.05")
    gate = gates("gate")
    (long,) = fleet.submit("trial.gate", str(gate).encode())
    short = fleet.submit("sleep", b"1", b"0.1", b"0.1", b"0.1", b"0.1")
    for task_id in short:
        assert fleet.outcome(task_id, wait_s=30).state == SUCCEEDED
    assert fleet.get(long).state == LEASED, "it runs on until the gate opens"
    gate.touch()
    assert ended(fleet, long).attempts == 1


def test_tasks_of_a_long_ones_kind_do_not_wait_behind_it(fleet: Fleet, gates: Gates) -> None:
    """Batches hold several of them by now, with the long one in front: those behind it come back from the engine."""
    opened, gate = gates("opened"), gates("gate")
    opened.touch()
    for _ in range(4):
        widen(fleet, "trial.gate", str(opened).encode())
    long, *short = fleet.submit("trial.gate", str(gate).encode(), *[str(opened).encode()] * 40)
    for task_id in short:
        assert fleet.outcome(task_id, wait_s=30).state == SUCCEEDED
    assert fleet.get(long).state == LEASED
    gate.touch()
    assert ended(fleet, long).attempts == 1


@pytest.mark.parametrize("wide", [False, True], ids=["narrow windows", "wide windows"])
def test_urgent_tasks_overtake_leases_sent_ahead(fleet: Fleet, tmp_path: Path, gates: Gates, wide: bool) -> None:
    log = tmp_path / "log"
    if wide:
        widen(fleet, "sleep", b"0.02")
    closed = [gates("gate0"), gates("gate1")]
    long = fleet.submit("trial.gate", *[str(gate).encode() for gate in closed])
    # Leases that are not begun are recalled, too, and engines have just started.
    until(lambda: all(fleet.get(task_id).stages.HasField("start_time") for task_id in long))
    ordinary = fleet.submit("trial.logged", *[b"ordinary"] * 8, priority=5, parameters={"log": str(log)})
    until(lambda: sum(fleet.get(task_id).state == LEASED for task_id in ordinary) >= 2)
    (urgent,) = fleet.submit("trial.logged", b"urgent", priority=1, parameters={"log": str(log)})
    until(lambda: fleet.get(urgent).state == LEASED, timeout_s=20, what="a place in a window")
    until_read(fleet, fleet.get(urgent).worker_id)
    (before,) = [i for i, task_id in enumerate(long) if fleet.get(task_id).worker_id == fleet.get(urgent).worker_id]
    closed[before].touch()
    assert fleet.outcome(urgent).state == SUCCEEDED
    assert log.read_text().splitlines()[0].endswith("urgent"), log.read_text()
    closed[1 - before].touch()
    for task_id in (*long, *ordinary):
        assert ended(fleet, task_id).attempts == 1, "it was begun once"
