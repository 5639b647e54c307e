"""The devices' numbers: `mgpu_device_*` for both roads, and for OTLP `hw.*` by OpenTelemetry's conventions too.

What a device doesn't tell has no sample.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from multigpu.daemon.metrics import Metric, Sample
from multigpu.v1 import device_pb2

from multigpu_master.core.model import Worker
from multigpu_master.core.workers.info import Health, HealthState, Telemetry, WorkerInfo
from multigpu_master.wire import devices as wire_devices

Kind = Literal["counter", "gauge", "updowncounter"]


# What a worker has said, None of its health where it is lost: values that don't change, so that another thread may
# make metrics of them.
Words = tuple[WorkerInfo, Telemetry, Health | None]


class Told(NamedTuple):
    """What a worker has said of its device, read. `health`: None if the worker is lost."""

    info: WorkerInfo
    health: Health | None
    device: device_pb2.Device
    telemetry: device_pb2.DeviceTelemetry


def words(workers: Iterable[Worker]) -> list[Words]:
    return [(w.info, w.telemetry, w.health if w.session else None) for w in workers]


def told(said: list[Words]) -> list[Told]:
    return [
        Told(info, health, wire_devices.device_message(info), wire_devices.telemetry_message(telemetry))
        for info, telemetry, health in said
    ]


# --- mgpu_device_* ---------------------------------------------------------------------------------------------------

# A field of DeviceTelemetry, what it is called, and what it is.
_FIELDS = (
    ("memory_used_bytes", "memory_used_bytes", "Device memory in use."),
    ("memory_total_bytes", "memory_total_bytes", "Device memory."),
    ("utilization", "utilization_ratio", "Busy share, 0 to 1."),
    (
        "memory_utilization",
        "memory_utilization_ratio",
        "Share of time in which its memory was in use, 0 to 1.",
    ),
    ("temperature_celsius", "temperature_celsius", "Temperature."),
    ("power_watts", "power_watts", "Power drawn."),
    ("power_limit_watts", "power_limit_watts", "The power limit that is enforced."),
    ("sm_clock_hertz", "sm_clock_hertz", "Clock of the multiprocessors."),
    ("memory_clock_hertz", "memory_clock_hertz", "Clock of the memory."),
    ("energy_joules", "energy_joules_total", "Energy taken since its driver was loaded."),
    ("pcie_generation", "pcie_generation", "PCIe generation of the link as it is now."),
    ("pcie_width", "pcie_lanes", "PCIe lanes in use."),
    ("pcie_sent_bytes", "pcie_sent_bytes_per_second", "Sent over PCIe."),
    ("pcie_received_bytes", "pcie_received_bytes_per_second", "Received over PCIe."),
    ("nvlinks_active", "nvlinks_active", "NVLinks that are up."),
)


def metrics(devices: list[Told]) -> Iterator[Metric]:
    """Of a lost worker's device, only that it is lost: its last figures say nothing about the present."""
    text = "1 for the state that it is in; lost: of its worker nothing is heard."
    yield _metric("health", text, devices, _health)
    devices = [t for t in devices if t.health is not None]
    for field, name, text in _FIELDS:
        yield _metric(name, text, devices, lambda t, field=field: _field(t, field))  # type: ignore[misc]
    yield _metric("ecc_errors_total", "ECC errors since its driver was loaded.", devices, _ecc)
    yield _metric("remapped_rows", "Rows of memory replaced by spare ones.", devices, _rows)
    yield _metric("row_remap_pending", "1 if a reset is needed to replace rows.", devices, _remap("pending"))
    yield _metric("row_remap_failed", "1 if there was no spare row left.", devices, _remap("failed"))
    yield _metric("throttled", "1 for each reason that holds its clocks down.", devices, _throttled)
    yield _metric("processes", "Processes that compute on it.", devices, _processes)
    yield _metric("info", "What it is.", devices, _info)


Samples = list[tuple[float, dict[str, str]]]


def _metric(name: str, text: str, devices: list[Told], samples: Callable[[Told], Samples]) -> Metric:
    kind: Kind = "counter" if name.endswith("_total") else "gauge"
    found = tuple(
        Sample(value, {"worker_id": t.info.worker_id, "device_id": t.info.device_id, **labels})
        for t in devices
        for value, labels in samples(t)
    )
    return Metric(f"mgpu_device_{name}", kind, text, found)


def _field(t: Told, field: str) -> Samples:
    return [(float(getattr(t.telemetry, field)), {})] if t.telemetry.HasField(field) else []


def _ecc(t: Told) -> Samples:
    kinds = (("ecc_corrected", "corrected"), ("ecc_uncorrected", "uncorrected"))
    return [(value, {"severity": name}) for field, name in kinds for value, _ in _field(t, field)]


def _rows(t: Told) -> Samples:
    if not t.telemetry.HasField("remapped_rows"):
        return []
    rows = t.telemetry.remapped_rows
    return [(rows.correctable, {"severity": "corrected"}), (rows.uncorrectable, {"severity": "uncorrected"})]


