"""Decides which waiting leases go to the engine together.

Pure. Leases wait in one queue (a line) for each spec, oldest first. A batch is cut from the line whose first lease has
the lowest rank, so no kind starves another. Lines that no engine can run now (for example while their model is being
loaded) are skipped and keep their leases' ranks.

A lease's rank is its arrival number plus AGE_TASKS for each priority level below the first (priority is part of a spec,
so all leases of a line have the same). So a lease overtakes a waiting lease of a lower level only if it arrives fewer
than AGE_TASKS leases later, for each level between the two.

A batch leaves as soon as an engine can take it, unless its model has a delay: then it waits until the delay is over, a
limit is reached, or it has one of the sizes that the model prefers. Leases that come back from an engine that ended
are not delayed again. The master watches deadlines and revokes leases; the batcher then drops them.

Kinds that run a batch together (embeddings) have a budget of tokens for each batch. For kinds that run one by one
(handlers) a larger batch only saves hops between processes, and it delays reports and revocations. So their batches
hold about 50 ms of work, by the run times measured so far: one task at first, then more.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from multigpu_worker.repository.model import BatchRules
from multigpu_worker.session.lease import Lease, Spec

# A rough rule for English text, to bound the cost of a batch.
BYTES_PER_TOKEN = 4
# The number of kinds and models whose speed is remembered.
SPEEDS_MAX = 1024
# A batch that runs one by one is at most this many times as large as the largest one measured so far.
GROWTH = 8
# Later arrivals of the next higher level that may overtake a lease: as many as a worker's window usually holds.
AGE_TASKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    tasks_max: int = 256
    tokens_max: int = 16384
    # Run time of a batch of a kind that runs one by one.
    batch_s: float = 0.05
    # Time that a batch may wait to grow while an engine could take it.
    delay_s: float = 0.0


DEFAULT_RULES = BatchRules()


def tokens_of(lease: Lease) -> int:
    """An estimate, for kinds that run a batch together."""
    return max(1, len(lease.payload) // BYTES_PER_TOKEN)


@dataclass(slots=True)
class Speed:
    task_s: float
    largest: int


@dataclass(slots=True)
class Growth:
    """A line whose batch is delayed so that more tasks can join; and the tasks and tokens in it counted so far."""

    due_s: float
    tasks: int = 0
    tokens: int = 0


class Batcher:
    """`rules`: the batching rules of models and handlers, by the kind and model name in a spec."""

    def __init__(self, limits: BatchLimits, slots: int) -> None:
        assert limits.tasks_max >= 1
        assert limits.tokens_max >= 1
        assert slots >= 1
        self.limits = limits
        self.slots = slots
        self.rules: dict[tuple[str, str], BatchRules] = {}
        # The waiting leases of each spec, with their ranks.
        self._lines: dict[Spec, deque[tuple[int, Lease]]] = {}
        self._speeds: OrderedDict[tuple[str, str], Speed] = OrderedDict()
        self._arrivals = 0
        # Leases that are put back get ranks below all others, also below those put back earlier.
        self._returns = 0
        self._growing: dict[Spec, Growth] = {}
        self._due_s: float | None = None

    def add(self, spec: Spec, leases: Iterable[Lease]) -> int:
        """Append leases of one spec. Returns the last one's rank."""
        line = self._lines.get(spec)
        if line is None:
            line = self._lines[spec] = deque()
        behind = (spec.priority - 1) * AGE_TASKS
        rank = self._arrivals + behind
        for lease in leases:
            rank += 1
            line.append((rank, lease))
        self._arrivals = rank - behind
        if not line:
            del self._lines[spec]
        return rank

    def put_back(self, leases: Iterable[Lease]) -> None:
        """Put leases of an engine that ended before all others, in the given order whatever their specs."""
        for lease in reversed(list(leases)):
            self._returns -= 1
            self._lines.setdefault(lease.spec, deque()).appendleft((self._returns, lease))

    def give_way(self, leases: Iterable[Lease]) -> None:
        """Put leases that an engine gave back at the places where they waited before."""
        for lease in reversed(list(leases)):
            line = self._lines.setdefault(lease.spec, deque())
            line.appendleft((min(lease.rank, line[0][0] - 1) if line else lease.rank, lease))

    def pop(
        self, *, one_by_one: Callable[[Spec], bool], may: Callable[[Spec], bool] | None = None, now_s: float = 0.0
    ) -> list[Lease]:
        """Cut the next batch: leases of one spec, without dropped ones. Empty: nothing may go now.

        `one_by_one`: whether the engine of a spec runs one task after the other. `may`: whether an engine can take a
        batch of a spec now. `now_s`: on a monotonic clock.
        """
        self._due_s = None
        lines = sorted(self._lines, key=self._head) if len(self._lines) > 1 else list(self._lines)
        for spec in lines:
            if may is not None and not may(spec):
                continue
            line = self._lines[spec]
            if one_by_one(spec):
                batch = self._cut(line, self._tasks_max(spec, len(line)), None)
            else:
                rules = self.rules.get((spec.kind, spec.model), DEFAULT_RULES)
                tasks_max = rules.tasks_max or self.limits.tasks_max
                tokens_max = rules.tokens_max or self.limits.tokens_max
                delay_s = self.limits.delay_s if rules.delay_s < 0 else rules.delay_s
                if delay_s and line[0][0] > 0:
                    tasks_max = self._grown(spec, Growth(now_s + delay_s), tasks_max, tokens_max, now_s)
                batch = self._cut(line, tasks_max, tokens_max) if tasks_max else []
            if not line:
                del self._lines[spec]
                self._growing.pop(spec, None)
            if batch:
                self._growing.pop(spec, None)
                return batch
        return []

    def first(self, spec: Spec) -> Lease | None:
        """The lease with which the next batch of a spec begins; None: all its leases were dropped."""
        return next((lease for _, lease in self._lines[spec] if not lease.dropped), None)

    def due_s(self) -> float | None:
        """After a pop that returned nothing: when the first delay of a line is over. None: no line is delayed."""
        return self._due_s

    def measure(self, spec: Spec, tasks: int, work_s: float) -> None:
        """Record the run time of tasks that ran one by one."""
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

    def _grown(self, spec: Spec, fresh: Growth, tasks_max: int, tokens_max: int, now_s: float) -> int:
        """The largest batch that a delayed line may send now; 0: the line waits on.

        Dropped leases are counted, too, so a batch may go a little early.
        """
        line, growth = self._lines[spec], self._growing.setdefault(spec, fresh)
        growth.tokens += sum(tokens_of(lease) for _, lease in islice(line, growth.tasks, None))
        growth.tasks = len(line)
        preferred = self.rules.get((spec.kind, spec.model), DEFAULT_RULES).preferred
        size = max((size for size in preferred if size <= min(growth.tasks, tasks_max)), default=0)
        if size:
            return size
        if growth.tasks >= tasks_max or growth.tokens >= tokens_max or now_s >= growth.due_s:
            return tasks_max
        self._due_s = growth.due_s if self._due_s is None else min(self._due_s, growth.due_s)
        return 0

    def _tasks_max(self, spec: Spec, waiting: int) -> int:
        limit = self.rules.get((spec.kind, spec.model), DEFAULT_RULES).tasks_max or self.limits.tasks_max
        speed = self._speeds.get((spec.kind, spec.model))
        if speed is None:
            return 1
        tasks = min(limit, speed.largest * GROWTH)
        if speed.task_s * tasks > self.limits.batch_s:
            tasks = int(self.limits.batch_s / speed.task_s)
        # The waiting tasks are divided among the slots.
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
            lease.rank = line[0][0]
            if tokens_max is not None:
                tokens += tokens_of(lease)
                if batch and tokens > tokens_max:
                    break
            if len(batch) >= lease.together_max:
                break
            tasks_max = min(tasks_max, lease.together_max)
            batch.append(lease)
            line.popleft()
        return batch
