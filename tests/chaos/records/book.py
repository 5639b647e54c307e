"""A history, indexed for the checker (checker.py and streams.py). Shares no code with the product."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tests.chaos.records.history import CLIENTS

Record = dict[str, Any]
EPHEMERAL = {"ephemeral", "lend"}
# An outcome is delivered before it is on disk. A death of the master explains that another outcome stayed, or none,
# only if a client noted the outcome within this time of the death, not counting time in which the master was stopped
# or cut off from the clients.
UNSAFE_S = 2.0


class Book:
    """A history, indexed by what happened."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.by_what: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self.by_what[record["what"]].append(record)
        self.broken: list[str] = []
        self.digests: dict[str, str] = {}
        self.ways: dict[str, str] = {}
        for r in self["submit"]:
            if self.digests.setdefault(r["request_id"], r["digest"]) != r["digest"]:
                self.broken.append(f"request {r['request_id']} was submitted with two payloads: a defect of the run")
            self.ways[r["request_id"]] = r["by"]
        self.master_deaths_s = sorted(
            [r["at_s"] for r in self["kill"] if r["target"] == "master"]
            + [r["at_s"] for r in self["failpoint"] if r["process"] == "master"]
        )
        self._standstills_s = _merged(
            [(r["at_s"], r["at_s"] + r["duration_s"]) for r in self["pause"] if r["target"] == "master"]
            + [(r["at_s"], r["at_s"] + r["duration_s"]) for r in self["network"] if r["place"] == CLIENTS]
        )
        # The outcomes that the watch gave, by task.
        self.watched: dict[int, Record] = {}

    def __getitem__(self, what: str) -> list[Record]:
        return self.by_what[what]

    def durable(self, request_id: str) -> bool:
        return self.ways.get(request_id) not in EPHEMERAL

    def master_died(self, since_s: float, until_s: float) -> bool:
        return any(since_s <= at_s <= until_s for at_s in self.master_deaths_s)

    def unsafe(self, at_s: float) -> bool:
        """Whether a master died so soon after this instant that its acknowledgement need not be on its disk."""
        return any(self._running_s(at_s, death_s) <= UNSAFE_S for death_s in self.master_deaths_s)

    def _running_s(self, one_s: float, other_s: float) -> float:
        """The time between two instants, standstills left out."""
        begin_s, end_s = min(one_s, other_s), max(one_s, other_s)
        stood_s = sum(max(0.0, min(to_s, end_s) - max(from_s, begin_s)) for from_s, to_s in self._standstills_s)
        return end_s - begin_s - stood_s


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of these spans of time, without overlaps."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
