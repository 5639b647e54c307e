"""What takes minutes of the processors and needs nothing of the other tests is begun when the run begins, at the lowest
priority: tests of fleets wait most of the time, and leave them idle.

    @pytest.mark.ahead("tests.sim", "--seeds", "20000")
    @pytest.mark.timeout(900)
    def test_…(ahead: subprocess.CompletedProcess[str]) -> None:

The command is `python -m` with the mark's arguments; the fixture waits until it has ended.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Ahead:
    """A command that runs now, and is asked for later."""

    def __init__(self, *arguments: str) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  until it has ended
        argv = ["nice", "-n", "19", sys.executable, "-m", *arguments]
        self._process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, process_group=0
        )

    def ended(self) -> "subprocess.CompletedProcess[str]":
        """Waits for its end. `stdout` is all that it wrote."""
        with contextlib.suppress(PermissionError, ProcessLookupError):  # only root may take it back
            os.setpriority(os.PRIO_PGRP, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0))
        status = self._process.wait()
        self._output.seek(0)
        text = self._output.read().decode("utf-8", "replace")
        return subprocess.CompletedProcess(self._process.args, status, stdout=text)

    def close(self) -> None:
        """Ends it, with its children."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()
