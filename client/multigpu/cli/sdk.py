"""From the SDK's errors to mgpuctl's: the same words, with an exit code. And no task left behind."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import click

from multigpu import errors
from multigpu.cli import show
from multigpu.cli.failures import Failure, NotFound, TasksFailed, Unreachable, WrongUsage
from multigpu.cli.options import load_config
from multigpu.config.config import ConfigError, TelemetryConfig
from multigpu.daemon import telemetry

T = TypeVar("T")


def with_flags(text: str) -> str:
    """What the SDK or the master says of an option, with the flag that this command has for it."""
    flags = {flag for parameter in click.get_current_context().command.params for flag in parameter.opts}

    def flag_of(word: re.Match[str]) -> str:
        flag = "--" + word[0].replace("_", "-")
        return flag if flag in flags else word[0]

    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", flag_of, text)


@contextmanager
def sdk_failures() -> Iterator[None]:
    """Ends the command with the exit code that belongs to an error of the SDK. What the SDK logs goes to stderr."""
    logger = logging.getLogger("multigpu")
    handler = _Notes(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        command = click.get_current_context().command_path
        telemetry.configure_tracing(load_config(TelemetryConfig).config, {"service.name": "mgpuctl"})
        with telemetry.span(command):
            yield
    except ConfigError as error:  # an endpoint is set, and its exporter is not installed
        raise WrongUsage(str(error)) from error
    except errors.UnavailableError as error:
        raise Unreachable(str(error)) from error
    except errors.NotFoundError as error:
        raise NotFound(str(error)) from error
    except errors.TaskError as error:
        raise TasksFailed(str(error)) from error
    except errors.AccessError as error:
        own = isinstance(error.__cause__, ConfigError)  # our token or certificate can't be read
        raise (WrongUsage if own else Failure)(str(error)) from error
    except errors.MultigpuError as error:
        raise Failure(with_flags(str(error))) from error
    finally:
        telemetry.shut_down_tracing()
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
