"""A target: code that reads untrusted input. Inputs are bytes, so that random inputs and hypothesis can use the same
targets, and a crashing input can be kept in a file.
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tests.hostile.targets.inputs import Maker


def mute() -> None:
    """Turns off the log of rejected inputs."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


class Crash(Exception):  # noqa: N818  the word for it here
    """A target failed on an input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`feed` returns for every input; an exception is a crash. `check`, after many inputs: the target still works."""

    name: str
    make: Callable[[Maker], bytes]
    feed: Callable[[bytes], None]
    check: Callable[[], None] = lambda: None
