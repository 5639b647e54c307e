"""A history: what clients and daemons observed, one record after another, each with its time on one clock.

Every process has a file of its own, one JSON record per line, written at once, so that a history survives kill -9 and
can be checked again later. CLOCK_MONOTONIC is the same for all processes of a machine.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
CLIENTS = "clients"  # the place of all clients in the network


class History:
    """Writes records to one file, from many threads, in one order."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, what: str, **fields: Any) -> None:
        line = json.dumps({"at_s": time.monotonic(), "what": what, **fields}) + "\n"
        with self._lock:
            os.write(self._descriptor, line.encode())


def records_of(path: Path, offset: int = 0) -> Iterator[tuple[Record, int]]:
    """The complete lines of a file from an offset on, each with its end. The writer may have died in the last line."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield json.loads(line), offset


def load(folder: Path) -> list[Record]:
    """All records of all files of a history, in the order in which they were written."""
    records = [record for path in sorted(folder.glob("*.jsonl")) for record, _ in records_of(path)]
    return sorted(records, key=lambda r: r["at_s"])
