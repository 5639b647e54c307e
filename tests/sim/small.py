"""Limits of the core so small that small worlds reach them, for caches and sweeps. Only while a simulation runs: other
tests of the same process use the core's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from multigpu_master.core import admission, timers
from multigpu_master.core.placement import dispatch, gangs, pins, resource_classes
from multigpu_master.core.workers import fleet

SMALL = (
    (resource_classes, "STALE_MIN", 2),
    (timers, "SWEEP_MIN", 4),
    (fleet, "ELIGIBLE_SHAPES_MAX", 32),
    (admission, "QUEUE_SHAPES_MAX", 3),
    (dispatch, "BLOCKS_MAX", 3),
    (pins, "PINS_MAX", 4),
    (gangs, "RESERVED_S", 0.4),
)


@contextmanager
def small_limits() -> Iterator[None]:
    before = [getattr(module, name) for module, name, _ in SMALL]
    for module, name, value in SMALL:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(SMALL, before, strict=True):
            setattr(module, name, value)
