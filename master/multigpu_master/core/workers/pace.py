"""Measures how fast a worker completes tasks, and sets its window: how many leases it may hold.

A worker may hold as many leases as it completes in WINDOW_S, at least one more than it has slots, at most its
window_tasks. So thousands of fast tasks are sent ahead, and slow tasks stay in the queue, from which any worker can get
them. Worker.window_full has the exception for kinds whose tasks run together.
"""

from dataclasses import dataclass, field

from multigpu_master.core.workers.info import WorkerInfo

WINDOW_S = 0.5
# Minimum time of a measurement, in seconds: tasks that ran together are reported together, which says nothing about
# their pace. The first measurement may be shorter, so that fast tasks soon have a window.
PACE_S, FIRST_PACE_S = 0.1, 0.005
# The weight of the newest sample in the moving averages.
GAIN = 0.5
# Limit of (kind, model) pairs with a known speed; beyond it the oldest is forgotten.
PACES_MAX = 10_000

# (kind, model)
Key = tuple[str, str]


@dataclass(slots=True)
class Pace:
    """The measured pace of one worker. Times in seconds since the epoch."""

    leases_max: int = 1  # leases that the worker may hold now
    task_s: float = 0.0  # seconds a task, all kinds; 0.0: not measured
    unit_s: dict[Key, float] = field(default_factory=dict)  # seconds a unit of work
    since_s: float = 0.0  # start of the present measurement, without the time the worker was idle
    finished: int = 0  # attempts that ended since then
    reported_s: float = 0.0
    last_report_tasks: int = 1

    def restart(self, info: WorkerInfo, now: float) -> None:
        """Begins a session: the window is narrow until the pace is measured."""
        self.leases_max = narrow_window(info)
        self.task_s = 0.0
        self.finished = 0
        self.reported_s = self.since_s = now

    def end_idle(self, now: float) -> None:
        self.since_s += now - self.reported_s
        self.reported_s = now

    def report(self, info: WorkerInfo, n: int, now: float) -> None:
        """Records that `n` attempts have ended, and adapts the window."""
        self.reported_s = now
        self.last_report_tasks = n
        self.finished += n
        elapsed_s = now - self.since_s
        if elapsed_s < (PACE_S if self.task_s else FIRST_PACE_S) or not self.finished:
            return
        # Averaged as a rate, so that one slow start (a model being loaded) does not narrow the window for long.
        rate = self.finished / elapsed_s
        if self.task_s:
            rate = GAIN * rate + (1 - GAIN) / self.task_s
        self.task_s = 1 / rate
        self.since_s = now
        self.finished = 0
        self.leases_max = max(narrow_window(info), min(int(rate * WINDOW_S), info.window_tasks))


class SteppedAverages:
    """Moving averages by (kind, model). `values` changes in steps only, because a change makes every rank stale."""

    def __init__(self) -> None:
        self.values: dict[Key, float] = {}
        self._exact: dict[Key, float] = {}

    def learn(self, key: Key, sample: float) -> bool:
        """Adds a sample. Returns whether `values` changed."""
        exact = update_average(self._exact, key, sample)
        value = self.values.get(key)
        if value is not None and value * 0.8 <= exact <= value * 1.25:
            return False
        self.values[key] = exact
        if len(self.values) > PACES_MAX:
            del self.values[next(iter(self.values))]
        return True


def update_average(averages: dict[Key, float], key: Key, sample: float) -> float:
    """Adds a sample to the moving average of a key. Returns the average."""
    old = averages.get(key)
    new = averages[key] = sample if old is None else GAIN * sample + (1 - GAIN) * old
    if len(averages) > PACES_MAX:
        del averages[next(iter(averages))]
    return new


def narrow_window(info: WorkerInfo) -> int:
    """The leases that a worker may hold whatever its pace."""
    return min(info.slots + 1, info.window_tasks)
