"""The simulated engine of a worker, which acts as the options of payloads say: see worker.py."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from multigpu_master.core import events as ev
from multigpu_master.core.attempts import SICK_RETURNS_MAX
from multigpu_master.core.model import TaskError
from multigpu_worker.session import session as ws
from multigpu_worker.session.lease import Lease

from tests.sim.world import check

if TYPE_CHECKING:
    from tests.sim.actors.worker import SimWorker

# How long a call that ignores its cancellation continues, until its engine is replaced.
CANCEL_S = 2.0


class SimEngine:
    """Runs the leases of one process of a worker."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self.running: dict[int, Lease] = {}
        self.occupied = 0  # slots in which cancelled calls run on
        self.run_timeouts_s: dict[int, float] = {}  # by lease_id

    def drop(self, leases: list[Lease]) -> None:
        for lease in leases:
            assert isinstance(lease.payload, bytes), "simulated payloads are small"
            deaf = not {b"stuck", b"deaf"}.isdisjoint(lease.payload.split())
            if self.running.pop(lease.lease_id, None) is not None and deaf:
                self._worker.world.coverage["worker: a cancelled call runs on"] += 1
                self.occupied += 1
                self._worker.heartbeat()
                self._worker.world.after(CANCEL_S, partial(self._vacate, self._worker.life))
        self.pump()

    def _vacate(self, life: int) -> None:
        if self._worker.life == life and self._worker.awake(lambda: self._vacate(life)):
            self.occupied -= 1
            self._worker.heartbeat()
            self.pump()

    def pump(self) -> None:
        for lease in list(self._worker.held.leases.values()):
            if len(self.running) + self.occupied >= self._worker.info.slots or self._worker.inert:
                return
            if lease.lease_id not in self.running and not self._worker.stopping:
                self._begin(lease)

    def _begin(self, lease: Lease) -> None:
        lease.running = True
        self.running[lease.lease_id] = lease
        assert isinstance(lease.payload, bytes), "simulated payloads are small"
        options = lease.payload.decode().split()
        run_s = float(options[options.index("run") + 1])
        if "innocent" in options and not self.run_timeouts_s[lease.lease_id]:
            beside = self._worker.world.fell_sick[lease.task_id]
            most = 1 + max(0, beside - SICK_RETURNS_MAX)
            check(lease.attempt <= most, "task %s is charged for devices that others made sick", lease.task_id)
        if "uneven" in options and self._worker.info.worker_id in ("w1", "healer"):
            run_s *= 3.0
        began_s, life = self._worker.world.now, self._worker.life
        if "stream" in options and lease.partials_received:
            self._worker.world.coverage["worker: yielded on after a resume"] += 1
        elif "stream" in options:
            self._worker.held.partial(lease, b"p0")
            self._worker.flush()
        if "save" in options:
            if lease.checkpoint:
                self._worker.world.coverage["worker: went on from a checkpoint"] += 1
                check(
                    lease.checkpoint == options[0].encode(),
                    "task %s received the checkpoint of another task",
                    lease.task_id,
                )
            self._worker.world.after(run_s / 2, lambda: self._save(lease, options, life))
        if "stuck" in options:
            run_s = self.run_timeouts_s[lease.lease_id]
        if "deaf" not in options:
            self._worker.world.after(run_s, lambda: self._finish(lease, options, began_s, life))

    def _save(self, lease: Lease, options: list[str], life: int) -> None:
        if self._worker.life == life and self._worker.alive and self.running.get(lease.lease_id) is lease:
            self._worker.held.save(lease, options[0].encode())

    def _finish(self, lease: Lease, options: list[str], began_s: float, life: int) -> None:
        if self._worker.life != life or not self._worker.awake(lambda: self._finish(lease, options, began_s, life)):
            return
        if self.running.get(lease.lease_id) is not lease:
            return
        if "poison" in options:
            self._worker.crash(self._worker.world.between(0.1, 0.5))
            return
        if "sicken" in options:
            self._sicken(lease, int(options[options.index("sicken") + 1]))
            return
        del self.running[lease.lease_id]
        if "stream" in options and lease.partials_received + lease.partials_made < 2:
            self._worker.held.partial(lease, b"p1")
        error = None
        if "stuck" in options:
            error = ws.TaskError(type="RunTimeout", message="the worker ended it", retryable=True)
        elif "fatal" in options:
            error = ws.TaskError(type="ValueError", message="not retryable", retryable=False)
        elif "fail" in options or ("flaky" in options and lease.attempt == 1):
            error = ws.TaskError(type="RuntimeError", message="retryable", retryable=True)
        state = ws.ReportState.SUCCEEDED if error is None else ws.ReportState.FAILED
        result = f"{options[0]} {lease.lease_id} {options[-1]}".encode() if error is None else b""
        report = ws.Report(lease, state, result, error=error)
        skew_s, now_s = self._worker.skew_s, self._worker.world.now
        self._worker.held.report(int((began_s + skew_s) * 1e9), int((now_s + skew_s) * 1e9), [report])
        self.pump()
        if self._worker.world.chance(0.2):  # what is made soon after leaves together with it
            self._worker.world.after(0.02, self._flush_when_awake)
        else:
            self._worker.flush()

    def _sicken(self, lease: Lease, attempts_max: int) -> None:
        """The task is returned with all others, as after an XID that needs a reset."""
        world = self._worker.world
        world.fell_sick.update(each.task_id for each in self.running.values())
        count, most = world.fell_sick[lease.task_id], SICK_RETURNS_MAX + attempts_max
        world.coverage["worker: a task made its device sick"] += 1
        check(count <= most, "task %s made devices sick %s times, and %s is the most", lease.task_id, count, most)
        self._worker.fall_sick(unusable=True, well_after_s=world.between(0.05, 0.5))

    def _flush_when_awake(self) -> None:
        if self._worker.awake(self._flush_when_awake):
            self._worker.flush()


def reports_of(session: int, group: ws.Reports) -> ev.Reports:
    """A group as the master reads it off the wire."""
    done = [r for r in group.reports if r.state is ws.ReportState.SUCCEEDED]
    failures = []
    for r in group.reports:
        if r.state is not ws.ReportState.SUCCEEDED:
            assert r.error is not None, "whatever did not succeed says why"
            error = TaskError(r.error.type, r.error.message, r.error.retryable)
            failures.append(ev.Failure(r.lease.lease_id, error, returned=r.state is ws.ReportState.RETURNED))
    lease_ids = [r.lease.lease_id for r in done]
    results = [r.result for r in done if isinstance(r.result, bytes)]
    return ev.Reports(session, lease_ids, results, "", failures, group.start_ns / 1e9, group.finish_ns / 1e9)
