"""Runs a program in a session of its own, and kills all its processes when the engine that wanted them is gone.

    python keeper.py ENGINE_PID FOLDER COMMAND...

vLLM's engine goes on for long when its server was killed, and holds the GPU's memory. When the engine process dies, the
kernel sends SIGTERM to this one; it and what it started are one process group. FOLDER, with the socket, is deleted.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def end(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main(engine_pid: str, folder: str, *command: str) -> None:
    signal.signal(signal.SIGTERM, lambda _number, _frame: end(folder))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(engine_pid):  # it died before the call
        end(folder)
    code = 1
    try:
        try:
            code = subprocess.call(command)
        except OSError as error:
            sys.stderr.write(f"{type(error).__name__}: {command[0]}: {error.strerror}\n")
        sys.stderr.write(f"exit code {code}\n")
        sys.stderr.flush()
    finally:  # also if the engine is gone, and with it the reader of stderr
        end(folder)  # and what it has left


if __name__ == "__main__":
    main(*sys.argv[1:])
