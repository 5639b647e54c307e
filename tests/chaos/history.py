"""What happened, as those outside saw it: one record after another, each with the instant on one clock.

Records are plain dicts so that a history can be kept as JSON lines and checked again later.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class History:
    """Collects records from many threads, in one order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[Record] = []

    def add(self, what: str, **fields: Any) -> None:
        with self._lock:
            self._records.append({"at_s": time.monotonic(), "what": what, **fields})

    def records(self) -> list[Record]:
        with self._lock:
            return list(self._records)

    def save(self, path: Path) -> None:
        path.write_text("".join(json.dumps(r) + "\n" for r in self.records()))


def load(path: Path) -> list[Record]:
    """The records of a saved history."""
    return [json.loads(line) for line in path.read_text().splitlines()]
