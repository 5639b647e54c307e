"""The plain loop that `mgpuctl bench` compares a fleet with: a process that has nothing to do with the fleet.

It is `python -m multigpu_worker.baselines.main`, of the package that workers are installed from; where that is missing
there is nothing to compare with. One JSON object a line goes there and one comes back; payloads and answers go through
files.
"""

import json
import marshal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from multigpu.cli import show


class PlainError(Exception):
    """The plain loop can't do it. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run a model, or a kind that needs none, as it is asked for."""

    # Empty: the kind needs none.
    model: str
    kind: str
    engine: str
    precision: str
    # Of payloads: empty for raw bytes, "application/json" for JSON values.
    content_type: str

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join((self.model or self.kind, self.engine, self.precision))

    @property
    def options(self) -> dict[str, Any]:
        """For tasks."""
        wishes = {"engine": self.engine, "precision": self.precision}
        return {"model": self.model, "parameters": {name: wish for name, wish in wishes.items() if wish != "auto"}}


class Plain:
    """The process. Once it is gone, every call is a PlainError."""

    def __init__(
        self, *, device: str, threads: int, models: Sequence[str], handlers: Sequence[str], pid: int = 0
    ) -> None:
        """`models`: where they lie, as NAME=PATH, instead of what the worker `pid` was started with."""
        self._settings = {
            "device": device,
            "threads": threads,
            "models": list(models),
            "handlers": list(handlers),
            "pid": pid,
        }
        self._folder = tempfile.TemporaryDirectory(prefix="multigpu-bench-")
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        argv = [sys.executable, "-m", "multigpu_worker.baselines.main", json.dumps(self._settings)]
        # A group of its own: Ctrl-C in a terminal is for us, and we end it.
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        assert self._process is not None
        self._process.communicate()
        self._folder.cleanup()

    def kill(self) -> None:
        """End the process: a call that waits for it ends too. From any thread."""
        assert self._process is not None
        self._process.kill()

    def load(self, way: Way, payloads: Sequence[bytes]) -> None:
        """Load a model, and run it with these until it is warm."""
        self._call("load", way, payloads)

    def run(self, way: Way, payloads: Sequence[bytes], times: int) -> tuple[float, int | None]:
        """Seconds that it took to run them so many times, and tokens in all where the model counts in them."""
        said = self._call("run", way, payloads, times=times)
        return float(said["seconds"]), said["tokens"]

    def answers(self, way: Way, payloads: Sequence[bytes]) -> NDArray[np.float32] | list[bytes]:
        """What the model gives: a row for each example, or the result of each task."""
        out = Path(self._folder.name, "answers")
        if self._call("run", way, payloads, times=1, out=str(out))["form"] == "rows":
            rows: NDArray[np.float32] = np.load(out)
            return rows
        results: list[bytes] = marshal.loads(out.read_bytes())  # noqa: S302  from our own child
        return results

    def _call(self, do: str, way: Way, payloads: Sequence[bytes], **more: Any) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        file = Path(self._folder.name, "payloads")
        file.write_bytes(marshal.dumps(list(payloads)))
        asked = {name: getattr(way, name) for name in ("model", "kind", "engine", "precision", "content_type")}
        try:
            self._process.stdin.write(json.dumps({"do": do, **asked, "payloads": str(file), **more}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PlainError(f"the plain loop ended (exit code {self._process.wait()}); is multigpu[worker] installed?")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise PlainError(show.clean_lines(said["error"]))
        return said
