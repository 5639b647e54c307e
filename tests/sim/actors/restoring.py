"""Settings of the journal as events for a new core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multigpu_master.core import events as ev
from multigpu_master.strategies.registry import load_strategies

if TYPE_CHECKING:
    from tests.sim.actors.master import Master

STRATEGIES = load_strategies()


class Restoring:
    """Passes settings to a new core through the master, so that the invariants see these events too."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self.strategies = STRATEGIES

    def handle(self, event: ev.Event, _now: float) -> list[ev.Command]:
        return self._master.handle(event)
