"""Results that are not there any more: expired, deleted, truncated, damaged, or not readable at the moment. No call may
answer with a value in their place, and none may lose the results beside them.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import multigpu
import pytest
from multigpu.v1 import task_service_pb2

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


def test_a_listed_outcome_has_no_result_to_be_taken_for_one(fleet: Fleet) -> None:
    settle(fleet, here=b"here")
    with fleet.client() as client:
        (task,) = client.list_tasks()
        assert task.outcome is not None and task.outcome.succeeded
        with pytest.raises(multigpu.MultigpuError, match="a list has no results"):
            task.outcome.value()


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
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=400, check=False)
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
