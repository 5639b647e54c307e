"""Which waiting leases go to the engine together.

Pure. Leases wait in one line for each spec, oldest first; a batch is cut from the line whose head has waited longest,
so no kind starves another. There is no waiting for a fuller batch: whatever is there when the engine can take a batch,
goes.

How large a batch may be depends on how its kind runs. Kinds that run a batch together (embeddings) are bounded by a
budget of tokens. Kinds that run one by one (handlers) gain nothing from large batches but fewer hops between the
processes, and lose prompt reports and revocations, so a batch of theirs holds about 50 ms of work, as measured so far:
one task at first, then more, up to the limit for the fastest.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from multigpu_worker.session import Lease, Spec

# A rough rule for English text, and near enough to bound what a batch costs.
BYTES_PER_TOKEN = 4
# How many kinds and models are remembered by their speed.
SPEEDS_MAX = 1024
# A batch is at most this many times as large as the largest one measured.
GROWTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    tasks_max: int = 256
    tokens_max: int = 16384
    # Work in a batch of a kind that runs one by one.
    batch_s: float = 0.05


@dataclass(slots=True)
class Speed:
    task_s: float
    largest: int


class Batcher:
    def __init__(self, limits: BatchLimits, slots: int) -> None:
        assert limits.tasks_max >= 1
        assert limits.tokens_max >= 1
        assert slots >= 1
        self.limits = limits
        self.slots = slots
        self._lines: dict[Spec, deque[tuple[int, Lease]]] = {}
        self._speeds: OrderedDict[tuple[str, str], Speed] = OrderedDict()
        self._arrivals = 0
        # What is put back is older than any arrival, and than what was put back before.
        self._returns = 0

    def add(self, spec: Spec, leases: Iterable[Lease]) -> None:
        """Let leases of one spec wait, behind those that do."""
        line = self._lines.get(spec)
        if line is None:
            line = self._lines[spec] = deque()
        arrivals = self._arrivals
        for lease in leases:
            arrivals += 1
            line.append((arrivals, lease))
        self._arrivals = arrivals
        if not line:
            del self._lines[spec]

    def put_back(self, leases: Iterable[Lease]) -> None:
        """Let leases that already were in an engine go first again, in this order whatever their specs."""
        for lease in reversed(list(leases)):
            self._returns -= 1
            self._lines.setdefault(lease.spec, deque()).appendleft((self._returns, lease))

    def pop(self, *, one_by_one: frozenset[str]) -> list[Lease]:
        """Cut the next batch: leases of one spec, without those dropped meanwhile. Empty: nothing waits."""
        while self._lines:
            spec = min(self._lines, key=self._head)
            line = self._lines[spec]
            if spec.kind in one_by_one:
                batch = self._cut(line, self._tasks_max(spec, len(line)), None)
            else:
                batch = self._cut(line, self.limits.tasks_max, self.limits.tokens_max)
            if not line:
                del self._lines[spec]
            if batch:
                return batch
        return []

    def measure(self, spec: Spec, tasks: int, work_s: float) -> None:
        """Learn how long tasks that ran one by one took."""
        assert tasks >= 1
        key = (spec.kind, spec.model)
        speed = self._speeds.pop(key, None)
        task_s = work_s / tasks
        if speed is None:
            speed = Speed(task_s, tasks)
        else:
            speed.task_s = (speed.task_s + task_s) / 2
            speed.largest = max(speed.largest, tasks)
        self._speeds[key] = speed
        if len(self._speeds) > SPEEDS_MAX:
            self._speeds.popitem(last=False)

    def _head(self, spec: Spec) -> int:
        return self._lines[spec][0][0]

    def _tasks_max(self, spec: Spec, waiting: int) -> int:
        speed = self._speeds.get((spec.kind, spec.model))
        if speed is None:
            return 1
        tasks = min(self.limits.tasks_max, speed.largest * GROWTH)
        if speed.task_s * tasks > self.limits.batch_s:
            tasks = int(self.limits.batch_s / speed.task_s)
        # Every slot gets a share of what waits.
        return max(1, min(tasks, -(-waiting // self.slots)))

    @staticmethod
    def _cut(line: deque[tuple[int, Lease]], tasks_max: int, tokens_max: int | None) -> list[Lease]:
        batch: list[Lease] = []
        tokens = 0
        while line and len(batch) < tasks_max:
            lease = line[0][1]
            if lease.dropped:
                line.popleft()
                continue
            if tokens_max is not None:
                tokens += max(1, len(lease.payload) // BYTES_PER_TOKEN)
                if batch and tokens > tokens_max:
                    break
                if len(batch) >= lease.together_max:
                    break
                tasks_max = min(tasks_max, lease.together_max)
            batch.append(lease)
            line.popleft()
        return batch
