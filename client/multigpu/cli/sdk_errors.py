"""Errors of the clients as Failures with the same message."""

import logging
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar, cast

import click

from multigpu import TaskError, errors
from multigpu.cli import show
from multigpu.cli.failures import Failure, NotFound, TasksFailed, Unreachable, WrongUsage
from multigpu.cli.options import load_config
from multigpu.config.config import ConfigError, TelemetryConfig

T = TypeVar("T")


def with_flags(text: str) -> str:
    """A message of the SDK or the master with the names of options replaced by this command's flags."""
    context = click.get_current_context(silent=True)
    flags = {flag for parameter in context.command.params for flag in parameter.opts} if context is not None else set()

    def flag_of(word: re.Match[str]) -> str:
        flag = "--" + word[0].replace("_", "-")
        return flag if flag in flags else word[0]

    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", flag_of, text)


@contextmanager
def failures() -> Iterator[None]:
    """Turns errors of a client into Failures."""
    try:
        yield
    except ConfigError as error:
        raise WrongUsage(str(error)) from error
    except (errors.UnavailableError, errors.CallTimeoutError) as error:
        raise Unreachable(str(error)) from error
    except errors.NotFoundError as error:
        raise NotFound(str(error)) from error
    except TaskError as error:
        raise TasksFailed(str(error)) from error
    except errors.AccessError as error:
        raise (WrongUsage if error.local else Failure)(str(error)) from error
    except errors.MultigpuError as error:
        raise Failure(with_flags(str(error))) from error


@contextmanager
def sdk_session() -> Iterator[None]:
    """`failures`, for commands that run tasks: in a span, and with the client's warnings on stderr."""
    from multigpu.daemon import telemetry  # noqa: PLC0415  it imports structlog

    logger = logging.getLogger("multigpu")
    handler = _StderrHandler(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with failures():
            command = click.get_current_context().command_path
            telemetry.configure_tracing(load_config(TelemetryConfig).config, {"service.name": "mgpuctl"})
            with telemetry.span(command):
                yield
    finally:
        telemetry.shut_down_tracing()
        logger.removeHandler(handler)
        logger.propagate = True


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        show.note(f"mgpuctl: {record.getMessage()}")


@contextmanager
def cancelled_at_end(items: Iterator[T]) -> Iterator[Iterator[T]]:
    """Closes an iterator of the SDK at the end of the block, which cancels its unfinished tasks."""
    with closing(cast("Any", items)):
        yield items
