"""The events of a job: its attempts, its metrics and its checkpoints, in the order in which they came.

They are in the job's folder and, as partial outputs, in the master. A master that was restarted has lost them: then the
next attempt sends those of the folder again.
"""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from multigpu._encoding import JSON
from multigpu._kinds.training import Job, report_text

from multigpu_worker.engines.base import Item, Reporter

# Of an attempt, about this many metrics are kept in each e-fold of its duration: all at first, fewer later.
SAMPLES = 2000
# The master takes 16 MiB of partial outputs for a task.
SENT_BYTES_MAX = 12 << 20
OVERHEAD_BYTES = 128


class Events:
    def __init__(self, path: Path, item: Item, reporter: Reporter) -> None:
        """OSError: the file can't be read or written."""
        self._item = item
        self._reporter = reporter
        # By the script's clock: when it reported first; and by the names of metrics, when the last report was kept.
        self._first_s = 0.0
        self._kept_s: dict[tuple[str, ...], float] = {}
        # By the names of metrics: the last ones that were not kept.
        self._left_out: dict[tuple[str, ...], dict[str, Any]] = {}
        # The last metrics, with their step, and the last checkpoint.
        self.last: dict[str, Any] = {"step": None, "metrics": {}, "checkpoint": None}
        known = _whole_lines(path)
        received, rest = known[: item.partials_received], known[item.partials_received :]
        self._sent_bytes = sum(len(line) + OVERHEAD_BYTES for line in received if self._note_line(line))
        unsent = [line for line in rest if self._note_line(line)]
        # The next attempt compares the number of lines with what the master has received: keep none that is not sent,
        # and send none before.
        if len(unsent) < len(rest):
            fresh = path.with_name(f".{path.name}.new")
            fresh.write_bytes(b"".join(line + b"\n" for line in received + unsent))
            fresh.replace(path)
        self._file = path.open("ab", buffering=0)
        for line in unsent:
            self._send(line)

    def begin(self, job: Job, world_size: int, logs: Path) -> None:
        """An attempt begins."""
        attempt = {"task": self._item.task_id, "attempt": self._item.attempt, "world_size": world_size}
        self._add({"job": job.payload(), **attempt, "logs": str(logs), "time": time.time()})

    def reported(self, line: str) -> None:
        """Rank 0's script has reported this, by multigpu.train."""
        try:
            event = json.loads(line)
        except ValueError:  # empty, or the script was killed, or the disk was full, while it wrote the line
            return
        self._note(event)
        if "metrics" not in event:
            self._add(event)
            if "checkpoint" in event:  # the master may begin again with more workers
                self._reporter.checkpoint(self._item, str(event["checkpoint"]["step"]).encode())
            return
        if event.get("fraction") is not None or event.get("step") is not None:
            self._reporter.progress(self._item, event.get("fraction") or 0.0, report_text(event))
        time_s, names = float(event["time"]), tuple(event["metrics"])
        self._first_s = self._first_s or time_s
        self._left_out[names] = event
        if time_s - self._kept_s.get(names, 0.0) >= (time_s - self._first_s) / SAMPLES:
            self._kept_s[names] = time_s
            self._add(self._left_out.pop(names))

    def end(self) -> None:
        """Keeps the last metrics: the attempt ends."""
        for event in self._left_out.values():
            self._add(event)
        self._left_out.clear()

    def _note_line(self, line: bytes) -> bool:
        """Note an event of the file. Returns whether it is whole: those before and after a damaged one still count."""
        try:
            self._note(json.loads(line))
        except (ValueError, TypeError, KeyError):
            return False
        return True

    def _note(self, event: dict[str, Any]) -> None:
        if "metrics" in event:
            before = self.last["metrics"] if event["step"] == self.last["step"] else {}
            self.last |= {"step": event["step"], "metrics": before | event["metrics"]}
        elif "checkpoint" in event:
            self.last["checkpoint"] = event["checkpoint"]
        elif "finetuned" in event:
            self.last |= {"finetuned": event["finetuned"], "checkpoint": None}  # which it has replaced

    def _add(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, separators=(",", ":")).encode()
        whole_bytes = self._file.seek(0, os.SEEK_END)
        if self._file.write(line + b"\n") <= len(line):  # the next line must not follow on a part of this one
            self._file.truncate(whole_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        self._send(line)

    def _send(self, line: bytes) -> None:
        self._sent_bytes += len(line) + OVERHEAD_BYTES
        if self._sent_bytes < SENT_BYTES_MAX:
            self._reporter.partial(self._item, line, JSON)


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of the file; cuts off one that a killed engine has not finished."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return whole.split(b"\n")[:-1]
