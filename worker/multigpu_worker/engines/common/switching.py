"""One back end serves while a better one is made in the background; then it takes over.

What is made has to stand a trial before it may serve. If it can't be made, or fails the trial, the first goes on, and
says so: an error in the log, and in what `facts` answers. It may be made anew later, when what it was made for has
changed; until that is ready the one before it serves.
"""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import structlog

B = TypeVar("B")

log = structlog.get_logger(__name__)


class Switch(Generic[B]):
    """Who serves now. Any thread may look at `current`, and should look once for each piece of work."""

    def __init__(self, first: B, name: str) -> None:
        """`name`: what is served, for the log."""
        self.current = first
        self._name = name
        self._facts: dict[str, str] = {}
        self._thread: threading.Thread | None = None

    def begin(self, make: Callable[[], tuple[B, dict[str, str]]], what: str) -> bool:
        """Begin to make another, unless one is being made. `make` includes the trial; what it raises is told."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self._facts |= {"plan": f"{what} is being made"}
        self._thread = threading.Thread(target=self._make, args=(make, what), name=f"make {what}", daemon=True)
        self._thread.start()
        return True

    def settle(self, timeout_s: float) -> bool:
        """Wait for what is being made. False: it takes longer."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def facts(self) -> dict[str, str]:
        """For people: who serves, and why. The dict itself: it changes when that does."""
        return self._facts

    def _make(self, make: Callable[[], tuple[B, dict[str, str]]], what: str) -> None:
        try:
            made, facts = make()
        except Exception as error:
            self._facts |= {"plan": f"{what} can't be had: {type(error).__name__}: {error}"}
            log.exception("the engine stays with what serves now", model=self._name, making=what)
        else:
            self._facts |= {"plan": f"{what} serves"} | facts
            self.current = made
            log.info("the engine has switched over", model=self._name, to=what, **_words(facts))


def _words(facts: dict[str, str]) -> dict[str, Any]:
    return {name.replace(" ", "_"): value for name, value in facts.items()}
