"""What a strategy is: a policy that chooses the worker for the next task of a shape.

The core asks only about workers that can run the shape and have room in their window; a strategy adds its own
exclusions and a score, lower first. Both depend on their arguments alone: no I/O, no clock, no memory of earlier
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
        """Expected run time of a task of this shape on this worker: measured seconds a unit of work, there or else on
        the fleet, times the units (0: the average of such tasks).
        """

    def load_s(self, worker: Worker, shape: Shape) -> float:
        """Time to load the shape's model on the worker; 0.0 if it is resident or none is needed."""

    def resident_workers(self, shape: Shape) -> int:
        """How many workers that accept work have the shape's model loaded."""


class Strategy(Protocol):
    """One policy."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]]
    summary: ClassVar[str]
    score_meaning: ClassVar[str]
    pinned: ClassVar[bool]
    """True: a task waits for the worker that ranks first, even while that one has no room. Scores and
    exclusions must then depend on nothing but the shape and the worker's id and info."""

    def excludes(self, shape: Shape, worker: Worker, fleet: FleetView) -> str | None:
        """Why this worker must not get tasks of this shape now, for people; None if it may."""

    def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        """Its rank among the workers that may: the lowest gets the task; on a tie, the one that has waited longest."""

    def min_backlog(self, shape: Shape, worker: Worker, fleet: FleetView) -> int:
        """How many tasks of this shape must be queued before the worker gets one. With fewer it is passed over, and if
        no other worker has room the tasks wait. It may change when a score may, and when the number of workers that
        have the model does.
        """


class Base:
    """The defaults of a strategy: excludes no worker, needs no backlog."""

    aliases: ClassVar[tuple[str, ...]] = ()
    pinned: ClassVar[bool] = False

    def excludes(self, shape: Shape, worker: Worker, fleet: FleetView) -> str | None:
        return None

    def min_backlog(self, shape: Shape, worker: Worker, fleet: FleetView) -> int:
        return 1
