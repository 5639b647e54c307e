"""The log of `mgpuctl up`: the lines of its children, with their names, and the supervisor's events.

To stderr: JSON lines unchanged, others behind the child's name. To a file in the data directory, for `mgpuctl logs`:
every line as JSON with its process. Neither a closed stderr nor a full disk ends the fleet.
"""

import contextlib
import datetime as dt
import json
import os
import sys
from pathlib import Path
from typing import Any

# Below the data directory. A full file is renamed to NAME.1, which replaces the last one.
LOG_NAME = Path("log") / "fleet.jsonl"
LOG_BYTES_MAX = 16 << 20


class FleetLog:
    """Writes lines to stderr and to `file`. `as_json`: events are JSON on stderr, too."""

    def __init__(self, *, as_json: bool, names: list[str], file: Path | None = None) -> None:
        self._as_json = as_json
        self._width = max(len(name) for name in names)
        self._file = file

    def line(self, name: str, text: str) -> None:
        """A child's line."""
        _write_stderr(text if text.startswith("{") and text.endswith("}") else self._labelled(name, text))
        self._keep(name, _told(text) or {"timestamp": _now(), "event": text})

    def event(self, name: str, text: str) -> None:
        """An event of the supervisor about a child."""
        event = {"timestamp": _now(), "level": "info", "logger": "mgpuctl.up", "process": name, "event": text}
        if self._as_json:
            _write_stderr(json.dumps(event, ensure_ascii=False))
        else:
            _write_stderr(self._labelled(name, f"* {text}"))
        self._keep(name, event)

    def _labelled(self, name: str, text: str) -> str:
        return f"{name:<{self._width}} | {text}"

    def _keep(self, name: str, entry: dict[str, Any]) -> None:
        if self._file is None:
            return
        data = json.dumps({**entry, "process": name}, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        # The lines are on stderr in any case.
        with contextlib.suppress(OSError):
            # For its owner only, as the master makes it.
            self._file.parents[1].mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file.parent.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if self._file.stat().st_size + len(data) > LOG_BYTES_MAX:
                    self._file.replace(older(self._file))
            with self._file.open("ab", buffering=0) as file:
                file.write(data)


def older(file: Path) -> Path:
    """The older part of the log."""
    return file.with_name(file.name + ".1")


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat().replace("+00:00", "Z")


def _told(text: str) -> dict[str, Any] | None:
    """The JSON object on a line, if it is one."""
    if not text.startswith("{"):
        return None
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _write_stderr(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        try:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        except BrokenPipeError:
            # The reader has gone; the fleet goes on without it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
