"""The handlers of this engine process: instances of their classes, and their engines."""

import logging
import sys

from multigpu._handling import engine
from multigpu.contexts import current_context
from multigpu.handlers import registered_handlers

_instances = engine.Instances()


def instantiate(device: str) -> None:
    """Makes the instances of handler classes. Raises what they raise."""
    global _instances  # noqa: PLW0603  one for each process
    to_log = logging.StreamHandler(sys.stderr)  # which is the worker's log
    to_log.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("multigpu.handlers")
    logger.addHandler(to_log)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    _instances = engine.Instances(device)
    current_context.set(_instances.context)
    for handler in registered_handlers().values():
        _instances.function_of(handler)


def engine_of(kind: str) -> engine.HandlerEngine:
    return engine.engine_of(registered_handlers()[kind], _instances)


def close() -> None:
    """The process ends: calls `close` of the instances."""
    _instances.close()
