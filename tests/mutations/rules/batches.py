"""The batcher against a slow and obvious model: any order of arrivals, drops, returns, measurements and pops.

Each pop must take from the line whose head comes first by age and priority, of those that may go, in order, without
what was dropped, and as much as the limits allow: no more, and no less. Lines of the model that waits ("slack") may
only go when their time has come, a limit or a preferred size is reached, or they come back from an engine.
"""

import random
from collections.abc import Container

from multigpu.repository.model import BatchRules
from multigpu_worker.session.batcher import AGE_TASKS, BYTES_PER_TOKEN, GROWTH, Batcher, BatchLimits
from multigpu_worker.session.session import Lease, Spec

SPECS = (
    Spec(kind="embed"),
    Spec(kind="embed", parameters=(("a", "b"),), priority=1),
    Spec(kind="embed", model="slack"),
    Spec(kind="mine"),
    Spec(kind="slow", priority=5),
)
RULES = {("embed", "slack"): BatchRules(tasks_max=6, tokens_max=15, delay_s=1.0, preferred=(2, 4))}
ONE_BY_ONE = frozenset({"mine", "slow"})


class Model:
    """What waits, in order: (arrival, lease); negative for what came back from an engine."""

    def __init__(self, limits: BatchLimits, slots: int) -> None:
        self.limits, self.slots = limits, slots
        self.lines: dict[Spec, list[tuple[int, Lease]]] = {spec: [] for spec in SPECS}
        self.speeds: dict[str, tuple[float, int]] = {}
        # Since when a line could have gone and waits.
        self.since_s: dict[Spec, float] = {}

    def expected(self, rejected: Container[Spec], now_s: float) -> list[Lease]:
        """The next batch. What can't be in any is taken out."""
        for spec in sorted(
            (s for s in SPECS if self.lines[s] and s not in rejected), key=lambda s: self.lines[s][0][0]
        ):
            tasks_max = self._tasks_max(spec, len(self.lines[spec]))
            tokens_max = self.limits.tokens_max
            if spec.model == "slack":
                tasks_max, tokens_max = self._slack(spec, now_s), 15
            batch: list[Lease] = []
            tokens, at = 0, 0
            for _, lease in self.lines[spec]:
                together_max = min([tasks_max, *(x.together_max for x in batch)])
                if len(batch) >= together_max:
                    break
                if not lease.dropped:
                    if spec.kind not in ONE_BY_ONE:
                        tokens += max(1, len(lease.payload) // BYTES_PER_TOKEN)
                        if batch and tokens > tokens_max:
                            break
                    if len(batch) >= lease.together_max:
                        break
                    batch.append(lease)
                at += 1
            del self.lines[spec][:at]
            if batch or not self.lines[spec]:
                self.since_s.pop(spec, None)
            if batch:
                return batch
        return []

    def _slack(self, spec: Spec, now_s: float) -> int:
        """How many may go of the line that waits to grow."""
        line = self.lines[spec]
        if line[0][0] < 0:
            return 6
        since_s = self.since_s.setdefault(spec, now_s)
        for size in (4, 2):
            if len(line) >= size:
                return size
        full = sum(max(1, len(lease.payload) // BYTES_PER_TOKEN) for _, lease in line) >= 15
        return 6 if full or now_s >= since_s + 1.0 else 0

    def _tasks_max(self, spec: Spec, waiting: int) -> int:
        if spec.kind not in ONE_BY_ONE:
            return self.limits.tasks_max
        if spec.kind not in self.speeds:
            return 1
        task_s, largest = self.speeds[spec.kind]
        tasks = min(self.limits.tasks_max, GROWTH * largest)
        if task_s * tasks > self.limits.batch_s:
            tasks = int(self.limits.batch_s / task_s)
        share = (waiting + self.slots - 1) // self.slots
        return max(1, min(tasks, share))

    def measure(self, spec: Spec, tasks: int, work_s: float) -> None:
        task_s, largest = self.speeds.get(spec.kind, (work_s / tasks, tasks))
        self.speeds[spec.kind] = (task_s + work_s / tasks) / 2, max(largest, tasks)


def draw_leases(rng: random.Random, spec: Spec, arrivals: int) -> list[Lease]:
    leases = [
        Lease(arrivals + i, 0, 1, spec, b"x" * rng.choice((0, 8, 20, 200))) for i in range(1, 1 + rng.randrange(6))
    ]
    for lease in leases:
        lease.together_max = rng.choice((1, 2, 99))
    return leases


def check(seed: int) -> None:
    """AssertionError: the batcher and the model disagree."""
    rng = random.Random(seed)
    limits = BatchLimits(tasks_max=rng.choice((1, 3, 8)), tokens_max=rng.choice((4, 20)), batch_s=0.05)
    slots = rng.choice((1, 2, 3))
    batcher, model = Batcher(limits, slots), Model(limits, slots)
    batcher.rules = RULES
    arrivals = returns = 0
    now_s = 1000.0
    taken: list[Lease] = []
    ranks: dict[Lease, int] = {}
    for _ in range(60):
        event = rng.randrange(11)
        if event < 3:
            spec = rng.choice(SPECS)
            leases = draw_leases(rng, spec, arrivals)
            batcher.add(spec, leases)
            ranked = [(x.lease_id + (spec.priority - 1) * AGE_TASKS, x) for x in leases]
            model.lines[spec] += ranked
            ranks |= {x: rank for rank, x in ranked}
            arrivals += len(leases)
        elif event == 3:
            waiting = [lease for line in model.lines.values() for _, lease in line]
            for lease in rng.sample(waiting, len(waiting) // 3):
                lease.dropped = True
        elif event == 4 and taken:
            batcher.put_back(taken)
            for lease in reversed(taken):
                returns -= 1
                model.lines[lease.spec].insert(0, (returns, lease))
                ranks[lease] = returns
            taken = []
        elif event == 10:
            back = taken[rng.randrange(len(taken) + 1) :]
            batcher.give_way(back)
            for lease in reversed(back):
                line = model.lines[lease.spec]
                rank = ranks[lease] = min([ranks[lease], *[line[0][0] - 1 for _ in line[:1]]])
                line.insert(0, (rank, lease))
            taken = taken[: len(taken) - len(back)]
        elif event == 5:
            spec, tasks, work_s = rng.choice(SPECS), rng.randint(1, 4), rng.choice((1e-4, 0.02, 1.0))
            batcher.measure(spec, tasks, work_s)
            model.measure(spec, tasks, work_s)
        else:
            now_s += rng.choice((0.0, 0.3, 1.0))
            rejected = set(rng.sample(SPECS, rng.choice((0, 0, 2))))
            expected = model.expected(rejected, now_s)
            batch = batcher.pop(one_by_one=ONE_BY_ONE, may=set(SPECS).difference(rejected).__contains__, now_s=now_s)
            due_s = min(
                (since_s + 1.0 for spec, since_s in model.since_s.items() if spec not in rejected), default=None
            )
            if not batch:
                assert batcher.due_s() == due_s, f"the next batch is due at {batcher.due_s()}, it should be {due_s}"
            taken += batch  # of several specs, as an engine holds more than one batch
            got, wanted = [x.lease_id for x in batch], [x.lease_id for x in expected]
            assert got == wanted, f"the batch is {got}, it should be {wanted}"
