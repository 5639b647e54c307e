"""Metrics of devices: `mgpu_device_*`.

A value that a device does not report has no sample. A lost worker's device has a single sample: state `lost`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from multigpu.daemon.metrics import Metric, Sample, metric, sample
from multigpu.v1 import device_pb2

from multigpu_master.core.model import Worker
from multigpu_master.core.workers.info import Health, HealthState, Telemetry, WorkerInfo
from multigpu_master.wire.devices import device_message, telemetry_message


class DeviceSnapshot(NamedTuple):
    """What a worker has reported. Its values are immutable: metrics are made on other threads."""

    info: WorkerInfo
    telemetry: Telemetry
    health: Health | None  # None: the worker is lost


def snapshots(workers: Iterable[Worker]) -> list[DeviceSnapshot]:
    return [DeviceSnapshot(w.info, w.telemetry, w.health if w.session else None) for w in workers]


class ConnectedDevice:
    """A device of a connected worker."""

    def __init__(self, info: WorkerInfo, message: device_pb2.Device, telemetry: device_pb2.DeviceTelemetry) -> None:
        self.info = info
        self.message = message
        self.telemetry = telemetry
        self.is_gpu = info.device_id != "cpu"
        self.labels = {"worker_id": info.worker_id, "device_id": message.device_id}

    def field(self, name: str, **labels: str) -> list[Sample]:
        """Returns a sample of a field of DeviceTelemetry, or none if the device does not report the field."""
        return [sample(float(getattr(self.telemetry, name)), **labels)] if self.telemetry.HasField(name) else []


def connected_devices(devices: Iterable[DeviceSnapshot]) -> Iterator[ConnectedDevice]:
    """Yields each device of each connected worker."""
    for snapshot in devices:
        if snapshot.health is None:
            continue
        message, telemetry = device_message(snapshot.info), telemetry_message(snapshot.telemetry)
        if message.members:
            telemetries = telemetry.members if len(telemetry.members) == len(message.members) else ()
            for index, member in enumerate(message.members):
                member_telemetry = telemetries[index] if telemetries else device_pb2.DeviceTelemetry()
                yield ConnectedDevice(snapshot.info, member, member_telemetry)
        else:
            yield ConnectedDevice(snapshot.info, message, telemetry)


def device_metrics(devices: list[DeviceSnapshot]) -> Iterator[Metric]:
    yield metric(
        "mgpu_device_health",
        "1 for the device's current state; `lost` while its worker is disconnected.",
        *[
            _labelled(each, {"worker_id": d.info.worker_id, "device_id": d.info.device_id})
            for d in devices
            for each in _health(d.health)
        ],
    )
    connected = [*connected_devices(devices)]
    for name, text, samples in _METRICS:
        values = [_labelled(each, device.labels) for device in connected for each in samples(device)]
        yield metric(f"mgpu_device_{name}", text, *values)


def _labelled(each: Sample, labels: dict[str, str]) -> Sample:
    return Sample(each.value, {**labels, **each.labels})


def _health(health: Health | None) -> list[Sample]:
    if health is None:
        return [sample(1.0, state="lost")]
    states = [sample(float(health.state is state), state=state.name.lower()) for state in HealthState]
    return [*states, sample(0.0, state="lost")]


def _ecc(device: ConnectedDevice) -> list[Sample]:
    return device.field("ecc_corrected", severity="corrected") + device.field("ecc_uncorrected", severity="uncorrected")


def _rows(device: ConnectedDevice) -> list[Sample]:
    if not device.telemetry.HasField("remapped_rows"):
        return []
    rows = device.telemetry.remapped_rows
    return [sample(rows.correctable, severity="corrected"), sample(rows.uncorrectable, severity="uncorrected")]


def _row_remap(field: str) -> Callable[[ConnectedDevice], list[Sample]]:
    def samples(device: ConnectedDevice) -> list[Sample]:
        telemetry = device.telemetry
        return [sample(float(getattr(telemetry.remapped_rows, field)))] if telemetry.HasField("remapped_rows") else []

    return samples


def _processes(device: ConnectedDevice) -> list[Sample]:
    if not device.is_gpu or not device.telemetry.ListFields():
        return []
    mps = sum(p.mps_client for p in device.telemetry.processes)
    return [sample(mps, mps="true"), sample(len(device.telemetry.processes) - mps, mps="false")]


def _info(device: ConnectedDevice) -> list[Sample]:
    names = "name", "product", "driver_version", "cuda_version", "compute_capability", "pci_bus_id"
    texts = {name: getattr(device.message, name) for name in names}
    flags = {"mig": device.message.mig_enabled, "simulated": device.message.simulated}
    return [sample(1.0, host=device.info.host, **texts, **{name: str(flag).lower() for name, flag in flags.items()})]


def _field(field: str) -> Callable[[ConnectedDevice], list[Sample]]:
    return lambda device: device.field(field)


_METRICS: tuple[tuple[str, str, Callable[[ConnectedDevice], list[Sample]]], ...] = (
    ("memory_used_bytes", "Device memory in use.", _field("memory_used_bytes")),
    ("memory_total_bytes", "Device memory.", _field("memory_total_bytes")),
    ("utilization_ratio", "Share of time in which it was busy, 0 to 1.", _field("utilization")),
    ("memory_utilization_ratio", "Share of time with memory accesses, 0 to 1.", _field("memory_utilization")),
    ("temperature_celsius", "Temperature.", _field("temperature_celsius")),
    ("power_watts", "Power drawn.", _field("power_watts")),
    ("power_limit_watts", "The enforced power limit.", _field("power_limit_watts")),
    ("sm_clock_hertz", "Clock of the multiprocessors.", _field("sm_clock_hertz")),
    ("memory_clock_hertz", "Clock of the memory.", _field("memory_clock_hertz")),
    ("energy_joules_total", "Energy used since the driver was loaded.", _field("energy_joules")),
    ("pcie_generation", "Current PCIe generation of the link.", _field("pcie_generation")),
    ("pcie_lanes", "PCIe lanes in use.", _field("pcie_width")),
    ("pcie_sent_bytes_per_second", "Bytes sent over PCIe per second.", _field("pcie_sent_bytes")),
    ("pcie_received_bytes_per_second", "Bytes received over PCIe per second.", _field("pcie_received_bytes")),
    ("nvlinks_active", "Active NVLinks.", _field("nvlinks_active")),
    ("ecc_errors_total", "ECC errors since the driver was loaded.", _ecc),
    ("remapped_rows", "Rows of memory replaced by spare ones.", _rows),
    ("row_remap_pending", "1 if a reset is needed to replace rows.", _row_remap("pending")),
    ("row_remap_failed", "1 if no spare row was left to replace a row.", _row_remap("failed")),
    (
        "throttled",
        "1 for each reason for which the clocks are reduced.",
        lambda device: [sample(1.0, reason=reason) for reason in device.telemetry.throttle_reasons],
    ),
    ("processes", "Compute processes on the device.", _processes),
    ("info", "Description.", _info),
)
