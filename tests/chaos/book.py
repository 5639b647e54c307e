"""A history, sorted out for the checker, which is in checker.py and streams.py. Shares no code with the product."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]
EPHEMERAL = {"ephemeral", "lend"}
# An outcome is delivered before it is on the disk, but not long before: a master whose death explains that another
# one stayed, or none, died no further from the instant when the client noted it.
UNSAFE_S = 10.0


class Book:
    """A history, sorted out."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.by_what: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self.by_what[record["what"]].append(record)
        self.broken: list[str] = []
        self.digests: dict[str, str] = {}
        self.ways: dict[str, str] = {}
        for r in self["submit"]:
            if self.digests.setdefault(r["request_id"], r["digest"]) != r["digest"]:
                self.broken.append(f"request {r['request_id']} was submitted with two payloads: the run is at fault")
            self.ways[r["request_id"]] = r["by"]
        self.master_deaths_s = sorted(
            [r["at_s"] for r in self["kill"] if r["target"] == "master"]
            + [r["at_s"] for r in self["failpoint"] if r["room"] == "master"]
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
        """Whether a master died so soon that what it had said just then need not be on its disk."""
        return self.master_died(at_s - UNSAFE_S, at_s + UNSAFE_S)
