"""The fleet's last hour, as a point for each ten seconds, and the queues' rates in the last minute. Kept in memory."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from multigpu.v1 import admin_service_pb2 as pb

from multigpu_master.core.model import OutcomeState, Queue, Task
from multigpu_master.core.scheduler import Core
from multigpu_master.telemetry.latencies import Latencies
from multigpu_master.wire.times import duration, set_time

INTERVAL_S = 10.0
POINTS = 360
RATE_INTERVALS = 6


class History:
    """Runs from `start` to `stop`. Pass each settled task to `observe` once. `now`: the master's clock."""

    def __init__(self, core: Core, now: Callable[[], float]) -> None:
        self._core = core
        self._now = now
        self.points: deque[pb.HistoryPoint] = deque(maxlen=POINTS)
        self.latencies: Latencies | None = None  # set while metrics are collected
        self._timer: asyncio.TimerHandle | None = None
        # The current interval: the counters at its start, and the number and durations of its succeeded tasks.
        self._counts_at_start = (0, 0, 0)
        self._succeeded = 0
        self._queue_s = self._run_s = 0.0
        self._ended: dict[str, int] = {}  # tasks that have ended, by queue
        # For the start of each recent interval, oldest first: the time, and by queue, how many tasks had ended, and how
        # many were queued or leased.
        self._queue_counts: deque[tuple[float, dict[str, tuple[int, int]]]] = deque(maxlen=RATE_INTERVALS + 1)
        self._resumed: dict[str, tuple[float, tuple[int, int]]] = {}  # as in _queue_counts, at the queue's last resume

    def start(self) -> None:
        self._begin_interval()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def observe(self, tasks: Sequence[Task]) -> None:
        """Counts settled tasks, and adds up the times of those that succeeded."""
        if self.latencies is not None:
            self.latencies.observe(tasks)
        ended = self._ended
        for task in tasks:
            queue = task.spec.queue
            ended[queue] = ended.get(queue, 0) + 1
            outcome = task.outcome
            # start_s is 0 if it is unknown.
            if outcome is not None and outcome.state is OutcomeState.SUCCEEDED and outcome.start_s:
                self._succeeded += 1
                self._queue_s += outcome.dispatch_s - task.submit_s
                self._run_s += outcome.finish_s - outcome.start_s

    def rates(self, queue: Queue) -> tuple[float, float]:
        """Returns how many tasks per second ended, and how many were submitted, in about the last minute, or since the
        queue was resumed if that is more recent.
        """
        if not self._queue_counts:
            return 0.0, 0.0
        begin_s, counts = self._queue_counts[0]
        ended_before, tasks_before = counts.get(queue.name, (0, 0))
        if (resumed := self._resumed.get(queue.name)) is not None and resumed[0] > begin_s:
            begin_s, (ended_before, tasks_before) = resumed
        ended = max(0, self._ended.get(queue.name, 0) - ended_before)
        submitted = max(0, ended + queue.queued + queue.leased - tasks_before)
        seconds = max(1.0, self._now() - begin_s)
        return ended / seconds, submitted / seconds

    def restart_rates(self, queue: Queue) -> None:
        """Restarts the measurement of a resumed queue's rates: while it was paused, they were low."""
        self._resumed[queue.name] = self._now(), (self._ended.get(queue.name, 0), queue.queued + queue.leased)

    def recent_queues(self) -> set[str]:
        """Returns the names of queues in which a task ended in about the last minute."""
        before = self._queue_counts[0][1] if self._queue_counts else {}
        return {name for name, ended in self._ended.items() if ended != before.get(name, (0, 0))[0]}

    def end_interval(self) -> None:
        """Ends the current interval: adds its point, and begins the next interval."""
        core = self._core
        point = pb.HistoryPoint(queued=core.ledger.unsettled - core.ledger.leased, leased=core.ledger.leased)
        set_time(point.end_time, self._now())
        point.submitted, point.succeeded, point.unsuccessful = (
            now - before for now, before in zip(self._counts(), self._counts_at_start, strict=True)
        )
        if self._succeeded:
            point.queue_duration.CopyFrom(duration(max(0.0, self._queue_s / self._succeeded)))
            point.run_duration.CopyFrom(duration(max(0.0, self._run_s / self._succeeded)))
        self._add_devices(point)
        self.points.append(point)
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._counts_at_start = self._counts()
        self._succeeded, self._queue_s, self._run_s = 0, 0.0, 0.0
        queues = self._core.ledger.queues
        counts = {name: (self._ended.get(name, 0), queue.queued + queue.leased) for name, queue in queues.items()}
        self._queue_counts.append((self._now(), counts))
        begin_s, _ = self._queue_counts[0]
        # A queue that the core has dropped stays as long as rates() may compare with it.
        names = {name for _, each in self._queue_counts for name in each}
        self._ended = {name: self._ended.get(name, 0) for name in names}
        self._resumed = {name: resumed for name, resumed in self._resumed.items() if resumed[0] > begin_s}
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self.end_interval)

    def _counts(self) -> tuple[int, int, int]:
        c = self._core.ledger.counters
        return c.submitted, c.succeeded, c.failed + c.cancelled + c.expired + c.dead_lettered

    def _add_devices(self, point: pb.HistoryPoint) -> None:
        """Adds the number of connected workers, and the devices' power and utilization. A device that several workers
        report counts once.
        """
        connected = [worker for worker in self._core.fleet.workers.values() if worker.session]
        point.workers_active = len(connected)
        samples = {(worker.info.host, worker.info.device_id): worker.telemetry for worker in connected}.values()
        power = [each.power_watts for each in samples if each.power_watts is not None]
        used = [each.utilization for each in samples if each.utilization is not None]
        if power:
            point.power_watts = sum(power)
        if used:
            point.utilization = sum(used) / len(used)
