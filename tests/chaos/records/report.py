"""What a chaos run says at its end: how much was broken, what the checker found, and how long it took to heal.

Times come from the history alone. To re-queue: from the kill of a worker to the dispatch, elsewhere or to the same
worker come back, of a task that had begun there, by the outcome's dispatch_time (the master's clock), which is of the
last attempt; backoff before that attempt is in it. Tasks that were interrupted once more are left out, and so are kills
close to another one, to a pause, or to trouble with the master or the network. To recover: from the start of a new
master's process to the first acknowledgement or outcome that any client got.
"""

import itertools
import math
from bisect import bisect_left
from collections import Counter
from dataclasses import asdict, dataclass

from tests.chaos.records.book import Record
from tests.chaos.records.checker import Findings

# What happened so close before the kill of a worker may explain a late dispatch.
APART_S = 2.5


@dataclass(frozen=True, slots=True)
class Times:
    """Of one kind, in seconds."""

    count: int
    p50_s: float
    p99_s: float
    max_s: float

    def __str__(self) -> str:
        if not self.count:
            return "none measured"
        return f"p50 {self.p50_s:.3f} s, p99 {self.p99_s:.3f} s, max {self.max_s:.3f} s, of {self.count}"


def times_of(values: list[float]) -> Times:
    values = sorted(values)
    if not values:
        return Times(0, 0.0, 0.0, 0.0)
    last = len(values) - 1
    return Times(len(values), values[last // 2], values[math.ceil(last * 0.99)], values[-1])


@dataclass(frozen=True, slots=True)
class Report:
    """See the module."""

    rounds: int
    kills: int  # processes that were ended with SIGKILL, by us or at a failpoint
    by_kind: dict[str, int]
    figures: dict[str, int]
    requeue: Times
    recovery: Times
    broken: list[str]

    def lines(self) -> list[str]:
        """For a person."""
        kinds = ", ".join(f"{kind} {number}" for kind, number in self.by_kind.items())
        lines = [f"rounds: {self.rounds}", f"kills: {self.kills}", f"faults by kind: {kinds}"]
        lines += [f"{name}: {figure}" for name, figure in self.figures.items()]
        lines += [f"to re-queue: {self.requeue}", f"to recover a master: {self.recovery}"]
        lines += [f"BROKEN: {line}" for line in self.broken[:50]]
        return [*lines, f"promises broken: {len(self.broken)}"]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def report(records: list[Record], findings: Findings) -> Report:
    """The report of a checked history."""
    kinds: Counter[str] = Counter()
    for r in records:
        match r["what"]:
            case "kill":
                kinds[f"kill -9 {r['target']}"] += 1
            case "failpoint":
                kinds[f"kill -9 at a failpoint ({r['room']})"] += 1
            case "pause":
                kinds[f"SIGSTOP {r['whom']}"] += 1
            case "network":
                kinds[f"network {r['how']}"] += 1
            case "handlers":
                kinds["handlers broken"] += 1
            case "armed":
                kinds["failpoints armed"] += 1
    return Report(
        rounds=sum(r["what"] == "round" for r in records),
        kills=sum(number for kind, number in kinds.items() if kind.startswith("kill -9")),
        by_kind=dict(sorted(kinds.items())),
        figures=findings.figures,
        requeue=times_of(requeue_times_s(records)),
        recovery=times_of(recovery_times_s(records)),
        broken=findings.broken,
    )


def requeue_times_s(records: list[Record]) -> list[float]:
    """See the module."""
    offset_s = next(r["wall_less_monotonic_s"] for r in records if r["what"] == "clock")
    outcomes: dict[int, Record] = {r["task_id"]: r for r in records if r["what"] == "outcome" and r["by"] == "watch"}
    kills_s: dict[int, float] = {r["pid"]: r["at_s"] for r in records if _kills_an_agent(r)}
    disturbances = [d for r in records if (d := _disturbance(r)) is not None]
    executions = [r for r in records if r["what"] == "execution"]
    begun = Counter(r["task_id"] for r in executions)
    times = []
    for r in executions:
        if r["parent_pid"] not in kills_s or begun[r["task_id"]] != 2:
            continue
        # The attempt may have the same number again: the master need not have known that it ran.
        outcome, kill_s = outcomes.get(r["task_id"]), kills_s[r["parent_pid"]]
        if outcome is None or outcome["result"].endswith(f":{r['pid']}"):
            continue
        dispatch_s = outcome["dispatch_s"] - offset_s
        if dispatch_s < kill_s:  # it was interrupted before that: by its engine's end
            continue
        if not any(begin_s <= dispatch_s and end_s > kill_s for begin_s, end_s in disturbances):
            times.append(dispatch_s - kill_s)
    return times


def _kills_an_agent(r: Record) -> bool:
    return (r["what"], r.get("target"), r.get("room")) in (("kill", "worker", None), ("failpoint", None, "agent"))


def _disturbance(r: Record) -> tuple[float, float] | None:
    """From when until when something else than the kill of a worker may explain a late dispatch. Another such kill
    does so from its instant on: what went there has to be dispatched once more.
    """
    at_s = float(r["at_s"])
    if _kills_an_agent(r):
        return at_s, at_s
    match r["what"]:
        case "pause":
            return at_s, at_s + float(r["duration_s"]) + APART_S
        case "network" | "master":  # a master that was started: it may wait for workers to come back
            return at_s, at_s + APART_S
        case "kill" | "failpoint" if "master" in (r.get("target"), r.get("room")):
            return at_s, at_s
    return None


def recovery_times_s(records: list[Record]) -> list[float]:
    """See the module."""
    starts_s = [r["at_s"] for r in records if r["what"] == "master"]
    signs_s = sorted(r["at_s"] for r in records if r["what"] in ("ack", "outcome"))
    times = []
    for start_s, next_s in itertools.pairwise([*starts_s[1:], math.inf]):  # the first one had nothing to recover from
        first = bisect_left(signs_s, start_s)
        if first < len(signs_s) and signs_s[first] < next_s:
            times.append(signs_s[first] - start_s)
    return times
