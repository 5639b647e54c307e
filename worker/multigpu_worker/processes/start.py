"""Why no default process is ready. Pure: default_host.py reports events, the health monitor asks."""

# After this many kills before it was ready, or this time, the worker reports that no engine can start, and goes on
# trying.
KILLS_MAX = 3
READY_S = 60.0
# A start that takes longer than this is reported, with what it waits for.
SLOW_START_S = 5.0


class EngineStart:
    """The starts of the default process since one was ready."""

    def __init__(self) -> None:
        self._error = ""
        self._kills = 0
        self._unready_s: float | None = None

    def begun_anew(self) -> None:
        """A process is ready, or none is wanted for now."""
        self._error, self._kills, self._unready_s = "", 0, None

    def rejected(self, error: str) -> None:
        """The process reported why it ends."""
        self._error = error

    def died(self, how: str, *, killed: bool) -> None:
        """The process ended before it was ready."""
        self._kills += killed
        if not killed or self._kills >= KILLS_MAX:
            self._error = self._error or f"the engine process {how} before it was ready; its output is in the log"

    def error(self, now_s: float, *, ready: bool) -> str:
        """Why none can start; empty: one is ready, or may be soon."""
        if ready:
            self._unready_s = None
            return ""
        if self._unready_s is None:
            self._unready_s = now_s
        late = f"no engine process was ready for {READY_S:g} s; its output is in the log"
        return self._error or (late if now_s - self._unready_s > READY_S else "")
