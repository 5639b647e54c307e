"""Becomes the process of a training script, which the kernel kills when its engine dies.

torch.distributed.elastic puts it into a session of its own, so killing the engine's process group does not end it.
What the script starts is ended by group.py.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    engine_pid, folder, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # execv keeps it
    if os.getppid() != int(engine_pid):  # it died before the call
        sys.exit(1)
    os.chdir(folder)
    os.execv(command[0], command)  # noqa: S606  as torchrun, which has no shell either
