"""Results that are not there any more: expired, deleted, truncated, damaged, or not readable at the moment. No call may
answer with a value in their place, and none may lose the results beside them.
"""

import os
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import multigpu
import pytest
from multigpu.v1 import task_service_pb2
from multigpu_master.journal.sqlite.schema import clear_open_flag

from tests.fleet import Fleet, rejected, until
from tests.integration.streams import run_frame

SMALL, LARGE = b"small", bytes(200 << 10)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path / "fleet", workers=1) as running:
        yield running
        assert not running.faults()


def settle(fleet: Fleet, **payloads: bytes) -> dict[str, int]:
    """Runs an echo of each payload under its name as request_id; their task_ids, once they are on the disk."""
    with fleet.client() as client:
        tasks = [multigpu.Input(payload=payload, request_id=name) for name, payload in payloads.items()]
        ids = {outcome.request_id: outcome.task_id for outcome in client.map_outcomes("echo", tasks)}
    until(lambda: fleet.stats().outcomes_retained >= len(payloads))
    return ids


def spoil(fleet: Fleet, harm: Callable[[sqlite3.Connection], object]) -> None:
    """Does something to the journal of a master that is away."""
    fleet.master.kill()
    with closing(sqlite3.connect(fleet.data_dir / "journal.sqlite3", isolation_level=None)) as connection:
        harm(connection)
        clear_open_flag(connection)  # closing this connection deletes the log
    fleet.start_master()
    fleet.wait_for_workers()


def expire(name: str) -> Callable[[sqlite3.Connection], object]:
    return lambda connection: connection.execute("UPDATE outcome SET body = NULL WHERE request_id = ?", (name,))


def file_of(fleet: Fleet, name: str) -> Path:
    """The file that a large body lies in."""
    with closing(sqlite3.connect(fleet.data_dir / "journal.sqlite3")) as connection:
        ((body,),) = connection.execute("SELECT body FROM outcome WHERE request_id = ?", (name,)).fetchall()
    segment = str(body).partition(":")[0]
    return fleet.data_dir / ("payloads" if "-" in segment else "segments") / segment


def ask_all(fleet: Fleet, task_id: int, request_id: str, payload: bytes = SMALL) -> list[BaseException | Any]:
    """What every call of the SDK makes of a task: its value, or the error."""

    def answer(call: Callable[[multigpu.Client], Any]) -> BaseException | Any:
        with fleet.client() as client:
            try:
                return call(client)
            except multigpu.MultigpuError as error:
                return error

    def stored(client: multigpu.Client) -> multigpu.Outcome:
        outcome = client.get(task_id).outcome
        assert outcome is not None
        return outcome

    again = multigpu.Input(payload=payload, request_id=request_id)
    return [
        answer(lambda client: client.run("echo", payload, request_id=request_id)),
        answer(lambda client: client.run_outcome("echo", payload, request_id=request_id).result),
        answer(lambda client: list(client.map("echo", [again]))),
        answer(lambda client: next(client.map("echo", [again], return_exceptions=True))),
        answer(lambda client: list(client.stream("echo", payload, request_id=request_id))),
        answer(lambda client: stored(client).value()),
        answer(lambda client: stored(client).result),
        answer(lambda client: stored(client).partials),
        answer(lambda client: next(o for o, _ in client.watch() if o.task_id == task_id).value()),
    ]


def mgpuctl(fleet: Fleet, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    environment = {**os.environ, "MGPU_MASTER": fleet.address}
    command = [sys.executable, "-m", "multigpu.cli", *arguments]
    return subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)


@pytest.mark.slow
def test_an_expired_result_is_an_error_in_every_call(fleet: Fleet, tmp_path: Path) -> None:
    ids = settle(fleet, gone=SMALL, here=b"here")
    spoil(fleet, expire("gone"))
    for answer in ask_all(fleet, ids["gone"], "gone"):
        assert isinstance(answer, multigpu.ResultExpiredError), answer
        assert "result_ttl" in str(answer)
    with fleet.client() as client:
        assert client.run("echo", b"here", request_id="here") == b"here"
        (listed,) = [task for task in client.list_tasks() if task.task_id == ids["gone"]]
        assert listed.outcome is not None
        assert listed.outcome.state is multigpu.OutcomeState.SUCCEEDED  # that it did
    output = tmp_path / "result"
    done = mgpuctl(fleet, "tasks", "get", str(ids["gone"]), "-o", str(output))
    assert done.returncode != 0
    assert b"ResultExpired" in done.stderr
    assert not output.exists()


