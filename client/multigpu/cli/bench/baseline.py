"""The baseline of `mgpuctl bench`: a process that runs the same tasks in a plain loop, without the fleet.

It is `python -m multigpu_worker.baselines.main`, from the package of the workers. Requests and responses are JSON
objects, one a line; payloads and answers go through files.
"""

import json
import marshal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from multigpu.cli.text import clean_lines


class BaselineError(Exception):
    """The baseline failed. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A model with an engine and a precision, or a kind that needs no model."""

    # Empty: the kind needs none.
    model: str
    kind: str
    engine: str
    precision: str
    # Of payloads: empty for raw bytes, "application/json" for JSON values.
    content_type: str

    @property
    def name(self) -> str:
        return ", ".join((self.model or self.kind, self.engine, self.precision))

    @property
    def options(self) -> dict[str, Any]:
        """The options of its tasks."""
        chosen = {"engine": self.engine, "precision": self.precision}
        return {"model": self.model, "parameters": {name: value for name, value in chosen.items() if value != "auto"}}


class Baseline:
    """The process. After it has ended, every call raises BaselineError."""

    def __init__(
        self, *, device: str, threads: int, models: Sequence[str], handlers: Sequence[str], pid: int = 0
    ) -> None:
        """`models`: as NAME=PATH. Models and handlers that are not given are those of the worker `pid`."""
        self._settings = {
            "device": device,
            "threads": threads,
            "models": list(models),
            "handlers": list(handlers),
            "pid": pid,
        }
        self._folder = tempfile.TemporaryDirectory(prefix="multigpu-bench-")

    def __enter__(self) -> Self:
        argv = [sys.executable, "-m", "multigpu_worker.baselines.main", json.dumps(self._settings)]
        pipe = subprocess.PIPE
        # In its own process group, so that a terminal's Ctrl-C does not reach it.
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, process_group=0)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.communicate()
        self._folder.cleanup()

    def kill(self) -> None:
        """Ends the process, and so a call that waits for it. From any thread."""
        self._process.kill()

    def load(self, variant: Variant, payloads: Sequence[bytes]) -> None:
        """Loads a model and warms it up with the payloads."""
        self._call("load", variant, payloads)

    def run(self, variant: Variant, payloads: Sequence[bytes], times: int) -> tuple[float, int | None]:
        """Runs the payloads `times` times. Returns seconds, and tokens if the model has them."""
        response = self._call("run", variant, payloads, times=times)
        return float(response["seconds"]), response["tokens"]

    def answers(self, variant: Variant, payloads: Sequence[bytes]) -> NDArray[np.float32] | list[bytes]:
        """A row for each example, or the result of each task."""
        out = Path(self._folder.name, "answers")
        if self._call("run", variant, payloads, times=1, out=str(out))["form"] == "rows":
            rows: NDArray[np.float32] = np.load(out)
            return rows
        results: list[bytes] = marshal.loads(out.read_bytes())  # noqa: S302  from our own child
        return results

    def _call(self, do: str, variant: Variant, payloads: Sequence[bytes], **more: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        file = Path(self._folder.name, "payloads")
        file.write_bytes(marshal.dumps(list(payloads)))
        named = {name: getattr(variant, name) for name in ("model", "kind", "engine", "precision", "content_type")}
        try:
            self._process.stdin.write(json.dumps({"do": do, **named, "payloads": str(file), **more}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            raise BaselineError(f"the baseline ended (exit code {status}); is multigpu[worker] installed?")
        response: dict[str, Any] = json.loads(line)
        if "error" in response:
            raise BaselineError(clean_lines(response["error"]))
        return response
