"""Configuration: where the value of a setting comes from. `settings` has the settings themselves.

A value is looked for in four places, later ones win: the default, one TOML file, the environment, the flags. All pass
the same checks, and an error names the place. An unknown key is an error everywhere: a typo must not mean the default.

The environment's names are `MGPU_<FIELD>` for the client and `MGPU_<SECTION>_<FIELD>` for the rest. `MGPU_MASTER` is
the client's `master`; `MGPU_MASTER_LISTEN` is the master's `listen`: no client field may begin with a section's name.

Importing this module must be cheap: the daemons start in a fraction of a second.
"""

import dataclasses
import difflib
import os
import stat
import tomllib
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from multigpu.config.fields import Checked, Field, convert, fields_of, read_table, reject_unknown
from multigpu.config.old_names import worker_values
from multigpu.config.profiles import PROFILES
from multigpu.config.settings import (
    CONFIG_CLASSES,
    SECTIONS,
    ClientConfig,
    GatewayConfig,
    MasterConfig,
    TelemetryConfig,
    WorkerConfig,
    default_data_dir,
)  # fmt: skip
from multigpu.config.values import format_value, from_text, is_size
from multigpu.errors import ConfigError

__all__ = (
    "CONFIG_CLASSES", "ClientConfig", "ConfigError", "GatewayConfig", "Loaded", "MasterConfig", "TelemetryConfig",
    "WorkerConfig", "click_options", "default_data_dir", "find_file", "load", "load_client_config",
)  # fmt: skip

FILE_VARIABLE = "MGPU_CONFIG"
# Names with our prefix that are not settings: the file; a secret, which no list of settings shows; those of the deploy
# script and of the tests.
_NOT_SETTINGS = frozenset({FILE_VARIABLE, "MGPU_TOKEN", "MGPU_VENV", "MGPU_SHARED_DATA"})
# How similar an unknown variable must be to a known one to count as a typo.
_TYPO_SIMILARITY = 0.8

C = TypeVar("C", bound=Checked)
F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[C]):
    """A config and where each of its values came from: "default", a "profile …", the file's path, a variable's name, or
    "--flag". `remarks` say for the log which old variables have no effect.
    """

    config: C
    sources: dict[str, str]
    file: Path | None
    remarks: tuple[str, ...] = ()


def env_names(cls: type[Checked], field_name: str) -> tuple[str, ...]:
    """The environment variables that set a field, by precedence."""
    prefix = "MGPU_" if cls is ClientConfig else f"MGPU_{cls.section.upper()}_"
    return (prefix + field_name.upper(), *fields_of(cls)[field_name].metadata["also"])


def flag_name(field_name: str) -> str:
    """The command-line flag that sets a field."""
    return "--" + field_name.replace("_", "-")


def default_text(field: Field) -> str:
    """A field's default, for help texts and tables; empty if there is none."""
    text: str = field.metadata["default_text"]
    if text:
        return text
    return format_value(field.name, field.default_factory() if callable(field.default_factory) else field.default)


