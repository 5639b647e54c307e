"""One back end serves while a better one is made in the background and then takes over.

The better one has to pass a trial first. If it cannot be made, or fails its trial, the first back end stays; the log
and the facts say so.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

B = TypeVar("B")

log = structlog.get_logger(__name__)


class Switch(Generic[B]):
    """Holds the back end that serves now. Any thread may read `current`, once for each piece of work."""

    def __init__(self, first: B, model: str, make: Callable[[], tuple[B, dict[str, str]]], what: str) -> None:
        """Start to make the other back end. `make` returns it and its facts after its trial, or raises.

        `model` and `what` name the model and the other back end in the log.
        """
        self.current = first
        self._facts = {"plan": f"{what} is being made"}
        self._thread = threading.Thread(target=self._make, args=(model, make, what), name=f"make {what}", daemon=True)
        self._thread.start()

    def settle(self, timeout_s: float) -> bool:
        """Wait until the other back end serves or has failed. False: timed out."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def facts(self) -> dict[str, str]:
        """Which back end serves and why, for people. The dict changes when the other back end serves."""
        return self._facts

    def _make(self, model: str, make: Callable[[], tuple[B, dict[str, str]]], what: str) -> None:
        try:
            made, facts = make()
        except Exception as error:
            self._facts |= {"plan": f"{what} can't be had: {type(error).__name__}: {error}"}
            log.exception("the engine stays with what serves now", model=model, making=what)
        else:
            self._facts |= {"plan": f"{what} serves"} | facts
            self.current = made
            named = {name.replace(" ", "_"): value for name, value in facts.items()}
            log.info("the engine has switched over", model=model, to=what, **named)
