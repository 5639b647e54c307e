"""The plain loop that `mgpuctl bench` compares a fleet with: a process that has nothing to do with the fleet.

It is `python -m multigpu_worker.plain`, of the package that workers are installed from; where that is missing there is
nothing to compare with. One JSON object a line goes there and one comes back; arrays go through files.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from multigpu.cli import show


class PlainError(Exception):
    """The plain loop can't do it. The message says why."""


class Plain:
    """The process. Once it is gone, every call is a PlainError."""

    def __init__(self, *, device: str, threads: int, config_file: str | None, models: Sequence[str]) -> None:
        """`models`: where they lie, as NAME=PATH, besides those that a worker here is configured to have."""
        self._settings = {"device": device, "threads": threads, "config_file": config_file, "models": list(models)}
        self._folder = tempfile.TemporaryDirectory(prefix="multigpu-bench-")
        self._process: subprocess.Popen[str] | None = None
        self._files = 0

    def __enter__(self) -> Self:
        argv = [sys.executable, "-m", "multigpu_worker.plain", json.dumps(self._settings)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def load(self, model: str, kind: str, engine: str, precision: str, warm_up: "Examples") -> None:
        """Load a model, and run it until it is warm."""
        self._call("load", model=model, kind=kind, engine=engine, precision=precision, **warm_up.request(self))

    def run(self, model: str, engine: str, precision: str, examples: "Examples") -> tuple[float, int | None]:
        """Seconds, and tokens where the model counts in them."""
        said = self._call("run", model=model, engine=engine, precision=precision, **examples.request(self))
        return float(said["seconds"]), said["tokens"]

    def rows(self, model: str, engine: str, precision: str, examples: "Examples") -> NDArray[np.float32]:
        """What the model gives: a row for each example."""
        out = self.file("rows.npy")
        self._call("run", model=model, engine=engine, precision=precision, out=str(out), **examples.request(self))
        rows: NDArray[np.float32] = np.load(out)
        return rows

    def file(self, name: str) -> Path:
        """A place for a file that lives as long as the process."""
        self._files += 1
        return Path(self._folder.name, f"{self._files}-{name}")

    def _call(self, do: str, **request: Any) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PlainError(f"the plain loop ended (exit code {self._process.wait()}); is multigpu[worker] installed?")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise PlainError(show.clean(said["error"]))
        return said


class Examples:
    """What goes through a model: texts, or arrays of examples, which go through it so many times."""

    def __init__(self, texts: Sequence[str], arrays: Mapping[str, NDArray[Any]] | None = None, times: int = 1) -> None:
        self._texts = list(texts)
        self._arrays = arrays
        self._times = times

    def request(self, plain: Plain) -> dict[str, Any]:
        if self._arrays is None:
            return {"texts": self._texts, "times": self._times}
        path = plain.file("inputs.npz")
        np.savez(path, allow_pickle=False, **self._arrays)
        return {"inputs": str(path), "times": self._times}
