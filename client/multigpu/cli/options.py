"""The options that commands share, and what they turn into: the address of a master, and how to print.

The address may be given before or after the command's name (`mgpuctl --master A status`, `mgpuctl status --master A`);
the nearer one wins, then MGPU_MASTER, then the config file.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from multigpu.cli.failures import Failure, WrongUsage
from multigpu.config import config
from multigpu.config import values as config_values

COMPLETION_TIMEOUT_S = 1.0

# Its name is what click says of a wrong one: "'x' is not a valid task id".
TASK_ID = click.IntRange(min=1)
TASK_ID.name = "task id"


class _TaskIdOrOption(click.IntRange):
    """A task id of a command that has --request-id as well."""

    name = "task id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter as error:
            self.fail(f"{error.message.rstrip('.')}; a client's own id goes with --request-id", param, ctx)


TASK_ID_OR_OPTION = _TaskIdOrOption(min=1)

# In seconds, 31 years.
NUMBER_MAX = 1_000_000_000

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
    """A number within limits, and one that fits a span of time: neither NaN nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not abs(found) <= NUMBER_MAX:  # true of NaN
            self.fail(f"{value!r} is not a number up to {NUMBER_MAX:,}.", param, ctx)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Globals:
    """What stood before the command's name."""

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

    if not context.resilient_parsing:  # a completion asks the master after it has closed the context
        context.call_on_close(restore)


# Sets MGPU_CONFIG for this process and those that it starts: the SDK, threads and children read the file too.
config_option = click.option("--config", metavar="FILE", expose_value=False, callback=_use_config, help=CONFIG_HELP)


def load_config(cls: type[config.C], *, flags: dict[str, Any] | None = None) -> "config.Loaded[config.C]":
    """As config.load, with errors that end the command as WrongUsage."""
    try:
        return config.load(cls, flags=flags)
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


def wait_option(command: F) -> F:
    """Gives a command --queue, --priority and --wait-for-worker, the last as `wait_s`: None where it is not given."""
    for option in (
        click.option(
            "--wait-for-worker", "wait_s", type=Number(min=0), metavar="SECONDS",
            help="How long to wait for a master and a worker to appear.  [default: 60; 0 where workers serve others]",
        ),
        click.option("--priority", type=click.IntRange(1, 5), default=3, show_default=True, help="1 is served first."),
        click.option("--queue", default="", metavar="QUEUE", help="The queue to wait in.  [default: default]"),
    ):  # fmt: skip
        command = option(command)
    return command


def json_option(command: F) -> F:
    """Gives a command `--json`, as `as_json`."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print JSON, for programs, instead of text for people."
    )(command)


def complete_worker_id(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Worker ids for the shell's Tab. A master that doesn't answer quickly means no suggestions, and no noise."""
    from multigpu.cli.rpc import Master  # noqa: PLC0415  only Tab and the commands that call pay for grpc
    from multigpu.v1 import admin_service_pb2 as admin  # noqa: PLC0415

    master_flag = context.params.get("master") or context.find_root().params.get("master")
    try:
        address = config.load(config.ClientConfig, flags={"master": master_flag}).config.master
        with Master(address) as master:
            request = admin.ListWorkersRequest(page_size=1000)
            answer = master.call(master.admin.ListWorkers, request, timeout_s=COMPLETION_TIMEOUT_S)
    except (Failure, config.ConfigError):
        return []
    return [worker.worker_id for worker in answer.workers if worker.worker_id.startswith(incomplete)]
