"""The processes of a training script, which are one process group: all end with the script, and with its engine.

torch.distributed.elastic signals the group only while the script itself runs. The kernel kills the script when its
engine dies, but not what the script has started: this file, as a program, does that.

    python group.py ENGINE_PID GROUP
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02


class ScriptGroup:
    def __init__(self, leader_pid: int) -> None:
        self._leader_pid = leader_pid
        self._guard: subprocess.Popen[bytes] | None = None

    def guard(self) -> None:
        """Have the group killed if this process dies before `end`.

        For the kernel, the calling thread is the guard's parent: it must live until then.
        """
        command = [sys.executable, "-I", __file__, str(os.getpid()), str(self._leader_pid)]
        # In a session of its own, as the agent kills the process group of an engine.
        null = subprocess.DEVNULL
        self._guard = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)

    def end(self, wait_s: float) -> None:
        """End what still runs: by SIGTERM, and by SIGKILL after `wait_s`."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            _kill(self._leader_pid, number)
            end_s = time.monotonic() + wait_s
            while _runs(self._leader_pid) and time.monotonic() < end_s:
                time.sleep(_POLL_S)
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()


def _kill(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has no process, or none but another user's
        os.killpg(group, number)


def _runs(group: int) -> bool:
    """Whether a process of the group runs. Zombies don't count: in a container they may stay."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, its_group = file.read_text("utf-8", "replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def _guard(engine_pid: int, group: int) -> None:
    # SIGTERM may go to all processes of a host that stops, where a script is to have its time.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() == engine_pid:  # else it died before the call
        signal.sigwait({signal.SIGUSR1})
    _kill(group, signal.SIGKILL)


if __name__ == "__main__":
    _guard(*map(int, sys.argv[1:]))
