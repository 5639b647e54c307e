"""What `mgpuctl up` writes: the children's lines, each with its child's name, and the keeper's own.

Lines that are JSON already name their program: they pass through untouched, and then the keeper writes JSON as well, so
that the whole stream stays one value a line. A reader that goes away does not end the fleet.
"""

import contextlib
import datetime as dt
import json
import os
import sys


class FleetLog:
    """Writes lines to stderr; `as_json` says how the keeper's own lines look."""

    def __init__(self, *, as_json: bool, names: list[str]) -> None:
        self._as_json = as_json
        self._width = max(len(name) for name in names)

    def line(self, name: str, text: str) -> None:
        """A line that a child printed."""
        _write_stderr(text if text.startswith("{") and text.endswith("}") else self._labelled(name, text))

    def event(self, name: str, text: str) -> None:
        """A line of the keeper's own about a child."""
        if not self._as_json:
            _write_stderr(self._labelled(name, f"* {text}"))
            return
        now = dt.datetime.now(dt.UTC).isoformat().replace("+00:00", "Z")
        event = {"timestamp": now, "level": "info", "logger": "mgpuctl.up", "process": name, "event": text}
        _write_stderr(json.dumps(event, ensure_ascii=False))

    def _labelled(self, name: str, text: str) -> str:
        return f"{name:<{self._width}} | {text}"


def _write_stderr(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        try:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        except BrokenPipeError:
            # Nobody reads any more: say it to nobody from now on, and keep the fleet.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
