"""Handlers of an engine whose simulated GPU falls sick, and a self-test that a test can make fail."""

import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from multigpu.contexts import context
from multigpu.handlers import handler
from multigpu_worker.engines.common import self_test

# While this file exists the processor computes wrong: a simulated fault, beneath the real self_test.
WRONG = os.environ.get("TEST_WRONG_FILE", "")
if WRONG:
    importlib.import_module("torch")
    right = self_test.product

    def product(torch: Any, device: str, size: int) -> Any:
        """While the file exists, raises the file's text; if it is empty, one number of many is off by one."""
        if Path(WRONG).exists() and (text := Path(WRONG).read_text()):
            raise RuntimeError(text)
        answer = right(torch, device, size)
        answer[3, 5] += Path(WRONG).exists()
        return answer

    self_test.product = product

# SLOW_FILE: the self-test creates this file and never ends. UNLOADABLE: importing torch ends the engine, as it may when
# memory is short. ANYWAY: torch is imported, and memory may really be short.
SLOW, UNLOADABLE, ANYWAY = (
    os.environ.get(f"TEST_SELF_TEST_{name}", "") for name in ("SLOW_FILE", "UNLOADABLE", "ANYWAY")
)


def slow(torch: Any, device: str) -> tuple[bool | None, str]:
    """Says that it has begun, and takes its time."""
    Path(SLOW).touch()
    time.sleep(3600)
    return True, ""


if SLOW or UNLOADABLE:
    self_test.loaded = lambda: True  # as in a process that has loaded torch for its tasks
if SLOW or UNLOADABLE or ANYWAY:
    self_test.able = lambda device, *, models: True  # as a GPU's engine with models is
if SLOW:
    self_test.load, self_test.shortage, self_test.run = lambda: None, lambda *_: "", slow
elif UNLOADABLE:
    self_test.load = lambda: os._exit(1)


@handler("health.work")
def work(value: bytes) -> bytes:
    """Works for so many seconds. The result is the engine's pid."""
    ctx = context()
    end_s = time.monotonic() + float(value or b"0")
    while time.monotonic() < end_s and not ctx.cancelled:
        time.sleep(0.01)
    return b"%d" % os.getpid()


@handler("health.mark")
def mark(value: bytes) -> None:
    """Creates the file of this name, and works until it is cancelled."""
    ctx = context()
    Path(value.decode()).touch()
    while not ctx.cancelled:
        time.sleep(0.01)


@handler("health.raise")
def raising(value: bytes) -> Any:
    """Fails with these words, as a framework would."""
    raise RuntimeError(value.decode())


@handler("health.work_and_raise")
def work_and_raise(value: bytes) -> Any:
    """Works for so many seconds and fails in words that tell nothing of CUDA."""
    time.sleep(float(value))
    raise RuntimeError("it went wrong")


@handler("health.crash")
def crash(value: bytes) -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(600)
