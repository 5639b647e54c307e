"""The log of `mgpuctl up`: the lines of its children, with their names, and the supervisor's events.

It goes to stderr: JSON lines unchanged, others behind the child's name. Neither a closed stderr nor a full disk ends
the fleet.
"""

import contextlib
import datetime as dt
import json
import os
import sys


class FleetLog:
    """Writes lines to stderr. `as_json`: events are JSON, too."""

    def __init__(self, *, as_json: bool, names: list[str]) -> None:
        self._as_json = as_json
        self._width = max(len(name) for name in names)

    def line(self, name: str, text: str) -> None:
        """A child's line."""
        _write_stderr(text if text.startswith("{") and text.endswith("}") else self._labelled(name, text))

    def event(self, name: str, text: str) -> None:
        """An event of the supervisor about a child."""
        if self._as_json:
            now = dt.datetime.now(dt.UTC).isoformat().replace("+00:00", "Z")
            event = {"timestamp": now, "level": "info", "logger": "mgpuctl.up", "process": name, "event": text}
            _write_stderr(json.dumps(event, ensure_ascii=False))
        else:
            _write_stderr(self._labelled(name, f"* {text}"))

    def _labelled(self, name: str, text: str) -> str:
        return f"{name:<{self._width}} | {text}"


def _write_stderr(text: str) -> None:
    """A reader that has gone or a full disk costs lines, and does not end the fleet."""
    data = memoryview(text.encode(errors="replace") + b"\n")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(sys.stderr.fileno(), data) :]
