"""The baseline of `mgpuctl bench`: a process that runs the same tasks in a plain loop, without the fleet.

It is `python -m multigpu_worker.baselines.main`, from the package of the workers. Requests and responses are pickled
dicts, over pipes.
"""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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

    def __init__(self, *, device: str, threads: int, pid: int) -> None:
        """Models and handlers are those of the worker `pid`."""
        self._settings = {"device": device, "threads": threads, "pid": pid}

    def __enter__(self) -> Self:
        argv = [sys.executable, "-m", "multigpu_worker.baselines.main"]
        # In its own process group, so that a terminal's Ctrl-C does not reach it.
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.communicate()

    def kill(self) -> None:
        """Ends the process, and so a call that waits for it. From any thread."""
        self._process.kill()

    def load(self, variant: Variant, payloads: Sequence[bytes]) -> None:
        """Loads a model, which `run` uses from now on, and warms it up with the payloads."""
        self._call({"settings": self._settings, "variant": asdict(variant), "payloads": list(payloads)})

    def run(self, payloads: Sequence[bytes], times: int) -> tuple[float, int | None]:
        """Runs the payloads `times` times. Returns seconds, and tokens if the model has them."""
        response = self._call({"payloads": list(payloads), "times": times})
        return float(response["seconds"]), response["tokens"]

    def answers(self, payloads: Sequence[bytes]) -> NDArray[np.float32] | list[bytes]:
        """A row for each example, or the result of each task."""
        found: NDArray[np.float32] | list[bytes] = self._call({"payloads": list(payloads), "times": 1})["results"]
        return found

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            response: dict[str, Any] = pickle.load(self._process.stdout)  # noqa: S301  from our own child
        except (BrokenPipeError, EOFError):
            status = self._process.wait()
            raise BaselineError(f"the baseline ended (exit code {status}); is multigpu[worker] installed?") from None
        if "error" in response:
            raise BaselineError(clean_lines(response["error"]))
        return response
