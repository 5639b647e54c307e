"""The report of a chaos run: how many faults of each kind there were, and what the checker found."""

from collections import Counter
from dataclasses import dataclass

from tests.chaos.records.book import Record
from tests.chaos.records.checker import Findings

KINDS = {
    "kill": "kill -9 {target}", "failpoint": "kill -9 at a failpoint ({process})", "pause": "SIGSTOP {target}",
    "network": "network {how}", "handlers": "handlers broken", "clock": "clock set between two masters",
    "armed": "failpoints armed",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    rounds: int
    kills: int  # processes that were ended with SIGKILL, by a strike or at a failpoint
    by_kind: dict[str, int]
    figures: dict[str, int]
    broken: list[str]

    def lines(self) -> list[str]:
        kinds = ", ".join(f"{kind} {number}" for kind, number in self.by_kind.items())
        lines = [f"rounds: {self.rounds}", f"kills: {self.kills}", f"faults by kind: {kinds}"]
        lines += [f"{name}: {figure}" for name, figure in self.figures.items()]
        lines += [f"BROKEN: {line}" for line in self.broken[:50]]
        return [*lines, f"promises broken: {len(self.broken)}"]


def report(records: list[Record], findings: Findings) -> Report:
    """The report of a checked history."""
    kinds = Counter(KINDS[r["what"]].format(**r) for r in records if r["what"] in KINDS)
    return Report(
        rounds=sum(r["what"] == "round" for r in records),
        kills=sum(number for kind, number in kinds.items() if kind.startswith("kill -9")),
        by_kind=dict(sorted(kinds.items())),
        figures=findings.figures,
        broken=findings.broken,
    )
