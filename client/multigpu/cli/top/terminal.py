"""A terminal that gives keys at once, and is as it was when it is left, however that happens."""

import contextlib
import fcntl
import os
import select
import signal
import sys
import termios
from collections.abc import Iterator
from types import FrameType
from typing import Any

READ_BYTES = 1024
# How long the rest of an escape sequence may take: what comes later was the key Esc itself.
ESCAPE_WAIT_S = 0.05
ESCAPE = "\x1b"
SEQUENCES = {
    **{
        f"{ESCAPE}[{letter}": name
        for letter, name in zip("ABCDHF", ("up", "down", "right", "left", "home", "end"), strict=True)
    },
    **{
        f"{ESCAPE}O{letter}": name
        for letter, name in zip("ABCDHF", ("up", "down", "right", "left", "home", "end"), strict=True)
    },
    f"{ESCAPE}[1~": "home",
    f"{ESCAPE}[4~": "end",
    f"{ESCAPE}[5~": "page_up",
    f"{ESCAPE}[6~": "page_down",
    f"{ESCAPE}[7~": "home",
    f"{ESCAPE}[8~": "end",
    f"{ESCAPE}[Z": "back_tab",
}
SINGLE = {"\t": "tab", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x03": "ctrl_c", ESCAPE: "escape"}


def keys_in(text: str) -> list[str]:
    """The keys in what a terminal sent: their names, or the character itself. Unknown sequences are no keys."""
    keys = []
    while text:
        if text[0] == ESCAPE and len(text) > 1 and text[1] in "[O":
            end = next((i for i in range(2, len(text)) if "@" <= text[i] <= "~"), len(text) - 1)
            if name := SEQUENCES.get(text[: end + 1]):
                keys.append(name)
            text = text[end + 1 :]
            continue
        keys.append(SINGLE.get(text[0], text[0]))
        text = text[1:]
    return keys


class Keyboard:
    """Keys of a terminal in raw mode, and a wait that others can end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Never closed: threads may call `wake` until the process ends, and it ends soon.
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def wake(self) -> None:
        """Ends the wait in `keys`. From any thread, and from signal handlers."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"w")

    def keys(self, timeout_s: float) -> list[str]:
        """The keys that were pressed; empty after `timeout_s` or a call of `wake`. EOFError: the terminal is gone."""
        ready, _, _ = select.select([self._fd, self._wake_read], [], [], timeout_s)
        if self._wake_read in ready:
            os.read(self._wake_read, READ_BYTES)
        if self._fd not in ready:
            return []
        data = os.read(self._fd, READ_BYTES)
        if not data:
            raise EOFError
        while data.endswith(ESCAPE.encode()) or data[-2:] in (b"\x1b[", b"\x1bO"):
            if not select.select([self._fd], [], [], ESCAPE_WAIT_S)[0]:
                break
            data += os.read(self._fd, READ_BYTES)
        return keys_in(data.decode("utf-8", "replace"))


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Takes the terminal at stdin: no echo, no waiting for Enter. Ctrl-C still interrupts; Ctrl-Z is off.

    A change of the window's size ends the wait for keys.
    """
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    keys = Keyboard(fd)

    def resized(_number: int, _frame: FrameType | None) -> None:
        keys.wake()

    handler = signal.signal(signal.SIGWINCH, resized)
    try:
        termios.tcsetattr(fd, termios.TCSADRAIN, _raw(before))
        yield keys
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, handler)


def _raw(attributes: list[Any]) -> list[Any]:
    raw = [*attributes[:6], list(attributes[6])]
    raw[3] &= ~(termios.ICANON | termios.ECHO)
    raw[6][termios.VMIN], raw[6][termios.VTIME] = 1, 0
    raw[6][termios.VSUSP] = os.fpathconf(0, "PC_VDISABLE").to_bytes(1, "little")
    return raw


def size(fd: int) -> tuple[int, int]:
    """Columns and lines of the terminal."""
    lines, columns = memoryview(fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8))).cast("H")[:2]
    return columns or 80, lines or 24
