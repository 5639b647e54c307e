"""Decides which waiting leases go to the engine together.

Pure. Leases wait in one queue for each spec, oldest first. A batch is cut from the queue whose first lease has the
lowest rank, so no kind starves another. Queues that no engine can run now (for example while their model is being
loaded) are skipped and keep their leases' ranks.

A lease's rank is its arrival number plus AGE_TASKS for each priority level below the first (priority is part of a spec,
so all leases of a queue have the same). So a lease overtakes a waiting lease of a lower level only if it arrives fewer
than AGE_TASKS leases later, for each level between the two.

A batch leaves as soon as an engine can take it, unless its model has a delay: then it waits until the delay is over, a
limit is reached, or it has one of the sizes that the model prefers. Leases that come back from an engine that ended
are not delayed again. The master watches deadlines and revokes leases; the batcher then drops them, also from the heads
of queues that can't run.

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
    # Time that a batch may be delayed while an engine could take it.
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
class Delay:
    """A queue whose batch is delayed so that more tasks can join; and the tasks and tokens in it counted so far."""

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
        self._queues: dict[Spec, deque[tuple[int, Lease]]] = {}
        self._speeds: OrderedDict[tuple[str, str], Speed] = OrderedDict()
        self._arrivals = 0
        # Leases that are requeued first get ranks below all others, also below those requeued earlier.
        self._returns = 0
        self._delayed: dict[Spec, Delay] = {}
        self._due_s: float | None = None

    def add(self, spec: Spec, leases: Iterable[Lease]) -> int:
        """Append leases of one spec. Returns the last one's rank."""
        queue = self._queues.get(spec)
        if queue is None:
            queue = self._queues[spec] = deque()
        behind = (spec.priority - 1) * AGE_TASKS
        rank = self._arrivals + behind
        for lease in leases:
            rank += 1
            queue.append((rank, lease))
        self._arrivals = rank - behind
        if not queue:
            del self._queues[spec]
        return rank

    def requeue_first(self, leases: Iterable[Lease]) -> None:
        """Put leases of an engine that ended before all others, in the given order whatever their specs."""
        for lease in reversed(list(leases)):
            self._returns -= 1
            self._queues.setdefault(lease.spec, deque()).appendleft((self._returns, lease))

    def requeue_in_place(self, leases: Iterable[Lease]) -> None:
        """Put leases that an engine gave back at the places where they waited before."""
        for lease in reversed(list(leases)):
            queue = self._queues.setdefault(lease.spec, deque())
            queue.appendleft((min(lease.rank, queue[0][0] - 1) if queue else lease.rank, lease))

    def pop(
        self, *, one_by_one: Callable[[Spec], bool], may: Callable[[Spec], bool] | None = None, now_s: float = 0.0
    ) -> list[Lease]:
        """Cut the next batch: leases of one spec, without dropped ones. Empty: nothing may go now.

        `one_by_one`: whether the engine of a spec runs one task after the other. `may`: whether an engine can take a
        batch of a spec now. `now_s`: on a monotonic clock.
        """
        self._due_s = None
        self._drop_heads()
        specs = sorted(self._queues, key=self._head) if len(self._queues) > 1 else list(self._queues)
        for spec in specs:
            if may is not None and not may(spec):
                continue
            queue = self._queues[spec]
            if one_by_one(spec):
                batch = self._cut(queue, self._tasks_max(spec, len(queue)), None)
            else:
                rules = self.rules.get((spec.kind, spec.model), DEFAULT_RULES)
                tasks_max = rules.tasks_max or self.limits.tasks_max
                tokens_max = rules.tokens_max or self.limits.tokens_max
                delay_s = self.limits.delay_s if rules.delay_s < 0 else rules.delay_s
                if delay_s and queue[0][0] > 0:
                    tasks_max = self._tasks_due(spec, Delay(now_s + delay_s), tasks_max, tokens_max, now_s)
                batch = self._cut(queue, tasks_max, tokens_max) if tasks_max else []
            if not queue:
                del self._queues[spec]
                self._delayed.pop(spec, None)
            if batch:
                self._delayed.pop(spec, None)
                return batch
        return []

    def first(self, spec: Spec) -> Lease | None:
        """The lease with which the next batch of a spec begins; None: all its leases were dropped."""
        return next((lease for _, lease in self._queues[spec] if not lease.dropped), None)

    def due_s(self) -> float | None:
        """After a pop that returned nothing: when the first delay of a queue is over. None: no queue is delayed."""
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

    def _drop_heads(self) -> None:
        """Remove dropped leases at the heads of queues: no model is loaded for them, and they don't pile up."""
        for spec in [spec for spec, queue in self._queues.items() if queue[0][1].dropped]:
            queue = self._queues[spec]
            before = len(queue)
            while queue and queue[0][1].dropped:
                queue.popleft()
            if not queue:
                del self._queues[spec]
                self._delayed.pop(spec, None)
            elif (delay := self._delayed.get(spec)) is not None:
                delay.tasks = max(0, delay.tasks - (before - len(queue)))

    def _head(self, spec: Spec) -> int:
        return self._queues[spec][0][0]

    def _tasks_due(self, spec: Spec, fresh: Delay, tasks_max: int, tokens_max: int, now_s: float) -> int:
        """The largest batch that a delayed queue may send now; 0: the queue waits on.

        Dropped leases are counted, too, so a batch may go a little early.
        """
        queue, delay = self._queues[spec], self._delayed.setdefault(spec, fresh)
        delay.tokens += sum(tokens_of(lease) for _, lease in islice(queue, delay.tasks, None))
        delay.tasks = len(queue)
        preferred = self.rules.get((spec.kind, spec.model), DEFAULT_RULES).preferred
        size = max((size for size in preferred if size <= min(delay.tasks, tasks_max)), default=0)
        if size:
            return size
        if delay.tasks >= tasks_max or delay.tokens >= tokens_max or now_s >= delay.due_s:
            return tasks_max
        self._due_s = delay.due_s if self._due_s is None else min(self._due_s, delay.due_s)
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
    def _cut(queue: deque[tuple[int, Lease]], tasks_max: int, tokens_max: int | None) -> list[Lease]:
        batch: list[Lease] = []
        tokens = 0
        while queue and len(batch) < tasks_max:
            lease = queue[0][1]
            if lease.dropped:
                queue.popleft()
                continue
            lease.rank = queue[0][0]
            if tokens_max is not None:
                tokens += tokens_of(lease)
                if batch and tokens > tokens_max:
                    break
            if len(batch) >= lease.batch_size_max:
                break
            tasks_max = min(tasks_max, lease.batch_size_max)
            batch.append(lease)
            queue.popleft()
        return batch
