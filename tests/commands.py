"""Commands of the project that a test runs to their end."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_module(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs `python -m` with these arguments in the project's root. `stdout` is all that it wrote, errors included.

    At the lowest priority: tests of fleets, which run at the same time, have time limits.
    """
    command = ["nice", "-n", "19", sys.executable, "-m", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
