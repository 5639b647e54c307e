"""What can be set for each program: a frozen dataclass for each, whose fields are the settings.

`config.load` fills them in. The table of docs/configuration.md is generated from them.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, ClassVar

from multigpu.config.fields import Checked, setting
from multigpu.config.profiles import PROFILES
from multigpu.config.values import (
    GIB,
    KIB,
    MIB,
    check_address,
    check_device,
    check_models,
    check_tcp_address,
    check_tcp_address_or_off,
)
from multigpu.errors import ConfigError


def log_level() -> Any:
    return setting("info", "The lowest level of log lines to write.", choices=("debug", "info", "warning", "error"))


def log_format() -> Any:
    text = 'How log lines look. "auto": "console" on a terminal, else "json".'
    return setting("auto", text, choices=("auto", "json", "console"))


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
    """Settings of clients and mgpuctl."""

    section: ClassVar[str] = "client"

    master: str = setting("127.0.0.1:7433", "The master's address.", check=check_address)
    max_in_flight: int = setting(8192, "Maximum of unsettled tasks of a client.", minimum=1, maximum=1_000_000)
    max_in_flight_bytes: int = setting(64 * MIB, "Maximum of their payload bytes.", minimum=MIB)
    tls_ca: str = tls_ca()
    tls_cert: str = setting("", "File of the client's certificate, if the master requires one.")
    tls_key: str = setting("", "File of its key.")
    token_file: str = setting("", "File of the client's token. MGPU_TOKEN holds the token itself.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MasterConfig(Checked):
    """Settings of mgpu-master."""

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
    tls_client_ca: str = setting("", "File of the authority of callers' certificates. Empty: callers need none.")
    require_tokens: bool = setting(False, "Whether callers need a token (`mgpuctl tokens`).")
    token_calls_max: int = setting(500, "Maximum of open calls and streams of one token.", minimum=1)
    insecure: bool = setting(False, "Listen for other hosts without TLS and tokens: any of them may do anything.")
    strategy: str = setting("auto", "The fleet's strategy, unless `mgpuctl strategy set` has set another.")
    memory_threshold_percent: float = setting(
        80.0, "A device that uses more of its memory gets no new tasks (memory_usage).", minimum=1, maximum=100
    )
    heartbeat_interval_s: float = setting(1.0, "Interval of workers' heartbeats.", minimum=0.01, maximum=60)
    session_timeout_s: float = setting(5.0, "A worker silent for longer is lost.", minimum=0.05, maximum=3600)
    reconnect_grace_s: float = setting(
        3.0, "How long a new master waits for workers to report the leases they hold.", minimum=0, maximum=600
    )
    breaker_share: float = setting(
        0.3,
        "Past this share of the devices, further sick ones are quarantined by an operator only.",
        minimum=0,
        maximum=1,
    )
    breaker_window_s: float = setting(600.0, "Period in which sick devices count for it.", minimum=1, maximum=86_400)
    queue_tasks_max: int = setting(10_000_000, "Maximum of unsettled tasks; more are rejected.", minimum=1)
    queue_bytes_max: int = setting(
        4 * GIB, "Maximum of their bytes: payloads, partial outputs, checkpoints, logs.", minimum=MIB
    )
    payload_bytes_max: int = setting(32 * MIB, "Largest payload of one task.", minimum=KIB, maximum=60 * MIB)
    submit_tasks_max: int = setting(10_000, "Maximum of tasks in one Submit.", minimum=1, maximum=1_000_000)
    result_ttl_max_s: float = setting(
        30 * 86_400.0, "Longest result_ttl of a task. Outcomes stay on the disk until then.", minimum=86_400
    )
    stream_bytes_max: int = setting(128 * MIB, "Maximum of unread outcomes on a stream.", minimum=MIB)
    ephemeral_bytes_max: int = setting(256 * MIB, "Results of ephemeral tasks kept in memory.", minimum=MIB)
    journal_bytes_max: int = setting(
        64 * GIB,
        "Maximum of bytes on disk (database, log, segments, payload files, reserve). Past it durable submits are "
        "rejected; outcomes of tasks that are on the disk are still written.",
        minimum=MIB,
    )
    share_payloads: bool = setting(True, "Whether clients and workers on this host share large payloads as files.")
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
    """Settings of mgpu-worker."""

    section: ClassVar[str] = "worker"

    master: str = setting("127.0.0.1:7433", "The master's address.", check=check_address, also=("MGPU_MASTER",))
    tls_ca: str = tls_ca(also=("MGPU_TLS_CA",))
    tls_cert: str = setting("", "File of the worker's certificate, for a master that asks for one.")
    tls_key: str = setting("", "File of its key.")
    token_file: str = setting("", "File of the worker's token.")
    device: str = setting(
        "auto",
        'The device: "cpu", "cuda:N", "rocm:N", the UUID of a GPU or MIG instance, or "auto". Several GPUs, for models '
        'that do not fit on one: "cuda:0,cuda:1".',
        check=check_device,
    )
    worker_id: str = setting("", "The worker's stable name.", default_text="host and device")
    labels: dict[str, str] = setting(dict, "Labels that tasks may require, as KEY=VALUE.")
    slots: int = setting(1, "Tasks that a handler engine runs at the same time.", minimum=1, maximum=1024)
    window_tasks: int = setting(1024, "Maximum of leases held.", minimum=1, maximum=1_000_000)
    window_bytes: int = setting(64 * MIB, "Maximum of their payload bytes.", minimum=MIB)
    handlers: tuple[str, ...] = setting((), "Python modules with @multigpu.handler functions.")
    allow_pickle: bool = setting(False, "Let handlers take and return pickles: any client may run any code.")
    train_dir: str = setting(
        "", "Folder of the scripts that training jobs may run, and of the jobs' files. Empty: no such jobs."
    )
    models: tuple[str, ...] = setting(
        (), "Models to serve, as NAME=PATH; the first is the default.", check=check_models
    )
    default_model: str = setting("", "The model of tasks that name none. Empty: the first one found at the start.")
    model_repository: str = setting("", "Folder with a folder for each model (docs/models.md). Empty: none.")
    repository_poll_s: float = setting(
        5.0, "Interval of scans of that folder for changes. 0: on request only.", minimum=0
    )
    model_memory_bytes: int = setting(
        0,
        "Maximum of device memory of loaded models. 0: a share of 90 % of a GPU's memory, or of half of a CPU host's.",
        minimum=0,
    )
    device_workers: int = setting(
        1,
        "Number of workers that share the device and its memory.",
        minimum=1,
        maximum=1024,
    )
    engine: str = setting(
        "auto", "The engine of models whose model.toml names none.", choices=("auto", "torch", "onnx", "tensorrt")
    )
    vllm_python: str = setting(
        "",
        "The Python of an environment with vLLM, for the engine vllm (docs/generate.md). Empty: none.",
    )
    precision: str = setting(
        "auto",
        "The precision of models whose model.toml names none.",
        choices=("auto", "fp32", "tf32", "bf16", "fp16", "int8", "fp8"),
    )
    artifacts_dir: str = setting(
        "",
        "Folder of plans, exports and other artifacts; workers of one host may share it.",
        default_text="$XDG_CACHE_HOME/multigpu",
    )
    artifacts_bytes_max: int = setting(10 * GIB, "Maximum of bytes in it.", minimum=MIB)
    profile: str = setting(
        "balanced",
        "What batching optimises.",
        choices=tuple(PROFILES),
    )
    batch_delay_s: float = setting(
        0.0, "How long a batch may wait to grow while the engine is idle.", minimum=0, maximum=10
    )
    threads: int = setting(0, "Threads of the engine. 0: its own default.", minimum=0, maximum=4096)
    batch_tasks_max: int = setting(256, "Maximum of tasks in a batch.", minimum=1, maximum=65_536)
    batch_tokens_max: int = setting(16_384, "Maximum of estimated tokens in a batch.", minimum=1)
    embedding_cache_entries: int = setting(
        0, "Maximum of vectors in the embedding cache, and in its file. 0: off.", minimum=0
    )
    embedding_cache_bytes_max: int = setting(256 * MIB, "Maximum of their bytes, in each.", minimum=MIB)
    embedding_cache_ttl_s: float = setting(0.0, "How long a vector is kept. 0: until it is evicted.", minimum=0)
    embedding_cache_file: str = setting(
        "", "File that keeps vectors over restarts; workers of one host may share it. Empty: memory only."
    )
    engine_memory_bytes: int = setting(
        0, "Maximum of memory of the engine process. 0: 80 % of the host's for a CPU worker, else no limit.", minimum=0
    )
    progress_timeout_s: float = setting(0.0, "An engine without progress for longer is ended. 0: off.", minimum=0)
    canary_interval_s: float = setting(
        600.0, "Interval of self-tests of an idle engine with torch. 0: never.", minimum=0
    )
    cancel_grace_s: float = setting(5.0, "How long a cancelled task may run on before its engine is ended.", minimum=0)
    drain_timeout_s: float = setting(30.0, "How long leases may run on after SIGTERM.", minimum=0)
    result_bytes_max: int = setting(
        63 * MIB, "Largest result of one task. A message can't hold more than the default.", minimum=KIB
    )
    stats_file: str = setting("", "File for JSON lines about the device. Empty: none.")
    stats_interval_s: float = setting(60.0, "Interval of these lines.", minimum=0.1)
    mps: str = setting(
        "auto",
        'Whether engines share a GPU by NVIDIA MPS. "auto": where its daemon runs; "on": else the worker exits.',
        choices=("auto", "on", "off"),
    )
    mps_active_thread_percentage: float = setting(
        0.0, "Maximum share of the GPU's threads for an engine. 0: no limit.", minimum=0, maximum=100
    )
    mps_pinned_device_mem_limit_bytes: int = setting(
        0, "Maximum of the GPU's memory for an engine under MPS. 0: no limit.", minimum=0
    )
    mps_terminate_timeout_s: float = setting(
        20.0,
        "How long MPS may take to release an engine that ends; then the GPU's MPS server is shut down.",
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
class GatewayConfig(Checked):
    """Settings of mgpu-gateway."""

    section: ClassVar[str] = "gateway"

    master: str = setting("127.0.0.1:7433", "The master's address.", check=check_address, also=("MGPU_MASTER",))
    tls_ca: str = tls_ca(also=("MGPU_TLS_CA",))
    tls_cert: str = setting("", "File of the gateway's certificate, for a master that asks for one.")
    tls_key: str = setting("", "File of its key.")
    connect_timeout_s: float = setting(10.0, "How long a call waits for a master that was never reached.", minimum=0)
    http: str = setting("127.0.0.1:8000", "Where HTTP is served. Port 0: any.", check=check_tcp_address)
    grpc: str = setting(
        "127.0.0.1:8001", "Where Triton's gRPC service is served. Empty: off.", check=check_tcp_address_or_off
    )
    http_tls_cert: str = setting("", "File of the certificate for HTTPS and for gRPC with TLS. Empty: without TLS.")
    http_tls_key: str = setting("", "File of its key.")
    insecure: bool = setting(False, "Listen for other hosts without TLS and tokens: any of them may do anything.")
    body_bytes_max: int = setting(32 * MIB, "Largest body of a request.", minimum=KIB, maximum=1 * GIB)
    connections_max: int = setting(10_000, "Maximum of connections and of requests under way.", minimum=1)
    request_timeout_s: float = setting(
        600.0, "How long a request may wait for its tasks, or for the next part of a stream.", minimum=1
    )
    stop_timeout_s: float = setting(10.0, "How long requests under way may take after SIGTERM.", minimum=1, maximum=600)
    kserve_shared_memory: bool = setting(
        False,
        "Let Triton's clients put tensors in shared memory: every caller may then read and write what the gateway can "
        "in /dev/shm. Only on loopback.",
    )
    webhook_url: str = setting("", "Where every durable outcome is posted. Empty: nowhere.")
    webhook_secret_file: str = setting("", "File of the secret (whsec_…) that signs what is posted.")
    webhook_token_file: str = setting("", "File of the token for reading outcomes. Empty: none.")
    webhook_cursor_file: str = setting("", "File that says up to which outcome the receiver has taken them.")
    webhook_queue: str = setting("", "The queue whose outcomes are posted. Empty: all.")
    log_level: str = log_level()
    log_format: str = log_format()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig(Checked):
    """Where traces and metrics go. The same for every program."""

    section: ClassVar[str] = "telemetry"

    otlp_endpoint: str = setting("", "OTLP/gRPC collector, such as http://127.0.0.1:4317. Empty: off.")
    trace_sample_ratio: float = setting(0.0, "Share of traces to record.", minimum=0, maximum=1)
    service_name: str = setting("", "The service.name of this program.", default_text="the program's name")


CONFIG_CLASSES: tuple[type[Checked], ...] = (ClientConfig, MasterConfig, WorkerConfig, GatewayConfig, TelemetryConfig)
SECTIONS = {cls.section: cls for cls in CONFIG_CLASSES}
