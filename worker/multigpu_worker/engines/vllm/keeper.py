"""Runs a program in a session of its own, and kills all its processes when the engine that wanted them is gone.

    python keeper.py ENGINE_PID COMMAND...

vLLM's engine goes on for long when its server was killed, and holds the GPU's memory. When the engine process dies, the
kernel sends SIGTERM to this one; it and what it started are one process group.
"""

import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

_PR_SET_PDEATHSIG = 1


def _end(_number: int, _frame: FrameType | None) -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    engine_pid, *command = sys.argv[1:]
    signal.signal(signal.SIGTERM, _end)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(engine_pid):  # it died before the call
        sys.exit(1)
    code = 1
    try:
        code = subprocess.call(command)
    except OSError as error:
        sys.stderr.write(f"{type(error).__name__}: {command[0]}: {error.strerror}\n")
    sys.stderr.write(f"exit code {code}\n")
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)  # what it has left
