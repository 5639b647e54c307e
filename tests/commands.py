"""Commands of the project that a test runs to their end."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_module(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs `python -m` with these arguments in the project's root. `stdout` is all that it wrote, errors included."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