def _remap(field: str) -> Callable[[Told], Samples]:
    def samples(t: Told) -> Samples:
        rows = t.telemetry.remapped_rows
        return [(float(getattr(rows, field)), {})] if t.telemetry.HasField("remapped_rows") else []

    return samples


def _throttled(t: Told) -> Samples:
    return [(1.0, {"reason": reason}) for reason in t.telemetry.throttle_reasons]


def _processes(t: Told) -> Samples:
    if t.info.device_id == "cpu" or not t.telemetry.ListFields():
        return []
    mps = sum(p.mps_client for p in t.telemetry.processes)
    return [(mps, {"mps": "true"}), (len(t.telemetry.processes) - mps, {"mps": "false"})]


def _health(t: Told) -> Samples:
    if t.health is None:
        return [(1.0, {"state": "lost"})]
    states = [(float(t.health.state is state), {"state": state.name.lower()}) for state in HealthState]
    return [*states, (0.0, {"state": "lost"})]


def _info(t: Told) -> Samples:
    device = t.device
    labels = {
        "host": t.info.host,
        "name": device.name,
        "product": device.product,
        "driver_version": device.driver_version,
        "cuda_version": device.cuda_version,
        "compute_capability": device.compute_capability,
        "pci_bus_id": device.pci_bus_id,
        "mig": str(device.mig_enabled).lower(),
        "simulated": str(device.simulated).lower(),
    }
    return [(1.0, labels)]


# --- hw.* ------------------------------------------------------------------------------------------------------------

_STATES = {
    HealthState.HEALTHY: "ok",
    HealthState.DEGRADED: "degraded",
    HealthState.SICK: "failed",
    HealthState.RECOVERING: "failed",
}


def hardware_metrics(devices: list[Told]) -> Iterator[Metric]:
    """By https://opentelemetry.io/docs/specs/semconv/hardware/. The resource is the master, so each sample names its
    device's host. Bytes over PCIe are not among them: NVML tells a rate, `hw.gpu.io` is a sum. A lost worker's device
    has no samples: the conventions have no state for it.
    """
    devices = [t for t in devices if t.health is not None]
    gpus = [t for t in devices if t.info.device_id != "cpu"]

    def each(name: str, kind: Kind, unit: str, text: str, samples: Callable[[Told], Samples]) -> Metric:
        of_gpus = name.startswith("hw.gpu.")
        found = tuple(
            Sample(value, {**_hardware(t, typed=not of_gpus), **labels})
            for t in (gpus if of_gpus else devices)
            for value, labels in samples(t)
        )
        return Metric(name, kind, text, found, unit)

    def field(name: str, **labels: str) -> Callable[[Told], Samples]:
        return lambda t: [(value, labels) for value, _ in _field(t, name)]

    busy = field("utilization", **{"hw.gpu.task": "general"})
    yield each("hw.gpu.utilization", "gauge", "1", "Fraction of time spent in a specific task.", busy)
    yield each("hw.gpu.memory.usage", "updowncounter", "By", "GPU memory used.", field("memory_used_bytes"))
    yield each("hw.gpu.memory.limit", "updowncounter", "By", "Size of the GPU memory.", field("memory_total_bytes"))
    yield each("hw.gpu.memory.utilization", "gauge", "1", "Fraction of GPU memory used.", _memory_fraction)
    yield each("hw.temperature", "gauge", "Cel", "Temperature.", field("temperature_celsius"))
    yield each("hw.power", "gauge", "W", "Instantaneous power consumed by the component.", field("power_watts"))
    yield each("hw.energy", "counter", "J", "Energy consumed by the component.", field("energy_joules"))
    yield each("hw.errors", "counter", "{error}", "Number of errors encountered by the component.", _errors)
    yield each("hw.status", "updowncounter", "1", "Operational status: 1 (true) or 0 (false) for each state.", _status)


def _hardware(t: Told, *, typed: bool) -> dict[str, str]:
    device, info = t.device, t.info
    is_gpu = info.device_id != "cpu"
    attributes = {
        "hw.id": info.device_id,
        "hw.name": device.name,
        "hw.model": device.product,
        "host.name": info.host,
        "multigpu.worker_id": info.worker_id,
    }
    if typed:
        attributes["hw.type"] = "gpu" if is_gpu else "cpu"
    elif device.driver_version:
        attributes |= {"hw.vendor": "NVIDIA", "hw.driver_version": device.driver_version}
    return attributes


def _memory_fraction(t: Told) -> Samples:
    total, used = _field(t, "memory_total_bytes"), _field(t, "memory_used_bytes")
    return [(used[0][0] / total[0][0], {})] if used and total and total[0][0] else []


def _errors(t: Told) -> Samples:
    return [(value, {"error.type": labels["severity"]}) for value, labels in _ecc(t)]


def _status(t: Told) -> Samples:
    assert t.health is not None, "its worker is connected"
    now = _STATES[t.health.state]
    return [(float(now == state), {"hw.state": state}) for state in ("ok", "degraded", "failed")]