def test_a_listed_outcome_has_no_result_to_be_taken_for_one(fleet: Fleet) -> None:
    settle(fleet, here=b"here")
    with fleet.client() as client:
        (task,) = client.list_tasks()
        assert task.outcome is not None
        assert task.outcome.succeeded
        with pytest.raises(multigpu.MultigpuError, match="a list has no results"):
            task.outcome.value()


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.slow
@pytest.mark.parametrize("harm", [delete, truncate])
def test_a_result_whose_file_was_deleted_or_truncated_is_lost_and_no_other(
    fleet: Fleet, harm: Callable[[Path], None]
) -> None:
    ids = settle(fleet, lost=LARGE, here=SMALL)
    harm(file_of(fleet, "lost"))
    for answer in ask_all(fleet, ids["lost"], "lost", LARGE):
        assert isinstance(answer, multigpu.ResultLostError), answer
    with fleet.client() as client:
        assert client.run("echo", SMALL, request_id="here") == SMALL
        watched = {}
        for outcome, _ in client.watch():  # goes on behind it
            watched[outcome.request_id] = outcome.state
            if len(watched) == 2:
                break
        assert watched == {"lost": multigpu.OutcomeState.RESULT_MISSING, "here": multigpu.OutcomeState.SUCCEEDED}


@pytest.mark.slow
def test_a_body_that_is_damaged_in_its_row_is_lost(fleet: Fleet) -> None:
    ids = settle(fleet, lost=SMALL)
    spoil(fleet, lambda connection: connection.execute("UPDATE outcome SET body = x'ffff'"))
    for answer in ask_all(fleet, ids["lost"], "lost"):
        assert isinstance(answer, multigpu.ResultLostError), answer


@pytest.mark.slow
def test_a_file_that_cannot_be_opened_now_is_unavailable_and_not_lost(fleet: Fleet) -> None:
    """As many files as the master has already are all that it may have, for a while."""
    ids = settle(fleet, here=LARGE)
    fleet.restart_master()
    fleet.wait_for_workers()
    stub = fleet.tasks
    request = task_service_pb2.GetRequest(task_id=ids["here"])
    assert stub.Get(request).task.outcome.result == LARGE
    _, most = resource.prlimit(fleet.master.pid, resource.RLIMIT_NOFILE)
    open_now = [int(path.name) for path in Path(f"/proc/{fleet.master.pid}/fd").iterdir()]
    lowest_free = next(n for n in range(len(open_now) + 1) if n not in open_now)
    resource.prlimit(fleet.master.pid, resource.RLIMIT_NOFILE, (lowest_free, most))
    with rejected(grpc.StatusCode.UNAVAILABLE, "try again"):
        stub.Get(request)
    resource.prlimit(fleet.master.pid, resource.RLIMIT_NOFILE, (most, most))
    assert stub.Get(request).task.outcome.result == LARGE


NO_MEMORY = """
import os, resource
from multigpu.v1 import task_pb2
from multigpu_master.journal.protocol import StoredOutcome
from multigpu_master.rpc.intake import stored_body
result = bytes(64 << 20)
body = task_pb2.Outcome(task_id=1, state=1, result=result).SerializeToString()
stored = StoredOutcome(1, 1, "r", 1, "default", "echo", "", 0.0, None, body)
size = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + (8 << 20), limits[1]))
try:
    stored_body(stored)
except MemoryError:
    resource.setrlimit(resource.RLIMIT_AS, limits)
    print(task_pb2.Outcome.FromString(stored_body(stored)).result == result)
"""


def test_an_intact_result_for_which_there_is_too_little_memory_is_not_called_damaged() -> None:
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "True\n", done


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had since its peak was reset."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_a_reconnect_that_repeats_settled_tasks_holds_few_of_their_results_at_a_time(tmp_path: Path) -> None:
    """Formerly the bodies of all tasks of a frame were loaded at once, on the event loop."""
    count, size, limit = 400, 1 << 20, 32 << 20
    options: Any = {"workers": 1, "handlers": ["trial_handlers"], "master_flags": ["--stream-bytes-max", str(limit)]}
    with Fleet(tmp_path / "fleet", **options) as fleet:
        names = [f"r{n}" for n in range(count)]
        with fleet.client() as client:
            tasks = [multigpu.Input(payload=name.encode(), request_id=name) for name in names]
            parameters = {"bytes": str(size)}
            assert all(o.succeeded for o in client.map_outcomes("trial.big", tasks, parameters=parameters))
        until(lambda: fleet.stats().outcomes_retained == count)
        fleet.restart_master()
        pid = fleet.master.pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
        before = peak_bytes(pid)
        frame = run_frame("trial.big", *[(name, name.encode()) for name in names], parameters=parameters)
        outcomes: list[tuple[str, int]] = []
        for response in fleet.tasks.Run(iter([frame]), timeout=60):
            if not outcomes:  # meanwhile the master reads on as far as it may
                time.sleep(1)
            outcomes += [(outcome.request_id, len(outcome.result)) for outcome in response.outcomes]
        assert sorted(outcomes) == sorted((name, size) for name in names)
        assert peak_bytes(pid) - before < 3 * limit
        assert not fleet.faults()
