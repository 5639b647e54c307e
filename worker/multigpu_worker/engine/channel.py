"""The engine's end of the socket: frames to and from the agent.

User code may fork. A forked child that comes back to this code is ended before it can send frames on its parent's
socket. Python reports a fork (`forked`); a fork that Python did not see is recognised by the pid.
"""

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from multigpu._transport.payloads import Reference

from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.ipc.blobs import BlobMemory

EXIT_FORKED = 70


class AgentChannel:
    """Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, blobs: BlobMemory) -> None:
        # True in a child that user code forked.
        self.forked = False
        self._pid = os.getpid()
        self._sock = sock
        self._blobs = blobs
        # Yields each frame of the agent as it comes. Raises EOFError or ConnectionError if the agent is gone.
        self.frames = self._receive()
        self._lock = threading.Lock()
        # Results in shared files that the agent has been sent and has not pinned yet, oldest first.
        self._unpinned: deque[Reference] = deque()

    def _receive(self) -> Iterator[tuple[frames.Message, list[bytes]]]:
        decoder = frames.Decoder(self._blobs.down)
        while True:
            yield from decoder.feed(self._sock)

    def send(self, message: frames.Message, blobs: Sequence[bytes] = (), written: Sequence[Reference] = ()) -> None:
        """Block until the frame is written. `written`: results in shared files, held until they are `pinned`."""
        if self.forked or os.getpid() != self._pid:
            os._exit(EXIT_FORKED)
        with self._lock:
            self._unpinned += written
            try:
                for buffer in frames.encode(message, blobs, self._blobs.up):
                    self._sock.sendall(buffer)
            except OSError:
                os._exit(0)  # the agent is gone

    def pinned(self, count: int) -> None:
        """The agent has pinned the oldest `count` results."""
        for _ in range(count):
            self._unpinned.popleft()

    def close_in_child(self) -> None:
        """Called in a forked child, which must neither read nor write its parent's frames."""
        self.forked = True
        self._sock.close()
