"""Writes the output of engine processes to the agent's log, line by line, with a limit of lines in each second."""

import asyncio
import os

import structlog

log = structlog.get_logger()

_READ_BYTES = 64 << 10
_LINE_BYTES_MAX = 4 << 10
# Lines beyond this limit are only counted.
_LINES_PER_SECOND_MAX = 200


class OutputLog:
    """Reads standard output and error of the processes that one EngineProcess starts, each from its own pipe."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._read_fds: dict[int, bytes] = {}
        self._second = 0
        self._lines = 0
        self._dropped = 0

    def open(self) -> int:
        """Make a pipe. Returns the end to write to, which the caller closes."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_fd, False)
        self._read_fds[read_fd] = b""
        self._loop.add_reader(read_fd, self._readable, read_fd)
        return write_fd

    def close(self) -> None:
        """Log what is there and stop reading."""
        for fd in list(self._read_fds):
            self._readable(fd)
            if fd in self._read_fds:
                self._end(fd)

    def _readable(self, fd: int) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end(fd)
            return
        *lines, rest = (self._read_fds[fd] + data).split(b"\n")
        if len(rest) > _LINE_BYTES_MAX:
            lines.append(rest)
            rest = b""
        self._read_fds[fd] = rest
        for line in lines:
            self._log(line)

    def _end(self, fd: int) -> None:
        rest = self._read_fds.pop(fd)
        self._loop.remove_reader(fd)
        os.close(fd)
        if rest:
            self._log(rest)

    def _log(self, line: bytes) -> None:
        second = int(self._loop.time())
        if second != self._second:
            if self._dropped:
                log.warning("engine output not logged", lines=self._dropped)
            self._second, self._lines, self._dropped = second, 0, 0
        self._lines += 1
        if self._lines > _LINES_PER_SECOND_MAX:
            self._dropped += 1
        else:
            log.info("engine output", line=line[:_LINE_BYTES_MAX].decode("utf-8", "replace"))
