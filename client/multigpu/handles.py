"""Waiting for many TaskHandles of one Client. AsyncTaskHandles are awaitables: asyncio has these functions for them."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from multigpu._sync.handles import TaskHandle
    from multigpu.outcome import Outcome

R = TypeVar("R")


def as_completed(
    handles: Iterable[TaskHandle[R]], timeout: float | None = None
) -> Generator[TaskHandle[R], None, None]:
    """Yields the handles as their tasks end. `timeout`: the most seconds that the wait for each may take; then
    CallTimeoutError. Default: the client's.
    """
    return _follow(handles, ordered=False, timeout=timeout)


def gather(
    handles: Iterable[TaskHandle[R]], *, timeout: float | None = None, return_exceptions: bool = False
) -> list[R]:
    """Waits until all tasks have ended, and returns their results in the order of the handles.

    Raises the first TaskError; with `return_exceptions` it takes the place of the result. `timeout`: the most seconds
    that the call may take; then CallTimeoutError, and the tasks go on. Default: the client's.
    """
    results: list[Any] = []
    for handle in _follow(handles, ordered=True, timeout=timeout, total=True):
        outcome = handle.outcome()
        results.append(outcome.to_error() if return_exceptions and not outcome.succeeded else outcome.value())
    return results


def wait(handles: Iterable[TaskHandle[R]], timeout: float | None = None) -> list[Outcome]:
    """Waits until all tasks have ended, and returns their outcomes, whatever they are. `timeout`: as `gather`."""
    return [handle.outcome() for handle in _follow(handles, ordered=True, timeout=timeout, total=True)]


def _follow(
    handles: Iterable[TaskHandle[R]], *, ordered: bool, timeout: float | None, total: bool = False
) -> Generator[TaskHandle[R], None, None]:
    given = list(handles)
    if not given:
        return
    cores = {getattr(handle, "_core", None) for handle in given}
    core = cores.pop()
    if cores or not hasattr(core, "follow_all"):
        raise TypeError("give TaskHandles of one Client; asyncio.gather and asyncio.as_completed take AsyncTaskHandles")
    yield from core.follow_all(given, ordered, timeout, total)  # type: ignore[union-attr]  # checked above
