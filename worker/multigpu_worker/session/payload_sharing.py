"""The worker's side of payloads by reference (multigpu._transport.payloads): the directory that the master shares.

The engine writes large results there. The agent pins their segments at once, so that they outlive the engine, and holds
each until the master has taken it.
"""

from collections import deque
from collections.abc import Iterable
from weakref import WeakValueDictionary

from multigpu._transport.payloads import Directory, Reference, Segment


class Sharing:
    def __init__(self) -> None:
        # None: the session's master shares none.
        self.directory: Directory | None = None
        # Pinned in this session, by name: only these may be lent to its master.
        self._segments: WeakValueDictionary[str, Segment] = WeakValueDictionary()
        self._lent: deque[Reference] = deque()
        self._taken = 0

    @property
    def path(self) -> str:
        """For engines; empty: there is no directory."""
        return str(self.directory.path) if self.directory is not None else ""

    def begin(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """A session begins, with this initial metadata. Returns whether its master shares a directory."""
        before, self.directory = self.directory, Directory.of(metadata)
        if before is None or self.directory is None or before.key != self.directory.key:
            self._segments = WeakValueDictionary()
        self._lent.clear()
        self._taken = 0
        return self.directory is not None

    def pin(self, name: str, offset: int, size_bytes: int) -> Reference:
        """Hold a result of an engine. OSError: it is gone, with the engine."""
        segment = self._segments.get(name)
        if segment is None:
            if self.directory is None:
                raise FileNotFoundError("the master shares no directory any more")
            segment = self._segments[name] = self.directory.pin(name)
        return Reference(segment, offset, size_bytes)

    def lend(self, reference: Reference) -> bool:
        """Whether the session's master can read a result where it lies. If so, hold it until `taken`."""
        if self.directory is None or self._segments.get(reference.pin.name) is not reference.pin:
            return False
        self._lent.append(reference)
        return True

    def taken(self, count: int) -> None:
        """The master has taken `count` results since the session began."""
        while self._taken < count and self._lent:
            self._lent.popleft()
            self._taken += 1
