"""The processes of a training script, which are one process group: all end with the script, and with its engine.

torch.distributed.elastic signals the group only while the script itself runs.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Self

from multigpu_worker.engines.train import launch

_POLL_S = 0.02


class ScriptGroup:
    """A context. What runs of the group when it ends, or this process dies, is killed by the guard of launch.py."""

    def __enter__(self) -> Self:
        # The guard reads it until the other end is closed.
        self._pipe = os.pipe()
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._pipe:
            os.close(end)

    def command(self, folder: Path, command: list[str]) -> tuple[str, ...]:
        """Arguments of a Python interpreter: it runs the command in the folder, as leader of a group."""
        return "-I", launch.__file__, str(os.getpid()), str(self._pipe[0]), str(folder), *command


def end_group(group: int, wait_s: float) -> None:
    """End what still runs: by SIGTERM, and by SIGKILL after `wait_s`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _kill(group, number)
        end_s = time.monotonic() + wait_s
        while _runs(group) and time.monotonic() < end_s:
            time.sleep(_POLL_S)


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
