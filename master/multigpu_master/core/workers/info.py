"""What a worker reports about itself: its device, its health, the models that it offers and has loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class HealthState(IntEnum):
    """Whether a device is fit for work. The numbers are those of multigpu.v1.HealthState."""

    HEALTHY = 1
    DEGRADED = 2
    SICK = 3
    RECOVERING = 4


@dataclass(frozen=True, slots=True)
class HealthReason:
    code: str
    message: str = ""
    since_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A multigpu.v1.DeviceHealth. Times in seconds since 1970; 0.0: none."""

    state: HealthState = HealthState.HEALTHY
    since_s: float = 0.0
    reasons: tuple[HealthReason, ...] = ()
    unusable: bool = False  # it can run no task: its worker is quarantined even if the circuit breaker has tripped
    checks_passed: int = 0  # number of the newest check (DesiredState.check) that it has passed
    next_check_s: float = 0.0

    @property
    def fit(self) -> bool:
        return self.state <= HealthState.DEGRADED


HEALTHY = Health()


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """The device's last sample. None: not reported."""

    sample_s: float = 0.0
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None  # of several devices: of the one with the least free memory
    utilization: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    wire: bytes = b""  # the serialized DeviceTelemetry, including what the core does not read


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What a heartbeat reports about the engine processes."""

    embedding_cache: bytes | None = None  # the serialized EmbeddingCache; None: the worker has none
    mps: bytes = b""  # the serialized MpsStatus; empty: not reported
    handlers: bytes | None = None  # the serialized Handlers; None: the worker has none


class ModelState(IntEnum):
    """The numbers are those of multigpu.v1.ModelState."""

    LOADING = 1
    READY = 2
    UNLOADING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One version of a model that a worker offers. 0 and 0.0: not measured on that worker."""

    name: str
    version: str = ""
    current: bool = False  # tasks that give no version run on this one
    files_bytes: int = 0
    memory_bytes: int = 0
    expected_bytes: int = 0  # the worker's estimate of memory_bytes
    load_s: float = 0.0
    error: str = ""  # why it can't be loaded
    wire: bytes = b""  # the serialized multigpu.v1.Model, including what the core does not read

    @property
    def model_id(self) -> str:
        return f"{self.name}:{self.version}" if self.version else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A model in a worker's memory, or being loaded or unloaded, as of a heartbeat."""

    model: str
    state: ModelState = ModelState.READY
    memory_bytes: int = 0
    last_use_s: float = 0.0
    loads: int = 0  # how often the worker has loaded it
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A kind that a worker runs, and the models on which it can run this kind (empty: any, or the kind needs none)."""

    kind: str
    models: tuple[str, ...] = ()
    concurrency: int = 1  # tasks of the kind that a slot runs together


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker announces when its session begins. A later catalog replaces the capabilities and models."""

    worker_id: str
    host: str = ""
    version: str = ""
    pid: int = 0
    device_id: str = "cpu"
    device_wire: bytes = b""  # the serialized Device, including what the core does not read
    memory_total_bytes: int = 0  # of several devices: of the one with the least memory
    capabilities: tuple[Capability, ...] = ()
    models: tuple[Model, ...] = ()
    model_memory_bytes: int = 0  # limit for all loaded models together; 0: unknown
    labels: Mapping[str, str] = field(default_factory=dict)
    nvlink_peers: tuple[str, ...] = ()  # ids of the devices that NVLink connects to the worker's device
    store_address: str = ""  # of the store that its engine opens as rank 0 of a gang; "": it takes no ranks
    slots: int = 1
    window_tasks: int = 1024
    window_bytes: int = 64 << 20
