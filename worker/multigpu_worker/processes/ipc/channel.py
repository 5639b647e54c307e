"""The agent's end of the socket to one engine process. Nothing here blocks."""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable

from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.ipc.blobs import BlobMemory

# More reads than a full socket needs.
_READS_MAX = 10_000


class EngineChannel:
    """`apply_frame` is called with each frame and may raise FrameError. After a FrameError, `broken` is called once."""

    def __init__(
        self,
        sock: socket.socket,
        blobs: BlobMemory,
        apply_frame: Callable[[frames.Message, list[bytes]], None],
        broken: Callable[[frames.FrameError], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._blobs = blobs
        self._decoder = frames.Decoder(blobs.up)
        self._apply_frame = apply_frame
        self._broken = broken
        self._unsent: deque[memoryview] = deque()
        self._reading = True
        # Nothing is read any more.
        self._ended = False
        self._loop.add_reader(sock, self._readable)

    def send(self, message: frames.Message, blobs: list[bytes]) -> None:
        """Send a frame. The part for which the socket has no room is sent as soon as it has."""
        waiting = bool(self._unsent)
        self._unsent += [memoryview(buffer) for buffer in frames.encode(message, blobs, self._blobs.down) if buffer]
        if not waiting:
            self._write()
            if self._unsent:
                self._loop.add_writer(self._sock, self._writable)

    def pause(self, *, paused: bool) -> None:
        """Stop reading, so that the engine waits when the socket is full; or, if not `paused`, go on."""
        if self._ended or paused is not self._reading:
            return
        self._reading = not paused
        if paused:
            self._loop.remove_reader(self._sock)
        else:
            self._loop.add_reader(self._sock, self._readable)

    def read_rest(self) -> None:
        """Apply the frames that the engine has sent so far, except "ready" and "loaded", and read no later ones. The
        number of reads is limited, because a living engine may go on sending.
        """
        if self._ended:
            return
        self._end()
        with contextlib.suppress(BlockingIOError, EOFError, ConnectionError, frames.FrameError):
            for _ in range(_READS_MAX):
                for message, blobs in self._decoder.feed(self._sock):
                    if message[0] not in ("ready", "loaded"):
                        self._apply_frame(message, blobs)

    def close(self) -> None:
        self._end()
        self._loop.remove_writer(self._sock)
        self._sock.close()

    def _end(self) -> None:
        self._ended = True
        self._loop.remove_reader(self._sock)

    def _readable(self) -> None:
        try:
            received = self._decoder.feed(self._sock)
        except BlockingIOError:
            return
        except (EOFError, ConnectionError):
            self._end()  # the pidfd reports the process's death
            return
        except frames.FrameError as error:
            self._break(error)
            return
        try:
            for message, blobs in received:
                self._apply_frame(message, blobs)
        except frames.FrameError as error:
            self._break(error)
            return
        # Not at the next read: the engine may send nothing more. Ended already: an applied frame had the engine killed.
        if self._decoder.error is not None and not self._ended:
            self._break(self._decoder.error)

    def _break(self, error: frames.FrameError) -> None:
        self._end()
        self._broken(error)

    def _writable(self) -> None:
        self._write()
        if not self._unsent:
            self._loop.remove_writer(self._sock)

    def _write(self) -> None:
        """Write as much as the socket takes."""
        try:
            while self._unsent:
                sent_bytes = self._sock.send(self._unsent[0])
                if sent_bytes == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent_bytes:]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # the pidfd reports the process's death
