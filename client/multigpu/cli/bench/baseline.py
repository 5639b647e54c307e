"""The baseline of `mgpuctl bench`: a process that runs the same tasks in a plain loop, without the fleet.

It is `python -m multigpu_worker.baselines.main`, from the package of the workers. Requests and responses are pickled
dicts, over pipes.
"""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self

from multigpu.cli.text import clean_lines


class BaselineError(Exception):
    """The baseline failed. The message says why."""


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

    def load(self, kind: str, model: str, content_type: str, payloads: Sequence[bytes]) -> None:
        """Loads a model, or the handler of a kind that needs none, and warms it up with the payloads."""
        task = {"kind": kind, "model": model, "content_type": content_type}
        self._call({"settings": self._settings, "task": task, "payloads": list(payloads)})

    def run(self, payloads: Sequence[bytes], times: int) -> tuple[float, int | None]:
        """Runs the payloads `times` times. Returns seconds, and tokens if the model has them."""
        response = self._call({"payloads": list(payloads), "times": times})
        return float(response["seconds"]), response["tokens"]

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
