"""Handlers that write to the logs of their tasks."""

import time

import multigpu


@multigpu.handler("logs.steps", retries=1)
def steps(value: bytes) -> bytes:
    """Writes a line, waits for as long as the payload says, fails once, and writes an error with its traceback."""
    log = multigpu.context().log
    log.info("begins with %d bytes", len(value))
    log.debug("details that nobody asked for")
    time.sleep(float(value))
    if multigpu.context().attempt == 1:
        try:
            int("the first time")
        except ValueError:
            log.exception("it went wrong")
        raise RuntimeError("once more")
    log.warning("ends")
    return value


@multigpu.handler("logs.many")
def many(value: bytes) -> None:
    """Writes as many lines as the payload says."""
    for n in range(int(value)):
        multigpu.context().log.info("line %d of \ud800", n)
