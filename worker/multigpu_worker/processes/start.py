"""Why no engine is ready although one should be. Pure: host.py reports what happens, the health monitor asks."""

# How often an engine may be killed from outside before it is ready, and how long it may take to become ready, before
# the worker says that no engine can start. It goes on trying all the same.
KILLS_MAX = 3
READY_S = 60.0
# A start that takes longer than this is reported, with what it waits for.
SLOW_START_S = 5.0


class EngineStart:
    """The starts of the base process since one was ready."""

    def __init__(self) -> None:
        self._error = ""
        self._kills = 0
        self._unready_s: float | None = None

    def begun_anew(self) -> None:
        """An engine is ready, or none is wanted for now."""
        self._error, self._kills, self._unready_s = "", 0, None

    def rejected(self, error: str) -> None:
        """The engine process said why it ends."""
        self._error = error

    def died(self, words: str, *, killed: bool) -> None:
        """The engine process ended before it was ready."""
        self._kills += killed
        if not killed or self._kills >= KILLS_MAX:
            self._error = self._error or f"the engine process {words} before it was ready; its output is in the log"

    def error(self, now_s: float, *, ready: bool) -> str:
        """Why no engine can start; empty: one is ready, or may be soon."""
        if ready:
            self._unready_s = None
            return ""
        if self._unready_s is None:
            self._unready_s = now_s
        late = f"no engine process was ready for {READY_S:g} s; its output is in the log"
        return self._error or (late if now_s - self._unready_s > READY_S else "")
