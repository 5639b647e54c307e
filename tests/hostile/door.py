"""A door: something that reads what others wrote. Inputs are bytes, so that chance, hypothesis and atheris can all
knock at the same doors, and an input that crashed one can be kept in a file.
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tests.hostile.inputs import Maker


def mute() -> None:
    """Logs of what was rejected, a million times over, help nobody."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


class Crash(Exception):  # noqa: N818  the word for it here
    """A door did not stand an input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """`feed` returns whatever the input, or raises what is a crash. `check` after many: is all well behind the door?"""

    name: str
    make: Callable[[Maker], bytes]
    feed: Callable[[bytes], None]
    check: Callable[[], None] = lambda: None
