"""Limits of the core so small that small worlds reach them, for caches, sweeps and wait lists. Only while a simulation
runs: other tests of the same process use the core's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from multigpu_master.core import admission, timers
from multigpu_master.core.placement import dispatch, placement, resource_classes, wait_lists
from multigpu_master.core.workers import fleet

SMALL = (
    (resource_classes, "STRETCH", 4),
    (wait_lists, "STALE_MIN", 2),
    (timers, "SWEEP_MIN", 4),
    (fleet, "CHANGES_MAX", 32),
    (admission, "SHAPES_MAX", 3),
    (dispatch, "PARKS_MAX", 3),
    (placement, "RANKINGS_MAX", 3),
    (placement, "PINS_MAX", 4),
    (placement, "FEW", 2),
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
