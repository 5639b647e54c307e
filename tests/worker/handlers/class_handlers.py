"""Handler classes, and functions that take batches, for test_class_handlers.py."""

import os
import threading
import time
from typing import Any

import multigpu


class Base:
    """Counts its instances, and the calls that run at a time."""

    made = 0

    def __init__(self, step: int = 2) -> None:
        Base.made += 1
        self.step = step
        self.device = multigpu.context().device
        self.running = self.most = 0
        self.lock = threading.Lock()

    def __call__(self, value: int) -> Any:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(0.02)
        with self.lock:
            self.running -= 1
        return {"made": Base.made, "value": value * self.step, "device": self.device, "pid": os.getpid(),
                "most": self.most, "attempt": multigpu.context().attempt}  # fmt: skip


@multigpu.handler
class Counter(Base):
    pass


@multigpu.handler("one.at.a.time", concurrency=1)
class Single(Base):
    pass


@multigpu.handler
class Batched:
    @multigpu.batch(max_size=8, max_wait_ms=200)
    def __call__(self, values: list[Any]) -> list[Any]:
        if "poison" in values:
            raise ValueError(f"poison among {len(values)}")
        if "one by one" in values and len(values) > 1:
            raise RuntimeError("too many")
        return [
            KeyError("bad") if value == "bad" else object() if value == "odd" else [value, len(values)]
            for value in values
        ]


@multigpu.handler("batch.function", retries=1, retry_on=OSError)
@multigpu.batch(max_size=4)
async def batched(values: list[Any]) -> Any:
    if values == ["short"]:
        return []
    if values == ["text"]:
        return "x"
    if values == ["again"]:
        raise ConnectionError("try again")
    return (len(values) for _ in values)


@multigpu.handler("logs")
def logs(value: bytes) -> None:
    multigpu.context().log.info("working on %s", value.decode())
