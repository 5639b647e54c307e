"""Checks of messages before the core sees them. InvalidMessageError says what is wrong and what is allowed."""

import re

ATTEMPTS_MAX = 100
NAME_BYTES_MAX, MODEL_BYTES_MAX, KEY_BYTES_MAX = 128, 256, 256
MESSAGE_CHARS_MAX = 8 << 10
# Total size of a worker's hello without its leases, and of its catalog.
HELLO_BYTES_MAX = 128 << 10
# Control characters, and characters that are invisible or change how the text around them is displayed.
_CONTROL = re.compile(
    "[\0-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


class InvalidMessageError(Exception):
    """A task or a worker's message is invalid; the text says why and what is allowed."""


def check_printable(field: str, value: str) -> None:
    """InvalidMessageError: a terminal or a log would not show the text as it is."""
    if _CONTROL.search(value):
        raise InvalidMessageError(f"{field} {value!r} contains control or invisible characters; remove them")


def check_size(field: str, value: str, bytes_max: int) -> None:
    """InvalidMessageError: the text is too long."""
    size = len(value.encode())
    if size > bytes_max:
        raise InvalidMessageError(f"{field} has {size} bytes; at most {bytes_max} are allowed")
