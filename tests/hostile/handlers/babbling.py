"""A handler that does to its engine what a stray write of native code would do."""

import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

from multigpu.handlers import handler


@handler("babble")
def babble(value: bytes) -> Any:
    """Writes its payload to every socket of the engine's process, among them the one to the agent."""
    for path in list(Path("/proc/self/fd").iterdir()):
        fd = int(path.name)
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and socket.socket(fileno=os.dup(fd)).family == socket.AF_UNIX:
                os.write(fd, value)
        except OSError:
            continue
    time.sleep(10)  # it is ended long before: while it runs, so that it is known who it was
    return b"said"
