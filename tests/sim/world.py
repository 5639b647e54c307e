"""The simulated world: one clock, one seeded source of chance, links that deliver in order until they break.

Everything that happens is an event in one heap. A seed and a commit reproduce a run to the last detail: nothing
iterates over a set, and nothing but `World.random` draws numbers.

What the network may do is what it may do to a gRPC stream, which runs over TCP: within one stream nothing is lost,
repeated or overtaken while the stream lives, so a `Link` delays, stalls one direction for seconds, and breaks. When it
breaks, what was on its way is lost, or arrives before the other side hears of the end, even after the first words of
the next stream: thus things are lost, reordered and (as each side says again what had no answer) duplicated, between
streams. Who hears of a break, and when, is drawn as well: at once, late, or never.
"""

from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any


class ViolationError(AssertionError):
    """The core broke a promise."""


def check(holds: object, message: str, *args: object) -> None:
    if not holds:
        raise ViolationError(message % args if args else message)


class World:
    """The clock, the heap of what is to happen, and the trace of what did. `coverage` counts what occurred, by name."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 1_000_000.0
        self.start = self.now
        self.events = 0
        self.lines: list[str] = []
        self.coverage: Counter[str] = Counter()
        self.tracing = trace
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._tickets = 0

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Has `what` happen once."""
        self._tickets += 1
        heappush(self._heap, (self.now + delay_s, self._tickets, what))

    def step(self) -> bool:
        """Lets the next thing happen; False if nothing is left to happen."""
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
        """Notes what happened, for the reader of a failed seed. Formatted only if somebody reads."""
        if self.tracing:
            said = [tell(a) if brief else a for a in args]
            self.lines.append(f"{self.now - self.start:9.4f}  {text % tuple(said) if said else text}")


def tell(what: Any) -> str:
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
    """What a process does in order, as soon as it is awake. `asleep_until` says when that is."""

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
        """The process is gone."""
        self._waiting.clear()


class Link:
    """One direction of a stream: in order, late, and lost from the moment that it breaks."""

    def __init__(self, world: World, delay_s: float, deliver: Callable[[Any], None]) -> None:
        self._world = world
        self._delay_s = delay_s
        self._deliver = deliver
        self.arrival_s = 0.0  # when the last of what is on its way arrives
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
        """What is sent from now on arrives no sooner than this."""
        self.arrival_s = max(self.arrival_s, self._world.now + seconds)

    def end(self, *, lost: bool) -> float:
        """The sender is gone. What is on its way is lost, or arrives. Returns how long the last of it takes."""
        self.ended = True
        self.broken = self.broken or lost
        return 0.0 if self.broken else max(0.0, self.arrival_s - self._world.now)
