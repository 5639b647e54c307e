"""Handlers whose engine is a client of the simulated MPS: some work, others fail, hang or end their engine."""

import mmap
import os
import signal
import time
from typing import Any

from multigpu.handlers import handler
from simulated_mps import Client

_clients: dict[int, Client] = {}


def _client() -> Client:
    """The client of this process, created at first use, like a CUDA context."""
    if os.getpid() not in _clients:
        _clients.clear()
        _clients[os.getpid()] = Client()
    return _clients[os.getpid()]


@handler("m.work")
def work(value: Any) -> Any:
    """Computes for `value` seconds, and returns its process id."""
    end_s = time.monotonic() + float(value or 0)
    _client().work()
    while time.monotonic() < end_s:
        time.sleep(0.01)
        _client().work()
    return str(os.getpid())


@handler("m.fault")
def fault(value: Any) -> Any:
    _client().fault()


@handler("m.stuck")
def stuck(value: Any) -> Any:
    """Hangs as a client."""
    _client().work()
    time.sleep(3600)


@handler("m.children")
def children(value: Any) -> Any:
    """Hangs as a client, with a child that is also a client and hangs."""
    _client().work()
    if not os.fork():
        _client().work()
        time.sleep(3600)
    time.sleep(3600)


@handler("m.hoard")
def hoard(value: Any) -> Any:
    """Takes 512 MiB of memory, more than the tests permit an engine, and hangs as a client."""
    _client().work()
    size = 512 << 20
    shared = mmap.mmap(-1, size)
    for at in range(0, size, mmap.PAGESIZE):
        shared[at] = 1
    time.sleep(3600)


@handler("m.crash")
def crash(value: Any) -> Any:
    """Ends its own engine, announced so that the simulated MPS does not count a violation."""
    _client().excuse()
    os.kill(os.getpid(), signal.SIGKILL)


@handler("m.environment")
def environment(value: Any) -> Any:
    return {name: text for name, text in os.environ.items() if name.startswith("CUDA_")}
