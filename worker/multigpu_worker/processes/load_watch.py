"""Detects process groups that make no progress, by their CPU time."""

from collections.abc import Iterable
from pathlib import Path

from multigpu_worker.process_group import members


class LoadWatch:
    """`still_s`: the time without progress after which a process is stuck. `interval_s`: between calls of `stuck`."""

    def __init__(self, still_s: float, interval_s: float) -> None:
        self._still_s = still_s
        self._gap_max_s = max(2.0, 2 * interval_s)
        # By pid: its CPU ticks, the ticks of its group (-1: not read), and since when neither has changed.
        self._seen: dict[int, tuple[int, int, float]] = {}
        self._looked_s = 0.0

    def stuck(self, pids: Iterable[int], now_s: float) -> bool:
        """Whether one of these processes makes no progress."""
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if gap_s > self._gap_max_s:  # the worker was suspended, and perhaps these processes with it
            self._seen = {pid: (ticks, group, since_s + gap_s) for pid, (ticks, group, since_s) in self._seen.items()}
        still = [self._still(pid, now_s) for pid in pids if pid]
        return any(still)

    def _still(self, pid: int, now_s: float) -> bool:
        ticks, group, since_s = self._seen.get(pid, (-1, -1, now_s))
        now_ticks = _cpu_ticks(pid)
        if now_ticks == ticks and now_s - since_s > self._still_s / 2:
            # It may wait for its children. Finding them requires a scan of all processes, so it is done late.
            now_group = sum(_cpu_ticks(member) for member, _ in members(pid))
            if now_group == group:
                return now_s - since_s > self._still_s
            since_s, group = (now_s, now_group) if group >= 0 else (since_s, now_group)
        elif now_ticks != ticks:
            group, since_s = -1, now_s
        self._seen[pid] = (now_ticks, group, since_s)
        return False

    def forget(self, pid: int) -> None:
        self._seen.pop(pid, None)


def _cpu_ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    fields = stat.rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])