def load(
    cls: type[C],
    *,
    file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Loaded[C]:
    """The config of one program. `file`: from --config; `flags`: field name to text, None for flags not given.

    Raises ConfigError.
    """
    env = os.environ if env is None else env
    path = find_file(file, env)
    from_file = _read_file(path, cls) if path is not None else {}
    _reject_unknown_env(env)
    given = {name: value for name, value in (flags or {}).items() if value is not None and value != ()}
    fields = fields_of(cls)
    try:
        reject_unknown(given, fields, "flag", render=flag_name)
    except ValueError as error:
        raise ConfigError(str(error)) from error

    values = dict(from_file)
    sources = dict.fromkeys(fields, "default") | dict.fromkeys(values, str(path))

    def put(name: str, text: str, source: str) -> None:
        try:
            values[name] = convert(cls, name, text, from_text)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from error
        sources[name] = source

    for name in fields:
        variable = next((variable for variable in env_names(cls, name) if variable in env), None)
        if variable is not None:
            put(name, env[variable], variable)
    for name, value in given.items():
        put(name, ",".join(value) if isinstance(value, tuple) else str(value), flag_name(name))
    remarks: tuple[str, ...] = ()
    if cls is WorkerConfig:
        old, remarks = worker_values(env)
        for name, (text, variable) in old.items():
            if sources[name] == "default":
                put(name, text, variable)
        profile = str(values.get("profile", fields["profile"].default))
        for name, value in PROFILES[profile].items():
            if sources[name] == "default":
                values[name], sources[name] = value, f"profile {profile}"
    return Loaded(config=cls(**values), sources=sources, file=path, remarks=remarks)


def load_client_config() -> ClientConfig:
    """The client's config from the file and the environment. Raises ConfigError."""
    return load(ClientConfig).config


def find_file(file: str | Path | None, env: Mapping[str, str]) -> Path | None:
    """The one file to read: --config, MGPU_CONFIG, the user's, the host's. None if there is none."""
    for asked, origin in ((file, "--config"), (env.get(FILE_VARIABLE), FILE_VARIABLE)):
        if asked:
            path = Path(asked).expanduser()
            if not _is_file(path):
                raise ConfigError(f"{origin} names {path}, which is not a file: create it, or leave {origin} out")
            return path
    home = Path(env.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    candidates = (home / "multigpu" / "config.toml", Path("/etc/multigpu/config.toml"))
    return next((path for path in candidates if _is_file(path)), None)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # such as the host's file, in a folder that only root and the services may read
        remedy = "run this as root or as the user multigpu, or name a file of your own in MGPU_CONFIG"
        raise ConfigError(f"can't look for {path}: {error.strerror}; {remedy}") from error


def click_options(cls: type[Checked]) -> Callable[[F], F]:
    """Gives a click command `--config` (as `config_file`) and one flag a field, to be passed to `load`."""
    import click  # noqa: PLC0415  the client does without it

    hints = typing.get_type_hints(cls)

    def decorate(command: F) -> F:
        for name, field in reversed(fields_of(cls).items()):
            flag = flag_name(name)
            declaration = f"{flag}/--no-{flag.removeprefix('--')}" if hints[name] is bool else flag
            default = default_text(field)
            text = field.metadata["help"] + (f"  [default: {default}]" if default else "")
            multiple = typing.get_origin(hints[name]) in (tuple, dict)
            metavar = _metavar(field, hints[name])
            option = click.option(declaration, name, default=None, multiple=multiple, help=text, metavar=metavar)
            command = option(command)
        text = "TOML file to read.  [default: ~/.config/multigpu/config.toml, /etc/multigpu/config.toml]"
        return click.option("--config", "config_file", default=None, metavar="FILE", help=text)(command)

    return decorate


def _metavar(field: Field, hint: Any) -> str | None:
    if field.metadata["choices"]:
        return "|".join(field.metadata["choices"])
    if hint is bool:
        return None
    if hint is int and is_size(field.name):
        return "SIZE"
    names = {int: "N", float: "SECONDS" if field.name.endswith("_s") else "NUMBER", Path: "PATH", str: "TEXT"}
    return names.get(hint, "KEY=VALUE,…" if typing.get_origin(hint) is dict else "A,B,…")


def _read_file(path: Path, cls: type[Checked]) -> dict[str, Any]:
    """The values of a config's section. The keys of all sections must be known, also those of other programs."""
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} must be a section: write [{section}] on a line of its own")
    where = f"{path}:"
    try:
        reject_unknown(tables, SECTIONS, "section")
        for section, table in tables.items():
            where = f"{path}: [{section}]"
            reject_unknown(table, fields_of(SECTIONS[section]), "key")
        where = f"{path}: [{cls.section}]"
        return read_table(cls, tables.get(cls.section, {}))
    except ValueError as error:
        raise ConfigError(f"{where} {error}") from error


def _reject_unknown_env(env: Mapping[str, str]) -> None:
    """Under a section's prefix every name must be known. Elsewhere under MGPU_ only likely typos are rejected: other
    programs may use the prefix too.
    """
    known = {variable for cls in CONFIG_CLASSES for name in fields_of(cls) for variable in env_names(cls, name)}
    prefixes = tuple(f"MGPU_{section.upper()}_" for section in SECTIONS if section != ClientConfig.section)
    for name in env:
        if not name.startswith("MGPU_") or name in known or name in _NOT_SETTINGS:
            continue
        nearest = difflib.get_close_matches(name, sorted(known | _NOT_SETTINGS), n=1, cutoff=_TYPO_SIMILARITY)
        if nearest or name.startswith(prefixes):
            remedy = f"did you mean {nearest[0]}? If it is not for multigpu, unset it" if nearest else "unset it"
            raise ConfigError(f"unknown environment variable {name}; {remedy}")
