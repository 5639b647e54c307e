"""The SDK's errors as Failures with the same message."""

import logging
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar, cast

import click

from multigpu import errors
from multigpu.cli import show
from multigpu.cli.failures import Failure, NotFound, TasksFailed, Unreachable, WrongUsage
from multigpu.cli.options import load_config
from multigpu.config.config import ConfigError, TelemetryConfig
from multigpu.daemon import telemetry

T = TypeVar("T")


def with_flags(text: str) -> str:
    """A message of the SDK or the master with the names of options replaced by this command's flags."""
    flags = {flag for parameter in click.get_current_context().command.params for flag in parameter.opts}

    def flag_of(word: re.Match[str]) -> str:
        flag = "--" + word[0].replace("_", "-")
        return flag if flag in flags else word[0]

    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", flag_of, text)


@contextmanager
def sdk_failures() -> Iterator[None]:
    """Turns errors of the SDK into Failures, and prints its warnings to stderr."""
    logger = logging.getLogger("multigpu")
    handler = _Notes(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        command = click.get_current_context().command_path
        telemetry.configure_tracing(load_config(TelemetryConfig).config, {"service.name": "mgpuctl"})
        with telemetry.span(command):
            yield
    except ConfigError as error:  # an endpoint is set, but its exporter is not installed
        raise WrongUsage(str(error)) from error
    except errors.UnavailableError as error:
        raise Unreachable(str(error)) from error
    except errors.NotFoundError as error:
        raise NotFound(str(error)) from error
    except errors.TaskError as error:
        raise TasksFailed(str(error)) from error
    except errors.AccessError as error:
        own = isinstance(error.__cause__, ConfigError)  # the client's own token or certificate can't be read
        raise (WrongUsage if own else Failure)(str(error)) from error
    except errors.MultigpuError as error:
        raise Failure(with_flags(str(error))) from error
    finally:
        telemetry.shut_down_tracing()
        logger.removeHandler(handler)
        logger.propagate = True


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        show.note(f"mgpuctl: {record.getMessage()}")


@contextmanager
def cancelled_at_end(items: Iterator[T]) -> Iterator[Iterator[T]]:
    """Closes an iterator of the SDK at the end of the block, which cancels its unfinished tasks."""
    with closing(cast("Any", items)):
        yield items
