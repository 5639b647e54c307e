"""The simulated world: one clock, one seeded random generator, links that deliver in order until they break.

All events are in one heap. A seed and a commit reproduce a run exactly: nothing iterates over a set, and all random
numbers come from seeded generators.

The network does what it may do to a gRPC stream, which runs over TCP: while a stream lives, nothing in it is lost,
repeated or reordered, so a `Link` delays, stalls one direction for seconds, and breaks. When it breaks, messages on
their way are lost, or arrive before the other side notices the end, even after the first messages of the next stream.
Each side notices a break at once, late, or never.
"""

from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any


class ViolationError(AssertionError):
    """An invariant does not hold."""


def check(holds: object, message: str, *args: object) -> None:
    if not holds:
        raise ViolationError(message % args if args else message)


class World:
    """The clock, the heap of future events, and the trace of past ones. `coverage` counts what occurred, by name."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 1_000_000.0
        self.start = self.now
        self.events = 0
        self.lines: list[str] = []
        self.coverage: Counter[str] = Counter()
        self.fell_sick: Counter[int] = Counter()  # by task_id, how often a device was made sick while it ran there
        self.tracing = trace
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._tickets = 0

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Calls `what` once, after the delay."""
        self._tickets += 1
        heappush(self._heap, (self.now + delay_s, self._tickets, what))

    def step(self) -> bool:
        """Runs the next event. False: there is none."""
        if not self._heap:
            return False
        when, _, what = heappop(self._heap)
        self.now = max(self.now, when)
        self.events += 1
        what()
        return True

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def trace(self, text: str, *args: Any, brief: bool = False) -> None:
        """Adds a line to the trace. Formatted only if there is one."""
        if self.tracing:
            shown = [describe(a) if brief else a for a in args]
            self.lines.append(f"{self.now - self.start:9.4f}  {text % tuple(shown) if shown else text}")


def describe(what: Any) -> str:
    """An event or a command in a line: its numbers, and the ids in its lists."""
    parts = []
    for slot in getattr(what, "__slots__", ()):
        value = getattr(what, slot)
        if isinstance(value, list | tuple):
            value = [getattr(v, "lease_id", 0) or getattr(v, "task_id", 0) or v for v in value]
            value = [v if isinstance(v, int | str) else type(v).__name__ for v in value]
        elif not isinstance(value, int | float | str | None):
            value = getattr(value, "worker_id", "") or getattr(value, "task_id", "")
        if value:
            parts.append(f"{slot}={value}")
    return f"{type(what).__name__} {' '.join(parts)}"


class Inbox:
    """Calls that a process makes in order, as soon as it is awake. `asleep_until` returns when that is."""

    def __init__(self, world: World, asleep_until: Callable[[], float]) -> None:
        self._world = world
        self._asleep_until = asleep_until
        self._waiting: deque[Callable[[], None]] = deque()

    def put(self, what: Callable[[], None]) -> None:
        if self._waiting or self._asleep_until() > self._world.now:
            self._waiting.append(what)
            if len(self._waiting) == 1:
                self._world.after(self._asleep_until() - self._world.now, self._wake)
        else:
            what()

    def _wake(self) -> None:
        if self._waiting and self._asleep_until() > self._world.now:
            self._world.after(self._asleep_until() - self._world.now, self._wake)
            return
        waiting, self._waiting = self._waiting, deque()
        for what in waiting:
            what()

    def clear(self) -> None:
        """The process ended."""
        self._waiting.clear()


class Link:
    """One direction of a stream: delivers in order and with a delay, and nothing after it breaks."""

    def __init__(self, world: World, delay_s: float, deliver: Callable[[Any], object]) -> None:
        self._world = world
        self._delay_s = delay_s
        self._deliver = deliver
        self.arrival_s = 0.0  # when the last message on its way arrives
        self.ended = False  # nothing more is sent
        self.broken = False  # nothing more arrives

    def send(self, message: Any) -> None:
        if self.ended or self.broken:
            return
        world = self._world
        self.arrival_s = max(self.arrival_s, world.now + world.between(0.2, 2.0) * self._delay_s)

        def arrive() -> None:
            if not self.broken:
                self._deliver(message)

        world.after(self.arrival_s - world.now, arrive)

    def stall(self, seconds: float) -> None:
        """Messages sent from now on arrive at the earliest after this time."""
        self.arrival_s = max(self.arrival_s, self._world.now + seconds)

    def end(self, *, lost: bool) -> float:
        """The sender ended. Messages on their way are lost, or arrive. Returns the delay of the last one."""
        self.ended = True
        self.broken = self.broken or lost
        return 0.0 if self.broken else max(0.0, self.arrival_s - self._world.now)
