"""From the SDK's errors to mgpuctl's: the same words, with an exit code. And no task left behind."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from multigpu import errors
from multigpu.cli import show
from multigpu.cli.failures import Failure, NotFound, TasksFailed, Unreachable

T = TypeVar("T")


@contextmanager
def sdk_failures() -> Iterator[None]:
    """Ends the command with the exit code that belongs to an error of the SDK. What the SDK logs goes to stderr."""
    logger = logging.getLogger("multigpu")
    handler = _Notes(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    except errors.UnavailableError as error:
        raise Unreachable(str(error)) from error
    except errors.NotFoundError as error:
        raise NotFound(str(error)) from error
    except errors.TaskError as error:
        raise TasksFailed(str(error)) from error
    except errors.MultigpuError as error:
        raise Failure(str(error)) from error
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


class _Notes(logging.Handler):
    """A broken stream, say: worth a line while a person waits."""

    def emit(self, record: logging.LogRecord) -> None:
        show.note(f"mgpuctl: {record.getMessage()}")


@contextmanager
def withdrawn_at_end(items: Iterator[T]) -> Iterator[Iterator[T]]:
    """An iterator of the SDK that cancels what it started when the block is left early, for whatever reason."""
    try:
        yield items
    finally:
        close = getattr(items, "close", None)
        assert close is not None, "the SDK's iterators are generators"
        close()
