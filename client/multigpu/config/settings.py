"""What can be set for each program: a frozen dataclass for each, whose fields are the settings.

`config.load` fills them in. The table of docs/configuration.md is generated from them.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, ClassVar

from multigpu.config.fields import Checked, setting
from multigpu.config.profiles import PROFILES
from multigpu.config.values import GIB, KIB, MIB, check_address, check_device, check_models, check_tcp_address_or_off
from multigpu.errors import ConfigError


def log_level() -> Any:
    return setting("info", "The least serious log lines to write.", choices=("debug", "info", "warning", "error"))


def log_format() -> Any:
    text = 'How log lines look. "auto": "console" on a terminal, "journald" under systemd, else "json".'
    return setting("auto", text, choices=("auto", "json", "console", "journald"))


def tls_ca(**more: Any) -> Any:
    return setting("", "File of the authority of the master's certificate. Empty: no TLS.", **more)


def default_data_dir() -> Path:
    """Where the master keeps its journal: /var/lib/multigpu for root, the user's XDG state folder otherwise."""
    if os.geteuid() == 0:
        return Path("/var/lib/multigpu")
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "multigpu"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig(Checked):
    """What a client and mgpuctl need to know."""

    section: ClassVar[str] = "client"

    master: str = setting("127.0.0.1:7433", "The master's address.", check=check_address)
    window_tasks: int = setting(8192, "Most unsettled tasks a client has under way.", minimum=1, maximum=1_000_000)
    window_bytes: int = setting(64 * MIB, "Most payload bytes of unsettled tasks.", minimum=MIB)
    tls_ca: str = tls_ca()
    tls_cert: str = setting("", "File of the own certificate, for a master that asks for one.")
    tls_key: str = setting("", "File of its key.")
    token_file: str = setting("", "File of the token to show the master. MGPU_TOKEN holds a token itself.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MasterConfig(Checked):
    """What mgpu-master needs to know."""

    section: ClassVar[str] = "master"

    listen: str = setting("127.0.0.1:7433", "Where clients and workers connect. Port 0: any.", check=check_address)
    data_dir: Path = setting(
        default_data_dir,
        "Folder of the journal. One master at a time.",
        default_text="/var/lib/multigpu for root, else $XDG_STATE_HOME/multigpu",
    )
    metrics_listen: str = setting("", "Where Prometheus may scrape. Empty: off.", check=check_tcp_address_or_off)
    tls_cert: str = setting("", "File of the master's certificate. Empty: no TLS, and loopback only.")
    tls_key: str = setting("", "File of its key.")
    tls_client_ca: str = setting("", "File of the authority whose certificates callers must show. Empty: none needed.")
    require_tokens: bool = setting(False, "Whether callers need a token (`mgpuctl tokens`).")
    token_calls_max: int = setting(500, "Most calls and streams open with one token.", minimum=1)
    insecure: bool = setting(False, "Listen where other hosts reach it without TLS and tokens: let in everybody.")
    strategy: str = setting("auto", "The fleet's strategy until one is set with `mgpuctl strategy set`.")
    memory_threshold_percent: float = setting(
        80.0, "Above this share of its memory a device gets nothing new (memory_usage).", minimum=1, maximum=100
    )
    heartbeat_interval_s: float = setting(1.0, "How often a worker tells how it is.", minimum=0.01, maximum=60)
    session_timeout_s: float = setting(5.0, "A worker silent for longer is lost.", minimum=0.05, maximum=3600)
    reconnect_grace_s: float = setting(
        3.0, "How long a new master waits for workers to bring back the leases they hold.", minimum=0, maximum=600
    )
    breaker_share: float = setting(
        0.3, "Past this share of the devices no more sick ones are quarantined without a person.", minimum=0, maximum=1
    )
    breaker_window_s: float = setting(600.0, "Within how long they fell sick.", minimum=1, maximum=86_400)
    queue_tasks_max: int = setting(10_000_000, "Most unsettled tasks in all; more are rejected.", minimum=1)
    queue_bytes_max: int = setting(4 * GIB, "Most payload and partial output bytes of unsettled tasks.", minimum=MIB)
    payload_bytes_max: int = setting(32 * MIB, "Largest payload of one task.", minimum=KIB, maximum=60 * MIB)
    submit_tasks_max: int = setting(10_000, "Most tasks in one Submit.", minimum=1, maximum=1_000_000)
    result_ttl_max_s: float = setting(
        30 * 86_400.0, "Longest result_ttl of a task: until then its outcome takes room on the disk.", minimum=86_400
    )
    stream_bytes_max: int = setting(128 * MIB, "Outcomes a client may leave unread on a stream.", minimum=MIB)
    ephemeral_bytes_max: int = setting(256 * MIB, "Results of ephemeral tasks kept in memory.", minimum=MIB)
    journal_bytes_max: int = setting(
        64 * GIB,
        "From so many bytes on disk on (database, log, segments, payload files, reserve) durable submits are rejected. "
        "Outcomes are still written.",
        minimum=MIB,
    )
    share_payloads: bool = setting(True, "Whether clients and workers on this host may share large payloads as files.")
    stop_timeout_s: float = setting(10.0, "How long a stop may take.", minimum=0.1, maximum=600)
    log_level: str = log_level()
    log_format: str = log_format()

    def __post_init__(self) -> None:
        """Checks what no field can check alone."""
        Checked.__post_init__(self)
        if self.session_timeout_s < 2 * self.heartbeat_interval_s:
            raise ConfigError(
                f"session_timeout_s ({self.session_timeout_s:g}) must be at least twice heartbeat_interval_s "
                f"({self.heartbeat_interval_s:g}), or a single late heartbeat loses a worker"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(Checked):
    """What mgpu-worker needs to know."""

    section: ClassVar[str] = "worker"

    master: str = setting("127.0.0.1:7433", "The master's address.", check=check_address, also=("MGPU_MASTER",))
    tls_ca: str = tls_ca(also=("MGPU_TLS_CA",))
    tls_cert: str = setting("", "File of the worker's certificate, for a master that asks for one.")
    tls_key: str = setting("", "File of its key.")
    token_file: str = setting("", "File of the worker's token.")
    device: str = setting(
        "auto", 'The device to own: "cpu", "cuda:N", the UUID of a GPU or MIG instance, or "auto".', check=check_device
    )
    worker_id: str = setting("", "The worker's stable name.", default_text="host and device")
    labels: dict[str, str] = setting(dict, "Labels that tasks may require, as KEY=VALUE.")
    slots: int = setting(1, "Tasks a handler engine runs at once.", minimum=1, maximum=1024)
    window_tasks: int = setting(1024, "Most leases held at once.", minimum=1, maximum=1_000_000)
    window_bytes: int = setting(64 * MIB, "Most payload bytes of leases held at once.", minimum=MIB)
    handlers: tuple[str, ...] = setting((), "Python modules whose @multigpu.handler functions to serve.")
    models: tuple[str, ...] = setting(
        (), "Models to serve, as NAME=PATH; the first is the default.", check=check_models
    )
    default_model: str = setting(
        "", "The model for tasks that name none. Empty: the first that the worker finds at its start."
    )
    model_repository: str = setting("", "Folder of models, each in a folder of its own (docs/models.md). Empty: none.")
    repository_poll_s: float = setting(
        5.0, "How often to look whether models came, went or changed there. 0: only when told.", minimum=0
    )
    model_memory_bytes: int = setting(
        0,
        "Most device memory of loaded models together. 0: this worker's part of 90 % of a GPU's, or of half of the "
        "host's for a CPU.",
        minimum=0,
    )
    device_workers: int = setting(
        1,
        "How many workers share the device; each takes such a part of its memory for models.",
        minimum=1,
        maximum=1024,
    )
    engine: str = setting(
        "auto", "What runs models that don't say it themselves.", choices=("auto", "torch", "onnx", "tensorrt")
    )
    precision: str = setting(
        "auto",
        "The precision of models that don't say it themselves.",
        choices=("auto", "fp32", "tf32", "bf16", "fp16", "int8", "fp8"),
    )
    artifacts_dir: str = setting(
        "",
        "Folder for plans, exports and other things that are expensive to make; workers of one host may share it.",
        default_text="$XDG_CACHE_HOME/multigpu",
    )
    artifacts_bytes_max: int = setting(10 * GIB, "Most bytes in it.", minimum=MIB)
    profile: str = setting(
        "balanced",
        "What batches are put together for: as much as possible in all, as soon as possible each, or between the two.",
        choices=tuple(PROFILES),
    )
    batch_delay_s: float = setting(
        0.0, "How long a batch may wait to grow while the engine is idle.", minimum=0, maximum=10
    )
    threads: int = setting(0, "Threads of the engine. 0: as many as it likes.", minimum=0, maximum=4096)
    batch_tasks_max: int = setting(256, "Most tasks in one batch.", minimum=1, maximum=65_536)
    batch_tokens_max: int = setting(16_384, "Most tokens in one batch, as estimated.", minimum=1)
    embedding_cache_entries: int = setting(
        0, "Most vectors that the embedding cache remembers, in memory and in its file each. 0: off.", minimum=0
    )
    embedding_cache_bytes_max: int = setting(256 * MIB, "Most bytes of them, in each.", minimum=MIB)
    embedding_cache_ttl_s: float = setting(0.0, "How long a vector is remembered. 0: while there is room.", minimum=0)
    embedding_cache_file: str = setting(
        "", "File that keeps vectors over restarts; workers of one host may share it. Empty: memory alone."
    )
    engine_memory_bytes: int = setting(
        0, "Most memory of the engine process. 0: 80 % of the host's for a CPU worker, else no limit.", minimum=0
    )
    progress_timeout_s: float = setting(0.0, "Ends an engine that makes no progress for so long. 0: off.", minimum=0)
    canary_interval_s: float = setting(
        600.0, "How often an idle engine with torch computes something whose answer is known. 0: never.", minimum=0
    )
    cancel_grace_s: float = setting(5.0, "How long a cancelled task may go on before its engine is ended.", minimum=0)
    drain_timeout_s: float = setting(30.0, "How long held leases may still run after SIGTERM.", minimum=0)
    result_bytes_max: int = setting(
        64 * MIB - 64 * KIB, "Largest result of one task. A message holds no more than the default.", minimum=KIB
    )
    stats_file: str = setting("", "File to append a JSON line about the device to, at an interval. Empty: none.")
    stats_interval_s: float = setting(60.0, "How often.", minimum=0.1)
    mps: str = setting(
        "auto",
        'Whether engines share a GPU by NVIDIA\'s MPS. "auto": where it is possible; "on": the worker does not start without it.',
        choices=("auto", "on", "off"),
    )
    mps_active_thread_percentage: float = setting(
        0.0, "Most of the GPU's threads that an engine may use. 0: no limit.", minimum=0, maximum=100
    )
    mps_pinned_device_mem_limit_bytes: int = setting(
        0, "Most of the GPU's memory that an engine may use under MPS. 0: no limit.", minimum=0
    )
    mps_terminate_timeout_s: float = setting(
        20.0,
        "How long MPS may take to let go of an engine that is to be ended; then the GPU's MPS server is shut down.",
        minimum=0.1,
        maximum=600,
    )
    mps_pipe_dir: str = setting(
        "",
        "Folder with a pipe directory for each GPU, named by its UUID.",
        default_text="/run/multigpu/mps for root, else $XDG_RUNTIME_DIR/multigpu/mps",
    )
    log_level: str = log_level()
    log_format: str = log_format()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig(Checked):
    """Where traces and metrics go. The same for every program."""

    section: ClassVar[str] = "telemetry"

    otlp_endpoint: str = setting("", "OTLP/gRPC collector, such as http://127.0.0.1:4317. Empty: off.")
    trace_sample_ratio: float = setting(0.0, "Share of traces to record.", minimum=0, maximum=1)
    service_name: str = setting("", "How this program calls itself.", default_text="the program's name")


CONFIG_CLASSES: tuple[type[Checked], ...] = (ClientConfig, MasterConfig, WorkerConfig, TelemetryConfig)
SECTIONS = {cls.section: cls for cls in CONFIG_CLASSES}
