"""The options that commands share, and what they turn into: the address of a master, and how to print.

The address may be given before or after the command's name (`mgpuctl --master A status`, `mgpuctl status --master A`);
the nearer one wins, then MGPU_MASTER, then the config file.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from multigpu import config
from multigpu.cli.failures import WrongUsage

F = TypeVar("F", bound=Callable[..., Any])

MASTER_HELP = "The master's address.  [default: MGPU_MASTER, the config file, 127.0.0.1:7433]"
CONFIG_HELP = "TOML file to read.  [default: ~/.config/multigpu/config.toml, /etc/multigpu/config.toml]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Globals:
    """What stood before the command's name."""

    master: str | None = None
    config_file: str | None = None


def load_config(
    cls: type[config.C], *, file: str | None = None, flags: dict[str, Any] | None = None
) -> "config.Loaded[config.C]":
    """As config.load, with --config from before the command's name, and errors that end the command as WrongUsage."""
    before = click.get_current_context().find_object(Globals) or Globals()
    try:
        return config.load(cls, file=file or before.config_file, flags=flags)
    except config.ConfigError as error:
        raise WrongUsage(str(error)) from error


def client_config(master: str | None) -> config.ClientConfig:
    """What the SDK and the operator's calls need, from the flags of this command line."""
    before = click.get_current_context().find_object(Globals) or Globals()
    return load_config(config.ClientConfig, flags={"master": master or before.master}).config


def master_option(command: F) -> F:
    """Gives a command `--master`, and calls it with the address in force as `address`."""

    @functools.wraps(command)
    def with_address(*args: Any, master: str | None, **kwargs: Any) -> Any:
        return command(*args, address=client_config(master).master, **kwargs)

    option = click.option("--master", metavar="HOST:PORT", default=None, help=MASTER_HELP)
    return option(with_address)  # type: ignore[return-value]  # wraps changes the type; click reads only the parameters


def json_option(command: F) -> F:
    """Gives a command `--json`, as `as_json`."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print JSON, for programs, instead of text for people."
    )(command)
