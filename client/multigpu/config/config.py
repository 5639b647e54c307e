"""Configuration: what can be set, where a value comes from, and errors that name the remedy.

Each program has one frozen dataclass; a field is a setting, and its metadata carries the help text and the range. A
value is looked for in four places, the later ones winning: the default here, one TOML file, the environment, the flags.
All four pass through the same checks, so that a wrong value is rejected with the place it came from. An unknown key is
an error too, wherever it stands: a typo that silently means "the default" is the dearest kind.

The environment's names are `MGPU_<FIELD>` for the client and `MGPU_<SECTION>_<FIELD>` for the rest. `MGPU_MASTER` is
the client's `master`; `MGPU_MASTER_LISTEN` is the master's `listen`: no client field may begin with a section's name.
How values are written and read is in `values`; what a worker takes from variables of other names, in
`old_names`; what its profile means, in `profiles`.

Importing this module is cheap on purpose: the daemons start in a fraction of a second.
"""

import dataclasses
import difflib
import math
import os
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from multigpu.config.old_names import OldNameError, OldValues, worker_values
from multigpu.config.profiles import PROFILES
from multigpu.config.values import (
    GIB,
    KIB,
    MIB,
    check_address,
    check_device,
    check_models,
    check_tcp_address_or_off,
    format_value,
    from_text,
    from_toml,
    is_size,
)
from multigpu.errors import ConfigError as ConfigError  # noqa: PLC0414  imported from here too

# Names with our prefix that are not settings: where the file is; a secret, which no list of settings shows; the deploy
# script's; the tests'.
FILE_VARIABLE = "MGPU_CONFIG"
_NOT_SETTINGS = frozenset({FILE_VARIABLE, "MGPU_TOKEN", "MGPU_VENV", "MGPU_SHARED_DATA"})
# How alike two names must be for one to be taken as a slip of the other.
_TYPO_LIKENESS = 0.8


def _help(text: str, *, minimum: float | None = None, maximum: float | None = None, **more: Any) -> dict[str, Any]:
    """A setting's metadata. `more`: `choices` (allowed values), `check` (raises ValueError), `default_text` (for
    defaults that are computed), `also` (further environment names, of less weight).
    """
    return {"help": text, "minimum": minimum, "maximum": maximum, **more}


def _setting(default: Any, text: str, **limits: Any) -> Any:
    return dataclasses.field(default=default, metadata=_help(text, **limits))


def _log_level() -> Any:
    return _setting("info", "The least serious log lines to write.", choices=("debug", "info", "warning", "error"))


def _log_format() -> Any:
    text = 'How log lines look. "auto": "console" on a terminal, "journald" under systemd, else "json".'
    return _setting("auto", text, choices=("auto", "json", "console", "journald"))


def _tls_ca(**more: Any) -> Any:
    return _setting("", "File of the authority of the master's certificate. Empty: no TLS.", **more)


def default_data_dir() -> Path:
    """Where the master keeps its journal: /var/lib/multigpu for root, the user's XDG state folder otherwise."""
    if os.geteuid() == 0:
        return Path("/var/lib/multigpu")
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "multigpu"


