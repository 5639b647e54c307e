"""Calls of programs that ask a driver, which may not answer."""

import contextlib
import subprocess
from collections.abc import Sequence

# How long a killed program may take to end.
KILL_TIMEOUT_S = 1.0


def ask_driver(argv: Sequence[str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """Runs a program and returns its output. Raises subprocess.TimeoutExpired.

    Waits at most KILL_TIMEOUT_S for the end of a program that it has killed. subprocess.run waits without a limit, and
    the driver may hold the program in the kernel.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, errors="replace")
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except BaseException:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_TIMEOUT_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        raise
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)
