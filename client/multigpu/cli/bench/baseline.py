"""The baseline of `mgpuctl bench`: a process that runs the same tasks in a plain loop, without the fleet.

It is `python -m multigpu_worker.baselines.main`, from the package of the workers. A request is a pickled dict, an
answer a line of JSON.
"""

import asyncio
import asyncio.subprocess
import contextlib
import json
import pickle
import sys
from collections.abc import Sequence
from typing import Any, Self

from multigpu.cli.failures import Failure


class Baseline:
    """The process. After it has ended, every call raises Failure."""

    def __init__(self, *, device: str, threads: int, pid: int, kind: str, model: str) -> None:
        """The configuration of models is that of the worker `pid`."""
        self._settings = {"device": device, "threads": threads, "pid": pid, "kind": kind, "model": model}

    async def __aenter__(self) -> Self:
        argv = (sys.executable, "-m", "multigpu_worker.baselines.main")
        pipe = asyncio.subprocess.PIPE
        # In its own process group, so that a terminal's Ctrl-C does not reach it.
        self._process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, process_group=0)
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def load(self, payloads: Sequence[bytes]) -> None:
        """Loads the model and warms it up with the payloads."""
        await self._call(self._settings, payloads)

    async def run(self, payloads: Sequence[bytes]) -> float:
        """Runs the payloads. Returns seconds."""
        return float((await self._call({}, payloads))["seconds"])

    async def _call(self, request: dict[str, Any], payloads: Sequence[bytes]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = b""
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(pickle.dumps((request, payloads)))
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        if not line:
            status = await self._process.wait()
            raise Failure(f"the baseline ended (exit code {status}); is multigpu[worker] installed?")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failure(answer["error"])
        return answer