class _Checked:
    """Rejects values out of range however a config is built: by `load` or directly, as tests do."""

    __slots__ = ()
    section: ClassVar[str]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            _check(field, getattr(self, field.name), f"{type(self).__name__}.{field.name}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig(_Checked):
    """What a client and mgpuctl need to know."""

    section: ClassVar[str] = "client"

    master: str = _setting("127.0.0.1:7433", "The master's address.", check=check_address)
    window_tasks: int = _setting(8192, "Most unsettled tasks a client has under way.", minimum=1, maximum=1_000_000)
    window_bytes: int = _setting(64 * MIB, "Most payload bytes of unsettled tasks.", minimum=MIB)
    tls_ca: str = _tls_ca()
    tls_cert: str = _setting("", "File of the own certificate, for a master that asks for one.")
    tls_key: str = _setting("", "File of its key.")
    token_file: str = _setting("", "File of the token to show the master. MGPU_TOKEN holds a token itself.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MasterConfig(_Checked):
    """What mgpu-master needs to know."""

    section: ClassVar[str] = "master"

    listen: str = _setting("127.0.0.1:7433", "Where clients and workers connect. Port 0: any.", check=check_address)
    data_dir: Path = dataclasses.field(
        default_factory=default_data_dir,
        metadata=_help(
            "Folder of the journal. One master at a time.",
            default_text="/var/lib/multigpu for root, else $XDG_STATE_HOME/multigpu",
        ),
    )
    metrics_listen: str = _setting("", "Where Prometheus may scrape. Empty: off.", check=check_tcp_address_or_off)
    tls_cert: str = _setting("", "File of the master's certificate. Empty: no TLS, and loopback only.")
    tls_key: str = _setting("", "File of its key.")
    tls_client_ca: str = _setting("", "File of the authority whose certificates callers must show. Empty: none needed.")
    require_tokens: bool = _setting(False, "Whether callers need a token (`mgpuctl tokens`).")
    token_calls_max: int = _setting(500, "Most calls and streams open with one token.", minimum=1)
    insecure: bool = _setting(False, "Listen where other hosts reach it without TLS and tokens: let in everybody.")
    strategy: str = _setting("auto", "The fleet's strategy until one is set with `mgpuctl strategy set`.")
    memory_threshold_percent: float = _setting(
        80.0, "Above this share of its memory a device gets nothing new (memory_usage).", minimum=1, maximum=100
    )
    heartbeat_interval_s: float = _setting(1.0, "How often a worker tells how it is.", minimum=0.01, maximum=60)
    session_timeout_s: float = _setting(5.0, "A worker silent for longer is lost.", minimum=0.05, maximum=3600)
    reconnect_grace_s: float = _setting(
        3.0, "How long a new master waits for workers to bring back the leases they hold.", minimum=0, maximum=600
    )
    breaker_share: float = _setting(
        0.3, "Past this share of the devices no more sick ones are quarantined without a person.", minimum=0, maximum=1
    )
    breaker_window_s: float = _setting(600.0, "Within how long they fell sick.", minimum=1, maximum=86_400)
    queue_tasks_max: int = _setting(10_000_000, "Most unsettled tasks in all; more are rejected.", minimum=1)
    queue_bytes_max: int = _setting(4 * GIB, "Most payload and partial output bytes of unsettled tasks.", minimum=MIB)
    payload_bytes_max: int = _setting(32 * MIB, "Largest payload of one task.", minimum=KIB, maximum=60 * MIB)
    submit_tasks_max: int = _setting(10_000, "Most tasks in one Submit.", minimum=1, maximum=1_000_000)
    result_ttl_max_s: float = _setting(
        30 * 86_400.0, "Longest result_ttl of a task: until then its outcome takes room on the disk.", minimum=86_400
    )
    stream_bytes_max: int = _setting(128 * MIB, "Outcomes a client may leave unread on a stream.", minimum=MIB)
    ephemeral_bytes_max: int = _setting(256 * MIB, "Results of ephemeral tasks kept in memory.", minimum=MIB)
    journal_bytes_max: int = _setting(
        64 * GIB,
        "From so many bytes on disk on (database, log, segments, payload files, reserve) durable submits are rejected. "
        "Outcomes are still written.",
        minimum=MIB,
    )
    share_payloads: bool = _setting(True, "Whether clients and workers on this host may share large payloads as files.")
    stop_timeout_s: float = _setting(10.0, "How long a stop may take.", minimum=0.1, maximum=600)
    log_level: str = _log_level()
    log_format: str = _log_format()

    def __post_init__(self) -> None:
        """Checks what no field can check alone."""
        _Checked.__post_init__(self)
        if self.session_timeout_s < 2 * self.heartbeat_interval_s:
            raise ConfigError(
                f"session_timeout_s ({self.session_timeout_s:g}) must be at least twice heartbeat_interval_s "
                f"({self.heartbeat_interval_s:g}), or a single late heartbeat loses a worker"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(_Checked):
    """What mgpu-worker needs to know."""

    section: ClassVar[str] = "worker"

    master: str = _setting("127.0.0.1:7433", "The master's address.", check=check_address, also=("MGPU_MASTER",))
    tls_ca: str = _tls_ca(also=("MGPU_TLS_CA",))
    tls_cert: str = _setting("", "File of the worker's certificate, for a master that asks for one.")
    tls_key: str = _setting("", "File of its key.")
    token_file: str = _setting("", "File of the worker's token.")
    device: str = _setting(
        "auto", 'The device to own: "cpu", "cuda:N", the UUID of a GPU or MIG instance, or "auto".', check=check_device
    )
    worker_id: str = _setting("", "The worker's stable name.", default_text="host and device")
    labels: dict[str, str] = dataclasses.field(
        default_factory=dict, metadata=_help("Labels that tasks may require, as KEY=VALUE.")
    )
    slots: int = _setting(1, "Tasks a handler engine runs at once.", minimum=1, maximum=1024)
    window_tasks: int = _setting(1024, "Most leases held at once.", minimum=1, maximum=1_000_000)
    window_bytes: int = _setting(64 * MIB, "Most payload bytes of leases held at once.", minimum=MIB)
    handlers: tuple[str, ...] = _setting((), "Python modules whose @multigpu.handler functions to serve.")
    models: tuple[str, ...] = _setting(
        (), "Models to serve, as NAME=PATH; the first is the default.", check=check_models
    )
    default_model: str = _setting(
        "", "The model for tasks that name none. Empty: the first that the worker finds at its start."
    )
    model_repository: str = _setting("", "Folder of models, each in a folder of its own (docs/models.md). Empty: none.")
    repository_poll_s: float = _setting(
        5.0, "How often to look whether models came, went or changed there. 0: only when told.", minimum=0
    )
    model_memory_bytes: int = _setting(
        0,
        "Most device memory of loaded models together. 0: this worker's part of 90 % of a GPU's, or of half of the "
        "host's for a CPU.",
        minimum=0,
    )
    device_workers: int = _setting(
        1,
        "How many workers share the device; each takes such a part of its memory for models.",
        minimum=1,
        maximum=1024,
    )
    engine: str = _setting(
        "auto", "What runs models that don't say it themselves.", choices=("auto", "torch", "onnx", "tensorrt")
    )
    precision: str = _setting(
        "auto",
        "The precision of models that don't say it themselves.",
        choices=("auto", "fp32", "tf32", "bf16", "fp16", "int8", "fp8"),
    )
    artifacts_dir: str = _setting(
        "",
        "Folder for plans, exports and other things that are expensive to make; workers of one host may share it.",
        default_text="$XDG_CACHE_HOME/multigpu",
    )
    artifacts_bytes_max: int = _setting(10 * GIB, "Most bytes in it.", minimum=MIB)
    profile: str = _setting(
        "balanced",
        "What batches are put together for: as much as possible in all, as soon as possible each, or between the two.",
        choices=tuple(PROFILES),
    )
    batch_delay_s: float = _setting(
        0.0, "How long a batch may wait to grow while the engine is idle.", minimum=0, maximum=10
    )
    threads: int = _setting(0, "Threads of the engine. 0: as many as it likes.", minimum=0, maximum=4096)
    batch_tasks_max: int = _setting(256, "Most tasks in one batch.", minimum=1, maximum=65_536)
    batch_tokens_max: int = _setting(16_384, "Most tokens in one batch, as estimated.", minimum=1)
    embedding_cache_entries: int = _setting(
        0, "Most vectors that the embedding cache remembers, in memory and in its file each. 0: off.", minimum=0
    )
    embedding_cache_bytes_max: int = _setting(256 * MIB, "Most bytes of them, in each.", minimum=MIB)
    embedding_cache_ttl_s: float = _setting(0.0, "How long a vector is remembered. 0: while there is room.", minimum=0)
    embedding_cache_file: str = _setting(
        "", "File that keeps vectors over restarts; workers of one host may share it. Empty: memory alone."
    )
    engine_memory_bytes: int = _setting(
        0, "Most memory of the engine process. 0: 80 % of the host's for a CPU worker, else no limit.", minimum=0
    )
    progress_timeout_s: float = _setting(0.0, "Ends an engine that makes no progress for so long. 0: off.", minimum=0)
    canary_interval_s: float = _setting(
        600.0, "How often an idle engine with torch computes something whose answer is known. 0: never.", minimum=0
    )
    cancel_grace_s: float = _setting(5.0, "How long a cancelled task may go on before its engine is ended.", minimum=0)
    drain_timeout_s: float = _setting(30.0, "How long held leases may still run after SIGTERM.", minimum=0)
    result_bytes_max: int = _setting(
        64 * MIB - 64 * KIB, "Largest result of one task. A message holds no more than the default.", minimum=KIB
    )
    stats_file: str = _setting("", "File to append a JSON line about the device to, at an interval. Empty: none.")
    stats_interval_s: float = _setting(60.0, "How often.", minimum=0.1)
    mps: str = _setting(
        "auto",
        'Whether engines share a GPU by NVIDIA\'s MPS. "auto": where it is possible; "on": or reject to start.',
        choices=("auto", "on", "off"),
    )
    mps_active_thread_percentage: float = _setting(
        0.0, "Most of the GPU's threads that an engine may use. 0: no limit.", minimum=0, maximum=100
    )
    mps_pinned_device_mem_limit_bytes: int = _setting(
        0, "Most of the GPU's memory that an engine may use under MPS. 0: no limit.", minimum=0
    )
    mps_terminate_timeout_s: float = _setting(
        20.0,
        "How long MPS may take to let go of an engine that is to be ended; then the GPU's MPS server is shut down.",
        minimum=0.1,
        maximum=600,
    )
    mps_pipe_dir: str = _setting(
        "",
        "Folder with a pipe directory for each GPU, named by its UUID.",
        default_text="/run/multigpu/mps for root, else $XDG_RUNTIME_DIR/multigpu/mps",
    )
    log_level: str = _log_level()
    log_format: str = _log_format()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig(_Checked):
    """Where traces and metrics go. The same for every program."""

    section: ClassVar[str] = "telemetry"

    otlp_endpoint: str = _setting("", "OTLP/gRPC collector, such as http://127.0.0.1:4317. Empty: off.")
    trace_sample_ratio: float = _setting(0.0, "Share of traces to record.", minimum=0, maximum=1)
    service_name: str = _setting("", "How this program calls itself.", default_text="the program's name")


CONFIG_CLASSES: tuple[type[_Checked], ...] = (ClientConfig, MasterConfig, WorkerConfig, TelemetryConfig)
_SECTIONS = {cls.section: cls for cls in CONFIG_CLASSES}

C = TypeVar("C", bound=_Checked)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[C]):
    """A config and where each of its values came from: "default", a "profile …", the file's path, a variable's name, or
    "--flag". `remarks` say for the log what was set and can't be followed.
    """

    config: C
    sources: dict[str, str]
    file: Path | None
    remarks: tuple[str, ...] = ()


def env_names(cls: type[_Checked], field_name: str) -> tuple[str, ...]:
    """The environment variables that set a field, the weightiest first."""
    prefix = "MGPU_" if cls is ClientConfig else f"MGPU_{cls.section.upper()}_"
    return (prefix + field_name.upper(), *_fields(cls)[field_name].metadata.get("also", ()))


def flag_name(field_name: str) -> str:
    """The command-line flag that sets a field."""
    return "--" + field_name.replace("_", "-")


def default_text(field: dataclasses.Field[Any]) -> str:
    """A field's default, in words for help texts and tables; empty if there is none to speak of."""
    if "default_text" in field.metadata:
        return str(field.metadata["default_text"])
    value = field.default_factory() if callable(field.default_factory) else field.default
    return format_value(field.name, value)


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
    tables = _read_file(path) if path is not None else {}
    _reject_unknown_env(env)
    flags = {name: value for name, value in (flags or {}).items() if value is not None and value != ()}
    fields = _fields(cls)
    _reject_unknown(flags, fields, "flag", render=flag_name)

    values: dict[str, Any] = {}
    sources = dict.fromkeys(fields, "default")
    hints = typing.get_type_hints(cls)
    for name, value in tables.get(cls.section, {}).items():
        where = f"{path}: [{cls.section}] {name}"
        values[name], sources[name] = _convert(from_toml, value, fields[name], hints[name], where), str(path)
    for name in fields:
        for variable in env_names(cls, name):
            if variable in env:
                values[name] = _convert(from_text, env[variable], fields[name], hints[name], variable)
                sources[name] = variable
                break
    for name, value in flags.items():
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        values[name] = _convert(from_text, text, fields[name], hints[name], flag_name(name))
        sources[name] = flag_name(name)
    remarks = _fill_up(values, sources, env) if cls is WorkerConfig else ()
    return Loaded(config=cls(**values), sources=sources, file=path, remarks=remarks)


def _fill_up(values: dict[str, Any], sources: dict[str, str], env: Mapping[str, str]) -> tuple[str, ...]:
    """A worker's settings that were set nowhere: from variables of other names, then as the profile says."""
    fields, hints = _fields(WorkerConfig), typing.get_type_hints(WorkerConfig)
    try:
        old: OldValues = worker_values(env)
    except OldNameError as error:
        raise ConfigError(str(error)) from error
    for name, (text, variable) in old.values.items():
        if sources[name] == "default":
            values[name] = _convert(from_text, text, fields[name], hints[name], variable)
            sources[name] = variable
    profile = values.get("profile", fields["profile"].default)
    for name, value in PROFILES[profile].items():
        if sources[name] == "default":
            values[name], sources[name] = value, f"profile {profile}"
    return tuple(old.remarks)


def load_client_config() -> ClientConfig:
    """The client's config from the file and the environment. Raises ConfigError."""
    return load(ClientConfig).config


def find_file(file: str | Path | None, env: Mapping[str, str]) -> Path | None:
    """The one file to read: --config, MGPU_CONFIG, the user's, the host's. None if nobody wrote one."""
    for asked, origin in ((file, "--config"), (env.get(FILE_VARIABLE), FILE_VARIABLE)):
        if asked:
            path = Path(asked).expanduser()
            if not path.is_file():
                raise ConfigError(f"{origin} names {path}, which is not a file: create it, or leave {origin} out")
            return path
    home = Path(env.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    candidates = (home / "multigpu" / "config.toml", Path("/etc/multigpu/config.toml"))
    try:
        return next((path for path in candidates if path.is_file()), None)
    except PermissionError as error:  # the host's lies in a folder of root and the services
        remedy = "run this as root or as the user multigpu, or name a file of your own in MGPU_CONFIG"
        raise ConfigError(f"can't look for {error.filename}: {error.strerror}; {remedy}") from error


F = TypeVar("F", bound=Callable[..., Any])


def click_options(cls: type[_Checked]) -> Callable[[F], F]:
    """Gives a click command `--config` (as `config_file`) and one flag a field, to hand to `load` as they come."""
    import click  # noqa: PLC0415 - the client has no use for it

    hints = typing.get_type_hints(cls)

    def decorate(command: F) -> F:
        for name, field in reversed(_fields(cls).items()):
            declaration = flag_name(name)
            if hints[name] is bool:
                declaration += "/--no-" + name.replace("_", "-")
            default = default_text(field)
            text = field.metadata["help"] + (f"  [default: {default}]" if default else "")
            multiple = typing.get_origin(hints[name]) in (tuple, dict)
            command = click.option(
                declaration,
                name,
                default=None,
                multiple=multiple,
                help=text,
                metavar=_metavar(field, hints[name]),
            )(command)
        text = "TOML file to read.  [default: ~/.config/multigpu/config.toml, /etc/multigpu/config.toml]"
        return click.option("--config", "config_file", default=None, metavar="FILE", help=text)(command)

    return decorate


def _metavar(field: dataclasses.Field[Any], hint: Any) -> str | None:
    if "choices" in field.metadata:
        return "|".join(field.metadata["choices"])
    if hint is bool:
        return None
    if hint is int and is_size(field.name):
        return "SIZE"
    names = {int: "N", float: "SECONDS" if field.name.endswith("_s") else "NUMBER", Path: "PATH", str: "TEXT"}
    return names.get(hint, "KEY=VALUE,…" if typing.get_origin(hint) is dict else "A,B,…")


def _fields(cls: type[_Checked]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # always a dataclass


def _read_file(path: Path) -> dict[str, dict[str, Any]]:
    """The file's tables. Every key of every section must be known, not only those of the program that asks."""
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    _reject_unknown(tables, _SECTIONS, f"section in {path}")
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} must be a section: write [{section}] on a line of its own")
        _reject_unknown(table, _fields(_SECTIONS[section]), f"key in {path}, section [{section}]")
    return tables


def _reject_unknown(given: Iterable[str], known: Iterable[str], what: str, render: Callable[[str], str] = str) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            remedy = f"did you mean {render(nearest[0])}?" if nearest else f"known: {', '.join(map(render, known))}"
            raise ConfigError(f"unknown {what}: {render(name)}; {remedy}")


def _reject_unknown_env(env: Mapping[str, str]) -> None:
    """Under a section's prefix every name must be known. Elsewhere under MGPU_ only what looks like a slip is rejected:
    other programs may use the prefix too.
    """
    known = {variable for cls in CONFIG_CLASSES for name in _fields(cls) for variable in env_names(cls, name)}
    prefixes = tuple(f"MGPU_{section.upper()}_" for section in _SECTIONS if section != ClientConfig.section)
    for name in env:
        if not name.startswith("MGPU_") or name in known or name in _NOT_SETTINGS:
            continue
        nearest = difflib.get_close_matches(name, sorted(known | _NOT_SETTINGS), n=1, cutoff=_TYPO_LIKENESS)
        if nearest or name.startswith(prefixes):
            remedy = f"did you mean {nearest[0]}? If it is not for multigpu, unset it" if nearest else "unset it"
            raise ConfigError(f"unknown environment variable {name}; {remedy}")


def _convert(
    convert: Callable[[Any, Any, str], Any], value: Any, field: dataclasses.Field[Any], hint: Any, where: str
) -> Any:
    try:
        converted = convert(value, hint, field.name)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: {error}") from error
    _check(field, converted, where)
    return converted


def _check(field: dataclasses.Field[Any], value: Any, where: str) -> None:
    limits = field.metadata
    kind = {str: "a string", int: "a whole number"}.get(type(field.default))
    if kind is not None and not isinstance(value, type(field.default)):
        raise ConfigError(f"{where}: {value!r} is not {kind}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {value} is not a finite number")
    if limits["minimum"] is not None and value < limits["minimum"]:
        raise ConfigError(f"{where}: {value} is too small: at least {format_value(field.name, limits['minimum'])}")
    if limits["maximum"] is not None and value > limits["maximum"]:
        raise ConfigError(f"{where}: {value} is too large: at most {format_value(field.name, limits['maximum'])}")
    if "choices" in limits and value not in limits["choices"]:
        raise ConfigError(f"{where}: {value!r} is none of {', '.join(limits['choices'])}")
    if "check" in limits:
        try:
            limits["check"](value)
        except ValueError as error:
            raise ConfigError(f"{where}: {format_value(field.name, value)!r}: {error}") from error
