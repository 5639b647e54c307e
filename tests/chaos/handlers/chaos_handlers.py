"""Handlers of the chaos runs. Each says in the history that it runs before it does anything else.

This module is the engine's own user code, so it is also how failpoints get into an engine.
"""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

from multigpu.contexts import Context, context
from multigpu.handlers import handler

from tests.chaos import failpoints
from tests.chaos.records.history import History

_history: History | None = None

if Path(os.environ.get("CHAOS_BROKEN", os.devnull), str(os.getppid())).exists():
    raise RuntimeError("the chaos run has broken these handlers")


def _begin(value: bytes, ctx: Context) -> bytes:
    """Notes the execution; the result that stands for it."""
    global _history  # noqa: PLW0603  one file for each engine process, opened by the first task
    if _history is None:
        _history = History(Path(ctx.parameters["history"]) / f"engine-{os.getpid()}.jsonl")
    digest = hashlib.sha1(value).hexdigest()
    _history.add(
        "execution", task_id=ctx.task_id, attempt=ctx.attempt, pid=os.getpid(), parent_pid=os.getppid(), digest=digest
    )
    return f"{digest}:{ctx.attempt}:{os.getpid()}".encode()


@handler("chaos.work")
def work(value: bytes) -> Any:
    """Works for the parameter `seconds`; the result names the payload, the attempt and the process."""
    ctx = context()
    result = _begin(value, ctx)
    time.sleep(float(ctx.parameters["seconds"]))
    return result


@handler("chaos.stream")
def stream(value: bytes) -> Any:
    """Yields `count` parts, one each `seconds`, before its result."""
    ctx = context()
    result = _begin(value, ctx)
    for index in range(int(ctx.parameters["count"])):
        time.sleep(float(ctx.parameters["seconds"]))
        yield b"%s/%d" % (value, index)
    return result


failpoints.arm(failpoints.ENGINE)
