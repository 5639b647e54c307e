"""The clock of the master's host is set forward or back, while the master runs or before it starts. Results, deadlines
and idempotency keys stay valid, also after a restart.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2
from multigpu_master.journal.sqlite.journal import SWEEP_AFTER_S

from tests.disk import layer
from tests.fleet import Daemon, Fleet

pytestmark = pytest.mark.skipif(bool(layer.missing_requirement()), reason=layer.missing_requirement())

SHIM = Path(__file__).with_name("wall_clock.c")


class SteppedFleet(Fleet):
    """A fleet whose master has a wall clock that `step` sets. `stamp` returns timestamps by that clock."""

    def __init__(self, folder: Path, *, step_s: int = 0) -> None:
        folder.mkdir(parents=True)
        self._step = folder / "step"
        self.step(step_s)
        super().__init__(folder, workers=1)

    def launch(self, name: str, module: str, arguments: Sequence[str]) -> Daemon:
        plain = self._env
        if name == "master":
            self._env = {**plain, "LD_PRELOAD": str(layer.build(SHIM)), "CLOCK_STEP": str(self._step)}
        try:
            return super().launch(name, module, arguments)
        finally:
            self._env = plain

    def step(self, seconds: int) -> None:
        self.step_s = seconds
        aside = self._step.with_suffix(".new")
        aside.write_text(str(seconds))
        aside.rename(self._step)

    def stamp(self, seconds_ahead: float) -> Timestamp:
        stamp = Timestamp()
        stamp.FromNanoseconds(int((time.time() + self.step_s + seconds_ahead) * 1e9))
        return stamp


@pytest.mark.slow
@pytest.mark.parametrize("step_s", [25 * 3600, -25 * 3600])
def test_results_and_deadlines_are_kept_though_the_hosts_clock_is_set(tmp_path: Path, step_s: int) -> None:
    with SteppedFleet(tmp_path / "fleet") as fleet:
        (before,) = fleet.submit("echo", b"before")
        assert fleet.outcome(before).result == b"before"
        fleet.step(step_s)
        (after,) = fleet.submit("echo", b"after", deadline=fleet.stamp(60))
        assert fleet.outcome(after).result == b"after"
        assert [fleet.outcome(i).result for i in (before, after)] == [b"before", b"after"]

        fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="held"), timeout=20)
        (late,) = fleet.submit("echo", b"late", queue="held", deadline=fleet.stamp(3))
        assert fleet.outcome(late).state == task_pb2.OUTCOME_STATE_EXPIRED
        (result,) = fleet.submit_raw("echo", b"too late", deadline=fleet.stamp(-1)).results
        assert result.rejection.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


@pytest.mark.slow
def test_a_restart_while_the_hosts_clock_is_ahead_deletes_no_result_and_warns(tmp_path: Path) -> None:
    """Nor does the next restart, when the clock is right again."""
    with SteppedFleet(tmp_path / "fleet") as fleet:
        done = fleet.submit("echo", b"first", b"second", b"the newest outcome is kept anyway")
        for task_id in done:
            fleet.outcome(task_id)
        time.sleep(SWEEP_AFTER_S + 2)  # the journal has saved the time
        for step_s in (10 * 86400, 0):
            fleet.master.kill()
            fleet.step(step_s)
            fleet.start_master()
            time.sleep(SWEEP_AFTER_S + 3)
            assert [fleet.outcome(i).result for i in done[:2]] == [b"first", b"second"]
        assert fleet.master.log().count("differs from the last time in the journal") >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("boot_s", "then_s"), [(0, 2 * 86400), (-2 * 86400, 0), (2 * 86400, 0)])
def test_a_new_master_keeps_what_one_took_whose_clock_was_set(tmp_path: Path, boot_s: int, then_s: int) -> None:
    """But a step forward counts as time in the queue, once the new master follows it."""
    expired = then_s > boot_s
    with SteppedFleet(tmp_path / "fleet", step_s=boot_s) as fleet:
        fleet.step(then_s)
        fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="held"), timeout=20)
        (done,) = fleet.submit("echo", b"once", request_ids=["once"])
        assert fleet.outcome(done).result == b"once"
        (other,) = fleet.submit("echo", b"the newest outcome is kept anyway")
        fleet.outcome(other)
        (timed,) = fleet.submit("echo", b"timed", queue="held", queue_timeout=Duration(seconds=3600))
        (dated,) = fleet.submit("echo", b"dated", queue="held", deadline=fleet.stamp(3600))
        for _ in range(2):  # the second new master recovers what the first one wrote
            fleet.restart_master()
            fleet.wait_for_workers()
            time.sleep(SWEEP_AFTER_S + 1.5)
            assert fleet.outcome(done).result == b"once"
            assert fleet.submit("echo", b"once", request_ids=["once"]) == [done]
            assert fleet.get(dated).state == task_pb2.TASK_STATE_QUEUED
            assert (fleet.get(timed).state == task_pb2.TASK_STATE_QUEUED) is not expired
        fleet.admin.ResumeQueue(admin_pb.ResumeQueueRequest(queue="held"), timeout=20)
        assert fleet.outcome(dated).result == b"dated"
        state = task_pb2.OUTCOME_STATE_EXPIRED if expired else task_pb2.OUTCOME_STATE_SUCCEEDED
        assert fleet.outcome(timed).state == state
        assert not fleet.faults()
