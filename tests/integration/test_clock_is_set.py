"""The clock of the master's host is set while the master runs: its clients and workers are right, and it is behind."""

import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2

from tests.fleet import Daemon, Fleet

# A master whose wall clock is wrong by what a file says.
STEPPED_MASTER = """
import os, pathlib, time
wall, step = time.time, pathlib.Path(os.environ["CLOCK_STEP"])
time.time = lambda: wall() + float(step.read_text())
from multigpu_master.main import main
main()
"""


class SteppedFleet(Fleet):
    """`step` sets the wall clock of the master, and of its clients as `stamp` knows it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        folder.mkdir(parents=True)
        (folder / "stepped_master.py").write_text(STEPPED_MASTER)
        self._step = folder / "step"
        self.step(0)
        super().__init__(folder, handlers_dir=folder, env={"CLOCK_STEP": str(self._step)}, **options)

    def launch(self, name: str, module: str, *arguments: Any) -> Daemon:
        return super().launch(name, "stepped_master" if name == "master" else module, *arguments)

    def step(self, seconds: float) -> None:
        self.step_s = seconds
        aside = self._step.with_suffix(".new")
        aside.write_text(str(seconds))
        aside.rename(self._step)

    def stamp(self, seconds_ahead: float) -> Timestamp:
        stamp = Timestamp()
        stamp.FromNanoseconds(int((time.time() + self.step_s + seconds_ahead) * 1e9))
        return stamp


@pytest.mark.parametrize("step_s", [25 * 3600.0, -25 * 3600.0])
def test_results_and_deadlines_are_kept_though_the_hosts_clock_is_set(tmp_path: Path, step_s: float) -> None:
    with SteppedFleet(tmp_path / "fleet", workers=1) as fleet:
        (before,) = fleet.submit("echo", b"before")
        assert fleet.outcome(before).result == b"before"
        fleet.step(step_s)
        time.sleep(1.5)  # the master has read the clock since
        (after,) = fleet.submit("echo", b"after", deadline=fleet.stamp(60))
        assert fleet.outcome(after).result == b"after"
        assert [fleet.outcome(i).result for i in (before, after)] == [b"before", b"after"]

        fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="held"), timeout=20)
        (late,) = fleet.submit("echo", b"late", queue="held", deadline=fleet.stamp(3))
        assert fleet.outcome(late).state == task_pb2.OUTCOME_STATE_EXPIRED
        (result,) = fleet.submit_raw("echo", b"too late", deadline=fleet.stamp(-1)).results
        assert result.rejection.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
