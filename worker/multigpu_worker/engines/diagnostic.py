"""Engines of the kinds "echo", "sleep" and "fail", to try out and measure a fleet and to inject faults.

They need no model and no user code.


- "echo": the result is the payload.
- "sleep": sleeps for the seconds in the payload (decimal text) or in the parameter `seconds`. The result is the
  payload, followed by a colon and the engine's process id if the parameter `append_pid` is "1".
- "fail": fails in the way of the parameter `mode`: "raise" (the default; `type`, `message` and `retryable` are further
  parameters), "exit", "hang", "segfault" or "oom".
"""

import ctypes
import math
import os
import time
from typing import ClassVar

from multigpu_worker.engines.base import Batch, Engine, Item, Reporter

# How often a sleep checks whether it was cancelled.
_POLL_S = 0.01
_OOM_STEP_BYTES = 16 << 20


class EchoEngine:
    one_by_one: ClassVar[bool] = False

    def prepare(self, batch: Batch) -> object:
        return batch.items

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        del prepared
        content_type = batch.content_type
        for item in batch.items:
            reporter.succeed(item, item.payload, content_type)


class _OneByOne:
    one_by_one: ClassVar[bool] = True

    def prepare(self, batch: Batch) -> object:
        return batch.items

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        del prepared
        for item in batch.items:
            if not reporter.cancelled(item):
                reporter.begin(item)
                self._run(item, batch.parameters, reporter)

    def _run(self, item: Item, parameters: dict[str, str], reporter: Reporter) -> None:
        raise NotImplementedError


class SleepEngine(_OneByOne):
    def _run(self, item: Item, parameters: dict[str, str], reporter: Reporter) -> None:
        text = parameters.get("seconds", "") or item.payload.decode("ascii", "replace")
        seconds = _seconds(text)
        if seconds is None:
            message = f"not a number of seconds: {text[:100]!r}; send decimal text such as 0.5, at least 0"
            reporter.fail(item, "BadInput", message, retryable=False)
        elif _sleep(item, seconds, reporter):
            tail = b":%d" % os.getpid() if parameters.get("append_pid") == "1" else b""
            reporter.succeed(item, item.payload + tail)


class FailEngine(_OneByOne):
    def _run(self, item: Item, parameters: dict[str, str], reporter: Reporter) -> None:
        mode = parameters.get("mode", "raise")
        if mode == "exit":
            os._exit(1)
        elif mode == "hang":
            while True:
                time.sleep(3600)
        elif mode == "segfault":
            ctypes.string_at(0)
        elif mode == "oom":
            hoard = []
            while True:
                hoard.append(b"x" * _OOM_STEP_BYTES)
        elif mode == "raise":
            message = parameters.get("message", "asked to fail")
            retryable = parameters.get("retryable", "true") == "true"
            reporter.fail(item, parameters.get("type", "RuntimeError"), message, retryable=retryable)
        else:
            message = f"no such mode: {mode!r}; use raise, exit, hang, segfault or oom"
            reporter.fail(item, "BadInput", message, retryable=False)


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _sleep(item: Item, seconds: float, reporter: Reporter) -> bool:
    """Sleep. Returns False if the item was cancelled meanwhile."""
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(left_s, _POLL_S))
        reporter.beat()
        if reporter.cancelled(item):
            return False
    return True


ENGINES: dict[str, type[Engine]] = {"echo": EchoEngine, "sleep": SleepEngine, "fail": FailEngine}
