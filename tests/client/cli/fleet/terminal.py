"""A program in a pseudo-terminal, and the screen that it draws."""

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator

import pyte


class Terminal:
    """A real terminal's two ends, with a program at one and a screen that understands it at the other."""

    def __init__(self, *argv: str, columns: int = 80, lines: int = 24) -> None:
        self._master, self.slave = os.openpty()
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.before = termios.tcgetattr(self.slave)
        self.resize(columns, lines)
        # Without the size that pytest-xdist sets: the terminal has its own.
        size = ("COLUMNS", "LINES")
        terminal_env = {k: v for k, v in os.environ.items() if k not in size} | {"TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            argv,
            stdin=self.slave,
            stdout=self.slave,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=terminal_env,
        )

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    def read(self) -> str:
        while select.select([self._master], [], [], 0.05)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                break
            self.raw += data
            self._stream.feed(data)
        return "\n".join(self.screen.display)

    def wait_for(self, condition: Callable[[str], bool], what: str) -> str:
        end = time.monotonic() + 240
        while not condition(text := self.read()):
            assert time.monotonic() < end, f"waited in vain for {what}:\n{text}"
            assert self.process.poll() is None, (self.process.returncode, text, self.process.communicate()[1])
        return text

    def ended(self) -> int:
        end = time.monotonic() + 240
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < end
        self.read()
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        os.close(self._master)
        os.close(self.slave)


@contextlib.contextmanager
def terminal(*argv: str) -> Iterator[Terminal]:
    shown = Terminal(*argv)
    try:
        yield shown
    finally:
        shown.close()
