"""Options that several commands have, and the settings that follow from them.

`--master` may stand before or after the command's name (`mgpuctl --master A status`, `mgpuctl status --master A`); the
nearer one wins, then MGPU_MASTER, then the config file.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from multigpu.cli.failures import WrongUsage
from multigpu.config import config
from multigpu.config import values as config_values

# click's messages use the name: "'x' is not a valid task id".
TASK_ID = click.IntRange(min=1)
TASK_ID.name = "task id"

# In seconds, 31 years.
NUMBER_MAX = 1_000_000_000

F = TypeVar("F", bound=Callable[..., Any])

MASTER_HELP = "The master's address.  [default: MGPU_MASTER, the config file, 127.0.0.1:7433]"
CONFIG_HELP = "TOML file to read.  [default: ~/.config/multigpu/config.toml, /etc/multigpu/config.toml]"


class _TaskIdOrOption(click.IntRange):
    """A task id of a command that has --request-id as well."""

    name = "task id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter as error:
            self.fail(f"{error.message.rstrip('.')}; a client's own id goes with --request-id", param, ctx)


class Number(click.FloatRange):
    """A number in a range that a timeout can hold: neither NaN nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not abs(found) <= NUMBER_MAX:  # true of NaN
            self.fail(f"{value!r} is not a number up to {NUMBER_MAX:,}.", param, ctx)
        return found


def parse_size(text: str) -> int:
    """Bytes, as in the configuration: 4096, 64MiB, 2GiB. For `click.option(type=parse_size)`."""
    try:
        return int(config_values.from_text(text, int, "size_bytes"))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def key_values(flag: str, entries: Sequence[str]) -> dict[str, str]:
    """The pairs of a repeated KEY=VALUE flag."""
    pairs = {}
    for entry in entries:
        key, mark, value = entry.partition("=")
        if not key or not mark:
            raise click.BadParameter(f"{entry!r} is not of the form KEY=VALUE", param_hint=flag)
        pairs[key] = value
    return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Globals:
    """The options before the command's name."""

    master: str | None = None


def _use_config(context: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    try:
        path = config.find_file(value, {})
    except config.ConfigError as error:
        raise WrongUsage(str(error)) from error
    before = os.environ.get(config.FILE_VARIABLE)
    os.environ[config.FILE_VARIABLE] = str(Path(str(path)).resolve())

    def restore() -> None:
        os.environ.pop(config.FILE_VARIABLE)
        if before is not None:
            os.environ[config.FILE_VARIABLE] = before

    if not context.resilient_parsing:  # completion calls the master after the context is closed
        context.call_on_close(restore)


# Sets MGPU_CONFIG, so that the SDK, threads and child processes read the file too.
config_option = click.option("--config", metavar="FILE", expose_value=False, callback=_use_config, help=CONFIG_HELP)


def load_config(cls: type[config.C], *, flags: dict[str, Any] | None = None) -> "config.Loaded[config.C]":
    """As config.load, but errors end the command as WrongUsage."""
    try:
        return config.load(cls, flags=flags)
    except config.ConfigError as error:
        raise WrongUsage(str(error)) from error


def client_config(master: str | None) -> config.ClientConfig:
    """The settings of a client with the flags of this command line."""
    before = click.get_current_context().find_object(Globals) or Globals()
    return load_config(config.ClientConfig, flags={"master": master or before.master}).config


def master_option(command: F) -> F:
    """Gives a command `--master`, and calls it with the address in force as `address`."""

    @functools.wraps(command)
    def with_address(*args: Any, master: str | None, **kwargs: Any) -> Any:
        return command(*args, address=client_config(master).master, **kwargs)

    option = click.option("--master", metavar="HOST:PORT", default=None, help=MASTER_HELP)
    return option(with_address)  # type: ignore[return-value]  # wraps changes the type; click reads only the parameters


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, for programs, instead of text for people."
)
queue_filter_option = click.option("--queue", default="", metavar="QUEUE", help="Only of this queue.")
priority_option = click.option(
    "--priority", type=click.IntRange(1, 5), default=3, show_default=True, help="1 is served first."
)
queue_option = click.option("--queue", default="", metavar="QUEUE", help="The queue to wait in.  [default: default]")
task_ids_argument = click.argument("task_ids", metavar="[TASK_ID]...", nargs=-1, type=_TaskIdOrOption(min=1))
request_ids_option = click.option(
    "--request-id", "request_ids", multiple=True, metavar="ID", help="The client's own id. May be repeated."
)


def worker_timeout_option(default_text: str, default: float | None = None) -> Callable[[F], F]:
    """`--wait-for-worker` as `wait_s`."""
    return click.option(
        "--wait-for-worker",
        "wait_s",
        type=Number(min=0),
        default=default,
        metavar="SECONDS",
        help=f"How long to wait for a master and a worker to appear.  [default: {default_text}]",
    )


def submit_options(command: F) -> F:
    """--queue, --priority and --wait-for-worker."""
    wait = worker_timeout_option("60 s; fails at once if workers are connected, and none serves this")
    return queue_option(priority_option(wait(command)))


def seconds_option(flag: str, help_: str) -> Callable[[F], F]:
    """A duration in seconds: --run-timeout is the parameter `run_timeout_s`."""
    name = flag.removeprefix("--").replace("-", "_") + "_s"
    return click.option(flag, name, type=Number(min=0), metavar="SECONDS", help=help_)


def limit_option(noun: str) -> Callable[[F], F]:
    return click.option(
        "--limit",
        type=click.IntRange(min=1),
        default=100,
        show_default=True,
        metavar="N",
        help=f"At most N {noun}.",
    )
