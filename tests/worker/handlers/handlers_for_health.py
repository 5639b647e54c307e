"""Handlers of an engine whose simulated GPU falls sick, and a canary that a test can have sing wrong."""

import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from multigpu.handlers import Context, handler
from multigpu_worker.engines.common import self_test as canary

# While this file exists the processor computes wrong: a simulated fault, beneath the real canary.
WRONG = os.environ.get("TEST_WRONG_FILE", "")
if WRONG:
    importlib.import_module("torch")
    right = canary.product

    def product(torch: Any, device: str, size: int) -> Any:
        """One number of many is off by one while the file exists."""
        answer = right(torch, device, size)
        answer[3, 5] += Path(WRONG).exists()
        return answer

    canary.product = product

# The canary makes this file and goes on for ever; or to load torch ends the engine, as it may where memory is short; or
# torch is loaded, and memory may really be short.
SLOW, UNLOADABLE, ANYWAY = (os.environ.get(f"TEST_CANARY_{name}", "") for name in ("SLOW_FILE", "UNLOADABLE", "ANYWAY"))


def able(device: str, *, models: bool) -> bool:
    """As a GPU's engine with models is."""
    return True


def able_at_once() -> bool:
    """As a process that has loaded torch for its tasks."""
    return True


def slow(torch: Any, device: str) -> tuple[bool | None, str]:
    """Says that it has begun, and takes its time."""
    Path(SLOW).touch()
    time.sleep(3600)
    return True, ""


if SLOW or UNLOADABLE:
    canary.loaded = able_at_once
if SLOW:
    canary.able, canary.load, canary.shortage, canary.run = able, lambda: None, lambda *_: "", slow
elif UNLOADABLE:
    canary.able, canary.load = able, lambda: os._exit(1)
elif ANYWAY:
    canary.able = able


@handler("health.work")
def work(value: bytes, ctx: Context) -> bytes:
    """Works for so many seconds. The result is the engine's pid."""
    end_s = time.monotonic() + float(value or b"0")
    while time.monotonic() < end_s and not ctx.cancelled:
        time.sleep(0.01)
    return b"%d" % os.getpid()


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
    time.sleep(60)
