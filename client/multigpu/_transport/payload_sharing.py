"""The client's side of payloads by reference (multigpu._transport.payloads): what the master shares with this stream,
and whether it knows that we do.
"""

import contextlib

from multigpu._transport.payloads import LARGE_BYTES, Directory, Reference, Writer, read_file
from multigpu.v1 import task_pb2

# Results that lie around, taken already, before the master is told of it at once.
TELL_TAKEN = 16


class Sharing:
    def __init__(self) -> None:
        self._directory: Directory | None = None
        # The stream has said what it offers; and that is something.
        self.answered = False
        self._offered = False
        self._writer: Writer | None = None
        self._key_due = False
        self._taken = self._told = 0

    def stream_opened(self) -> None:
        """A new stream has offered nothing yet, and has been told nothing."""
        self.answered = self._offered = self._key_due = False
        self._taken = self._told = 0

    def offered(self, directory: Directory | None) -> bool:
        """What the stream's master shares. True: it isn't what was shared before, and what was written is of no use."""
        before, self._directory = self._directory, directory
        self.answered = True
        self._offered = self._key_due = directory is not None
        same = before is not None and directory is not None and before.key == directory.key
        if same and self._writer is not None:
            return False
        self._writer = Writer(directory.path) if directory is not None else None
        return True

    @property
    def shares(self) -> bool:
        """Whether this stream has offered a directory."""
        return self._offered and self._writer is not None

    def close(self) -> None:
        """There is nothing more to write."""
        self._writer = None

    def put(self, payload: bytes) -> Reference | None:
        """Puts a payload down for the master; None: it has to be sent. No room in there is no reason to fail."""
        if len(payload) < LARGE_BYTES or not self.shares:
            return None
        assert self._writer is not None
        with contextlib.suppress(OSError):
            return self._writer.put(payload)
        return None

    def take(self, at: task_pb2.PayloadReference) -> bytes:
        """A result that the master refers to. OSError: it is gone."""
        self._taken += 1
        if self._directory is None or "/" in at.segment:
            raise FileNotFoundError(f"the master refers to {at.segment!r}, which it does not share with us")
        return read_file(f"{self._directory.path}/{at.segment}", at.offset, at.size)

    def skip(self) -> None:
        """A result that nobody wants any more."""
        self._taken += 1

    @property
    def owes(self) -> bool:
        """Whether the master is to be told something now."""
        return self._key_due or self._taken - self._told >= TELL_TAKEN

    @property
    def owes_later(self) -> bool:
        """Whether the master is to be told something, with what else there is to say, or in a while."""
        return self._taken != self._told

    def key(self) -> bytes:
        """What shows the master that we share; empty if it was shown."""
        due, self._key_due = self._key_due, False
        return self._directory.key if due and self._directory is not None else b""

    def taken(self) -> int:
        """How many results were taken since the stream began; 0 if that was told."""
        told, self._told = self._told, self._taken
        return self._taken if told != self._taken else 0
