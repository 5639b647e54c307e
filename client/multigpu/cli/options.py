"""The options that commands share, and what they turn into: the address of a master, and how to print.

The address may be given before or after the command's name (`mgpuctl --master A status`, `mgpuctl status --master A`);
the nearer one wins, then MGPU_MASTER, then the config file.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from multigpu import config, config_values
from multigpu.cli.failures import Failure, WrongUsage

COMPLETION_TIMEOUT_S = 1.0

F = TypeVar("F", bound=Callable[..., Any])

MASTER_HELP = "The master's address.  [default: MGPU_MASTER, the config file, 127.0.0.1:7433]"
CONFIG_HELP = "TOML file to read.  [default: ~/.config/multigpu/config.toml, /etc/multigpu/config.toml]"


def key_values(flag: str, entries: Sequence[str]) -> dict[str, str]:
    """What a repeated KEY=VALUE flag says."""
    pairs = {}
    for entry in entries:
        key, mark, value = entry.partition("=")
        if not key or not mark:
            raise click.BadParameter(f"{entry!r} is not of the form KEY=VALUE", param_hint=flag)
        pairs[key] = value
    return pairs


def size(text: str) -> int:
    """Bytes, as the configuration writes them: 4096, 64MiB, 2GiB. For `click.option(type=size)`."""
    try:
        return int(config_values.from_text(text, int, "size_bytes"))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


class Number(click.FloatRange):
    """A number within limits. NaN, which every comparison lets through, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is no number.", param, ctx)
        return found


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


def complete_worker_id(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Worker ids for the shell's Tab. A master that doesn't answer quickly means no suggestions, and no noise."""
    from multigpu.cli.rpc import Master  # noqa: PLC0415  only Tab and the commands that call pay for grpc
    from multigpu.v1 import admin_service_pb2 as admin  # noqa: PLC0415

    before = context.find_object(Globals) or Globals()
    try:
        address = config.load(
            config.ClientConfig, file=before.config_file, flags={"master": before.master}
        ).config.master
        with Master(address) as master:
            request = admin.ListWorkersRequest(page_size=1000)
            answer = master.call(master.admin.ListWorkers, request, timeout_s=COMPLETION_TIMEOUT_S)
    except (Failure, config.ConfigError):
        return []
    return [worker.worker_id for worker in answer.workers if worker.worker_id.startswith(incomplete)]
