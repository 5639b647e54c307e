"""The base class of strategies. core/strategy.py has their protocol."""

from typing import ClassVar

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.strategy import FleetView


class Base:
    """Default values of a strategy: it excludes no worker and needs no backlog."""

    aliases: ClassVar[tuple[str, ...]] = ()
    pinned: ClassVar[bool] = False

    def excludes(self, shape: Shape, worker: Worker, fleet: FleetView) -> str | None:
        return None

    def min_backlog(self, shape: Shape, worker: Worker, fleet: FleetView) -> int:
        return 1
