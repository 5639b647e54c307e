"""Tasks for a host of simulated GPUs. They compute on the processor; what a GPU would do, the simulated driver is told.

The results say where a task ran: the UUID of its device.
"""

import os
import signal
import time

from multigpu.contexts import context
from multigpu.handlers import handler

from tests.fakes.gpus import SimulatedGpus

_LOOK_S = 0.01


def _own() -> tuple[SimulatedGpus, int]:
    """The host, and which of its GPUs this engine has."""
    gpus = SimulatedGpus.attached()
    return gpus, gpus.index(os.environ["CUDA_VISIBLE_DEVICES"])


@handler("gpu.work")
def work(value: bytes) -> bytes:
    """Works for the parameter `seconds`."""
    ctx = context()
    end_s = time.monotonic() + float(ctx.parameters.get("seconds", "0.1"))
    while (left_s := end_s - time.monotonic()) > 0 and not ctx.cancelled:
        time.sleep(min(left_s, _LOOK_S))
        ctx.progress(0.5)
    return os.environ["CUDA_VISIBLE_DEVICES"].encode()


@handler("gpu.poison")
def poison(value: bytes) -> bytes:
    """Crashes its engine, on whatever device it runs."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return b"never"


@handler("gpu.illegal_access")
def illegal_access(value: bytes) -> bytes:
    """A kernel that goes astray: the driver tells XID 13, and from then on every CUDA call of the process fails."""
    gpus, own = _own()
    gpus.xid(own, 13)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@handler("gpu.breaks_on")
def breaks_on(value: bytes) -> bytes:
    """Crashes its engine on the GPU number `on`; works everywhere else."""
    ctx = context()
    gpus, own = _own()
    if own == int(ctx.parameters["on"]):
        os.kill(os.getpid(), signal.SIGSEGV)
    return gpus.uuid(own).encode()


@handler("gpu.allocate")
def allocate(value: bytes) -> bytes:
    """Takes so many `bytes` of its GPU's memory for a moment. MemoryError: it hasn't them."""
    ctx = context()
    gpus, own = _own()
    gpu, wanted = gpus.gpu(own), int(ctx.parameters["bytes"])
    if wanted > gpu.memory_total - gpu.memory_reserved - gpu.memory_used:
        raise MemoryError(f"CUDA out of memory. Tried to allocate {wanted} bytes")
    gpus.process(own, os.getpid(), wanted)
    time.sleep(0.05)
    gpus.no_process(own, os.getpid())
    return gpus.uuid(own).encode()
