"""The client's side of payloads by reference (multigpu._transport.payloads), for one Run stream after the other: what
the master shares, the payloads written for it, and the reports to it.
"""

import contextlib

from multigpu._transport.payloads import LARGE_BYTES, Directory, Reference, Writer, read_file
from multigpu.v1 import task_pb2

# This many results taken, but not reported yet, are reported at once: the master keeps their files until then.
REPORT_TASKS = 16


class Sharing:
    def __init__(self) -> None:
        # True once it is known whether this stream's master shares a directory.
        self.offer_known = False
        # The directory that this stream's master shares.
        self._directory: Directory | None = None
        # Writes for the master with this key, also over several streams.
        self._writer: Writer | None = None
        self._writer_key = b""
        self._key_due = False
        # Results taken from this stream, and how many of them are reported. One that no call waits for counts too.
        self.taken = self._reported = 0

    def stream_opened(self) -> None:
        """A new stream: nothing is offered, and nothing reported."""
        self.offer_known = self._key_due = False
        self._directory = None
        self.taken = self._reported = 0

    def offered(self, directory: Directory | None) -> bool:
        """The stream's master shares this directory. False: it is that of the stream before; True: another, so that
        references made earlier are invalid.
        """
        self.offer_known = True
        self._directory = directory
        self._key_due = directory is not None
        if directory is not None and self._writer is not None and directory.key == self._writer_key:
            return False
        self._writer = Writer(directory.path) if directory is not None else None
        self._writer_key = directory.key if directory is not None else b""
        return True

    @property
    def shares(self) -> bool:
        """Whether payloads can be put for this stream's master."""
        return self._directory is not None and self._writer is not None

    def close(self) -> None:
        """Releases the segments written."""
        self._writer = None

    def put(self, payload: bytes) -> Reference | None:
        """Writes a payload to the directory. None: it is small, or can't be written, and has to be sent."""
        if len(payload) < LARGE_BYTES or not self.shares:
            return None
        assert self._writer is not None
        with contextlib.suppress(OSError):
            return self._writer.put(payload)
        return None

    def take(self, at: task_pb2.PayloadReference) -> bytes:
        """The bytes of a result. OSError: they are gone."""
        self.taken += 1
        if self._directory is None or "/" in at.segment:
            raise FileNotFoundError(f"the master refers to {at.segment!r}, which it does not share with us")
        return read_file(f"{self._directory.path}/{at.segment}", at.offset, at.size)

    @property
    def report_due(self) -> bool:
        """Whether a frame must be sent now: the key, or many results taken."""
        return self._key_due or self.taken - self._reported >= REPORT_TASKS

    @property
    def report_pending(self) -> bool:
        """Whether results taken must be reported with the next frame, or after a while."""
        return self.taken != self._reported

    def pop_key(self) -> bytes:
        """The key that proves that we share; empty if it was sent."""
        due, self._key_due = self._key_due, False
        return self._directory.key if due and self._directory is not None else b""

    def pop_taken(self) -> int:
        """How many results were taken since the stream began; 0 if that was reported."""
        reported, self._reported = self._reported, self.taken
        return self.taken if reported != self.taken else 0
