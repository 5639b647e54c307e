"""Handlers that the integration tests and the chaos runs send tasks to: good ones, and some that misbehave."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from multigpu.contexts import context
from multigpu.handlers import handler


@handler("trial.nap")
def nap(value: bytes) -> Any:
    """Sleeps for the parameter `seconds`; the result is the payload backwards."""
    ctx = context()
    time.sleep(float(ctx.parameters.get("seconds", "0.1")))
    return value[::-1]


@handler("trial.logged")
def logged(value: bytes) -> Any:
    """Says in the file `log` that it runs, then works for `seconds`. One write with O_APPEND: lines stay whole."""
    ctx = context()
    line = f"{ctx.task_id} {ctx.attempt} {os.getpid()} {os.getppid()} {value.decode()}\n".encode()
    descriptor = os.open(ctx.parameters["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
    time.sleep(float(ctx.parameters.get("seconds", "0")))
    return b"%s:%d:%d" % (value[::-1], ctx.attempt, os.getpid())


@handler("trial.stream")
def stream(value: bytes) -> Any:
    """Yields `count` parts, one each `seconds`."""
    ctx = context()
    for n in range(int(ctx.parameters.get("count", "5"))):
        time.sleep(float(ctx.parameters.get("seconds", "0.02")))
        yield b"%s-%d" % (value, n)
    return b"end of " + value


@handler("trial.says")
def says(value: bytes) -> None:
    """Writes the payload to its task's log."""
    context().log.info(value.decode())


@handler("trial.mixed")
def mixed(value: Any) -> Any:
    """Yields values of every form, and returns one more."""
    yield {"given": value}
    yield b"raw"
    yield "text"
    return [1.5, None]


@handler("trial.gate")
def gate(value: bytes) -> Any:
    """Runs until the file that the payload names exists."""
    ctx = context()
    while not Path(value.decode()).exists():
        if ctx.cancelled:
            return b"cancelled"
        time.sleep(0.01)
    return b"opened"


@handler("trial.raise", retry_on=LookupError)
def raising(value: bytes) -> Any:
    if not Path(value.decode()).is_file():
        raise LookupError("not there: " + value.decode())
    return b"there"


@handler("trial.wrong_type")
def wrong_type(value: bytes) -> Any:
    return object()


@handler("trial.hang")
def hang(value: bytes) -> Any:
    while True:
        time.sleep(600)


@handler("trial.exit")
def exit_now(value: bytes) -> Any:
    os._exit(7)


@handler("trial.big")
def big(value: bytes) -> Any:
    """A result of so many `bytes`."""
    ctx = context()
    return bytes(int(ctx.parameters["bytes"]))


@handler("trial.kill_worker")
def kill_worker(value: bytes) -> Any:
    """Takes the whole worker down, agent and all, a moment after it began."""
    time.sleep(0.5)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


@handler("trial.fork")
def fork(value: bytes) -> Any:
    """Both the parent and the child return; only one is heard."""
    return b"child" if os.fork() == 0 else b"parent"


@handler("trial.hoard")
def hoard(value: bytes) -> Any:
    mine = []
    while True:
        mine.append(b"x" * (16 << 20))


@handler("trial.third_time", retries=2)
def third_time(value: bytes) -> Any:
    """Fails twice, then says what the attempt before left for it."""
    ctx = context()
    if ctx.attempt < 3:
        ctx.save_checkpoint(b"attempt %d" % ctx.attempt)
        raise RuntimeError(f"attempt {ctx.attempt} fails")
    return ctx.checkpoint
