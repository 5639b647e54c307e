"""Output of all commands: facts for people, JSON for programs. Tables are in tables.py.

Text from tasks and workers is untrusted: its control characters never reach the terminal.
"""

import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from multigpu.cli.failures import BROKEN_PIPE
from multigpu.cli.text import clean, clean_lines

JOURNAL_FULL = "the disk is full, or journal_bytes_max is reached: the master's log says which"


def line(text: str = "") -> None:
    """A line to stdout. Exits without a message if the reader of the pipe has closed it."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _exit_broken_pipe()


def raw(data: bytes) -> None:
    """Bytes to stdout, unchanged."""
    left = memoryview(data)
    try:
        sys.stdout.flush()
        while left:  # an unbuffered stdout (python -u) may write only a part
            left = left[sys.stdout.buffer.write(left) :]
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _exit_broken_pipe()


def result(data: bytes) -> None:
    """A task's result, unchanged; a terminal gets a line end after it."""
    raw(data + b"\n" if sys.stdout.isatty() and not data.endswith(b"\n") else data)


def _exit_broken_pipe() -> None:
    discard_stdout()
    raise SystemExit(BROKEN_PIPE)


def discard_stdout() -> None:
    """Redirects stdout to /dev/null: the interpreter flushes it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """A remark to stderr."""
    sys.stderr.write(clean_lines(text) + "\n")
    sys.stderr.flush()


def value(data: Any) -> None:
    """One JSON value: indented on a terminal, one line in a pipe."""
    line(as_json(data, indent=2 if sys.stdout.isatty() else None))


def as_json(data: Any, indent: int | None = None) -> str:
    """JSON for stdout: ASCII on a terminal. Unprintable characters (controls, bidirectional overrides, lone
    surrogates) are escaped everywhere, because text in a pipe often ends on a terminal too.
    """
    text = json.dumps(data, ensure_ascii=sys.stdout.isatty(), indent=indent)
    return re.sub(r"[^\n -~]", lambda char: char[0] if char[0].isprintable() else json.dumps(char[0])[1:-1], text)


def facts(pairs: Sequence[tuple[str, str]]) -> None:
    """Names and values, one pair a line; pairs without a value are left out."""
    shown = [(clean(name), text) for name, text in pairs if text]
    width = max((len(name) for name, _ in shown), default=0)
    for name, text in shown:
        first, *more = clean_lines(text).splitlines() or [""]
        line(f"{name:<{width}}  {first}")
        for continued in more:
            line(f"{'':<{width}}  {continued}")
