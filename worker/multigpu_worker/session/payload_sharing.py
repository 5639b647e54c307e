"""The worker's side of payloads by reference (multigpu._transport.payloads): the directory that the master shares.

An engine writes large results there. The agent pins their segments as soon as the engine reports them, so that they
outlive the engine, and holds each result until the master has taken it over.
"""

from collections import deque
from collections.abc import Iterable
from weakref import WeakValueDictionary

from multigpu._transport.payloads import Directory, Reference, Segment


class Sharing:
    def __init__(self) -> None:
        # None: the master of this session shares no directory.
        self.directory: Directory | None = None
        # Pinned segments by name; cleared when the directory's key changes. Only results in these may be lent.
        self._segments: WeakValueDictionary[str, Segment] = WeakValueDictionary()
        self._lent: deque[Reference] = deque()
        self._taken = 0

    @property
    def path(self) -> str:
        """The directory's path, for engines; empty if there is none."""
        return str(self.directory.path) if self.directory is not None else ""

    def begin(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Start a session with the initial metadata of its stream. Returns whether the master shares a directory."""
        before, self.directory = self.directory, Directory.of(metadata)
        if before is None or self.directory is None or before.key != self.directory.key:
            self._segments = WeakValueDictionary()
        self._lent.clear()
        self._taken = 0
        return self.directory is not None

    def pin(self, name: str, offset: int, size_bytes: int) -> Reference:
        """Returns a reference that keeps an engine's result. Raises OSError if its segment or the directory is gone."""
        segment = self._segments.get(name)
        if segment is None:
            if self.directory is None:
                raise FileNotFoundError("the master shares no directory any more")
            segment = self._segments[name] = self.directory.pin(name)
        return Reference(segment, offset, size_bytes)

    def lend(self, reference: Reference) -> bool:
        """Whether the session's master can read a result from its file. If so, holds the result until `taken`."""
        if self.directory is None or self._segments.get(reference.pin.name) is not reference.pin:
            return False
        self._lent.append(reference)
        return True

    def taken(self, count: int) -> None:
        """The master has taken over the first `count` results since the session began: release them."""
        while self._taken < count and self._lent:
            self._lent.popleft()
            self._taken += 1
