"""A process with real pynvml on the simulated driver: reads expressions, one a line, and answers with their values.

An answer is JSON: {"value": …} or {"error": "GpuIsLost"}. `gpu[i]` is a handle; names that an expression binds, as in
(s := …), stay.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from tests.fakes.gpus import SimulatedGpus

ROOT = Path(__file__).resolve().parent.parent.parent


class DriverUser:
    """The process, seen from the test. It has called nvmlInit."""

    def __init__(self, gpus: SimulatedGpus) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.driver_user"],
            cwd=ROOT,
            env={**os.environ, **gpus.env()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, expression: str) -> None:
        """Asks; `end` takes the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        """Returns the expression's value. DriverError: the expression raised."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait(120)}"
        answer = json.loads(line)
        if "error" in answer:
            raise DriverError(answer["error"])
        return answer["value"]

    def ask(self, expression: str) -> Any:
        self.begin(expression)
        return self.end()

    def error(self, expression: str) -> str:
        """The name of the error that the expression raises, without NVMLError_; "": it raises none."""
        try:
            self.ask(expression)
        except DriverError as error:
            return str(error)
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=400)


class DriverError(Exception):
    """The name of pynvml's exception, without its NVMLError_."""


def _plain(value: Any) -> Any:
    """As JSON: structures as objects, bytes as text."""
    if hasattr(value, "_fields_"):
        return {name: _plain(getattr(value, name)) for name, *_ in value._fields_ if name not in ("device", "value")}
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (list, tuple)) or hasattr(value, "_length_"):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (int, float, str)):
        return value
    return {name: _plain(item) for name, item in vars(value).items()}


def main() -> None:
    import pynvml

    names = {name: getattr(pynvml, name) for name in dir(pynvml)}
    pynvml.nvmlInit()
    names["nvmlLib"] = pynvml.nvmlLib
    names["gpu"] = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    for line in sys.stdin:
        try:
            value = eval(line, names)
        except pynvml.NVMLError as error:
            print(json.dumps({"error": type(error).__name__.removeprefix("NVMLError_")}), flush=True)
        except Exception as error:
            print(json.dumps({"error": repr(error)}), flush=True)
        else:
            print(json.dumps({"value": _plain(value)}, default=str), flush=True)


if __name__ == "__main__":
    main()
