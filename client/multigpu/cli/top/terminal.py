"""Reads single keys from a terminal, and restores the terminal's settings at the end."""

import contextlib
import os
import re
import select
import sys
import termios
import tty
from collections.abc import Iterator

READ_BYTES = 1024
# How long to wait for the rest of an escape sequence. If nothing follows, the key was Esc.
ESCAPE_WAIT_S = 0.05
KEY = re.compile(r"\x1b[\[O][^@-~]*[@-~]?|.", re.DOTALL)
ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end"}
NAMES = {
    **{f"\x1b{mode}{letter}": name for mode in "[O" for letter, name in ARROWS.items()},
    "\x1b[1~": "home",
    "\x1b[4~": "end",
    "\x1b[5~": "page_up",
    "\x1b[6~": "page_down",
    "\x1b[7~": "home",
    "\x1b[8~": "end",
    "\x1b[Z": "back_tab",
    "\t": "tab",
    "\x03": "ctrl_c",
    "\x1b": "escape",
}


def keys_in(text: str) -> list[str]:
    """Each key in a text: its name in NAMES, or its character. Unknown escape sequences are ignored."""
    found = (NAMES.get(key, key) for key in KEY.findall(text))
    return [key for key in found if not key.startswith("\x1b")]


@contextlib.contextmanager
def key_input() -> Iterator[int]:
    """Turns off echo, line input and Ctrl-Z at stdin, and yields its descriptor. Ctrl-C still sends SIGINT."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        attributes = termios.tcgetattr(fd)
        attributes[6][termios.VSUSP] = os.fpathconf(fd, "PC_VDISABLE").to_bytes(1, "little")
        termios.tcsetattr(fd, termios.TCSADRAIN, attributes)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def read_keys(fd: int, timeout_s: float) -> list[str]:
    """The next keys; none if no key is pressed for `timeout_s`. EOFError: the terminal was closed."""
    data = b""
    while select.select([fd], [], [], ESCAPE_WAIT_S if data else timeout_s)[0]:
        read = os.read(fd, READ_BYTES)
        if not read:
            raise EOFError
        data += read
        if not data.endswith((b"\x1b", b"\x1b[", b"\x1bO")):
            break
    return keys_in(data.decode("utf-8", "replace"))
