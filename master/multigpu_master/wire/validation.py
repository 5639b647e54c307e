"""Checks of messages before the core gets them. An InvalidMessageError says what is wrong and what is allowed."""

from multigpu._transport.names import UNPRINTABLE

from multigpu_master.errors import InvalidMessageError

ATTEMPTS_MAX = 100
NAME_BYTES_MAX, KEY_BYTES_MAX = 128, 256
MESSAGE_CHARS_MAX = 8 << 10


def check_printable(field: str, value: str) -> None:
    """Raises InvalidMessageError if the text has control or invisible characters, which could falsify a log."""
    if UNPRINTABLE.search(value):
        raise InvalidMessageError(f"{field} {value!r} contains control or invisible characters; remove them")


def check_size(field: str, value: str, bytes_max: int) -> None:
    """Raises InvalidMessageError if the text is too long."""
    size = len(value.encode())
    if size > bytes_max:
        raise InvalidMessageError(f"{field} has {size} bytes; at most {bytes_max} are allowed")
