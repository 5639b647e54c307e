"""Measures how fast a worker completes tasks, and sets its window: how many leases it may hold.

A worker may hold as many leases as it completes in WINDOW_S seconds, at least one more than it has slots, at most its
window_tasks. So a worker holds thousands of fast tasks, but slow tasks stay in the queue, from which any worker can
get them. Where one slot runs several tasks at once, a worker may hold more: Worker.window_full allows leases until all
slots are filled.
"""

from dataclasses import dataclass, field

from multigpu_master.core.workers.info import WorkerInfo

WINDOW_S = 0.5
# Minimum time of a measurement, in seconds. One report has all tasks that ran together, so a measurement must be long
# enough for several reports. The first measurement of a session may be shorter, so that the window of a worker with
# fast tasks soon widens.
PACE_S, FIRST_PACE_S = 0.1, 0.005
# The weight of the newest sample in the moving averages.
GAIN = 0.5
# Minimum time between two changes of an average that all scores depend on, in seconds.
STEP_S = 1.0
# Limit of entries in each dict by (kind, model): the averages here, and `id_of_key` and `granted_without_id` of
# Residency. Beyond it, the averages and `granted_without_id` lose the entry that was added first; `id_of_key`, a cache,
# is emptied.
MODEL_KEYS_MAX = 10_000

# The kind and the model that tasks name.
Key = tuple[str, str]


@dataclass(slots=True)
class Pace:
    """The measured pace of one worker. `since_s` and `reported_s` are times in seconds since 1970."""

    leases_max: int = 1  # leases that the worker may hold now
    rate: float = 0.0  # tasks per second, over all kinds; 0.0: not measured
    unit_s: dict[Key, float] = field(default_factory=dict)  # seconds for each unit of work
    since_s: float = 0.0  # start of this measurement, moved forward by the time that the worker was idle
    finished: int = 0  # attempts that ended in this measurement
    reported_s: float = 0.0  # when the worker last reported, began its session, or got a lease while idle
    last_report_tasks: int = 1  # attempts that ended in the last report

    def restart(self, info: WorkerInfo, now: float) -> None:
        """Call when a session begins: the window is narrow until the pace is measured."""
        self.leases_max = narrow_window(info)
        self.rate = 0.0
        self.finished = 0
        self.reported_s = self.since_s = now

    def end_idle(self, now: float) -> None:
        """Call when an idle worker is granted a lease: the time since its last report does not count."""
        self.since_s += now - self.reported_s
        self.reported_s = now

    def report(self, info: WorkerInfo, n: int, now: float) -> None:
        """Records that `n` attempts have ended, and adapts the window."""
        self.reported_s = now
        self.last_report_tasks = n
        self.finished += n
        elapsed_s = now - self.since_s
        if elapsed_s < (PACE_S if self.rate else FIRST_PACE_S) or not self.finished:
            return
        # The average is of rates, not of durations: so one slow start (a model is loaded) does not narrow the window
        # for long.
        rate = self.finished / elapsed_s
        self.rate = GAIN * rate + (1 - GAIN) * self.rate if self.rate else rate
        self.since_s = now
        self.finished = 0
        self.leases_max = max(narrow_window(info), min(int(self.rate * WINDOW_S), info.window_tasks))


class SteppedAverages:
    """Moving averages by (kind, model). `values` changes only in steps, and each value at most once in STEP_S seconds,
    because after each change the scores of all workers must be computed again.
    """

    def __init__(self) -> None:
        # Each value is within a factor of 1.25 of the exact average, or changed in the last STEP_S.
        self.values: dict[Key, float] = {}
        self._exact: dict[Key, float] = {}
        self._changed_s: dict[Key, float] = {}  # when each of `values` changed

    def learn(self, key: Key, sample: float, now: float) -> bool:
        """Adds a sample. Returns whether `values` changed."""
        exact = update_average(self._exact, key, sample)
        value = self.values.get(key)
        if value is not None and (value * 0.8 <= exact <= value * 1.25 or now < self._changed_s[key] + STEP_S):
            return False
        self.values[key] = exact
        self._changed_s[key] = now
        if len(self.values) > MODEL_KEYS_MAX:
            first = next(iter(self.values))
            del self.values[first], self._changed_s[first]
        return True


def update_average(averages: dict[Key, float], key: Key, sample: float) -> float:
    """Adds a sample to the moving average of a key. Returns the average."""
    old = averages.get(key)
    new = averages[key] = sample if old is None else GAIN * sample + (1 - GAIN) * old
    if len(averages) > MODEL_KEYS_MAX:
        del averages[next(iter(averages))]
    return new


def narrow_window(info: WorkerInfo) -> int:
    """How many leases a worker may hold, however slow it is."""
    return min(info.slots + 1, info.window_tasks)
