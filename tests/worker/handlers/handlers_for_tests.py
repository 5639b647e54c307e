"""Handlers that the worker's tests run: good ones, and every kind of bad one."""

import asyncio
import ctypes
import mmap
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from multigpu.contexts import context
from multigpu.handlers import handler

running: list[int] = []


@handler("t.upper")
def upper(value: Any) -> Any:
    return value.upper()


@handler("t.note")
def note(value: Any) -> Any:
    """Notes in the file `log` that it runs."""
    ctx = context()
    with Path(ctx.parameters["log"]).open("a") as log:
        log.write(f"{ctx.task_id}\n")
    return value


@handler("t.json")
def double(value: Any) -> Any:
    return {"twice": value["n"] * 2}


@handler("t.dict")
def keys(value: dict[str, Any]) -> Any:
    return sorted(value)


@handler("t.quoted_list")
def length(value: "list[int]") -> Any:
    return len(value)


@handler("t.none")
def none(value: Any) -> Any:
    return None


@handler("t.context")
def show_context(value: Any) -> Any:
    ctx = context()
    told = {"task_id": ctx.task_id, "attempt": ctx.attempt, "parameters": dict(ctx.parameters)}
    return {**told, "checkpoint": ctx.checkpoint.decode(), "cancelled": ctx.cancelled}


@handler("t.async")
async def asleep(value: Any) -> Any:
    running.append(1)
    together = len(running)
    await asyncio.sleep(0.1)
    running.pop()
    return {"together": together, "thread": threading.current_thread().name}


@handler("t.generate")
def generate(value: Any) -> Any:
    for n in range(5):
        yield b"part%d" % n
    return b"whole"


@handler("t.generate_async")
async def generate_async(value: Any) -> Any:
    for n in range(3):
        await asyncio.sleep(0.001)
        yield {"n": n}


@handler("t.endless")
def endless(value: Any) -> Any:
    for n in range(1_000_000):
        time.sleep(0.005)
        yield b"%d" % n


@handler("t.slow_stream")
def slow_stream(value: Any) -> Any:
    yield b"first"
    time.sleep(600)


@handler("t.big_parts")
def big_parts(value: Any) -> Any:
    for _ in range(int(value)):
        yield b"x" * (1 << 20)
    return b"done"


@handler("t.close_all")
def close_all(value: Any) -> Any:
    os.closerange(3, 4096)


@handler("t.raise")
def raising(value: Any) -> Any:
    raise LookupError("not there: " + value.decode())


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@handler("t.speechless")
def speechless(value: Any) -> Any:
    raise SpeechlessError


@handler("t.surrogates")
def surrogates(value: Any) -> Any:
    ctx = context()
    ctx.progress(0.5, "\ud800")
    raise RuntimeError("\udcff" * 10_000)


@handler("t.retried", retries=2, retry_on=(OSError, KeyError))
def retried(value: Any) -> Any:
    raise {b"key": KeyError, b"value": ValueError}.get(value, ConnectionError)("again")


@handler("t.system_exit")
def system_exit(value: Any) -> Any:
    sys.exit(3)


@handler("t.wrong_type")
def wrong_type(value: Any) -> Any:
    return object()


@handler("t.nan")
def nan(value: Any) -> Any:
    return float("nan")


@handler("t.hang")
def hang(value: Any) -> Any:
    while True:
        time.sleep(600)


@handler("t.deaf")
def deaf(value: Any) -> Any:
    """Holds the interpreter's lock for a minute and more."""
    time.sleep(0.5)  # the agent learns that it runs
    ctypes.PyDLL(None).sleep(600)


@handler("t.spin")
def spin(value: Any) -> Any:
    while True:
        pass


@handler("t.exit")
def exit_now(value: Any) -> Any:
    os._exit(int(value or b"0"))


@handler("t.segfault")
def segfault(value: Any) -> Any:
    ctypes.string_at(0)


@handler("t.hoard")
def hoard_memory(value: Any) -> Any:
    mine = []
    while True:
        mine.append(b"x" * (16 << 20))


@handler("t.shared_hoard")
def hoard_shared_memory(value: Any) -> Any:
    """Takes memory that no limit on private memory sees."""
    size = 2 << 30
    shared = mmap.mmap(-1, size)
    for at in range(0, size, mmap.PAGESIZE):
        shared[at] = 1
    time.sleep(600)


@handler("t.flood")
def flood(value: Any) -> Any:
    for n in range(20_000):
        print(f"flood {n}")
    return b"done"


@handler("t.print")
def printing(value: Any) -> Any:
    print("a line from user code: " + value.decode())
    os.write(1, b"and one past Python\n")
    print("trouble", file=sys.stderr)
    return b"printed"


@handler("t.fork")
def fork(value: Any) -> Any:
    """Both the parent and the child return."""
    pid = os.fork()
    return b"child" if pid == 0 else b"parent of %d" % pid


@handler("t.fork_unseen")
def fork_unseen(value: Any) -> Any:
    """Forks where Python doesn't notice."""
    return b"child" if ctypes.CDLL(None).fork() == 0 else b"parent"


@handler("t.fork_and_die")
def fork_and_die(value: Any) -> Any:
    """Leaves a child behind that holds every descriptor, and dies."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    Path(value.decode()).write_text(str(pid))
    os._exit(5)


@handler("t.multiprocessing")
def use_multiprocessing(value: Any) -> Any:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, [-1, -2, -3])


@handler("t.checkpoint_then_raise")
def checkpoint_then_raise(value: Any) -> Any:
    ctx = context()
    ctx.save_checkpoint(b"kept " + value)
    ctx.progress(0.5, "half")
    raise RuntimeError("after the checkpoint")


@handler("t.checkpoint_then_exit")
def checkpoint_then_exit(value: Any) -> Any:
    ctx = context()
    ctx.save_checkpoint(b"kept " + value)
    os._exit(1)


@handler("t.until_cancelled")
def until_cancelled(value: Any) -> Any:
    ctx = context()
    while not ctx.cancelled:
        time.sleep(0.005)
    Path(value.decode()).write_text("seen")


@handler("t.async_forever")
async def async_forever(value: Any) -> Any:
    try:
        await asyncio.sleep(600)
    finally:
        Path(value.decode()).write_text("cancelled")


@handler("t.progress")
def progress(value: Any) -> Any:
    ctx = context()
    for n in range(int(value)):
        time.sleep(0.05)
        ctx.progress(n / int(value), f"step {n}")
    return b"done"


@handler("t.big")
def big(value: Any) -> Any:
    return b"x" * int(value)


@handler("t.nap")
def nap(value: Any) -> Any:
    time.sleep(float(value))
    return value
