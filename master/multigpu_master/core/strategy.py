"""The base class of strategies: policies that choose the worker for the next task of a shape.

The core calls a strategy only for workers that can run the shape; their windows may be full, and for Explain they may
be lost. The strategy excludes further workers, and gives each of the others a score; the worker with the lowest score
gets the task. Exclusion and score must depend on their arguments alone (no I/O, no clock, no state), so that the rpc
Explain gets the same answer as dispatch. The core keeps a worker's score and exclusion for a shape until the worker
changes (a lease is granted or ends, a heartbeat), or the fleet's averages change: so a strategy's answers may change
only then.

A strategy is a class that is named by an entry point in the group "multigpu.strategies"; docs/strategies.md shows one.

mypyc does not compile this module: strategies, which are not compiled, could not derive from a compiled class.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from multigpu_master.core.model import Shape, Worker


class FleetView(Protocol):
    """The information about the whole fleet that a strategy may use."""

    memory_threshold: float
    """The strategy memory_usage gives no new task to a device if more than this share (0 to 1) of its memory is in use.
    """

    def expected_s(self, worker: Worker, shape: Shape, units: float = 0.0) -> float:
        """Expected run time of a task of this shape on this worker.

        Measured seconds per unit of work, on this worker or else on the fleet (10 ms if nothing is measured), times
        `units`. If `units` is 0: times the average units of such tasks.
        """

    def load_s(self, worker: Worker, shape: Shape) -> float:
        """Seconds to load the shape's model on the worker, plus the seconds to reload later the models that are
        unloaded for it. 0.0: the model is loaded and is not to be unloaded, or a granted lease already makes the worker
        load it, or the tasks need no model.
        """

    def resident_workers(self, shape: Shape) -> int:
        """The number of workers that accept work and need not load a model for the shape: all of them, if its tasks
        need none.
        """


class Strategy(ABC):
    """A policy that chooses workers. By default it excludes no worker, and one queued task suffices."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str]
    score_meaning: ClassVar[str]
    pinned: ClassVar[bool] = False
    """True: a task waits for the worker that ranks first, even while that worker has no room. Scores and
    exclusions must then depend on nothing but the shape and the worker's id and info."""

    def excludes(self, shape: Shape, worker: Worker, fleet: FleetView) -> str | None:
        """Why this worker must not get tasks of this shape now, as a text for people. None: it may get them."""
        return None

    @abstractmethod
    def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        """The worker's score. Of the workers not excluded, the lowest gets the task; on a tie, the worker whose last
        lease was granted the longest ago (of a pinned strategy: the one with the lowest worker_id).
        """

    def min_backlog(self, shape: Shape, worker: Worker, fleet: FleetView) -> int:
        """How many tasks of this shape must be queued before the worker gets one.

        With fewer queued tasks the worker is skipped, unless it has a load reservation for their model; if every other
        window is full, the tasks wait. The value may change when a score may, and when the number of workers with the
        model changes.
        """
        return 1
