"""Reads the requests of health checks, which anyone may send, because they need no token."""

import asyncio
import time
from typing import Any

import grpc

from multigpu_master.errors import ExhaustedError, InvalidArgumentError

# gRPC accepts messages of up to 64 MiB, and needs about 1 ms of CPU to receive 1 MiB.
SMALL_BYTES_MAX = 4096
SMALL_CPU_S, SMALL_TIMEOUT_S, SMALL_POLL_S = 0.02, 1.0, 0.002


async def read_small(context: Any) -> Any:
    """Reads a request that needs no token, or EOF. Rejects a request that is large or does not arrive with its call.

    A call can make gRPC buffer at most what it receives in SMALL_CPU_S of the process's CPU time.
    """
    reading = asyncio.ensure_future(context.read())
    cpu_end_s, end_s = time.process_time() + SMALL_CPU_S, time.monotonic() + SMALL_TIMEOUT_S
    try:
        await asyncio.wait([reading], timeout=SMALL_POLL_S)
        while not reading.done():
            if time.process_time() > cpu_end_s or time.monotonic() > end_s:
                text = "the request is large, or did not come with the call: send both at once, or try again"
                raise ExhaustedError(text)
            await asyncio.wait([reading], timeout=SMALL_POLL_S)
    finally:
        reading.cancel()
    data = reading.result()
    if data is not grpc.aio.EOF and len(data) > SMALL_BYTES_MAX:
        text = (
            f"the request has {len(data)} bytes, and {SMALL_BYTES_MAX} are allowed: it only needs the name of a service"
        )
        raise InvalidArgumentError(text)
    return data
