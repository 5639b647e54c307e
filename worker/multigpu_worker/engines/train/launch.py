"""Becomes the process of a training script, and leaves a guard that kills the script's process group with its engine.

torch.distributed.elastic puts the script into a session of its own, so killing the engine's process group does not end
it. The guard reads a pipe of the engine that nobody writes to: it ends when the engine closes it, or dies.

    python launch.py ENGINE_PID PIPE FOLDER COMMAND...
"""

import os
import signal
import sys


def _guard(pipe: int, group: int) -> None:
    # SIGTERM may go to all processes of a host that stops, where a script is to have its time.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(pipe, 1)
    os.killpg(group, signal.SIGKILL)


def _start_guard(pipe: int) -> None:
    """Twice forked, it is no child for which the script could wait."""
    group = os.getpid()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if not os.fork():
            _guard(pipe, group)
    finally:
        os._exit(0)


if __name__ == "__main__":
    engine_pid, pipe, folder, *command = sys.argv[1:]
    reader = os.open(f"/proc/{engine_pid}/fd/{pipe}", os.O_RDONLY)
    if os.getppid() != int(engine_pid):  # it died before: this may be another process
        sys.exit(1)
    _start_guard(reader)
    os.chdir(folder)
    os.execv(command[0], command)  # noqa: S606  as torchrun, which has no shell either
