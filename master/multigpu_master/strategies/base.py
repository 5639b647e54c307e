"""What a strategy is: an opinion on which worker should get the next task of a shape.

The core asks only about workers that can run the shape and have room in their window; a strategy adds its own
exclusions and a score, lower first. Both are functions of what they are given: no I/O, no clock, no memory of earlier
calls, so that Explain can ask again and get the same answer. A score may only change when the worker changes (a
lease granted or ended, a heartbeat) or the fleet's averages do; the core keeps scores in a heap and asks again then.

A strategy is a class behind an entry point in the group "multigpu.strategies"; docs/strategies.md shows one.
"""

from typing import ClassVar, Protocol

from multigpu_master.core.model import Shape, Worker


class FleetView(Protocol):
    """What a strategy may ask about the fleet as a whole."""

    memory_threshold: float
    """The share of device memory in use above which memory_usage gives a device nothing new, 0 to 1."""

    def expected_s(self, worker: Worker, shape: Shape, units: float = 0.0) -> float:
        """How long a task of this shape should take on this worker: measured seconds a unit of work, there or else on
        the fleet, times the units (0: as many as its tasks have on average).
        """

    def load_s(self, worker: Worker, shape: Shape) -> float:
        """How long the worker needs to load the shape's model; 0.0 if it is resident or none is needed."""

    def resident_workers(self, shape: Shape) -> int:
        """How many workers that accept work have the shape's model loaded."""


class Strategy(Protocol):
    """One policy. Attributes are for people and for the core; the methods decide."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]]
    summary: ClassVar[str]
    score_meaning: ClassVar[str]
    pinned: ClassVar[bool]
    """True: a task waits for the worker that ranks first, even while that one has no room. Scores and
    exclusions must then depend on nothing but the shape and the worker's id and info."""

    def excludes(self, shape: Shape, worker: Worker, fleet: FleetView) -> str | None:
        """Why this worker must not get tasks of this shape now, in words; None if it may."""

    def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        """Its rank among the workers that may: the lowest gets the task; on a tie, who has waited longest for one."""

    def worth(self, shape: Shape, worker: Worker, fleet: FleetView, queued: int) -> bool:
        """Whether the worker is worth it, with `queued` tasks of this shape waiting. False: it is passed over, and if
        no other has room the tasks wait. More tasks must not make it worth less. It may change when a score may, and
        when the number of workers that have the model does.
        """


class Base:
    """The defaults of a strategy: excludes nobody, waits for nobody."""

    aliases: ClassVar[tuple[str, ...]] = ()
    pinned: ClassVar[bool] = False

    def excludes(self, shape: Shape, worker: Worker, fleet: FleetView) -> str | None:
        return None

    def worth(self, shape: Shape, worker: Worker, fleet: FleetView, queued: int) -> bool:
        return True
