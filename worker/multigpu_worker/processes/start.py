"""Decides when and why the default engine process counts as unable to start.

Pure: default_process.py reports events, and the health monitor reads the error.
"""

# The worker reports that no engine can start when KILLS_MAX processes were killed before they were ready, or when none
# was ready for READY_S. It continues to start processes.
KILLS_MAX = 3
READY_S = 60.0
# A start that takes longer than this is reported, with what the process imports.
SLOW_START_S = 5.0
NOT_STARTED = "the system could not start an engine process: {}; free processes, memory or file descriptors"


class EngineStart:
    """The failed starts since a default process was last ready."""

    def __init__(self) -> None:
        self._error = ""
        self._kills = 0
        self._unready_s: float | None = None

    def reset(self) -> None:
        """A process is ready, or none is to run for now."""
        self._error, self._kills, self._unready_s = "", 0, None

    def rejected(self, error: str) -> None:
        """The process cannot start, for a known reason."""
        self._error = error

    def died(self, how: str, *, killed: bool) -> None:
        """The process ended before it was ready."""
        self._kills += killed
        if not killed or self._kills >= KILLS_MAX:
            self._error = self._error or f"the engine process {how} before it was ready; its output is in the log"

    def error(self, now_s: float, *, ready: bool) -> str:
        """Why no process can start; empty: one is ready, or may be soon. READY_S begins with the first unready call."""
        if ready:
            self._unready_s = None
            return ""
        if self._unready_s is None:
            self._unready_s = now_s
        late = f"no engine process was ready for {READY_S:g} s; its output is in the log"
        return self._error or (late if now_s - self._unready_s > READY_S else "")
